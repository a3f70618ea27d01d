"""The worlds of an ensemble's members on a rank."""

from types import SimpleNamespace

from allranks.collectives.start import under_mpi
from allranks.engine.features import RankFeature, RankHooks
from allranks.features.ensemble.rank import RankEnsemble
from allranks.records import requests


def test_worlds_of_several_ranks_are_made_again_after_a_replacement_and_none_before(monkeypatch):
    made, hooks = [], RankHooks([RankEnsemble])
    world = SimpleNamespace(epoch=0, unfinished=False, traffic=False)
    monkeypatch.setattr(under_mpi, "divide", lambda each: made.append(each) or world)
    (ensemble,) = hooks.features
    shell = SimpleNamespace(user_ns={})
    ensemble.started(SimpleNamespace(rank=0, shell=shell, activate=hooks.activate))
    hooks.answer(requests.MEMBERS, {"ranks_each": 1}, [])
    assert hooks.of(RankFeature.rank_replaced) == []
    for _ in range(2):
        hooks.answer(requests.MEMBERS, {"ranks_each": 2}, [])
    hooks.rank_replaced([1])
    for each in (1, 2):
        hooks.answer(requests.MEMBERS, {"ranks_each": each}, [])
    assert made == [1, 2, 2]
