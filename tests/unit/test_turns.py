"""Whose turn it is in a graph of TensorFlow 1 is forgotten with the cell that asked."""

import pytest

pytest.importorskip("tensorflow", reason="no TensorFlow: pip install 'allranks[tensorflow]'")

from allranks import collectives
from allranks.collectives import global_process_set
from allranks.collectives import world as worlds
from allranks.collectives.transports import loopback
from allranks.tensorflow import turns


@pytest.fixture
def world():
    made = loopback.worlds_of(1)[0]
    worlds.set_thread(made)
    yield made
    worlds.set_thread(None)


def test_an_interrupted_cell_names_no_turn_in_the_next(world, monkeypatch):
    monkeypatch.setattr(collectives, "broadcast_object", lambda *_args, **_options: "b")
    monkeypatch.setattr(turns.ear, "heard", lambda: True)
    collectives.scope.enter("this cell", None, 1)
    asked = turns.of(global_process_set)
    with pytest.raises(KeyboardInterrupt), asked.taken("a"):
        pass
    assert asked._named == "b"
    assert turns.of(global_process_set) is asked
    collectives.scope.leave("KeyboardInterrupt", failed=True)
    collectives.scope.enter("this cell", None, 2)
    assert turns.of(global_process_set)._named is None
    assert turns.of(global_process_set) is turns.of(global_process_set)
