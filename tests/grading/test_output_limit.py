"""The output of a notebook that is graded is limited, whatever its kind."""

import pytest

from allranks.grading.output_limit import OutputLimit

LONG = "x" * 2_000
STREAM = {"msg_type": "stream", "content": {"name": "stdout", "text": LONG}}
DISPLAY = {"msg_type": "display_data", "content": {"data": {"text/html": LONG}, "metadata": {}}}
UPDATE = {**DISPLAY, "msg_type": "update_display_data"}
WIDGET = {"msg_type": "comm_open", "content": {"data": {"state": {"nested": [[LONG]]}}}}
BUFFERS = {"msg_type": "comm_msg", "content": {"data": {}}, "buffers": [bytes(2_000)]}
EMPTY = {"msg_type": "display_data", "content": {"data": {}, "metadata": {}}}


def error(text):
    content = {"ename": "ValueError", "evalue": text, "traceback": [text, text]}
    return {"msg_type": "error", "content": content}


@pytest.mark.parametrize("message", [STREAM, DISPLAY, UPDATE, WIDGET, BUFFERS])
def test_output_of_each_kind_is_dropped_beyond_the_limit(message):
    limit = OutputLimit(5_000)
    assert [limit.keeps(0, message) for _ in range(4)] == [True, True, False, False]
    assert limit.keeps(1, message)  # another cell


def test_many_empty_displays_are_dropped():
    limit = OutputLimit(5_000)
    assert 10 < sum(limit.keeps(0, EMPTY) for _ in range(1_000)) < 30


def test_nothing_short_is_kept_below_what_was_dropped():
    limit = OutputLimit(1_000)
    assert not limit.keeps(0, STREAM)
    assert not limit.keeps(0, EMPTY)


def test_a_notebook_of_many_cells_has_a_limit_too():
    limit = OutputLimit(5_000)
    assert sum(limit.keeps(cell, STREAM) for cell in range(1_000)) < 50


def test_the_first_error_of_a_cell_is_kept_and_cut():
    limit = OutputLimit(1_000)
    assert not limit.keeps(0, STREAM)
    first = error(LONG)
    assert limit.keeps(0, first)
    assert len(first["content"]["evalue"]) < 1_010
    assert len("".join(first["content"]["traceback"])) < 1_010
    assert not limit.keeps(0, error("short"))


def test_the_messages_that_end_a_cell_are_kept():
    limit = OutputLimit(0)
    assert limit.keeps(0, {"msg_type": "status", "content": {"execution_state": "idle"}})


def test_a_message_that_is_nested_deeply_is_counted():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert not OutputLimit(50_000).keeps(0, {"msg_type": "comm_msg", "content": {"data": nested}})
