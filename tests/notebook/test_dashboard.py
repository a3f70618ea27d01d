"""The view of a cell in a kernel: awaited, interrupted, stacked, live, and what stays of it."""

import re
import subprocess
import sys

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

from tests.kernel import wait_until

LOGGING = """
import time
for i in range(100):
    log(step=i, loss=1 / (i + 1))
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


def test_the_view_that_is_chosen_is_shown_and_logged_values_leave_a_still_picture(notebook):
    cell = notebook.run("%%distributed\nprint('hi'); allreduce(1.0)")
    assert cell.text == "ranks 0–1 │ hi\n          → 1.0\n"
    assert cell.comms == []
    cell = notebook.run(f"%%distributed --view plain{LOGGING}print('done')")
    assert cell.text == "ranks 0–1 │ done\n"
    assert cell.comms == []
    cell = notebook.run("%%distributed --view full\nprint('hi')")
    assert "ranks 0–1: finished" in cell.text
    assert "ranks 0–1 │ hi" in cell.text
    cell = notebook.run("%%distributed --view full\nif rank == 0: 1 / 0\nbarrier()")
    assert "ranks 0–1: rank 0 failed, 1 waited, " in cell.text
    notebook.run("%%distributed --view grand\npass").fails("UsageError", "--view")
    cell = notebook.run(f"%%distributed{LOGGING}").ok()
    assert set(cell.displays[-1]) == {"text/html", "text/plain"}
    assert "data:image/svg+xml;base64," in cell.displays[-1]["text/html"]
    assert "loss          99  0.01  0.01  0.01    0.01    0.01" in cell.text


def test_a_live_panel_is_told_its_points_and_is_closed(notebook):
    cell = notebook.start(f"%%distributed{LOGGING}time.sleep(600)")
    notebook.pump(lambda: any(WIDGET in shown for shown in cell.displays), 60, "a panel", cell)
    notebook.interrupt()
    cell.wait()
    assert cell.error_name == "CellInterrupted"
    assert not any(WIDGET in shown for shown in cell.displays)
    assert "2 interrupted" in cell.text or "ranks 0–1: interrupted" in cell.text
    opened, *_, closed = [comm["msg_type"] for comm in cell.comms]
    assert (opened, closed) == ("comm_open", "comm_close")
    (state,) = [c["data"]["state"] for c in cell.comms if c["msg_type"] == "comm_open"][-1:]
    assert {head["name"] for head in state["state"]["curves"]} == {"loss"}


def test_collectives_are_summed_by_name_and_size(notebook):
    source = """%%distributed --view full
import time
import numpy as np
from allranks import collectives
before = len(collectives.records())
for step in range(30):
    time.sleep(0.1 * rank)
    allreduce(np.ones(1000), name="weights")
broadcast(np.ones(10, np.float32), 0, name="start")
barrier()
if rank == 0: print("last", *(one.last_rank for one in collectives.records()[before:]))
"""
    said = notebook.run(source).text
    assert re.search(r"allreduce weights +30 × 8 kB .* [kMG]?B/s$", said, re.MULTILINE)
    assert re.search(r"broadcast start +1 × 40 B ", said)
    assert re.search(r"barrier In\[\d+\]:10 +1 × 0 B .* n/a +n/a$", said, re.MULTILINE)
    assert re.search(r"rank 0 +32 ", said)
    # Where others are busy, rank 0 may be held up as well now and then.
    last = re.search(r"│ last ([\d ]+)$", said, re.MULTILINE)[1].split()
    assert f"rank 1 came last in {last.count('1')} of 32 calls" in said


def test_the_explainer_leaves_a_picture_and_text_and_loses_nothing(notebook, tmp_path):
    cell = notebook.run("from allranks.widgets import ring\nring(values=[[1, 2], [10, 20]])")
    (shown,) = cell.displays
    assert set(shown) == {"text/html", "text/plain"}
    assert "data:image/svg+xml;base64," in shown["text/html"]
    assert cell.text.endswith("every rank has (11, 22)\n")
    assert notebook.run("%%distributed\nallreduce(1.0)").text == "ranks 0–1 → 1.0\n"
    cell = notebook.run("from allranks.widgets import ring\nring(ranks=3)").fails("UsageError")
    expected = "found 3, and 2 are running. Type for example: %distributed restart -n 3"
    assert expected in cell.error_value
    go, done = tmp_path / "go", tmp_path / "done"
    notebook.run(
        "%%distributed -r 0\nimport os, threading, time\ndef late():\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        f"    print('late')\n    open({str(done)!r}, 'w').close()\n"
        "threading.Thread(target=late).start()"
    )
    go.touch()
    wait_until(done.exists)
    notebook.run("import time; from allranks.widgets import ring; time.sleep(1); _ = ring()")
    cell = notebook.run("%%distributed -r 0\n1")
    late = "written after its cell had ended:\n       │ late\n       · (up to here)\n"
    assert cell.text == f"rank 0 · {late}       → 1\n"


@pytest.mark.parametrize("seconds", [0, 1.3])
def test_a_flood_leaves_the_same_whether_it_was_short_or_long(notebook, seconds):
    source = f"""%%distributed -r 0
