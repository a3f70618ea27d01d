"""``%load_ext allranks.px``: the magics of ipyparallel and nbdistributed, on our ranks."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.kernel import wait_until

COURSES = sorted(Path(__file__).with_name("courses").glob("*.ipynb"))
START = "%load_ext allranks.px\n%distributed start -n 4"


@pytest.mark.parametrize("path", COURSES, ids=lambda path: path.stem)
def test_a_course_runs_as_it_is_but_for_the_line_that_starts_the_ranks(own_kernel, path):
    """Notebooks on MPI written for ipyparallel; what a cell says is in its metadata."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert cells[0].id == "start"
    assert "ipyparallel" in cells[0].source
    for cell in cells:
        ran = own_kernel.run(START if cell.id == "start" else cell.source)
        assert ran.status == "ok", f"{cell.source}\n\n{ran.text}"
        ran.says(*cell.metadata.get("says", ())).lacks("Error")  # of MPI's own too


@pytest.fixture(scope="module")
def px(own_kernel):
    own_kernel.run("view = 'kept'\n%load_ext allranks.px\n%distributed stop").ok()
    own_kernel.run("%dist_init --num-processes 3").says("started ranks 0–2")
    return own_kernel


def test_dist_init_sends_the_following_cells_to_the_ranks(px):
    assert px.run("size").text == "ranks 0–2 → 3\n"
    px.run("%dist_mode -d").ok()
    assert px.value("'size' in globals()") == "False"


def test_the_first_cells_of_ipyparallel_need_not_run(px):
    assert px.value("rc.ids, len(rc), view") == "([0, 1, 2], 3, 'kept')"
    px.run("dv['shared'] = 7\ndv.scatter('part', list(range(6)), block=True)").ok()
    assert px.run("%%px\nshared, list(part)").text == (
        "rank 0 → (7, [0, 1])\nrank 1 → (7, [2, 3])\nrank 2 → (7, [4, 5])\n"
    )
    assert px.value("dv.gather('part', block=True)") == "[0, 1, 2, 3, 4, 5]"
    assert px.value("cluster.start_and_connect_sync()[1]['shared']") == "7"


def test_px_runs_a_cell_or_a_line_on_every_rank(px):
    assert px.run("%%px\nimport os\nrank * 2").text == "rank 0 → 0\nrank 1 → 2\nrank 2 → 4\n"
    assert px.run("%px rank + 1").text == "rank 0 → 1\nrank 1 → 2\nrank 2 → 3\n"


@pytest.mark.parametrize("line", ["{}", "%time {}", "def there():\n    {}\nthere()", "%%time\n{}"])
def test_what_stands_in_braces_belongs_to_the_ranks_and_options_to_the_notebook(px, line):
    px.run("%dist_mode -d").ok()
    px.run("import os\nchosen = 1").ok()
    cell = px.run(line.format('%px import os; print(f"{os.getpid()}", "$chosen")'))
    pids = re.findall(r"│ (\d+) \$chosen", cell.text)
    assert len({*pids, px.value("os.getpid()")}) == 4
    assert px.run("%%px --targets {chosen}\nprint(f'{rank}')").text == "rank 1 │ 1\n"


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("0", "rank 0"),
        ("-1", "rank 2"),
        ("[0,2]", "ranks 0, 2"),
        ("1:", "ranks 1–2"),
        ("::2", "ranks 0, 2"),
    ],
)
def test_px_takes_targets_as_ipyparallel_writes_them(px, targets, said):
    assert px.run(f"%%px --targets {targets}\n'x'").text == f"{said} → 'x'\n"


@pytest.mark.parametrize("magic", ["%%px", "%%rank 0", "%%distributed -r 0"])
@pytest.mark.parametrize("below", ["%%timeit -n1 -r1", "%%time"])
def test_a_magic_of_ipythons_may_stand_below_ours(px, magic, below):
    cell = px.run(f"{magic}\n{below}\nrank").ok()
    assert re.search(r"\d [nmµμ]?s", cell.text)


def test_cells_run_in_the_notebook_as_well(px):
    px.run("%%px --local -o values --block\ntwice = 2\nimport os\ntwice * 21").ok()
    assert px.value("list(values), values.get_dict(), twice") == (
        "([42, 42, 42], {0: 42, 1: 42, 2: 42}, 2)"
    )
    px.run("%%px -o ar\nprint('said', rank)\nrank + 1").ok()
    assert px.value("ar.stdout[1], ar[1], ar.successful()") == "('said 1\\n', 2, True)"
    cell = px.run("%%distributed --local\nhere = 'rank' in globals()\nprint('said')")
    assert cell.text == "ranks 0–2 │ said\nsaid\n"
    assert px.value("here") == "False"
    assert px.value("%distributed pull here") == ("{0: True, 1: True, 2: True}")
    cell = px.run("%%px --local\nprint(rank if 'rank' in globals() else nowhere)")
    assert cell.status == "error"
    cell.says("NameError: name 'nowhere' is not defined", "the notebook itself raised NameError")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--noblock --local", "found --noblock or --signal-on-interrupt 0"),
        ("--signal-on-interrupt 0 --local", "found --noblock or --signal-on-interrupt 0"),
        ("--signal-on-interrupt SIGHUP", "expected --signal-on-interrupt SIGINT, SIGKILL or 0"),
        ("--targets 0:x", "expected targets, found '0:x'"),
        ("--targets -4", "expected ranks as in 0,2-3, found '-4'"),
    ],
)
def test_what_is_otherwise_here_is_refused_with_words(px, line, said):
    px.run(f"%%px {line}\nprint('ran')").says("UsageError", said).lacks("ran\n")


