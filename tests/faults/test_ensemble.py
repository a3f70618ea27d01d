"""An ensemble that is disturbed: every finished member's result is intact, and the rest goes on."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.kernel import patched, wait_until

#: Slow enough to be disturbed, and large enough to be left in shared memory.
BODY = """
import os, time
import numpy as np
with open({ran!r}, "a") as file: file.write(f"{{x}} {{os.getpid()}}\\n")
for step in range(10):
    log(step=step, loss=x + 1 / (step + 1))
    time.sleep({seconds})
result = {{"x": x, "w": np.full(50_000, float(x))}}
"""
INTACT = (
    "all(m.result['x'] == m.number and (m.result['w'] == m.number).all() for m in {name}.finished)"
)


@pytest.fixture
def ran(tmp_path):
    return tmp_path / "ran"


def starts(ran: Path) -> list[int]:
    return [int(line.split()[0]) for line in ran.read_text().splitlines()] if ran.exists() else []


def pid_of(ran, member):
    """Returns which process has begun with a member, as soon as one has."""

    def begun():
        lines = ran.read_text().splitlines() if ran.exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == str(member)]

    wait_until(begun, lambda: f"the start of member {member}")
    return begun()[0]


def body(ran: Path, seconds: float = 0.05) -> str:
    return BODY.format(ran=str(ran), seconds=seconds)


def check_whole(notebook, count, name="runs"):
    assert notebook.value(f"len({name}.finished)") == str(count)
    assert notebook.value(INTACT.format(name=name)) == "True"
    losses = f"{{len(m.history['loss'].steps) for m in {name}.finished}}"
    assert notebook.value(losses) == "{10}"


def test_a_rank_that_dies_takes_one_member_with_it_and_that_runs_again(notebook, ran):
    # The first time it runs until it is killed.
    stays = f"if x == 9 and open({str(ran)!r}).read().count('\\n9 ') == 1: time.sleep(600)\n"
    cell = notebook.start(f"%%ensemble x=0:16\n{body(ran)}{stays}")
    os.kill(pid_of(ran, 9), signal.SIGKILL)
    cell.wait(120)
    assert cell.status == "ok", cell.text
    check_whole(notebook, 16)
    assert "was killed by signal 9 (SIGKILL" in cell.text
    assert "it ran member 9, which runs again, once" in cell.text
    assert "started again ranks 0–3" in cell.text
    # What had finished before did not run again.
    assert 17 <= len(starts(ran)) <= 20
    assert notebook.value("[m.deaths for m in runs if m.deaths]") == "[1]"
    notebook.note_files()


KEEPS = """
import os, pathlib, time
died, done = pathlib.Path({folder!r}, "died"), globals().get("done", ())
for step in range(len(done), 6):
    if x == 3 and rank == 0 and step == 4 and not died.exists():
        died.touch()
        time.sleep(1)  # what is kept is written behind the steps
        os._exit(4)
    done += ((step, os.getpid()),)
    keep(done=done)
result = {{"steps": [step for step, pid in done], "ranks": len({{pid for step, pid in done}})}}
"""


def test_a_member_whose_rank_dies_goes_on_from_what_it_has_kept(notebook, tmp_path):
    body = KEEPS.format(folder=str(tmp_path))
    cell = notebook.run(f"%%ensemble --ranks-per-member 2 x=0:5\n{body}", 90)
    assert cell.status == "ok", cell.text
    assert "it ran member 3, which runs again, once" in cell.text
    assert re.search(r"continues from what it kept \d+ s ago: done", cell.text)
    assert notebook.value("all(m.result['steps'] == [*range(6)] for m in runs)") == "True"
    assert notebook.value("runs[3].result['ranks']") == "2"
    assert notebook.value("[m.deaths for m in runs]") == "[0, 0, 0, 1, 0]"
    # The next ensemble's members begin from the start, and nothing is left of these.
    notebook.run("%%ensemble x=0:5\nresult = 'done' in globals()")
    assert notebook.value("[m.result for m in runs]") == str([False] * 5)
    folders = notebook.kept_folders()
    assert folders
    assert [path for folder in folders for path in folder.glob("member-*")] == []


def test_a_member_that_kills_its_rank_twice_has_failed_and_the_others_finish(notebook, ran):
    deadly = f"import os\nif x == 3: os.kill(os.getpid(), 11)\n{body(ran, 0.02)}"
    notebook.run(f"%%ensemble x=0:10\n{deadly}", 90).ok()
    check_whole(notebook, 9)
    error = notebook.value("runs.failed[0].error")
    assert "its rank died 2 times: rank" in error
    assert "was killed by signal 11 (SIGSEGV)" in error
    assert notebook.value("[m.number for m in runs.failed]") == "[3]"
    notebook.note_files()


def test_an_interrupt_keeps_what_has_finished(notebook, ran):
    cell = notebook.start(f"%%ensemble x=0:40\n{body(ran)}if x > 12: time.sleep(600)\n")
    pid_of(ran, 9)
    notebook.interrupt()
    cell.wait()
    cell.fails("CellInterrupted", "What has finished is in runs.")
    finished = int(notebook.value("len(runs.finished)"))
    assert 5 <= finished < 40
    check_whole(notebook, finished)
    assert notebook.value("{m.state for m in runs} == {'finished', 'stopped'}") == "True"
    # The ranks are as they were, and what has not finished runs when asked.
    assert notebook.on_ranks("int(allreduce(rank, op=Sum))").text == "ranks 0–3 → 6\n"
    rest = notebook.run(f"%%ensemble x=0:40 --retry-failed\n{body(ran, 0.005)}")
    assert rest.status == "ok"
    assert f"the cell has changed since {finished} members ended" in rest.text
    check_whole(notebook, 40)


def test_a_second_interrupt_ends_ranks_that_do_not_settle_and_keeps_what_has_finished(
    notebook, ran
):
    stubborn = """
