"""What a student sends is read in one place: it becomes clean values, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from allranks.cluster.failures import RankStatus
from allranks.features.classroom import board, door, states
from allranks.features.classroom.notebook import waits_of
from allranks.features.classroom.student import NotebookState
from allranks.records.ranks import RUNNING, WAITS, Activity

NAME = "Ana\nIn[9]  failed\x1b[2J\u202e\ud83d\x00 Z"


def rows(*messages: bytes) -> str:
    student = board.Student("zoe", "zoe", 7)
    for message in messages:
        student.receive(message + b"\n")
    return board.as_text([student]) + board.as_html([student]) + board.ranks_html(student)


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "9" * 400, "-1", "1e400", "true"]
)
def test_a_number_that_is_none_or_too_large_does_not_reach_the_board(number):
    shown = rows(f'{{"cell": {number}, "seconds": {number}, "state": "running"}}'.encode())
    assert "In[0]" in shown or "In[1]" in shown
    assert "now" in shown


def test_a_text_is_one_line_of_printable_characters():
    message = dict.fromkeys(("user", "notebook", "exercise", "error", "waits", "state"), NAME)
    found = states.read_state(json.dumps(message).encode())
    assert found["user"] == "Ana In[9] failed [2J Z"
    assert all(text.isprintable() for text in found.values())
    student = board.Student("zoe", "zoe", 7)
    student.take(found)
    assert len(board.as_text([student]).splitlines()) == 1


def test_only_the_states_of_ranks_have_lines():
    found = states.clean({"ranks": "4 ranks\n├── rank 0\x1b[2J\u2028\ud800"})
    assert found == {"ranks": "4 ranks\n├── rank 0 [2J  "}


def test_a_panel_has_no_half_of_a_character():
    assert states.read_panel(rb'"<p>\ud83d</p>"') == "<p>?</p>"


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"7",
        b"{",
        b"[" * 40_000,
        b'{"cell": ' + b"9" * 5000 + b"}",
        b"\xff",
        b" " * 60_000,
        b'{"error": "' + b"x" * 60_000 + b'"}',
        b'"an unasked panel"',
    ],
)
def test_what_is_no_state_is_refused(line):
    with pytest.raises(states.RefusedMessage):
        rows(line)


@pytest.mark.parametrize("line", [b"", b"[]", b"7\n", b"{", b"\xff", b"[" * 4000])
def test_an_answer_that_is_none_of_a_class_is_refused(line):
    with pytest.raises(states.RefusedMessage):
        states.read_admission(line)


def test_the_reason_of_a_refusal_is_one_line_of_printable_characters():
    assert states.read_admission(b'{"refused": ""}\n') == ""
    assert states.read_admission(json.dumps({"refused": NAME}).encode()) == "Ana In[9] failed [2J Z"


def test_a_line_without_an_end_is_refused_once_it_is_longer_than_a_state():
    student = board.Student("zoe", "zoe", 7)
    student.receive(b"x" * states.STATE_NBYTES)
    with pytest.raises(states.RefusedMessage):
        student.receive(b"x")


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"students": 1}, {"students": [1]}, {"students": [{"state": []}]}],
)
def test_an_answer_of_another_service_is_refused(answer):
    with pytest.raises(states.RefusedMessage):
        states.read_class(answer)


def test_the_hubs_answer_is_as_clean_as_a_students_message():
    one = {"key": "eve/1", "user": NAME, "seconds_ago": float("nan"), "state": {"error": NAME}}
    (found,), panel = states.read_class({"students": [one], "panel": "\ud800"})
    assert (found["user"], found["seconds_ago"]) == ("Ana In[9] failed [2J Z", 0.0)
    assert found["state"]["error"] == found["user"]
    assert panel == "?"


def test_only_the_newest_of_many_states_is_read(monkeypatch):
    """A student who sends them without end would take the processor from the teacher's cells."""
    read = []
    monkeypatch.setattr(states, "read_state", lambda line: read.append(line) or {"cell": len(read)})
    student = board.Student("zoe", "zoe", 7)
    student.receive(b"{}\n" * 1000 + b'{"cell": 7}\n{"ce')
    student.receive(b'll": 8}\n')
    assert read == [b'{"cell": 7}', b'{"cell": 8}']


def test_a_panel_is_read_between_states():
    student = board.Student("zoe", "zoe", 7, panels_asked=2)
    student.receive(b'{"cell": 7}\n"<p>"\n{"cell": 8}\n')
    assert (student.panel, student.cell, student.panels_asked) == ("<p>", 8, 1)


def test_the_name_of_an_account_is_shown_with_the_account(monkeypatch):
    """An account can often change its name to that of another student."""
    named = {7: "Ana Lima,,,", 8: "eve", 9: "\u202e,"}
    accounts = {7: "eve", 8: "eve", 9: "eve"}
    monkeypatch.setattr(
        door.pwd,
        "getpwuid",
        lambda uid: SimpleNamespace(pw_name=accounts[uid], pw_gecos=named[uid]),
    )
    assert [*map(door.full_name, named)] == ["Ana Lima (eve)", "eve", "eve"]


def test_all_ranks_that_wait_are_named_with_what_they_wait_for():
    place = "In[5]:3  allreduce(x)"
    doing = [Activity(WAITS, "allreduce", "rank 3")] * 3 + [RUNNING]
    ranks = [RankStatus(rank, "here", 1, "cpu", 0, one, place) for rank, one in enumerate(doing)]
    waits = "waiting in allreduce for rank 3"
    assert waits_of(ranks) == f"ranks 0–2 are {waits} at {place}"
    alone = replace(ranks[0], doing=Activity(WAITS, "recv", "rank 1"))
    assert waits_of([alone, *ranks[1:]]) == (
        f"ranks 1–2 are {waits} at {place}; rank 0 is waiting in recv for rank 1 at {place}"
    )
    assert waits_of(ranks[3:]) == ""


class Shell:
    """The events of IPython, for `NotebookState`."""

    def __init__(self) -> None:
        self.events, self._calls = self, {}

    def register(self, name, call):
        self._calls[name] = call

    def run(self, cell_id: str, error: Exception | None = None) -> None:
        info = SimpleNamespace(cell_id=cell_id)
        self._calls["pre_run_cell"](info)
        ended = {"execution_count": 1, "error_before_exec": None, "error_in_exec": error}
        self._calls["post_run_cell"](SimpleNamespace(info=info, **ended))


def test_an_exercise_is_solved_once_its_check_succeeds():
    shell = Shell()
    state = NotebookState(shell)
    shell.run("exercise-1")
    shell.run("check-1", AssertionError("not yet"))
    assert state.described()["solved"] == ""
    shell.run("check-1")
    shell.run("check-2")
    shell.run("exercise-3")
    assert (state.described()["solved"], state.described()["exercise"]) == ("1, 2", "3")
    shell.run("check-1", AssertionError("not yet"))
    assert state.described()["solved"] == "2"


def test_the_teacher_sees_the_solved_exercises():
    shown = rows(json.dumps({"exercise": "3", "solved": "1, <b>2"}).encode())
    assert "solved: 1, <b>2" in shown
    assert "✓ solved: 1, &lt;b&gt;2" in shown