def test_a_number_of_ranks_is_refused_with_the_command_that_starts_them(px):
    px.run("%%px -n 4\nprint('ran')").says(
        "UsageError", "3 ranks are running. Type first: %distributed restart -n 4"
    ).lacks("ran\n")
    px.run("%%px -n 3\n1").says("3 ranks are running. Leave out -n")


@pytest.mark.parametrize("option", ["--target 0", "--targ=0", "--t 0 --no-str --group-out engine"])
def test_options_may_be_abbreviated_as_with_ipyparallel(px, option):
    assert px.run(f"%%px {option}\nrank").text == "rank 0 → 0\n"
    px.run("%%px --no\nrank").fails("UsageError", "ambiguous option: --no could match")


def test_autopx_and_dist_mode_send_the_following_cells(px):
    px.run("%autopx")
    assert px.run("size").text == "ranks 0–2 → 3\n"
    px.run("%autopx")
    px.run("%dist_mode -e")
    assert px.run("size").text == "ranks 0–2 → 3\n"
    px.run("%dist_mode -d")
    assert px.value("1 + 1") == "2"


def test_a_cell_in_the_background_gives_a_result_for_later(px):
    assert "expected a cell in the background, found none" in px.run("%pxresult").text
    waits = "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)"
    sent = px.run(f"%%px --noblock -o later\n{waits}\nprint('went', rank)\nrank + 1")
    assert sent.text == "<PxResult: running on ranks 0–2>\n"
    assert px.value("later.ready()") == "False"
    px.run("open('go', 'w').close()").ok()
    assert px.run("%px size").text == "ranks 0–2 → 3\n"  # after the cell
    assert px.run("%pxresult").text == "".join(
        f"rank {rank} │ went {rank}\n       → {rank + 1}\n" for rank in range(3)
    )
    assert px.value("later.get(), later.successful(), later.stdout[1]") == (
        "([1, 2, 3], True, 'went 1\\n')"
    )
    px.run("%%px -a\nrank / 0").ok()
    px.run("%pxresult").fails("CellFailed").says("ZeroDivisionError")


def test_a_failed_line_is_caught_as_an_error_of_ipyparallel(px):
    px.run("import ipyparallel as ipp\ncaught = None").ok()
    px.run(
        "try:\n    %px 1 / rank\nexcept ipp.error.CompositeError as error:\n    caught = error"
    ).ok()
    assert px.value("[one[0] for one in caught.elist]") == "['ZeroDivisionError']"
    px.run("%px 1 / rank").fails("CellFailed").says("rank 0", "ZeroDivisionError")


def test_a_client_waits_for_the_cell_in_the_background_and_interrupts_it(px):
    px.run("import ipyparallel as ipp").ok()
    px.run("%%px --noblock -o endless\nwhile True: pass").ok()
    assert px.value("rc.wait(timeout=0), rc.wait(endless, timeout=0)") == "(False, False)"
    px.run("rc.send_signal('SIGINT', block=True)").ok()
    assert px.value("rc.wait(), rc.wait(endless), endless.ready()") == "(True, True, True)"
    px.run("endless.get()").says("KeyboardInterrupt")
    assert px.run("%px size").text == "ranks 0–2 → 3\n"


def test_an_interrupt_of_the_next_cell_ends_the_one_in_the_background(px):
    px.run("%%px --noblock -o endless\nmine = rank\nwhile True: pass").ok()
    cell = px.start("%%px\nprint('next')")
    cell.wait_for("still run the cell in the background")
    px.interrupt()
    assert cell.wait().status == "error"
    cell.says("the cell in the background was interrupted").lacks("next\n", "px_magics")
    assert px.run("%px mine").text == "".join(f"rank {rank} → {rank}\n" for rank in range(3))
    assert px.value("endless.ready(), endless.successful()") == "(True, False)"


