"""Operations of a graph are carried out in the order that the first rank says."""

import threading

import pytest

pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")

from allranks import collectives
from allranks.collectives import global_process_set
from allranks.collectives import world as worlds
from allranks.collectives.transports import loopback
from allranks.errors import RankLeft
from allranks.tensorflow import turns


@pytest.fixture
def world():
    made = loopback.worlds_of(1)[0]
    worlds.set_thread(made)
    yield made
    worlds.set_thread(None)


def test_an_interrupted_cell_names_no_turn_in_the_next(world, monkeypatch):
    monkeypatch.setattr(collectives, "broadcast_object", lambda *_args, **_options: ["b"])
    monkeypatch.setattr(turns.ear, "heard", lambda: True)
    collectives.scope.enter("this cell", None, 1)
    asked = turns.of(global_process_set)
    with pytest.raises(KeyboardInterrupt):
        asked.take("a", lambda: None)
    assert turns.of(global_process_set) is asked
    collectives.scope.leave("KeyboardInterrupt", failed=True)
    collectives.scope.enter("this cell", None, 2)
    assert turns.of(global_process_set) is not asked
    assert turns.of(global_process_set) is turns.of(global_process_set)


def test_what_ends_one_wait_ends_those_behind_it(world, monkeypatch):
    """Else a session would never end, as one of its operations waits on."""
    here, told = threading.Barrier(2), []

    def left(*_args, **_options):
        here.wait(60)
        while len(asked._ready) < 2:
            pass
        raise RankLeft("rank 1 has gone")

    monkeypatch.setattr(collectives, "broadcast_object", left)
    asked = turns.of(global_process_set)

    def behind():
        worlds.set_thread(world)
        here.wait(60)
        try:
            asked.take("b", lambda: None)
        except RankLeft as error:
            told.append(str(error))

    other = threading.Thread(target=behind)
    other.start()
    with pytest.raises(RankLeft):
        asked.take("a", lambda: None)
    other.join(60)
    assert told == ["rank 1 has gone"]


def test_the_first_ranks_order_is_everybodys(world, monkeypatch):
    done = []

    def ready_elsewhere(*_args, **_options):
        while len(asked._ready) < 3:
            pass
        return ["c", "a", "b"]

    monkeypatch.setattr(collectives, "broadcast_object", ready_elsewhere)
    asked = turns.of(global_process_set)

    def take(name):
        worlds.set_thread(world)
        asked.take(name, lambda: done.append(name))

    waiting = [threading.Thread(target=take, args=[name]) for name in "abc"]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(60)
    assert done == ["c", "a", "b"]
