"""Ranks that stay when their notebook goes, and the notebook that has them then."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.faults.notebook import KEPT, Notebook, stopped
from tests.kernel import patched, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the host agent needs Linux")

NONE = "No ranks of yours run on this machine.\n"
SUM = "import numpy as np\nfloat(allreduce(np.ones(2), op=Sum)[0])"
LONG = (
    "import os, time\n"
    "display({'text/plain': 'shown'}, raw=True)\n"
    "for step in range(3):\n    log(loss=1.0 / (1 + step))\n"
    "print('begun')\n"
    "while not os.path.exists('go'):\n    time.sleep(0.02)\n"
    "print('ended')\nkept\n"
)


@pytest.fixture(scope="module", autouse=True)
def _they_stay(notebook):
    notebook.run("%distributed detach-on-exit 120s").says("keep running for 2 min")
    yield
    assert notebook.run("%distributed detach-on-exit off").text == (
        "The ranks end with this notebook.\n"
    )


@pytest.fixture(scope="module")
def other(notebook, tmp_path_factory):
    with Notebook(tmp_path_factory.mktemp("other"), {"TMPDIR": str(notebook.temporary)}) as opened:
        yield opened


@pytest.fixture
def go(notebook):
    path = notebook.cwd / "go"
    yield path.touch
    path.unlink(missing_ok=True)


def again(notebook, attach=True):
    """Starts a kernel in the place of the one before; returns what attach says."""
    notebook.restart()
    assert notebook.run("%load_ext allranks").status == "ok"
    if not attach:
        return None
    return notebook.run("%distributed attach").says("Attached to ranks 0–3")


def check_at_work(notebook):
    assert notebook.on_ranks("kept").text == KEPT
    assert notebook.on_ranks(SUM).text == "ranks 0–3 → 4.0\n"


def test_a_kernel_that_was_killed_has_its_ranks_back(notebook, go):
    notebook.on_ranks(
        "import threading, time\n"
        "import os\ndef later():\n    while not os.path.exists('go'): time.sleep(0.02)\n"
        "    print('said while nobody was there')\n"
        "thread = threading.Thread(target=later)\nthread.start()",
        "-r 1",
    )
    pids = notebook.pids()
    os.killpg(notebook.pid, signal.SIGKILL)  # as Jupyter does where a kernel does not end
    go()
    again(notebook, attach=False)
    while "; detached, " not in (listed := notebook.run("%distributed clusters").text):
        notebook.drain(0.1)
    assert re.search(
        r"^\w{8}  ranks 0–3 of \S+, since \d\d:\d\d, idle; detached, \d+ s left: "
        r"%distributed attach \w{8}$",
        listed.strip(),
    )
    said = notebook.run("%distributed attach").text
    assert re.match(
        r"Attached to ranks 0–3 of \w{8}, running since \d\d:\d\d\. When this notebook's kernel "
        r"ends, they keep running for 2 min\.\n",
        said,
    )
    if "said while nobody" not in said:  # the kernel was that fast
        said = notebook.on_ranks("thread.join()", "-r 1").text
    assert "said while nobody was there" in said
    assert notebook.pids() == pids
    check_at_work(notebook)
    assert "attached to this notebook" in notebook.run("%distributed clusters").text
    assert notebook.value("ranks.client().ids") == "[0, 1, 2, 3]"


def test_a_cell_goes_on_where_its_kernel_dies_and_is_shown_from_its_beginning(notebook, go):
    cell = notebook.start_on_ranks(LONG).wait_for("begun")
    begun = time.monotonic()
    notebook.kill9()
    for seconds in (0.0, 0.2):  # kernels come and go
        again(notebook, attach=False)
        notebook.start("%distributed attach")
        notebook.drain(seconds)
        notebook.kill9()
    again(notebook, attach=False)
    assert "running In[" in notebook.run("%distributed clusters").text
    before = time.monotonic() - begun
    attached = notebook.start("%distributed attach").wait_for("begun")
    go()
    attached.wait()
    attached.ok().says(
        "ranks 0–3 are still running In[", "shown", "begun", "ended", "rank 3    → 30"
    )
    assert attached.text.count("begun") == 1
    assert "loss" in str(attached.displays)
    # The time before the attach counts too.
    found = re.search(r"ranks 0–3: finished, (?:(\d+) min )?([\d.]+) s", attached.text)
    minutes, seconds = found.groups("0")
    # Above 10 s it is shown to 0.1 s, and above a minute to 1 s.
    assert 60 * int(minutes) + float(seconds) > before - (1 if int(minutes) else 0.06)
    assert cell.status == "aborted"
    check_at_work(notebook)


def test_a_cell_that_ended_while_nobody_was_there_is_shown_and_fails_as_it_did(notebook, go):
    notebook.start_on_ranks(f"{LONG}if rank == 2: 1 / 0").wait_for("begun")
    notebook.kill9()
    go()
    again(notebook, attach=False)
    while ", idle; " not in notebook.run("%distributed clusters").text:
        notebook.drain(0.2)
    attached = notebook.run("%distributed attach")
    assert attached.error_name == "CellFailed"
    assert "rank 2 of 4 at line 11: ZeroDivisionError" in attached.error_value
    assert re.search(r"In\[\d+\] finished while no notebook was attached:", attached.text)
    assert "ended" in attached.text
    check_at_work(notebook)
    # Once seen, it is not shown again, and an ensemble that has ended is not called interrupted.
    assert "5 of 5 finished" in notebook.run("%%ensemble x=0:5\nresult = x").text
    attached = again(notebook).text
    assert "finished" not in attached
    assert "ensemble" not in attached
    check_at_work(notebook)


def test_a_cell_that_is_followed_can_be_interrupted_and_typed_to(notebook):
    notebook.start(
        "%%distributed\n"
        "answer = input('name? ') if rank == 1 else ''\nprint('here', answer)\n"
        "while True: barrier()",
        typing=True,
    ).wait_for("here")
    notebook.kill9()
    again(notebook, attach=False)
    attached = notebook.start("%distributed attach", typing=True)
    assert "name?" in attached.prompt()
    attached.answer("Ada")
    attached.wait_for("here Ada")
    notebook.drain(0.5)
    notebook.interrupt()
    assert attached.wait().error_name == "CellInterrupted"
    assert notebook.on_ranks("answer", "-r 1").text == "rank 1 → 'Ada'\n"
    check_at_work(notebook)


@pytest.mark.replaces
def test_a_rank_that_dies_while_nobody_is_there_is_replaced_after_it(notebook):
    victim = notebook.pids()[3]
    notebook.on_ranks("weights = 7 * rank\nkeep('weights', 'kept')")
    again(notebook, attach=False)
    os.kill(victim, signal.SIGKILL)
    # The host agent knows of its end once it has asked for its status.
    wait_until(lambda: not psutil.pid_exists(victim))
    attached = notebook.run("%distributed attach").ok()
    cell = notebook.on_ranks("weights")
    attached.says("was killed by signal 9", "rank 3 was replaced, with weights and kept kept")
    assert "rank 3 → 21\n" in cell.text
    check_at_work(notebook)
    # And one that dies now.
    died = notebook.on_ranks("import os\nif rank == 1: os.kill(os.getpid(), 9)")
    assert "rank 1 was replaced" in died.text
    notebook.on_ranks("kept = 10 * rank")
    check_at_work(notebook)


@pytest.mark.replaces
def test_a_cell_ends_where_its_kernel_dies_before_it_has_reported_a_death(notebook):
    victim = notebook.pids()[1]
    notebook.on_ranks("keep('kept')")
    notebook.start_on_ranks(
        "import time\nprint('begun')\nif rank == 1: time.sleep(600)\nbarrier()"
    ).wait_for("ranks 0–3 │ begun")
    with stopped(notebook.pid):
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(victim))
        notebook.kill9()
    again(notebook, attach=False)
    while ", idle; " not in notebook.run("%distributed clusters").text:
        notebook.drain(0.1)
    attached = notebook.run("%distributed attach")
    attached.fails("CellFailed", "ranks 0, 2–3 of 4 at line 5: RankLost: ", "rank 1 has died")
    attached.says("finished while no notebook was attached", "rank 1 was replaced, with kept kept")
    attached.says("was killed by signal 9").lacks("does not answer")
    check_at_work(notebook)


#: For a notebook: it asks only the first rank to join with new ones.
_ASKS_ONE = """
from allranks.cluster import cluster as held
from allranks.records import requests
connection = held.session.running.cells.connection
def send(ranks, record, *payloads, send=connection.send):
    is_heal = getattr(record, "name", "") == requests.HEAL
    return send(list(ranks)[: 1 if is_heal else None], record, *payloads)