def test_an_interrupt_can_leave_the_ranks_running(px):
    waits = "import os, time\nwhile not os.path.exists('left'):\n    time.sleep(0.01)"
    cell = px.start(
        f"%%px --signal-on-interrupt 0 -o left\nprint('began', rank)\n{waits}\nprint('went')\nrank"
    )
    cell.wait_for("began")
    px.interrupt()
    assert cell.wait().status == "ok"
    cell.says("continue with the cell", "%pxresult").lacks("went")
    assert px.value("left.ready()") == "False"
    px.run("open('left', 'w').close()").ok()
    px.run("%pxresult").ok().says("went")
    assert px.value("left.get()") == "[0, 1, 2]"
    # The same where nobody interrupts it.
    px.run("%%px --signal-on-interrupt 0 -o same\nprint('went', rank)\nrank").ok().says("went 1")
    assert px.value("same.get() == left.get()") == "True"
    px.run("%%px --signal-on-interrupt 0\n1 / rank").fails("CellFailed").says("ZeroDivisionError")


def test_the_engines_of_the_cluster_are_the_ranks(px):
    px.run("%px print('for the log')").ok()
    px.run("%%px --noblock -t 1:\nrank").ok()
    assert px.value("_._targets, _.get()") == "([1, 2], [1, 2])"
    assert px.value("cluster.engine_set.n") == "3"
    assert px.value("cluster.engine_set.get_output().count('for the log')") == "3"


def test_pxconfig_sets_options_for_the_following_cells(px):
    px.run("%pxconfig --targets 1").ok()
    assert px.run("%px rank").text == "rank 1 → 1\n"
    assert px.run("%%px --targets 0 --no-stream\nrank").text == "rank 0 → 0\n"
    px.run("%pxconfig --targets all").ok()
    assert px.run("%px size").text == "ranks 0–2 → 3\n"


def test_a_client_of_a_profile_without_a_cluster_finds_the_ranks(px):
    assert px.value("import ipyparallel as ipp\nipp.Client(profile='mpi').ids") == "[0, 1, 2]"


UNTIL = """
def until(name):
    import os, time
    while not os.path.exists(name):
        time.sleep(0.01)
"""
WAITS = "ranks 0–2 must first answer a request of an ipyparallel client"


@pytest.mark.parametrize("magic", ["%%px", "%%distributed"])
def test_a_cell_comes_after_requests_of_a_view_that_does_not_block(px, magic):
    gate = f"{magic[2:]}-gate"
    px.run(f"{UNTIL}\ndv.apply_async(until, {gate!r})\ndv.push({{'pushed': {gate!r}}})").ok()
    cell = px.start(f"{magic}\npushed")
    cell.wait_for(WAITS)
    (px.cwd / gate).touch()
    assert cell.wait().text.endswith(f" → {gate!r}\n")
    px.run(f"{UNTIL}\ndv.apply_async(until, {gate!r})\ndv.execute('pushed += \"2\"')").ok()
    assert px.value("ranks.pull('pushed')[1]") == f"'{gate}2'"


def test_a_request_of_a_view_comes_after_a_cell_that_awaits(px):
    waits = "import asyncio, os\nwhile not os.path.exists('open'):\n    await asyncio.sleep(0.01)"
    px.run(f"%%px --noblock\n{waits}\nawaited = rank").ok()
    px.run("asked = dv.pull('awaited', block=False)").ok()
    assert px.value("asked.ready()") == "False"
    px.run("open('open', 'w').close()").ok()
    assert px.value("asked.get()") == "[0, 1, 2]"


def test_stop_ends_the_request_that_a_cell_waits_for(px):
    px.run(f"{UNTIL}\nheld = dv.apply_async(until, 'never')").ok()
    cell = px.start("%%px\nrank")
    cell.wait_for(WAITS)
    px.interrupt()
    cell.wait().fails("KeyboardInterrupt").says("on ranks 0–2 was interrupted, too")
    px.run("held.get(timeout=60)").says("KeyboardInterrupt")
    assert px.run("%%px\nsize").text == "ranks 0–2 → 3\n"


THEIRS = """
import sys, ipyparallel as ipp
def until(name):
    import os, time
    for which in "", f" {rank}":
        open(f"until has begun{which}", "w").close()
    while not os.path.exists(name):
        time.sleep(0.01)
def total():
    from allranks.collectives import allreduce
    open(f"total has begun {rank}", "w").close()
    return allreduce(10.0)
_, file, ranks, function, *arguments = sys.argv
client = ipp.Client(file)
view = client[eval(ranks)] if ranks else client.load_balanced_view()
result = view.apply_async(globals()[function], *arguments)
try:
    print(result.get())
except BaseException as error:
    print(error)
"""
ANOTHER = """
import atexit, os, subprocess, sys, time
from allranks.cluster.ipython_profile import profile_folder
from allranks.features.ipyparallel.connection_files import connection_files
while not (files := connection_files(profile_folder())):
    time.sleep(0.01)
(file,) = files
theirs = subprocess.Popen(
    [sys.executable, "theirs.py", str(file), *{!r}],
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,  # the notebook's interrupts are not for it
)
atexit.register(theirs.kill)
while not all(map(os.path.exists, {})):
    time.sleep(0.01)
"""


