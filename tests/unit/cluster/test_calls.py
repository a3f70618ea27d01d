"""Calls of several threads on the same ranks, each in its turn."""

import os
import signal
import threading

import pytest

from allranks.cluster.calls import Turns
from allranks.cluster.state import ClusterState


@pytest.fixture
def _ignored():
    """Interrupts raise nothing, as in a cell that awaits, of which ipykernel cancels the await."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ignored")
def test_an_interrupt_ends_the_wait_for_a_turn_and_leaves_no_lock_taken():
    turns = Turns(ClusterState(1), lambda: None)
    begun, over = threading.Event(), threading.Event()

    def other() -> None:
        with turns.taken():
            begun.set()
            while not over.wait(0.01):
                os.kill(os.getpid(), signal.SIGINT)  # some of them before the wait

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    with pytest.raises(KeyboardInterrupt), turns.taken():
        pass
    over.set()
    thread.join()
    again = turns.submit(lambda: turns.taken().__enter__())
    assert again.result() is None
    turns.end_submitted(wait=True)


def test_a_call_that_is_submitted_while_the_others_are_ended_is_made_in_the_next_thread():
    turns = Turns(lambda: 0, lambda: None)
    ended = turns._executor

    class EndsMeanwhile:
        def submit(self, *call):
            turns._executor = ended
            turns.end_submitted(wait=False)
            return ended.submit(*call)

    turns._executor = EndsMeanwhile()
    assert turns.submit(lambda: 7).result() == 7
    turns.end_submitted(wait=True)
