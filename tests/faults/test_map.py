"""``ranks.map``: one list in order, errors by item, and what has finished is kept."""

import pytest

from tests.faults.notebook import KEPT


def test_functions_are_called_for_each_item_in_order_with_a_bar_and_what_they_print(notebook):
    notebook.run("scale = 3\ndef triple(x, more=0):\n    return scale * x + more")
    calls = {
        "ranks.map(triple, range(9))": [3 * x for x in range(9)],
        "ranks.map(triple, [1, 2, 3], [10, 20])": [13, 26],
        "ranks.map(triple, [])": [],
        "ranks.map(lambda x: None, 'ab')": [None, None],
    }
    for call, returned in calls.items():
        assert notebook.run(f"print({call})").text.endswith(f"{returned}\n")
    assert notebook.on_ranks("kept").text == KEPT
    cell = notebook.run(
        "def slow(x):\n    import time\n    print('squaring', x)\n    time.sleep(0.3)\n"
        "    return x * x\nsquares = ranks.map(slow, range(8))"
    ).ok()
    assert notebook.value("squares") == str([x * x for x in range(8)])
    cell.says("slow: 8 of 8", "█" * 30, "item 5 │ squaring 5")


def test_what_failed_is_told_by_item_and_the_rest_is_kept(notebook):
    notebook.run("ranks.map(lambda x: 1 / (x % 3), range(7))").fails("MapFailed").says(
        "3 of 7 items failed; the first, item 0 (0): ZeroDivisionError", "item 3 (3)\n"
    )
    caught = (
        "from allranks.errors import MapFailed\ntry:\n"
        "    ranks.map(lambda x: 1 // (x % 3), range(7))\n"
        "except MapFailed as error:\n    print(error.results, sorted(error.failed))"
    )
    assert notebook.run(caught).text.endswith("[None, 1, 0, None, 1, 0, None] [0, 3, 6]\n")
    assert notebook.on_ranks("kept").text == KEPT
    notebook.run(
        "def odd(x):\n    from allranks.collectives import comm\n    return comm if x else 7\n"
    )
    caught = (
        "from allranks.errors import MapFailed\ntry:\n    ranks.map(odd, [0, 1])\n"
        "except MapFailed as error:\n    print(error.results, error.failed[1])"
    )
    said = notebook.run(caught).text
    assert "[7, None] expected a value that the notebook can read, found in member 1" in said
    cell = notebook.run(
        "ranks.map(lambda x: __import__('time').sleep(30 * x), [0, 1, 0], timeout=5)"
    )
    assert cell.error_name == "MapFailed"
    assert "1 of 3 items failed; the first, item 1 (1): it exceeded its timeout of 5 s" in cell.text


def test_an_interrupt_ends_it_and_what_has_finished_is_kept(notebook):
    cell = notebook.start(
        "import time\nfrom allranks.errors import CellInterrupted\n"
        "def wait(x):\n    print('at', x)\n    time.sleep(600 if x > 4 else 0)\n"
        "    return x\n"
        "try:\n    ranks.map(wait, range(9))\n"
        "except CellInterrupted as error:\n    print(type(error).__name__, error.results[:5])"
    )
    for last in range(5, 9):
        cell.wait_for(f"at {last}")  # each of them runs where one of the first five has ended
    notebook.interrupt()
    cell.wait()
    cell.ok().says("MapInterrupted [0, 1, 2, 3, 4]")
    assert notebook.on_ranks("kept").text == KEPT


@pytest.mark.parametrize("call", ["ranks.map(3, [1])", "ranks.map(len)"])
def test_what_cannot_be_mapped_is_refused(notebook, call):
    notebook.run(call).says("UsageError: expected a function and a list of items")
