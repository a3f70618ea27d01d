"""Questions to ranks of which some answer late, and one never."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.cluster import cluster
from allranks.cluster.features import AskingFeature, ClusterContext
from allranks.features.toolbar.notebook import Toolbar
from allranks.records.wire import Answer, Query


@pytest.fixture
def asked() -> Any:
    """A feature whose questions are noted, and what is delivered to it."""
    feature, sent, told = AskingFeature(), list[Query](), SimpleQueue[Any]()
    context: Any = SimpleNamespace(
        size=3, send=lambda _, query: sent.append(query), post=lambda call: False
    )
    feature.started(context)

    def answer(*ranks: int) -> None:
        for rank in ranks:
            feature.message_arriving(Answer(sent[-1].request, rank, {}, ""), [])

    def ask(seconds: float, *, again: bool) -> int:
        return feature.ask(
            range(3), "state", {}, lambda found: told.put([*found]), seconds, again=again
        )

    return SimpleNamespace(ask=ask, answer=answer, told=told, drop=feature.drop)


@pytest.mark.parametrize("again", [False, True])
def test_answers_of_all_ranks_are_delivered_once(asked: Any, again: bool) -> None:
    asked.ask(0.01, again=again)
    assert asked.told.get(timeout=60) == []
    asked.ask(3600, again=again)
    asked.answer(2, 0, 1)
    assert asked.told.get(timeout=60) == [2, 0, 1]
    assert asked.told.empty()


def test_late_answers_are_delivered_when_the_last_one_has_come(asked: Any) -> None:
    asked.ask(0.01, again=True)
    assert asked.told.get(timeout=60) == []
    asked.answer(1)
    assert asked.told.empty()
    asked.answer(0, 2)
    assert asked.told.get(timeout=60) == [1, 0, 2]


def test_late_answers_to_a_question_that_was_dropped_or_is_not_asked_again_are_left(
    asked: Any,
) -> None:
    for again in (False, True):
        request = asked.ask(0.01, again=again)
        assert asked.told.get(timeout=60) == []
        asked.drop(request)
        asked.answer(0, 1, 2)
        assert asked.told.empty()


def test_the_page_hears_of_a_rank_that_was_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    toolbar, sent, told = Toolbar(), list[Query](), SimpleQueue[Any]()
    ranks: Any = SimpleNamespace(size=2, roster=SimpleNamespace(dead={}), hellos={})
    monkeypatch.setattr(cluster, "running", lambda: ranks)
    toolbar.started(ClusterContext(2, lambda _, query: sent.append(query), False))
    for _ in range(2):
        toolbar.ask_all(ranks, "state", lambda _, answers: told.put(sorted(answers)), 0.01)
        assert told.get(timeout=60) == []
    for query in sent:
        for rank in (1, 0):
            toolbar.message_arriving(Answer(query.request, rank, {}, ""), [])
    # Not of the first question: its answers are older.
    assert told.get(timeout=60) == [0, 1]
    assert told.empty()