def start_another(px, ranks, function, *arguments):
    """Has a client of another notebook call a function, which all these ranks have begun. Without
    ranks it is a task, which is begun by the first that is free.
    """
    (px.cwd / "theirs.py").write_text(THEIRS)
    begun = [f"{function} has begun {rank}" for rank in ranks] or [f"{function} has begun"]
    for file in begun:
        (px.cwd / file).unlink(missing_ok=True)
    px.run(ANOTHER.format((repr(ranks) if ranks else "", function, *arguments), begun)).ok()


def test_a_request_of_another_notebook_is_named_and_an_interrupt_leaves_it_alone(px):
    start_another(px, [0, 1], "until", "their-gate")
    theirs = px.value("theirs.pid")
    cell = px.start("%%px\nleft_out = rank")
    cell.wait_for(
        "ranks 0–1 must first answer a request of an ipyparallel client of another notebook "
        f"(process {theirs})"
    )
    px.interrupt()
    cell.wait().fails("CellInterrupted")
    cell.says("had not begun here", "ranks 0–1 go on with a request of an ipyparallel client of")
    (px.cwd / "their-gate").touch()
    assert px.value("theirs.communicate()[0]") == "'[None, None]\\n'"
    assert px.run("%%px\nallreduce(rank, op=Sum), 'left_out' in globals()").text.splitlines() == [
        "ranks 0–1 → (3, False)",
        "rank 2    → (3, True)",
    ]


def test_an_interrupt_leaves_it_alone_also_where_the_ranks_need_another_communicator(px):
    px.run("%%px\nif rank == 0: 1 / 0\ncomm.Barrier()").fails("CellFailed")
    start_another(px, [], "until", "second-gate")  # a task, which begins no epoch
    cell = px.start("%%px\nleft_out = rank")
    cell.wait_for("must first answer a request of an ipyparallel client of another notebook")
    px.interrupt()
    cell.wait().fails("KeyboardInterrupt")
    cell.says("goes on with a request of an ipyparallel client of another notebook")
    (px.cwd / "second-gate").touch()
    assert px.value("theirs.communicate()[0]") == "'None\\n'"
    assert px.run("%%px\nallreduce(rank, op=Sum)").text == "ranks 0–2 → 3\n"


def test_interrupt_ends_the_request_of_another_notebook(px):
    start_another(px, [0, 1], "until", "never")
    assert px.value("ranks.interrupt()") == "True"
    assert "KeyboardInterrupt" in px.value("theirs.communicate()[0]")


def test_a_call_of_a_cell_is_not_taken_for_one_of_a_request(px):
    start_another(px, [1], "total")
    cell = px.run("%%px\nallreduce(1.0 * rank)")
    said = "rank 1 is in a request of a client, ranks 0, 2 in a cell"
    cell.fails("CellFailed", "CollectiveMismatch").says(said)
    assert said in px.value("theirs.communicate()[0]")
    assert px.run("%%px\nallreduce(rank, op=Sum)").text == "ranks 0–2 → 3\n"


def test_the_requests_of_a_client_fail_when_its_ranks_end(px):
    px.run(
        f"import ipyparallel as ipp\n{UNTIL}\nold = ipp.Client()\n"
        "direct, tasks = old[:], old.load_balanced_view()\nheld = direct.apply_async(until, 'no')\n"
        "queued = tasks.map_async(until, 9 * ['no'])"
    ).ok()
    px.run("%distributed restart").ok()
    for result in ("held", "queued"):
        px.run(f"{result}.get()").says("EngineError: expected ranks of this client", "have ended")
    calls = ("direct.apply_sync(abs, 1)", "tasks.map_sync(abs, [1])", "old.queue_status()")
    for call in (*calls, "for rank in old.ids: pass"):
        px.run(call).fails("UsageError").says("Type: rc = ipp.Client()")
    assert px.value("old.wait(), ipp.Client()[:].apply_sync(abs, -1)") == "(True, [1, 1, 1])"


def test_a_client_that_shuts_down_stops_the_ranks_calmly(px):
    # Whoever else has a cluster of ipyparallel here: the client would wait for it.
    found = "import allranks.features.ipyparallel.notebook as ours"
    px.run(f"{found}\nours.a_cluster_may_start = lambda: False").ok()
    assert px.run("ipp.Client().shutdown(hub=True)").ok().text == ""
    px.run("ipp.Client()").says("UsageError", "found neither. Type: %distributed start")
    px.run("%px size").ok().says("allranks started ranks 0–2").lacks("again", "lost")


