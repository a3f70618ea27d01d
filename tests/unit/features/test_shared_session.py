"""What commands say where no ranks run."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.cluster.features import NotebookHooks
from allranks.cluster.state import ClusterState
from allranks.errors import UsageError
from allranks.features.attach import ownership, sessions
from allranks.features.attach.notebook import NotebookAttach
from allranks.features.attach.sharing import WatcherFeed


class Connected: ...


def new_session() -> Any:
    hooks = NotebookHooks([NotebookAttach])
    return hooks.command("session", hooks)


def test_a_stop_without_ranks_names_those_that_are_detached(monkeypatch):
    detached = SimpleNamespace(holder=0, size=4, name="7f3a9c21")
    monkeypatch.setattr(sessions, "running", lambda *_: [detached])
    assert new_session().stop() == (
        "No ranks are running. Earlier ones are detached: ranks 0–3 of 7f3a9c21. "
        "To list them: %distributed clusters"
    )
    monkeypatch.setattr(sessions, "running", lambda *_: [])
    assert new_session().stop() == "No ranks are running."


def test_attach_takes_one_word():
    with pytest.raises(UsageError, match="expected the name of one cluster, found 7f3a 9c21"):
        NotebookHooks([NotebookAttach]).command("attach", ["7f3a", "9c21"])


def test_another_notebook_is_refused_the_ranks_of_a_program_whose_event_loop_has_ended():
    session = new_session()
    feed = ownership.of(session.hooks).feed = WatcherFeed(ClusterState(1))

    async def offer() -> None:
        session._offer()

    asyncio.run(offer())
    asks, asked = socket.socketpair()
    with asks:
        assert feed.lend is not None
        feed.lend(asked)
        assert "it cannot be asked" in asks.makefile().readline()


def test_ranks_are_left_to_others_where_an_interrupt_comes_just_after_an_attach(monkeypatch):
    class Taken:
        def __init__(self, found):
            self.memo = {}

        @property
        def stays(self):
            raise KeyboardInterrupt

        def let_go(self):
            left.append("host agent")

    left, roster = list[str](), ClusterState(2)
    monkeypatch.setattr(sessions, "AttachedHostAgent", Taken)
    monkeypatch.setattr(ownership, "attach", lambda cells, taken, tell: None)
    monkeypatch.setattr(ownership, "detach", left.append)
    session = new_session()
    session._make = lambda asked: SimpleNamespace(cells="ranks", state="running", roster=roster)
    with pytest.raises(KeyboardInterrupt):
        session._attach_to(SimpleNamespace())
    assert left == ["ranks", "host agent"]
    assert session.running is None


def test_ranks_that_were_started_again_stay_and_are_shared_as_those_before(monkeypatch):
    session = new_session()
    own, stayed = ownership.of(session.hooks), []
    monkeypatch.setattr(ownership, "stay", lambda cells, seconds, memo: stayed.append(seconds))
    cells = SimpleNamespace(is_up=lambda tell: True, news=[], connection=Connected())
    ranks = SimpleNamespace(state="running", cells=cells, roster=ClusterState(2))
    ranks.roster.set_phase("running")
    own.feed = WatcherFeed(ClusterState(1))
    session._have(ranks)
    session.detach_on_exit("60s")
    session.cluster()
    assert stayed == [60.0]

    async def use() -> None:
        session.cluster()

    cells.connection, own.feed = Connected(), WatcherFeed(ClusterState(1))
    ranks.roster.reserve("running an ensemble", 1)
    asyncio.run(use())
    assert stayed == [60.0]
    ranks.roster.release(0)
    asyncio.run(use())
    assert (stayed, own.feed.lend is not None) == ([60.0, 60.0], True)
