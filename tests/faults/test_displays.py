"""What ranks display: checked before it is sent, bounded, updated under its own rank."""

import re

import pytest

CLASS = """
class Shown:
    def __init__(self, bundle):
        self.bundle = bundle
    def __repr__(self):
        return "plain"
    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.bundle
"""
ROUND = "round = []\nfor _ in range(500): round = [round]\n"
CANNOT_BE_SHOWN = {
    "metadata that is a number": (
        "Shown(({'text/html': '<b>a</b>', 'text/plain': 'a'}, 7))",
        "metadata is left out: expected a dict, found int",
    ),
    "an object": (
        "display({'application/json': object()}, raw=True)",
        "application/json is not shown: JSON has nothing for object",
    ),
    "bytes for text": (
        "Shown({'text/html': b'<b>', 'text/plain': 'a'})",
        "text/html is not shown: expected text, found bytes",
    ),
    "no mime type": (
        "display({7: 'a', 'text/plain': 'a'}, raw=True)",
        "a part of it is not shown: expected a mime type, found int",
    ),
    "deeper than a notebook can read": (
        f"import sys\nsys.setrecursionlimit(10_000)\n{ROUND}"
        "display({'application/json': round}, raw=True)\nsys.setrecursionlimit(1000)",
        "application/json is not shown: expected at most 100 levels, found more",
    ),
    "a circle": (
        "round = []\nround.append(round)\ndisplay({'application/json': round}, raw=True)",
        "application/json is not shown: Circular reference detected",
    ),
    "an update": (
        "h = display({'text/html': 'a'}, raw=True, display_id=True)\n"
        "h.update({'text/html': object()}, raw=True)",
        "text/html is not shown: JSON has nothing for object",
    ),
    "a picture of 20 MB": (
        "display({'image/png': 'a' * 20_000_000, 'text/plain': 'a'}, raw=True)",
        r"image/png is not shown: 20\.0 MB, and a cell shows 8\.4 MB of displays a rank",
    ),
}


pytestmark = pytest.mark.usefixtures("_ranks_live_on")


@pytest.mark.parametrize(("source", "said"), CANNOT_BE_SHOWN.values(), ids=CANNOT_BE_SHOWN.keys())
def test_a_display_that_cannot_be_shown_says_why_and_nothing_else_is_lost(notebook, source, said):
    cell = notebook.on_ranks(f"{CLASS}print('before')\n{source}\nprint('after')")
    if source.startswith("Shown"):
        cell = notebook.on_ranks(f"{CLASS}print('before')\nprint('after')\n{source}")
    assert cell.status == "ok", cell.text
    assert re.search(said, cell.text), cell.text
    cell.says("ranks 0–3 │ before", "│ after")
    assert cell.iopub_nbytes < 100_000


def test_what_a_cell_shows_is_bounded_and_says_so(notebook):
    cell = notebook.on_ranks("'x' * 50_000_000", "-o whole").ok()
    assert cell.iopub_nbytes < 500_000
    said = re.search(r"… ([\d,]+) bytes are not shown: %%distributed -o NAME returns", cell.text)
    shown = cell.text[: said.start()].count("x") + cell.text[said.end() :].count("x")
    assert int(said[1].replace(",", "")) + shown == 50_000_000
    assert notebook.value("[len(value) for value in whole]") == f"[{', '.join(['50000000'] * 4)}]"
    cell = notebook.on_ranks("for i in range(9): display({'text/plain': 'é' * 10**6}, raw=True)")
    assert cell.status == "ok"
    assert cell.iopub_nbytes < 2_000_000
    assert cell.text.count("bytes are not shown: print() writes the whole text to the log") == 9
    cell = notebook.on_ranks(
        "for i in range(20):\n    display({'text/html': f'{i}' + 'x' * 1_000_000}, raw=True)",
        "-r 0",
    )
    shown = [data for data in cell.displays if "text/html" in data]
    assert f"{20 - len(shown)} more displays are not shown: at most 64 and 8.4 MB" in cell.text
    assert 0 < len(shown) < 10
    cell = notebook.on_ranks(
        "h = display({'text/html': 'x' * 1_000_000}, raw=True, display_id=True)\n"
        "import time\n"
        "for i in range(20):\n"
        "    time.sleep(0.06)\n"
        "    h.update({'text/html': f'{i}' + 'x' * 1_000_000}, raw=True)",
        "-r 0",
    ).lacks("not shown")
    assert cell.displays[-1]["text/html"].startswith("19x")
    cell = notebook.on_ranks("raise type('x' * 1_000_000, (ValueError,), {})()").fails("CellFailed")
    assert cell.iopub_nbytes < 200_000