if x >= 4:
    print("in", flush=True)
    while True:
        try: time.sleep(600)
        except KeyboardInterrupt: print("no", flush=True)
"""
    cell = notebook.start(f"%%ensemble x=0:8\n{body(ran, 0.005)}{stubborn}").wait_for("in")
    for member in range(4, 8):
        pid_of(ran, member)  # each of them runs where one of the first four has ended
    notebook.interrupt()
    cell.wait_for("no")
    cell.wait_for("; all ranks will be killed by the next interrupt")
    notebook.interrupt()
    cell.wait()
    cell.fails("CellInterrupted", "interrupted twice: ")
    check_whole(notebook, 4)
    assert "started again" in notebook.on_ranks("kept = 10 * rank").text
    notebook.note_files()


def test_a_rank_that_dies_while_it_is_idle_costs_no_member_anything(notebook, ran):
    pids = notebook.pids()
    stays = f"if open({str(ran)!r}).read().count(f'{{x}} ') == 1: time.sleep(600)\n"
    cell = notebook.start(f"%%ensemble x=0:2\n{body(ran)}{stays}")
    busy = {pid_of(ran, 0), pid_of(ran, 1)}
    os.kill(next(pid for pid in pids.values() if pid not in busy), signal.SIGKILL)
    assert cell.wait(120).status == "ok"
    check_whole(notebook, 2)
    assert notebook.value("[m.deaths for m in runs]") == "[0, 0]"
    assert "interrupted by that, will run again" in cell.text
    notebook.note_files()


def test_a_store_goes_on_after_the_kernel_was_killed(notebook, ran, tmp_path):
    store = tmp_path / "store"
    source = f"%%ensemble x=0:20 -n 4 --store {store}\n{body(ran)}"

    notebook.start(source)
    pid_of(ran, 6)
    notebook.kill9()
    notebook.wait_for_no_children()
    before, started = len(list(store.glob("*.member"))), len(starts(ran))
    assert before >= 2
    notebook.restart()
    notebook.run("%load_ext allranks")
    notebook.run(source, 90).ok()
    check_whole(notebook, 20)
    assert len(starts(ran)) == started + 20 - before
    assert sorted(set(starts(ran))) == list(range(20))
    # Once more: everything is there, and nothing runs.
    assert notebook.run(source).status == "ok"
    assert len(starts(ran)) == started + 20 - before
    check_whole(notebook, 20)
    # More values: only those run.
    assert notebook.run(source.replace("x=0:20", "x=0:22")).status == "ok"
    assert len(starts(ran)) == started + 22 - before


def test_a_store_that_is_full_stops_the_ensemble_and_says_so(notebook, tmp_path):
    # What is not to be made bigger stands for a full disk.
    store = tmp_path / "store"
    notebook.run("import resource\nlimits = resource.getrlimit(resource.RLIMIT_FSIZE)")
    notebook.run("import signal; _ = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)")
    source = "import time, numpy as np\ntime.sleep(0.05)\nresult = np.ones(10_000 * (x > 5))"
    notebook.run("resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))")
    try:
        cell = notebook.run(f"%%ensemble x=0:20 --store {store}\n{source}")
    finally:
        notebook.run("resource.setrlimit(resource.RLIMIT_FSIZE, limits)")
    cell.fails("UsageError", "cannot be written any more")
    assert list(store.glob("*.tmp")) == []
    assert notebook.run(f"%%ensemble x=0:20 --store {store}\n{source}").status == "ok"
    assert notebook.value("[m.result.sum() > 0 for m in runs].count(True)") == "14"


def test_while_an_ensemble_runs_no_cell_can_be_run_beside_it(notebook, ran):
    notebook.run(f"""
