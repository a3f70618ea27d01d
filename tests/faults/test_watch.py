"""Two notebooks that share ranks: one watches what the other runs, and runs when it is idle."""

import re
import sys

import pytest

from tests.faults.notebook import Notebook, stopped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the host agent needs Linux")

WATCHING = (
    r"Watching ranks 0–3 of \w{{8}}, attached to the notebook of process {}: what it runs on them "
    r"is shown here\. When it is idle, a %%distributed cell runs here too\. "
    r"To end: %distributed detach\n"
)
WAITS = (
    "import os, time\nprint('begun')\n"
    "while not os.path.exists({!r}):\n    time.sleep(0.02)\nprint('ended')"
)
SUM = "import numpy as np\nfloat(allreduce(np.ones(2), op=Sum)[0])"


@pytest.fixture(scope="module")
def watcher(notebook, tmp_path_factory):
    cwd = tmp_path_factory.mktemp("watcher")
    with Notebook(cwd, {"TMPDIR": str(notebook.temporary)}) as other:
        other.cwd = cwd
        yield other


@pytest.fixture
def watching(notebook, watcher):
    """The first notebook has the ranks, the second one watches; its cell that shows them."""
    notebook.on_ranks("kept = 10 * rank").ok()
    cell = watcher.run(attach_to(watcher, notebook))
    # A cell that has just ended may be shown below that line.
    assert re.match(WATCHING.format(notebook.pid), cell.text), cell.text + cell.error_value
    return cell


@pytest.fixture
def go(tmp_path):
    return tmp_path / "go"


def status(notebook):
    return notebook.run("%distributed status").text


def attach_to(watcher, notebook):
    listed = watcher.run("%distributed clusters").text
    (name,) = re.findall(
        rf"(?m)^(\w{{8}}) .*attached to the notebook of process {notebook.pid}\b", listed
    )
    return f"%distributed attach {name}"


def wait_until_listed(notebook, text):
    while text not in (said := notebook.run("%distributed clusters").text):
        notebook.drain(0.05)
    return said


def test_clusters_and_status_say_who_has_the_ranks_and_who_watches(notebook, watcher, watching):
    first, second = notebook.pid, watcher.pid
    said = f"attached to the notebook of process {first}, watched by this notebook"
    assert said in watcher.run("%distributed clusters").text
    assert said in status(watcher)
    said = f"attached to this notebook, watched by the notebook of process {second}"
    assert said in notebook.run("%distributed clusters").text
    assert said in status(notebook)
    assert "Interrupt there" in watcher.run("%distributed interrupt").error_value
    assert "Type it there" in watcher.run("%distributed heal").error_value


def test_cells_are_shown_with_their_panels_and_errors_and_whose_they_are(
    notebook, watcher, watching
):
    notebook.on_ranks("for step in range(3): log(loss=1 / (1 + step))\nprint('one')\nrank")
    failed = notebook.on_ranks("import time\nprint('two')\nif rank == 2: 1 / 0")
    notebook.on_ranks("print('three')", "-r 1,3")
    watching.wait_for("three")
    watcher.pump(lambda: "loss" in str(watching.displays), 60, "the curves", watching)
    watcher.pump(lambda: "ZeroDivisionError" in watching.text, 60, "the error", watching)
    shown = watching.text
    whose = f"of the notebook of process {notebook.pid}, on ranks"
    assert len(re.findall(rf"(?m)^In\[\d+\] {whose} 0–3:$", shown)) == 2
    assert len(re.findall(rf"(?m)^In\[\d+\] {whose} 1, 3:$", shown)) == 1
    assert "ranks 0–3 │ one\n" in shown
    assert "rank 2    → 2\n" in shown
    assert "loss" in str(watching.displays)
    assert re.search(r"rank 2 \(.*, cpu\) raised ZeroDivisionError", shown)
    assert failed.error_name == "CellFailed"
    assert shown.index("one") < shown.index("two") < shown.index("three")


def test_a_cell_that_runs_already_is_shown_and_no_other_runs_beside_it(
    notebook, watcher, watching, go
):
    watcher.run("%distributed detach")
    cell = notebook.start_on_ranks(WAITS.format(str(go))).wait_for("begun")
    shown = watcher.run(attach_to(watcher, notebook)).wait_for("In[")
    refused = watcher.on_ranks("kept = 'changed'")
    go.touch()
    assert cell.wait().status == "ok"
    shown.wait_for("ended")
    assert f"of the notebook of process {notebook.pid}, on ranks 0–3" in shown.text
    found = f"the notebook of process {notebook.pid} has them, and it runs In["
    assert refused.error_name == "UsageError"
    assert found in refused.error_value
    assert "Wait for its end there, and run this cell again; nothing was run" in refused.error_value
    assert "rank 3 → 30\n" in notebook.on_ranks("kept").text