connection.send = send
"""


@pytest.mark.replaces
def test_ranks_that_a_killed_kernel_has_not_asked_to_replace_one_are_asked_by_the_next(notebook):
    notebook.on_ranks("weights = 7 * rank\nkeep('weights', 'kept')")
    notebook.run(_ASKS_ONE).ok()
    died = notebook.start_on_ranks("import os\nif rank == 3: os.kill(os.getpid(), 9)\nbarrier()")
    died.wait_for("rank 3: still being replaced")
    notebook.kill9()
    again(notebook)
    cell = notebook.on_ranks("weights").says("rank 3 was replaced, with weights and kept kept")
    assert "rank 3 → 21\n" in cell.text
    check_at_work(notebook)


@pytest.mark.replaces
def test_a_start_just_after_the_kernel_was_killed_removes_no_kept_variables(notebook):
    notebook.on_ranks("weights = 7 * rank\nkeep('weights', 'kept')")
    agent = int(notebook.on_ranks("import os\nos.getppid()", "-r 0").text.split()[-1])
    open_files = [os.path.realpath(file.path) for file in os.scandir(f"/proc/{notebook.pid}/fd")]
    folders = [file for file in open_files if os.path.basename(file).startswith("allranks-kept-")]
    assert folders
    os.kill(agent, signal.SIGSTOP)  # it has not yet noticed the kernel's end
    try:
        notebook.kill9()
        for folder in folders:
            os.utime(folder, (0, 0))  # new ones are not removed
        start = "from allranks.cluster.kept_folders import KeptFolders; KeptFolders()"
        tmpdir = {"TMPDIR": str(notebook.temporary)}
        subprocess.run([sys.executable, "-c", start], env=os.environ | tmpdir, check=True)
    finally:
        os.kill(agent, signal.SIGCONT)
    again(notebook)
    died = notebook.on_ranks("import os\nif rank == 1: os.kill(os.getpid(), 9)")
    assert "rank 1 was replaced, with weights and kept kept" in died.text
    assert notebook.on_ranks("weights", "-r 1").text == "rank 1 → 7\n"
    check_at_work(notebook)


def test_another_notebook_attaches_when_the_first_lets_go(notebook, other):
    name = re.match(r"\w{8}", notebook.run("%distributed clusters").text)[0]
    watched = other.run(f"%distributed attach {name[:5]}")
    assert f"Watching ranks 0–3 of {name}, attached to the notebook of process" in watched.text
    left = notebook.run("%distributed detach").text
    assert left == (
        "ranks 0–3 keep running for 2 min. Type in another notebook, or here: "
        f"%distributed attach {name}\n"
    )
    watched.wait_for(f" s left: %distributed attach {name}.")
    # What is left of a host agent that was killed is ended at once: this one lives on.
    other.run("from allranks.records import limits; limits.LAUNCHER_SECONDS = 0")
    assert "they keep running for 2 min" in other.run(f"%distributed attach {name}").text
    check_at_work(other)
    assert "keep running for 60 s" in other.run("%distributed detach 60s").text
    assert "keep running for 60 s" in notebook.run("%distributed attach").text
    check_at_work(notebook)
    notebook.run("%distributed detach-on-exit 120s")


def test_ranks_of_another_version_are_refused(notebook, other):
    name = re.match(r"\w{8}", notebook.run("%distributed clusters").text)[0]
    other.run(
        "from allranks.features.attach import sessions\n"
        "import dataclasses\nown = sessions.version\n"
        "sessions.version = lambda: '99.0'"
    )
    expected = "expected ranks of allranks 99.0, found "
    assert expected in other.run(f"%distributed attach {name}").error_value
    notebook.run("%distributed detach")
    refused = other.run(f"%distributed attach {name}").error_value
    assert expected in refused
    assert f"in {name}. Attach from a notebook with that version" in refused
    assert notebook.run("%distributed attach").status == "ok"
    # One that tells more than this one knows is listed all the same.
    other.run("sessions.fields = lambda it: dataclasses.fields(it)[:12]")
    assert name in other.run("%distributed clusters").text
    other.run("sessions.version, sessions.fields = own, dataclasses.fields")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's process")
def test_ranks_of_another_user_are_refused(notebook):
    folder = notebook.temporary / "allranks-session-1-0badcafe"
    notebook.temporary.chmod(0o1777)
    listens = (
        "import os, socket, sys, time\nos.mkdir(sys.argv[1], 0o700)\n"
        "door = socket.socket(socket.AF_UNIX)\ndoor.bind(sys.argv[1] + '/notebook')\n"
        "door.listen()\nprint('listens', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen(
        ["/usr/bin/env", "python3", "-c", listens, str(folder)],
        user=65534,
        group=65534,
        cwd="/",
        stdout=subprocess.PIPE,
    ) as theirs:
        try:
            assert theirs.stdout.readline() == b"listens\n"
            assert "0badcafe" not in notebook.run("%distributed clusters").text
            notebook.run("%distributed detach")
            refused = notebook.run("%distributed attach 0badcafe").error_value
            assert "expected a cluster of yours, found that 0badcafe belongs to nobody" in refused
            assert notebook.run("%distributed attach").status == "ok"
        finally:
            theirs.kill()
            notebook.temporary.chmod(0o700)
            shutil.rmtree(folder, ignore_errors=True)


def test_the_members_of_an_ensemble_that_are_left_run_after_an_attach(notebook, go):
    notebook.on_ranks("import os; os.makedirs('.ran', exist_ok=True)")
    ensemble = (
        "%%ensemble x=0:8 --store .members\n"
        "import os, time\nopen(f'.ran/{x}', 'a').write('.')\n"
        "while x > 5 and not os.path.exists('go'): time.sleep(0.02)\nresult = x\n"
    )

    def stored():
        return [*(notebook.cwd / ".members").glob("*.member")]

    def begun(member):
        path = notebook.cwd / f".ran/{member}"
        return path.read_text() if path.exists() else ""

    notebook.start(ensemble)
    while begun(6) != "." or begun(7) != "." or len(stored()) < 6:
        notebook.drain(0.1)
    notebook.kill9()
    again(notebook).says("The ensemble that ran is interrupted")
    check_at_work(notebook)
    go()
    notebook.run(ensemble).ok()
    assert [begun(x) for x in range(8)] == 6 * ["."] + 2 * [".."]
    check_at_work(notebook)


def test_what_cannot_be_attached_to_is_said(notebook):
    name = re.match(r"\w{8}", notebook.run("%distributed clusters").text)[0]
    # A busy host agent answers later than a notebook usually waits.
    with patched(notebook.run, "allranks.features.attach.sessions._GLANCE_SECONDS", 20):
        notebook.run("%distributed detach")
        cell = notebook.on_ranks("rank", "-n 1")
    assert (
        f"Starting new ranks. Earlier ones are detached: ranks 0–3 of {name}. To list them"
        in cell.text
    )
    assert "found ranks running for this one" in notebook.run("%distributed attach").error_value
    notebook.run("%distributed stop")
    assert "Attached to ranks 0–3" in notebook.run("%distributed attach").text
    check_at_work(notebook)
    told = notebook.run("%distributed attach")
    assert "expected a notebook without ranks" in told.error_value
    notebook.run("%distributed detach")
    unknown = notebook.run("%distributed attach abcd0123x").error_value
    assert "found none: it has ended, or its time ran out" in unknown
    assert "expected a time such as" in notebook.run("%distributed detach-on-exit soon").error_value
    assert notebook.run("%distributed attach").status == "ok"


@pytest.mark.leases
def test_a_rank_that_does_not_answer_is_named_and_stays(notebook):
    victim = notebook.pids()[2]
    again(notebook, attach=False)
    notebook.run("from allranks.records import limits; limits.ATTACH_SECONDS = 15")
    with stopped(victim):
        refused = notebook.run("%distributed attach").error_value
    assert "found that rank 2 did not answer within 15 s" in refused
    notebook.run("limits.ATTACH_SECONDS = 20")
    assert notebook.run("%distributed attach").status == "ok"
    check_at_work(notebook)


def test_a_process_that_has_the_line_of_a_killed_kernel_does_not_hold_its_ranks(notebook):
    notebook.run("%distributed detach\n%distributed attach")
    notebook.run(
        "import subprocess\n"
        "session = get_ipython().magics_manager.registry['DistributedMagics'].session\n"
        "line = session.running.cells.connection._taken._socket.fileno()\n"
        "sleeps = subprocess.Popen(\n"
        "    ['sleep', '600'], pass_fds=[line], start_new_session=True\n)"
    )
    sleeps = int(notebook.value("sleeps.pid"))
    notebook.kill9()
    try:
        notebook.restart()
        notebook.run("%load_ext allranks")
        while "; detached, " not in notebook.run("%distributed clusters").text:
            notebook.drain(0.1)
    finally:
        os.kill(sleeps, signal.SIGKILL)
    assert notebook.run("%distributed attach").status == "ok"
    check_at_work(notebook)


@pytest.mark.leases
def test_nothing_is_left_where_no_rank_can_be_replaced_or_nobody_has_come_in_time(new_notebook):
    notebook = new_notebook({"OMPI_MCA_coll": "^han"})  # a setting of the user's own
    notebook.run("%distributed detach-on-exit 60s")
    notebook.on_ranks("kept = rank", "-n 2")
    notebook.note_files()
    victim = notebook.pids()[1]
    notebook.run("%distributed detach")
    os.kill(victim, signal.SIGKILL)
    while notebook.run("%distributed clusters").text != NONE:
        notebook.drain(0.1)
    notebook.check_nothing_left()
    notebook.on_ranks("keep(kept=rank)", "-n 2")
    for command in ("", " 8s"):
        notebook.run(f"%distributed detach-on-exit{command}")
    notebook.note_files()
    notebook.start_on_ranks("import time\nprint('here')\ntime.sleep(600)").wait_for("here")
    notebook.kill9()
    notebook.drain(2)
    assert len(notebook.children()) > 2
    notebook.check_nothing_left()
    notebook.restart()
    notebook.run("%load_ext allranks")
    assert "found none of yours here" in notebook.run("%distributed attach").error_value
    assert notebook.run("%distributed clusters").text == NONE


def test_ranks_that_no_notebook_could_find_are_not_said_to_stay(notebook):
    notebook.run("%distributed detach-on-exit off")
    (folder,) = notebook.temporary.glob("allranks-session-*")
    # Not rmtree: the ranks may write a file into the folder meanwhile.
    moved = folder.rename(notebook.cwd / ".moved_session")
    expected = f"expected {folder}, by which another notebook finds the ranks"
    for command in ("detach-on-exit 60s", "detach 60s"):
        notebook.run(f"%distributed {command}").fails("UsageError", expected)
    assert notebook.run("%distributed detach-on-exit").text == "The ranks end with this notebook.\n"
    check_at_work(notebook)
    moved.rename(folder)
    notebook.run("%distributed detach-on-exit 120s")


def test_a_notebook_takes_its_own_ranks_and_others_by_name_only(notebook, new_notebook):
    shared = {"TMPDIR": str(notebook.temporary)}
    lab = shared | {"JPY_SESSION_NAME": "/course/lab.ipynb"}
    # In two folders, as the kernel was moved; the other one has had no ranks before.
    first, moved, other = new_notebook(lab), new_notebook(lab), new_notebook(shared)
    first.on_ranks("kept = 7", "-n 1")
    assert first.run("%distributed clusters").text.count("attached to the notebook of process") == 1
    first.run("%distributed detach 120s")
    refused = other.run("%distributed attach").error_value
    assert (
        "expected the name of a cluster, found none, and no cluster here has been this notebook's. "
        "Type one of:\n  %distributed attach "
    ) in refused
    assert f"  ranks 0–3 of {notebook.cwd}" in refused
    name = re.search(r"attach (\w{8})  rank 0 of lab\.ipynb", refused)[1]
    other.run("%distributed clusters").says(f"{name}  rank 0 of lab.ipynb, since ")
    moved.run("%distributed attach").says(f"Attached to rank 0 of {name}")
    assert moved.on_ranks("kept").text == "rank 0 → 7\n"
    moved.run("%distributed detach 120s")
    # Those of others have to be named, also where nobody has them.
    other.run("%distributed attach").fails("UsageError")
    other.run(f"%distributed attach {name}").says(f"Attached to rank 0 of {name}")
    moved.run("%distributed clusters").says(f"{name}  rank 0 of {other.cwd}, since ")
    other.run("%distributed stop")