def test_the_first_interrupt_of_a_blocking_call_of_a_view_ends_it_on_the_ranks(px):
    px.run(
        "def endless():\n    import time\n    open(f'began {rank}', 'w').close()\n"
        "    while True: time.sleep(0.01)"
    ).ok()
    cell = px.start("for _ in range(9): dv.apply_sync(endless)")
    wait_until(lambda: all((px.cwd / f"began {rank}").exists() for rank in range(3)))
    px.interrupt()
    cell.wait().fails("CellInterrupted").says(
        "while True: time.sleep(0.01)",
        "the call of endless on ranks 0–2 was interrupted; the ranks keep their variables",
    )
    assert px.run("%%px\nsize").text == "ranks 0–2 → 3\n"


def test_a_read_by_a_view_waits_for_the_cell_in_the_background_and_says_so(px):
    px.run("%%px --noblock -o endless\nfound = rank\nwhile True: pass").ok()
    waits = px.start('dv["found"]')
    waits.wait_for("the request waits: ranks 0–2 run In[")
    px.interrupt()
    waits.wait().fails("CellInterrupted").says(
        'dv["found"] was interrupted. ranks 0–2 run In[',
        "(%%px --noblock) first; it goes on, and the call is left out after it.",
        "type: ranks.interrupt()",
    )
    px.run("ranks.interrupt()").ok()
    px.run("endless.get()").says("KeyboardInterrupt")
    assert px.value('dv["found"]') == "[0, 1, 2]"


STOPPED = """
import sys, ipyparallel as ipp
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "allranks")
def endless():
    import time
    open(f"theirs began {rank}", "w").close()
    while True: time.sleep(0.01)
try:
    ipp.Client(sys.argv[1])[:].apply_sync(endless)
except BaseException as error:
    print(type(error).__name__, error)
"""


def test_a_stop_in_another_notebook_ends_its_blocking_call_on_these_ranks(px):
    (px.cwd / "theirs.py").write_text(STOPPED)
    begun = [f"theirs began {rank}" for rank in range(3)]
    px.run(ANOTHER.format((), begun) + "import signal\ntheirs.send_signal(signal.SIGINT)").ok()
    assert px.value("theirs.communicate()[0]") == repr(
        "CellInterrupted the call of endless on ranks 0–2 was interrupted; the ranks keep their "
        "variables\n"
    )
    assert px.run("%%px\nsize").text == "ranks 0–2 → 3\n"


def test_an_interrupted_request_says_for_which_rank_it_waited(px):
    px.run("import time\nwaits = rc[:2].apply_async(lambda: allreduce(rank))").ok()
    at = "sum(one.doing.waits_for == 'rank 2' for one in ranks.cells.statuses())"
    px.run(f"while {at} < 2: time.sleep(0.01)\nranks.interrupt()").ok()
    px.run("waits.wait(60)").ok()
    said = "allreduce(Average) waited for rank 2 when the request was interrupted."
    assert px.value("{one[1] for one in waits.exception().elist}") == str({said})


def test_a_view_that_waits_for_ranks_outside_of_it_says_so(px):
    px.run("import time\ndef sums():\n    return allreduce(rank, Sum)").ok()
    waits = px.start("rc[:2].apply_sync(sums)")
    waits.wait_for("rank 2 has nothing to run: no cell, and no request of a client")
    px.interrupt()
    waits.wait().fails("CellInterrupted").says("rank 0 · allreduce(Sum) at In[", "s for rank 2:")
    waits.says("This call needs all ranks: make it on all, as with the view rc[:]")
    assert px.value("rc[:2].apply_async(sums) and rc[2].apply_sync(sums)") == "3"


def test_a_wait_for_a_request_that_waits_for_other_ranks_and_a_cell_behind_it_say_so(px):
    px.run("held = rc[:2].apply_async(sums)").ok()
    gets = px.start("held.get()")
    gets.wait_for("rank 2 has nothing to run")
    px.interrupt()
    gets.wait().fails("KeyboardInterrupt").says("the ranks go on with the request")
    gets.lacks("late_notices")
    cell = px.start("%%px\nrank")
    cell.wait_for("rank 2 has nothing to run")
    px.interrupt()
    cell.wait().fails("KeyboardInterrupt").says(
        "ranks 0–1 must first answer a request", "rank 0: allreduce(Sum) at In[", "s for rank 2:"
    )


def test_a_collective_that_a_later_request_completes_ends(px):
    px.run("begun = dv.execute('if rank == 0: comm.bcast(7)', block=False)").ok()
    assert px.value("rc[[2, 1]].apply_sync(lambda: comm.bcast(None))") == "[7, 7]"
    px.run("begun.get()").ok()