def test_cells_of_both_take_turns(notebook, watcher, watching):
    pids = notebook.pids()
    watcher.on_ranks("theirs = kept + 1\ntheirs").ok().says("rank 3 → 31\n")
    assert watcher.pids() == pids
    assert watcher.on_ranks(SUM).text == "ranks 0–3 → 4.0\n"
    watcher.run("here = 7")
    watcher.run("%distributed push here")
    had = f"attached to the notebook of process {watcher.pid}, watched by this notebook"
    assert had in status(notebook)
    shown = notebook.run("%distributed attach")
    assert re.fullmatch(WATCHING.format(watcher.pid), shown.text.splitlines(True)[0])
    watcher.on_ranks("print('seen by the first')")
    shown.wait_for("seen by the first")
    back = notebook.on_ranks("here + theirs")
    assert re.match(
        r"ranks 0–3 of \w{8} are back: another notebook has run 3 cells on them\.\n", back.text
    )
    assert "rank 3 → 38\n" in back.text
    assert notebook.on_ranks(SUM).text == "ranks 0–3 → 4.0\n"
    watching.wait_for("4.0")
    # To and fro.
    for each in (watcher, notebook) * 2:
        assert "rank 0 → 1\n" in each.on_ranks("theirs", "-r 0").text
    assert notebook.pids() == pids
    watcher.run("%%ensemble x=0:5\nresult = x").says("5 of 5 finished")
    back = notebook.on_ranks("kept")
    assert "are back: another notebook has run 5 cells on them" in back.text, back.text
    assert "rank 3 → 30\n" in back.text
    assert "5 of 5 finished" in notebook.run("%%ensemble x=0:5\nresult = x").text
    assert "rank 3 → 30\n" in watcher.on_ranks("kept").text
    assert "rank 3 → 30\n" in notebook.on_ranks("kept").text


def test_a_cell_is_refused_while_the_watcher_runs_one(notebook, watcher, watching, go):
    cell = watcher.start_on_ranks(WAITS.format(str(go))).wait_for("begun")
    for line in ("%%distributed\nkept = 0", "%distributed stop", "%distributed pull kept"):
        notebook.run(line).fails(
            "UsageError", f"the notebook of process {watcher.pid} has them, and it runs In["
        )
    assert "Interrupt there" in notebook.run("%distributed interrupt").error_value
    go.touch()
    assert cell.wait().status == "ok"
    assert "rank 3 → 30\n" in notebook.on_ranks("kept").text


def test_a_notebook_that_runs_a_cell_of_its_own_does_not_answer_and_keeps_them(
    notebook, watcher, watching, go
):
    watcher.run("from allranks.records import limits\nlimits.ANSWERS_SECONDS = 2")
    own = notebook.start(WAITS.format(str(go))).wait_for("begun")
    refused = watcher.on_ranks("kept")
    go.touch()
    own.wait()
    assert "has not answered: it runs a cell of its own. Wait for its end" in refused.error_value
    watcher.run("limits.ANSWERS_SECONDS = 5")
    assert "attached to this notebook" in notebook.run("%distributed clusters").text
    assert "rank 3 → 30\n" in watcher.on_ranks("kept").text


def test_a_watcher_that_is_slow_or_killed_costs_nothing(notebook, watcher, watching, go):
    notebook.run("from allranks.features.attach import sharing\nsharing._MOST_NBYTES = 100_000")
    with stopped(watcher.pid):
        for _ in range(8):  # more than the socket takes
            cell = notebook.on_ranks("for line in range(300): print(rank, line, 80 * '.')").ok()
    watching.wait_for("are not shown: this notebook was too slow for them. All text is in the logs")
    assert re.search(r"\d+ messages \(0\.\d MB\) are not shown", watching.text)
    notebook.on_ranks("print('after all that')")
    watching.wait_for("after all that")
    notebook.run("sharing._MOST_NBYTES = 16 << 20")
    cell = notebook.start_on_ranks(WAITS.format(str(go))).wait_for("begun")
    watcher.kill9()
    go.touch()
    assert cell.wait().status == "ok"
    assert wait_until_listed(notebook, "attached to this notebook\n")
    assert "rank 3 → 30\n" in notebook.on_ranks("kept").text
    watcher.restart()
    watcher.run("%load_ext allranks")