import asyncio, os
said = []
async def meddle():
    while not os.path.exists({str(ran)!r}):
        await asyncio.sleep(0.05)
    cluster = get_ipython().magics_manager.registry["DistributedMagics"].session.running
    for act in (lambda: cluster.run("1 + 1"), cluster.interrupt):
        try:
            said.append(act())
        except Exception as error:
            said.append(f"{{type(error).__name__}}: {{error}}")
task = asyncio.ensure_future(meddle())
""")
    # Only the interrupt ends it before its many seconds.
    notebook.run(f"%%ensemble x=0:8\n{body(ran, 6)}").fails("CellInterrupted")
    refused, interrupted = notebook.run("print(*said, sep='\\n')").stdout.splitlines()
    assert refused.startswith("UsageError: expected idle ranks, found them running an ensemble")
    assert interrupted == "True"


def test_large_results_leave_no_file_and_their_memory_goes_with_the_table(notebook):
    # Held by the notebook outside its own memory, and by nobody once the table is gone.
    size = (
        "sum(os.stat(f'/proc/self/fd/{fd}').st_size for fd in os.listdir('/proc/self/fd') "
        "if 'allranks-results' in os.path.realpath(f'/proc/self/fd/{fd}'))"
    )
    forget = "runs = None\n%reset -f out\ngc.collect()"
    notebook.run(f"import gc, os, psutil\n{forget}")
    before = int(notebook.value(size))
    notebook.run("%%ensemble x=0:8 -o runs\nimport numpy as np\nresult = np.ones(1_000_000)")
    used = int(notebook.value("psutil.Process().memory_info().rss"))
    assert int(notebook.value(size)) - before >= 64_000_000
    assert notebook.value("sum(m.result.sum() for m in runs)") == "np.float64(8000000.0)"
    assert int(notebook.value("psutil.Process().memory_info().rss")) - used < 60_000_000
    notebook.run(forget)
    assert int(notebook.value(size)) == before


@pytest.mark.leases
def test_a_member_that_no_interrupt_reaches_ends_its_ranks_and_the_others_finish(notebook):
    notebook.run("from allranks.features.ensemble import runner; runner.GRACE_SECONDS = 4.0")
    stuck = "MPI.Intracomm(MPI.COMM_WORLD).recv(source=0)"
    with patched(notebook.run, "allranks.cluster.cell_run._ASK_BEFORE_SECONDS", 1.9):
        cell = notebook.run(
            f"%%ensemble x=0:8 --timeout 5\nif x == 2: {stuck}\nresult = x", 90
        ).ok()
    assert notebook.value("[m.number for m in runs.finished]") == "[0, 1, 3, 4, 5, 6, 7]"
    where = f"In[{cell.execution_count}]:2  if x == 2: {stuck}"
    said = "member 2 has not ended 2 s after its interrupt: rank"
    cell.says(said, f"{where}; all ranks will be killed in 2 s", "so all 4 ranks were killed")
    error = notebook.value("runs.failed[0].error")
    assert "it exceeded its timeout of 5 s, and 4 s after the interrupt it was" in error
    assert where in error
    notebook.run("runner.GRACE_SECONDS = 10.0")
    assert notebook.on_ranks("size").status == "ok"
    notebook.note_files()


def test_a_function_that_has_changed_is_computed_anew_and_what_is_stored_is_dated(
    notebook, tmp_path
):
    source = f"%%ensemble configs --store {tmp_path / 'kept'}\nresult = f(1)"
    ends = "\nconfigs = [{'f': f}]"
    define = "def f(x, k=1): return helper(x) + k" + ends
    notebook.run(f"by = 2\ndef helper(x): return x * by\n{define}")
    assert "1 of 1 finished" in notebook.run(source).text
    dated = r"1 of 1 finished, 1 from the store, computed on \d{4}-\d\d-\d\d \d\d:\d\d"
    assert re.search(dated, notebook.run(source).text)
    for changed in ("by = 3", define.replace("k=1", "k=5")):
        notebook.run(changed)
        again = notebook.run(source).text
        assert "1 of 1 finished" in again
        assert "from the store" not in again
    assert notebook.run("runs[0].result").text.strip().endswith("8")