def test_requests_of_views_that_no_cell_waits_for_are_interrupted_too(px):
    at = "['in a request of a client' in one.state for one in ranks.cells.statuses()]"
    wait = f"while not {{}}({at}): time.sleep(0.01)"
    # An interrupt concerns what a rank has begun.
    px.run(
        f"{UNTIL}\nimport time\nheld = dv.apply_async(until, 'never')\n{wait.format('all')}"
    ).ok()
    assert px.value("ranks.interrupt()") == "True"
    px.run("held.get(timeout=60)").says("KeyboardInterrupt")
    px.run("task = rc.load_balanced_view().apply_async(until, 'never')").ok()
    px.run(wait.format("any")).ok()
    assert px.value("ranks.interrupt()") == "True"
    px.run("task.get(timeout=60)").says("KeyboardInterrupt")
    assert px.value("ranks.interrupt()") == "False"


def test_stop_ends_the_task_that_a_cell_waits_for(px):
    px.run(f"{UNTIL}\ntask = rc.load_balanced_view().apply_async(until, 'never')").ok()
    cell = px.start("%%px\nrank")
    cell.wait_for("must first answer a request of an ipyparallel client; interrupt to end both")
    px.interrupt()
    cell.wait().fails("CellInterrupted").says("was interrupted, too")
    px.run("task.get(timeout=60)").says("KeyboardInterrupt")
    assert px.run("%%px\nsize").text == "ranks 0–2 → 3\n"


def test_a_request_awaits_and_can_be_interrupted_meanwhile(px):
    awaits = "import asyncio\nawait asyncio.sleep(0)\nslept = rank\n"
    px.run(f"dv.execute({awaits!r}, block=False)").ok()
    assert px.run("%%px\nslept == rank").text == "ranks 0–2 → True\n"
    px.run(f"held = dv.execute({awaits + 'await asyncio.Event().wait()'!r}, block=False)").ok()
    cell = px.start("%%px\nrank")
    cell.wait_for(WAITS)
    px.interrupt()
    cell.wait().fails("KeyboardInterrupt")
    px.run("held.get(timeout=60)").says("KeyboardInterrupt")
    assert px.run("%%px\nsize").text == "ranks 0–2 → 3\n"


def test_a_cell_does_not_wait_for_the_request_of_a_rank_that_has_died(px):
    px.run("import os\nlost = rc[1].apply_async(os._exit, 1)").ok()
    px.run("%%px\nrank")
    assert px.run("%%px\nsize").text == "ranks 0–2 → 3\n"


@pytest.mark.replaces
@pytest.mark.parametrize(
    ("name", "ranks", "error"), [("SIGKILL", "1", "RankDied"), ("9", "all", "ClusterLost")]
)
def test_an_interrupt_can_end_the_ranks_that_are_in_the_cell(px, name, ranks, error):
    px.run("%distributed heal on").ok()
    px.run("%%px\nkept = rank").ok()
    cell = px.start(
        f"%%px --signal-on-interrupt {name} -t {ranks}\nimport signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('began')\n"
        "while True:\n    try: time.sleep(600)\n    except BaseException: pass"
    )
    cell.wait_for("began")
    px.interrupt()
    cell.wait().fails(error).says("because the notebook was interrupted")
    px.run("%%px\nassert comm.allreduce(1) == size").ok()
    kept = px.run("%%px -t 0\n'kept' in globals()")
    kept.ok().says(f"rank 0 → {ranks == '1'}")


def test_nbdistributeds_magics_are_there(px):
    assert px.run("%%rank [0,2]\nrank").text == "rank 0 → 0\nrank 2 → 2\n"
    assert px.run("%sync").status == "ok"
    assert "3 ranks" in px.run("%dist_status").text
    assert px.run("%%rank [7]\nrank").error_name == "UsageError"
    assert "started ranks 0–2" in px.run("%dist_reset").text
    px.run("%dist_mode -e").ok()
    px.run("%dist_shutdown").ok().says("The ranks are stopped").says("run in the notebook")
    assert px.run("print(6 * 7)").text == "42\n"  # not on new ranks


CHOOSES = """
from IPython.core.magic import register_cell_magic

@register_cell_magic
def somewhere(line, cell):
    shell = get_ipython()
    known = shell.magics_manager.magics["cell"]
    view = known["px"].__self__.view if "px" in known else None
    engines = view is not None and len(view.client.ids) > 0
    processes = known["distributed"].__self__._comm_manager is not None
    print("engines" * engines + "processes" * processes)
    return shell.run_cell_magic("px" if engines else "distributed", line, cell)
"""
MIXED = [
    ("%load_ext nbdistributed", ""),
    (CHOOSES, ""),
    ("%dist_init --num-processes 2", "started ranks 0–1"),
    ("%dist_mode -d", ""),
    ("%%rank [1]\nprint('only', rank)", "rank 1 │ only 1"),
    ("%%distributed\nx = comm.allreduce(rank)\nprint(x)", "ranks 0–1 │ 1"),
    ("%%somewhere\nprint('sum', x)", "processes\nranks 0–1 │ sum 1"),
    ("%sync", ""),
    ("%dist_shutdown", "The ranks are stopped"),
    ("%%px\nfrom mpi4py import MPI\ny = MPI.COMM_WORLD.allreduce(1)", "started ranks"),
    ("%px print('y is', y)", "│ y is "),
    ("%%somewhere\nprint('still', y)", "engines\n"),
    ("dv['y'][0] == len(rc.ids)", "True"),
]


