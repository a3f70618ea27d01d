"""Nothing that leaves Python where a rank runs it takes the rank along."""

import pytest

pytestmark = pytest.mark.usefixtures("_ranks_live_on")
LEAVES = """
class Leaves:
    def __reduce__(self):
        return exec, ({source!r},)
leaves = Leaves()
"""
SOURCES = {
    "SystemExit": "raise SystemExit(3)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit",
    "a text that cannot be had": (
        "class Mute(BaseException):\n    def __str__(self): raise SystemExit\nraise Mute"
    ),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_what_a_pushed_object_or_an_argument_of_a_call_raises_is_answered(notebook, source):
    notebook.run(LEAVES.format(source=source))
    notebook.run("%distributed push leaves").fails("UsageError", "rank 0: ")
    notebook.run("import allranks\nallranks.run(print, args=(leaves,), np=4)").fails("CellFailed")


def test_values_of_members_and_what_is_pulled_may_raise_anything(notebook):
    notebook.run(LEAVES.format(source="raise SystemExit(3)"))
    notebook.run("members = [{'x': leaves}, {'x': 1}]")
    notebook.run("%%ensemble members\nresult = x").says("SystemExit")
    assert notebook.value("len(runs.failed), len(runs.finished)") == "(1, 1)"
    notebook.on_ranks("class Stays:\n    def __reduce__(self): raise SystemExit\nstays = Stays()")
    cell = notebook.run("%distributed pull stays")
    assert cell.error_value == "rank 0 cannot send stays: SystemExit"


LEFT_BEHIND = {
    # First, because the engine's own start ends with the first of them.
    "stops the loop": "loop.call_later(0.1, loop.stop)",
    "stops the loop in the cell": "loop.stop()",
    "raises SystemExit": "loop.call_later(0.1, sys.exit, 3)",
    "raises KeyboardInterrupt": (
        "async def interrupted():\n    await asyncio.sleep(0.1)\n    raise KeyboardInterrupt\n"
        "task = loop.create_task(interrupted())"
    ),
    "a signal": (
        "import signal\ndef late(*_): raise LookupError('late')\n"
        "signal.signal(signal.SIGALRM, late)\n"
        "loop.call_soon(signal.setitimer, signal.ITIMER_REAL, 0.05)"
    ),
}


@pytest.mark.parametrize("source", LEFT_BEHIND.values(), ids=LEFT_BEHIND.keys())
def test_a_task_that_a_cell_leaves_in_the_event_loop_may_do_what_it_likes(notebook, source):
    notebook.on_ranks(f"import asyncio, sys\nloop = asyncio.get_event_loop()\n{source}").ok()
    notebook.drain(0.3)
    cell = notebook.on_ranks("import numpy as np\nfloat(allreduce(np.ones(2), op=Sum)[0])")
    assert cell.text.endswith("→ 4.0\n")


def test_ipyparallel_may_end_the_engines(notebook):
    notebook.run(
        "import allranks\ncluster = allranks.Cluster(2).start()\n"
        "cluster.client().shutdown(block=True)\ncluster.run('1')"
    ).fails("ClusterLost")
