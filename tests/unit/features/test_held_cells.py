"""Cells that wait for requests of clients, and interrupts of these requests."""

from types import SimpleNamespace

import pytest

from allranks.cluster.connection import Connection
from allranks.cluster.features import NotebookHooks
from allranks.cluster.sockets import EventQueue
from allranks.cluster.state import ClusterState
from allranks.features.ipyparallel import client_requests, held_cells
from allranks.features.ipyparallel.held_cells import ended_text, held_text
from allranks.features.ipyparallel.notebook import NotebookClients
from allranks.records.ranks import BETWEEN, IDLE, Activity

HELD = {
    1: {"client": "ours", "notebook": "a.ipynb"},
    0: {"client": "ours", "notebook": "a.ipynb"},
    2: {"client": "theirs", "notebook": "b.ipynb"},
    3: {"client": "others", "notebook": ""},
}
_REQUEST = "a request of an ipyparallel client"


@pytest.fixture(autouse=True)
def _own_clients(monkeypatch):
    monkeypatch.setattr(client_requests, "names", lambda: {"ours"})


def test_the_notebooks_for_which_a_cell_waits_are_named_with_what_ends_their_requests():
    assert held_text(HELD).splitlines() == [
        f"ranks 0–1 must first answer {_REQUEST}; interrupt to end both",
        f"rank 2 must first answer {_REQUEST} of another notebook (b.ipynb); interrupt to leave "
        "the cell out, and to end the request as well, type then: ranks.interrupt()",
        f"rank 3 must first answer {_REQUEST} of another notebook; interrupt to leave the "
        "cell out, and to end the request as well, type then: ranks.interrupt()",
    ]


def test_after_an_interrupt_it_is_named_what_has_ended_and_what_goes_on():
    assert ended_text(HELD).split("; ") == [
        f"{_REQUEST} on ranks 0–1 was interrupted, too",
        f"rank 2 goes on with {_REQUEST} of another notebook (b.ipynb)",
        "to end it, type: ranks.interrupt()",
        f"rank 3 goes on with {_REQUEST} of another notebook",
        "to end it, type: ranks.interrupt()",
    ]


class Ranks:
    """The connection to three ranks; ``statuses`` is what they answer."""

    size, closed, awaits_clients = 3, False, None

    def __init__(self, statuses=None):
        self.roster, self.inbox, self.sent = ClusterState(3), EventQueue(), []
        for rank, engine in enumerate("abc"):
            self.roster.hellos[rank] = SimpleNamespace(engine=engine)
        self._statuses = statuses or {}

    def step(self, seconds):
        return []

    def ask(self, *_, **__):
        return {rank: (one, []) for rank, one in self._statuses.items()}

    def send(self, ranks, record):
        self.sent.append((ranks, record))


def unanswered_by(engines):
    return {"client": {engine: {"request"} for engine in engines}} if engines else {}


def test_a_cell_behind_a_request_that_an_interrupt_has_not_ended_says_so(monkeypatch):
    monkeypatch.setattr(client_requests, "given_up", lambda engines: set("ab"))
    monkeypatch.setattr(client_requests, "unanswered", lambda engines: {})
    told = []
    held_cells.await_clients(Ranks(), (0, 1), told.append)
    assert told == [f"ranks 0–1 must first answer {_REQUEST}, which was interrupted"]


def test_a_cell_behind_a_request_shows_what_its_ranks_say_meanwhile(monkeypatch):
    monkeypatch.setattr(held_cells, "_SLOW_SECONDS", 0)
    told, waits = [], ["a", "a", "a", ""]
    monkeypatch.setattr(client_requests, "given_up", lambda engines: set())
    monkeypatch.setattr(client_requests, "unanswered", lambda _: unanswered_by(waits.pop(0)))
    monkeypatch.setattr(client_requests, "unanswered_futures", list)
    monkeypatch.setattr(client_requests, "call_when_answered", lambda engines, call: None)
    monkeypatch.setattr(held_cells, "late_lines", lambda them: [f"said by {one}" for one in them])
    held_cells.await_clients(Ranks(), (0,), told.append)
    first = f"rank 0 must first answer {_REQUEST}; interrupt to end both"
    assert told == [first, "said by a", "said by a"]


def test_an_error_of_a_view_during_the_wait_is_not_one_of_the_feature(monkeypatch):
    monkeypatch.setattr(NotebookClients, "holds_cells", True)
    monkeypatch.setattr(client_requests, "given_up", lambda engines: set())
    monkeypatch.setattr(client_requests, "unanswered", lambda _: unanswered_by("a"))
    monkeypatch.setattr(client_requests, "call_when_answered", lambda engines, call: None)
    ranks = Ranks()
    ranks.hooks = NotebookHooks([NotebookClients])
    monkeypatch.setattr(ranks, "step", lambda _: {}["of a view"])
    with pytest.raises(KeyError, match="of a view"):
        Connection.await_clients(ranks, (0,), print)


@pytest.fixture
def interrupted(monkeypatch):
    def interrupt(statuses, unanswered=""):
        """Returns what an interrupt of clients returns, and the ranks that it reaches directly."""
        given_up, ranks = [], Ranks(statuses)
        monkeypatch.setattr(client_requests, "unanswered", lambda _: unanswered_by(unanswered))
        monkeypatch.setattr(client_requests, "give_up", given_up.extend)
        did = held_cells.interrupt_clients(ranks)
        ((reached, record),) = ranks.sent
        assert record.requests_too
        assert given_up == [*unanswered]
        return did, reached

    return interrupt


def running(client):
    return {"doing": Activity(BETWEEN), "request": {"client": client, "notebook": ""}}


IDLE_RANK = {"doing": IDLE, "request": None}


def test_an_interrupt_of_clients_says_whether_they_had_asked_for_anything(interrupted):
    idle = dict.fromkeys(range(3), IDLE_RANK)
    assert interrupted(idle) == (False, [0, 1, 2])
    assert interrupted(idle | {1: running("theirs")}) == (True, [0, 1, 2])
    awaits = {"doing": IDLE, "request": {"client": "ours", "notebook": ""}}
    assert interrupted(idle | {1: awaits}) == (True, [0, 1, 2])
    assert interrupted({}, "a") == (True, [1, 2])  # no rank answers


def test_an_interrupt_of_clients_ends_a_request_of_another_notebook_before_ours_too(interrupted):
    found = interrupted({0: running("ours"), 1: running("theirs"), 2: IDLE_RANK}, "ab")
    assert found == (True, [1, 2])