def test_a_notebook_that_mixes_px_and_nbdistributed_runs_with_one_changed_line(px):
    """The magic of its own, ``%%somewhere``, runs a cell where there are processes."""
    changed = {"%load_ext nbdistributed": "%load_ext allranks.px"}
    px.run("%distributed off\n%distributed stop").ok()
    px.run("%%px -n 4\n1").says("no ranks run yet. Type first: %distributed start -n 4")
    for source, says in MIXED:
        px.run(changed.get(source, source)).ok().says(says)
    px.run("%distributed stop").ok()


def test_the_extension_can_be_taken_away_by_itself(px):
    assert px.run("%unload_ext allranks.px").status == "ok"
    assert px.value("'rc' in globals(), view") == "(False, 'kept')"
    assert px.run("%%px\n1").status == "error"
    assert px.run("%%distributed -n 2\nsize").text.endswith("ranks 0–1 → 2\n")


def test_px_is_ipyparallels_where_a_view_was_activated(px):
    kernel = px
    kernel.run("%load_ext allranks.px")
    kernel.run(
        "import ipyparallel as ipp\nview = ipp.Client()[:]\nview.block = True\nview.activate()"
    )
    cell = kernel.run("%%px\nby_ipyparallel = rank\nprint('said', rank)\nrank + 5").ok()
    cell.says("[stdout:1] said 1", "Out[1:", ": 6")
    kernel.run("%%px\n1 / rank").says("[0:execute]", "ZeroDivisionError: division by zero")
    slow_to_end = "try: comm.recv(source=1)\nfinally: time.sleep(1)"
    stopped = kernel.start(f"%%px --targets 0\nimport time; print('waits')\n{slow_to_end}")
    stopped.wait_for("waits")
    kernel.interrupt()
    stopped.wait()
    kernel.run("%%px\ncomm.Barrier()\nprint('both')").says("[stdout:0] both").lacks("stderr")
    assert kernel.value("view['by_ipyparallel']") == "[0, 1]"
    assert kernel.run("%%distributed\n'by allranks'").text == "ranks 0–1 → 'by allranks'\n"


#: For a request: returns once the next one has come to its rank. That is to be sent only when there
#: is a file of this name, because only a rank that is in a request leaves the next one unread.
UNTIL_NEXT = """
def until_next(name):
    import time, zmq
    requests = get_ipython().kernel.shell_stream
    open(name, "w").close()
    while not requests.socket.get(zmq.EVENTS) & zmq.POLLIN:
        time.sleep(0.01)
    requests.flush()  # it is not announced a second time
"""


def test_requests_behind_a_failed_one_are_not_run(px):
    px.run(f"%%px{UNTIL_NEXT}").ok()
    px.run("run = view.client[1].execute").ok()
    px.run("run('a = 5; b = 10; c = 0', silent=False, block=False)").ok()
    px.run("run('until_next(\"alone\"); b / c', silent=False, block=False)").ok()
    wait_until((px.cwd / "alone").exists)
    px.run("last = run('b *= 2', silent=False, block=False)").ok()
    assert px.run("last.get()").error_name == "TaskAborted"
    assert px.value("view.client[1]['b']") == "10"


def test_no_rank_waits_for_one_that_does_not_run_a_request_behind_an_error(px):
    px.run(f"%%px{UNTIL_NEXT}").ok()
    px.run("%%px --noblock -o failed\nuntil_next(f'on {rank}')\nif rank == 0: 1 / 0").ok()
    wait_until(lambda: all((px.cwd / f"on {rank}").exists() for rank in range(2)))
    ended = px.run("%%px\ncomm.Barrier()\nprint('both')").lacks("[stdout")
    ended.says("[1:execute]", "RankLeft", "rank 0 has failed in this request, or in one before it")
    assert px.value("failed.successful()") == "False"
    px.run("%%px\ncomm.Barrier()\nprint('both')").says("[stdout:0] both", "[stdout:1] both")


def test_a_rank_that_has_failed_is_not_waited_for(px):
    failed = px.run("%%px\nif rank == 0: 1 / 0\nallreduce(1)")
    failed.says("ZeroDivisionError", "RankLeft", "Correct the error of rank 0")
    px.run("%%px\nprint(allreduce(1, Sum))").says("[stdout:0] 2", "[stdout:1] 2")


LEFT_OUT = {
    "a function": "view.client[[1, 0]].apply_sync(missing)",
    "a magic": "%%px\nif rank == 0: float(allreduce(rank))",
}


