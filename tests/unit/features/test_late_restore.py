"""What a rank says to a notebook that attaches while, or after, ranks are replaced."""

import os
import threading
from types import SimpleNamespace

import pytest

from allranks.collectives import loopback, world
from allranks.collectives.ops import keeping
from allranks.collectives.ops.keeping import VariableStore, VersionedFiles
from allranks.engine.rank import Rank
from allranks.features.attach.rank import RankAttach
from allranks.features.heal import rank as heal_rank
from allranks.features.heal import requests
from allranks.features.heal.rank import RankHeal
from allranks.records.wire import Query, RunCell

HEAL = Query(1, requests.HEAL, {"dead": [1], "epoch": 2})
CELL = RunCell(1, "", 0, (0,), "cell In[1]", False, 0)


@pytest.fixture
def rank():
    """The two features in a rank of a world of threads: ``rank(function)`` calls it there."""

    def run(function):
        def body():
            wire = SimpleNamespace(busy=False, cell=0)
            rank = SimpleNamespace(
                rank=0,
                cell=lambda: wire.cell if wire.busy else 0,
                begin_epoch=lambda move: move(),
                shell=SimpleNamespace(user_ns={}),
            )
            heals, attaches = RankHeal(), RankAttach()
            rank.handover_fields = heals.handover_fields
            heals._rank, attaches._rank, attaches._wire = rank, rank, wire
            return function(heals, attaches._about)

        return loopback.run(1, body)

    return run


def receiver(heals, busy=False):
    """A rank that receives records in the thread of its connection."""
    rank = SimpleNamespace(answered=[], queued=[], refused=[], wire=SimpleNamespace(busy=busy))
    rank.rank = 0
    rank._features = SimpleNamespace(message_received=lambda *_: None, requests_while_busy=set())
    rank._features.request_received = heals.request_received
    queue = lambda call, ask, payloads: rank.queued.append(ask)  # noqa: E731
    rank._loop = SimpleNamespace(call_soon_threadsafe=queue)
    rank._answer = lambda ask, payloads: rank.answered.append(ask)
    rank._refuse = lambda ask, why: rank.refused.append(ask)
    return rank


def test_a_rank_that_was_asked_to_join_with_new_ones_says_so_until_it_has_tried(rank):
    def check(heals, about):
        Rank._receive(receiver(heals), HEAL, [])
        seen = [about()["healing"]]
        heals._join = lambda dead, epoch: seen.append(about()["healing"])
        heals.answer(requests.HEAL, HEAL.arguments, [])
        assert [*seen, about()["healing"]] == [True, True, False]
        assert about()["heal"] == HEAL.arguments

    rank(check)


def test_a_rank_that_was_asked_to_join_twice_says_so_until_it_has_tried_twice(rank):
    def check(heals, about):
        seen = []
        Rank._receive(receiver(heals), HEAL, [])
        Rank._receive(receiver(heals), HEAL, [])
        heals._join = lambda dead, epoch: seen.append(about()["healing"])
        heals.answer(requests.HEAL, HEAL.arguments, [])
        heals.answer(requests.HEAL, HEAL.arguments | {"epoch": 9}, [])
        assert [*seen, about()["healing"]] == [True, True, False]
        # Two notebooks may ask for the same.
        heals.answer(requests.HEAL, HEAL.arguments | {"epoch": 9}, [])
        assert len(seen) == 2

    rank(check)


def test_a_new_rank_says_so_until_it_is_asked_to_restore(rank):
    def check(heals, about):
        world.current().lacks_variables = True
        assert about()["new"]
        assert heals.answer(requests.RESTORE, {"version": 1, "saved": []}, [])[0]["names"] == []
        assert not about()["new"]

    rank(check)


def test_what_was_kept_does_not_replace_what_a_cell_has_set_since(rank):
    def check(heals, about):
        world.current().lacks_variables = True
        heals.message_received(CELL, [])
        assert not about()["new"]

    rank(check)


def test_a_rank_says_which_others_were_not_replaced(rank):
    def check(heals, about):
        assert about()["died"] == []
        world.current().died[1] = "was killed"
        assert about()["died"] == [1]

    rank(check)


@pytest.mark.parametrize("healing", [True, False])
def test_a_rank_that_waits_in_mpi_for_a_lost_host_saves_in_another_thread(healing):
    heals, save = RankHeal(), Query(2, requests.SAVE, {})
    rank = receiver(heals)
    if healing:
        heals.request_received(requests.HEAL, HEAL.arguments)
    Rank._receive(rank, save, [])
    assert (rank.answered, rank.queued) == (([save], []) if healing else ([], [save]))


def test_a_rank_that_refuses_to_join_because_its_cell_has_just_begun_does_not_wait_in_mpi(rank):
    def check(heals, about):
        busy = receiver(heals, busy=True)  # the cell has begun just before the request is looked at

        def received(record, payloads):
            if isinstance(record, heals.records):
                heals.message_received(record, payloads)

        busy._features.message_received = received
        Rank._receive(busy, HEAL, [])
        assert busy.refused == [HEAL]
        assert not about()["healing"]

    rank(check)


def test_saved_variables_stay_on_disk_until_all_ranks_have_loaded_theirs(rank, monkeypatch):
    monkeypatch.setattr(heal_rank, "saved_names", SimpleNamespace(load=lambda parts, names: None))
    monkeypatch.setattr(heal_rank.wire, "parts", lambda data: [data])
    dropped = []
    life = SimpleNamespace(read=lambda version: b"saved", drop=lambda: dropped.append("life"))
    cells = SimpleNamespace(newest=lambda: 1)

    def check(heals, about):
        heals._rank.shell.user_global_ns = {}
        kept = SimpleNamespace(of_life=life, of_cells=cells, settled=lambda: 0)
        world.current().variable_store = kept
        heals._has_loaded = False
        loaded = heals.answer(requests.LOAD, {"sets": {}, "saved": [0]}, [])
        assert loaded == ({"problem": ""}, [])
        assert dropped == []
        for _ in range(2):
            heals.answer(requests.SETTLE, {}, [])
            assert dropped == ["life"]

    rank(check)


def test_a_rank_that_cannot_load_what_it_saved_takes_back_what_was_kept(rank):
    def check(heals, about):
        heals._rank.shell.user_global_ns = {}
        life = SimpleNamespace(read=lambda version: None)
        world.current().variable_store = SimpleNamespace(of_life=life)
        loaded, _ = heals.answer(requests.LOAD, {"sets": {}, "saved": [0]}, [])
        assert loaded == {"problem": "FileNotFoundError: the file is gone"}
        assert about()["new"]

    rank(check)


def test_a_rank_tells_the_version_for_whose_files_it_has_waited(rank, tmp_path, monkeypatch):
    waits, replaces, wait = threading.Event(), os.replace, VersionedFiles.wait

    def check(heals, about):
        kept = VariableStore([str(tmp_path)], 0, 1, {})
        world.current().variable_store, heals._has_loaded = kept, False

        def written_once_it_waits(*paths, **options):
            waits.wait()
            replaces(*paths, **options)

        def waited(files):
            if files is kept.of_cells:
                waits.set()
            wait(files)

        monkeypatch.setattr(keeping, "_WAITED_FOR_NBYTES", -1)
        monkeypatch.setattr(os, "replace", written_once_it_waits)
        monkeypatch.setattr(VersionedFiles, "wait", waited)
        kept.of_cells.write(1, {0: keeping.pieces_of([b"step"])})
        settled, _ = heals.answer(requests.SETTLE, {}, [])
        assert settled["version"] == 1

    try:
        rank(check)
    finally:
        waits.set()