FIGURE = """
import time
from IPython.display import clear_output
def figure(said):
    return {"text/html": f"<b>{said}</b>", "text/plain": f"<{said}>"}
h = display(figure("start"), raw=True, display_id=True)
"""
OF_EACH = "".join(f"rank {rank}:\n<I am rank {rank}>\n" for rank in range(4))


def shown(cell):
    return "".join(data["text/plain"] + "\n" for data in cell.displays if data)


@pytest.mark.parametrize("view", ["plain", "auto", "full"])
@pytest.mark.parametrize("pause", ["", "time.sleep(0.4)\n"], ids=["at once", "later"])
def test_an_update_stands_under_the_rank_that_made_it(notebook, view, pause):
    cell = notebook.on_ranks(
        f"{FIGURE}{pause}h.update(figure(f'I am rank {{rank}}'), raw=True)", f"--view {view}"
    )
    assert shown(cell).endswith(OF_EACH)
    cell.lacks("start", "ranks 0–3:\n")


def test_updates_and_clears_change_what_is_shown_of_their_rank(notebook):
    cell = notebook.on_ranks(f"{FIGURE}if rank == 2: h.update(figure('mine'), raw=True)")
    assert shown(cell) == "ranks 0–1, 3:\n<start>\nrank 2:\n<mine>\n"
    cell = notebook.on_ranks(
        f"{FIGURE}time.sleep(0.2)\nh.update(figure(rank), raw=True)\ntime.sleep(0.6)\n"
        "h.update(figure('end'), raw=True)\nprint('after')"
    )
    assert shown(cell) == "ranks 0–3:\n<end>\nranks 0–3 │ after\n"
    cell = notebook.on_ranks(
        FIGURE + "text = display({'text/plain': 'step 0'}, raw=True, display_id=True)\n"
        "for i in range(100): text.update({'text/plain': f'step {i}'}, raw=True)\n"
        "print('between')\n"
        "h.update({'text/plain': f'no figure on {rank % 2}\\nany more'}, raw=True)\n"
        "text.update({'text/plain': 'the last step'}, raw=True)\n"
        "other = display({'text/plain': 'a text'}, raw=True, display_id=True)\n"
        "other.update(figure('a figure'), raw=True)"
    )
    assert shown(cell) == (
        "ranks 0, 2 │ no figure on 0\n           │ any more\n"
        "ranks 1, 3 │ no figure on 1\n           │ any more\n"
        "ranks 0–3 │ the last step\nranks 0–3 │ between\nranks 0–3:\n<a figure>\n"
    )
    notebook.on_ranks("h = display({'text/plain': 'a'}, raw=True, display_id='twice')", "-r 0")
    cell = notebook.on_ranks(
        "from IPython.display import update_display\n"
        "h.update({'text/plain': 'b'}, raw=True)\nh.display({'text/plain': 'c'}, raw=True)\n"
        "print('between')\nupdate_display({'text/plain': 'd'}, raw=True, display_id='twice')",
        "-r 0",
    )
    assert shown(cell) == "rank 0 │ d\nrank 0 │ d\nrank 0 │ between\n"
    cell = notebook.on_ranks(f"{FIGURE}print('text')\nclear_output(wait=True)")
    assert shown(cell) == "ranks 0–3:\n<start>\nranks 0–3 │ text\n"
    cell = notebook.on_ranks(
        f"{FIGURE}for i in range(100):\n    clear_output(wait=True)\n    time.sleep(0.005)\n"
        "    display(figure(i), raw=True)"
    )
    assert shown(cell) == "ranks 0–3:\n<99>\n"
    assert len(cell.displays) <= 2 * 4


@pytest.mark.parametrize("wait", [True, False])
def test_what_a_rank_clears_is_gone_figures_too_and_the_others_keep_theirs(notebook, wait):
    cell = notebook.on_ranks(
        f"{FIGURE}print('text')\nh.display(figure('second'), raw=True)\ntime.sleep(0.2)\n"
        f"if rank == 1:\n    clear_output(wait={wait})\n    time.sleep(0.2)\n    print('anew')"
    )
    assert shown(cell) == (
        "rank 1 │ anew\nranks 0, 2–3:\n<start>\nranks 0, 2–3 │ text\nranks 0, 2–3:\n<second>\n"
    )