@pytest.mark.parametrize("call", LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_a_rank_that_has_left_out_a_collective_of_a_blocking_call_is_not_waited_for(px, call):
    px.run("def missing():\n    if rank == 0: return float(allreduce(rank))").ok()
    px.run(call).says(
        "RankLeft", "finished the request without calling allreduce(Average); rank 0 waits"
    )
    px.run("%%px\nprint(allreduce(1, Sum))").says("[stdout:0] 2", "[stdout:1] 2")


def test_a_task_behind_does_not_hide_that_a_rank_has_left_out_a_collective(px):
    px.run(f"%%px{UNTIL_NEXT}").ok()
    px.run(
        "def task(number): until_next(f'task {number}')\n"
        "tasks = view.client.load_balanced_view().map_async(task, range(4))"
    ).ok()
    wait_until(lambda: all((px.cwd / f"task {number}").exists() for number in range(2)))
    px.run("view.apply_sync(missing)").says("RankLeft", "finished the request without calling")
    wait_until(lambda: all((px.cwd / f"task {number}").exists() for number in range(4)))
    px.run("%%px\nprint(allreduce(1, Sum))").says("[stdout:0] 2", "[stdout:1] 2")
    assert px.value("tasks.get()") == str([None] * 4)


@pytest.mark.parametrize("magic", ["%%px", "%%distributed"])
def test_what_follows_a_failed_request_does_not_receive_its_messages(px, magic):
    sends = "if rank == 0: comm.send({!r}, 1)\nelse: {}"
    px.run("%%px\n" + sends.format("old", "raise ValueError")).says("ValueError")
    px.run("%%px --targets 1\nprint('alone')").says("alone")
    px.run(f"{magic}\n" + sends.format("new", "print(comm.recv())")).says("new").lacks("old")


def test_a_client_sends_other_signals_than_an_interrupt(px):
    px.run("view.client.send_signal(0, block=True)").ok()
    px.run("view.client.send_signal('SIGNOT', block=True)").says(
        "UsageError: expected 0 or a signal such as SIGINT or SIGKILL, found 'SIGNOT'"
    )
    px.run("%%px\nimport signal\nsignal.signal(signal.SIGUSR1, lambda *_: globals().update(got=1))")
    px.run("view.client.send_signal('SIGUSR1', block=True)").ok()
    px.run("%%px\nimport time\nwhile 'got' not in globals(): time.sleep(0.01)").ok()


def test_a_broadcast_view_gives_the_replies_of_all_ranks_as_one(px):
    px.run("all_at_once = view.client.broadcast_view([1, 0], is_coalescing=True)").ok()
    px.run("reply = all_at_once.apply_async(lambda: rank)").ok()
    assert px.value("reply.get(), reply.engine_id") == "([1, 0], [1, 0])"


@pytest.mark.replaces
def test_a_request_ends_with_its_rank_and_the_new_rank_has_the_same_id(px):
    px.run("%distributed heal on").ok()
    # It does not return to Python, and so the rank reads nothing that the client sends.
    px.run("waits = view.client[1].apply_async(sum, range(10**15))").ok()
    px.run("view.client.send_signal('SIGKILL', targets=1, block=True)").ok()
    said = [px.run("waits.get()").says("EngineError", "Engine 1 died while running task").text]
    # By itself, after a cell that is none of the ranks: the news may come a moment later.
    wait_until(lambda: "rank 1 was replaced" in said[-1] or said.append(px.run("pass").text))
    assert px.value("view.client[:].apply_sync(lambda: rank)") == "[0, 1]"
    px.run("view.apply_sync(lambda: by_ipyparallel)").says(
        "Cell In[", "rank 1 was replaced, and lacks what cells had made before."
    ).lacks("rank 0 was", "Could not get source")
    px.run("%%distributed\nrank").says("rank 1 → 1")


def test_a_request_does_not_wait_for_a_rank_that_has_died_in_it(px):
    died = px.run("%%px\nimport os\nif rank == 1: os._exit(1)\nallreduce(1, Sum)")
    # It hears how the rank has died, or finds that it has.
    died.says("[0:execute]", "RankLost: allreduce(Sum) needs all of ranks 0–1: rank 1 ")
    assert px.run("%%distributed\nallreduce(1, Sum)").text.endswith("ranks 0–1 → 2\n")


@pytest.mark.replaces
def test_a_rank_that_a_client_has_shut_down_is_replaced_and_the_reason_is_named(px):
    px.run("%distributed heal on").ok()
    said = [px.run("view.client.shutdown(targets=[1], block=True)").ok().text]
    wait_until(lambda: "rank 1 was replaced" in said[-1] or said.append(px.run("pass").text))
    reason = "ended with exit code 0: an ipyparallel client has shut it down"
    assert reason in "".join(said)