def test_ranks_whose_borrower_is_killed_in_its_cell_go_back(notebook, watcher, watching, go):
    watcher.start_on_ranks(WAITS.format(str(go)) + "\nkept = 5").wait_for("begun")
    watcher.kill9()
    wait_until_listed(notebook, "detached, and kept for this notebook")
    refused = notebook.on_ranks("kept")
    assert re.search(
        r"0–3 of \w{8} still run In\[\d+\] of a notebook whose kernel", refused.error_value
    )
    assert "To see its end, type: %distributed attach" in refused.error_value
    shown = notebook.start("%distributed attach").wait_for("begun")
    go.touch()
    assert shown.wait().status == "ok", shown.text
    assert "ended" in shown.text
    assert notebook.on_ranks("kept").text == "ranks 0–3 → 5\n"
    assert notebook.on_ranks(SUM).text == "ranks 0–3 → 4.0\n"
    watcher.restart()
    watcher.run("%load_ext allranks")


def test_ranks_that_both_have_used_stay_where_the_first_is_killed(notebook, watcher, watching, go):
    pids = notebook.pids()
    watcher.on_ranks("theirs = 1")
    notebook.start_on_ranks(WAITS.format(str(go))).wait_for("begun")
    notebook.kill9()
    wait_until_listed(watcher, "detached, and kept for this notebook")
    assert "still run In[" in watcher.on_ranks("kept").error_value
    shown = watcher.start("%distributed attach").wait_for("begun")
    go.touch()
    assert shown.wait().status == "ok", shown.text
    assert watcher.pids() == pids
    assert watcher.on_ranks(SUM).text == "ranks 0–3 → 4.0\n"
    notebook.restart()
    notebook.run("%load_ext allranks")
    assert re.fullmatch(
        WATCHING.format(watcher.pid), notebook.run("%distributed attach").text.splitlines(True)[0]
    )
    assert "rank 3 → 30\n" in notebook.on_ranks("kept").text
    # Both are restarted, one after the other.
    watcher.restart()
    watcher.run("%load_ext allranks")
    assert watcher.run("%distributed attach").status == "ok"
    assert "rank 3 → 30\n" in watcher.on_ranks("kept").text
    assert watcher.pids() == pids


def test_stop_and_detach_of_a_watcher_end_its_watching_only(notebook, watcher, watching):
    for line in ("%distributed stop", "%distributed detach"):
        left = watcher.run(line)
        assert re.fullmatch(
            rf"ranks 0–3 of \w{{8}} are no longer watched here: attached to the notebook of "
            rf"process {notebook.pid}\.\n",
            left.text,
        )
        assert "No ranks are running" in watcher.run("%distributed stop").text
        assert watcher.run("%distributed attach").status == "ok"
    assert "are another one's. Type there" in watcher.run("%distributed restart").error_value
    # Also where it has run the last cell.
    assert watcher.on_ranks("kept").status == "ok"
    left = watcher.run("%distributed stop").text
    assert "detached, and kept for the notebook of process" in left
    assert "rank 3 → 30\n" in notebook.on_ranks("kept").text


def test_ranks_end_with_the_notebook_that_has_them_where_others_only_watch(new_notebook):
    first = new_notebook()
    first.on_ranks("kept = rank", "-n 1")
    second = new_notebook({"TMPDIR": str(first.temporary)})
    first.start_on_ranks("import time\nprint('begun')\nwhile True: time.sleep(0.1)").wait_for(
        "begun"
    )
    shown = second.run(attach_to(second, first)).wait_for(" s ago; its output from now on:")
    assert "begun" not in shown.text
    first.note_files()
    first.kill9()
    shown.wait_for("have ended.")
    first.check_nothing_left()
    assert "rank 0 → 1" in second.on_ranks("1", "-n 1").text


DIES = "import os\nprint('begun')\nif rank == 1: os._exit(3)\nbarrier()"


@pytest.mark.replaces
def test_a_cell_of_the_watcher_runs_after_a_death_in_one_of_the_other(notebook, watcher, watching):
    assert notebook.on_ranks(DIES).status == "error"
    cell = watcher.on_ranks("rank")
    assert (cell.status, cell.text.count("→")) == ("ok", 4), cell.text + cell.error_value
    assert notebook.on_ranks("kept = 10 * rank").status == "ok"