import time
for i in range(20_000):
    print("line", i)
time.sleep({seconds})
print("end")
"""
    first, second, *_, last = notebook.run(source).text.splitlines()
    assert re.fullmatch(r"rank 0: finished, .* m?s", first)
    assert (second, last) == ("rank 0 │ line 0", "       │ end")


def test_other_work_is_done_while_a_cell_is_awaited(notebook, tmp_path):
    begun, ticked = (str(tmp_path / name) for name in ("begun", "ticked"))
    notebook.run(
        "import asyncio, os\nasync def tick():\n"
        f"    while not os.path.exists({begun!r}): await asyncio.sleep(0.01)\n"
        "    for _ in range(10): await asyncio.sleep(0.05)\n"
        f"    open({ticked!r}, 'w').close()\n"
        "ticking = asyncio.ensure_future(tick())"
    )
    # It ends only if the notebook has ticked ten times meanwhile.
    notebook.run(
        f"%%distributed --timeout 50\nimport os, time\nopen({begun!r}, 'w').close()\n"
        f"while not os.path.exists({ticked!r}): time.sleep(0.01)"
    ).ok()


@pytest.mark.parametrize("magic", ["%%time", "%%capture kept"])
def test_below_another_magic_a_cell_is_not_awaited_and_runs(notebook, magic):
    notebook.run(f"{magic}\n%%distributed\nmark = {magic!r}").ok()
    assert notebook.run("%%distributed\nprint(mark)").text == f"ranks 0–1 │ {magic}\n"


def test_without_autoawait_a_cell_runs_and_can_be_interrupted(notebook):
    notebook.run("%autoawait off")
    cell = notebook.start("%%distributed\nimport time; print('in'); time.sleep(600)").wait_for("in")
    notebook.interrupt()
    assert cell.wait().error_name == "CellInterrupted"
    notebook.run("%autoawait on")


SOURCES = [
    "%load_ext allranks\n%distributed start -n 2",
    f"%%distributed{LOGGING}",
    "1 + 1",
    "import allranks\nallranks.widgets.ring(algorithm='tree', size=2)",
]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papermill")
    made = new_notebook(cells=[new_code_cell(source) for source in SOURCES])
    made.metadata.kernelspec = {"name": "python3", "display_name": "", "language": "python"}
    nbformat.write(made, folder / "in.ipynb")
    command = [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    return nbformat.read(folder / "out.ipynb", as_version=4)


def test_papermill_and_nbclient_keep_still_pictures_and_go_on(executed):
    shown = executed.cells[1].outputs[-1].data
    assert set(shown) == {"text/html", "text/plain"}
    assert "loss" in shown["text/plain"]
    assert executed.cells[2].outputs[0].data["text/plain"] == "2"
    (explained,) = executed.cells[3].outputs
    assert set(explained.data) == {"text/html", "text/plain"}
    assert explained.data["text/plain"].endswith("every rank has (11, 22)")
    page, _ = HTMLExporter(template_name="basic").from_notebook_node(executed)
    assert "data:image/svg+xml;base64," in page
    assert "widget-view" not in page
