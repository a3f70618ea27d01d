"""Calls of several threads on the same ranks, each in its turn."""

import os
import signal
import threading

import pytest

from allranks.cluster import calls
from allranks.cluster.calls import Turns
from allranks.cluster.state import ClusterState
from tests.kernel import wait_until


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


def test_a_thread_waits_for_the_end_of_anothers_call_without_looking_again():
    roster = ClusterState(1)
    turns = Turns(roster, lambda: None)
    roster.begin_cell(1, [0], threading.get_ident())
    waiting = turns.submit(turns.await_own, 600)
    roster.end_cell()
    turns.wake()
    turns.end_submitted(wait=True)
    assert waiting.result() is None


def test_a_thread_waits_for_no_call_that_ended_before_the_wait():
    turns = Turns(ClusterState(1), lambda: None)
    turns.await_own(600)


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


def waiting(turns: Turns, done: list[str]) -> threading.Thread:
    """A thread that waits for the end of a cell of another thread."""

    def call() -> None:
        with turns.taken():
            done.append("other")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    wait_until(lambda: turns._waiting and turns._turn)
    return thread


@pytest.mark.parametrize("how", ["its thread ends", "its thread has waited for it"])
def test_a_call_waits_for_the_cell_of_another_thread_until(how, monkeypatch):
    monkeypatch.setattr(calls, "_LOOK_SECONDS", 3600.0)  # a wake ends each wait
    roster, done = ClusterState(1), list[str]()
    turns = Turns(roster, lambda: None)
    begun, goes_on = threading.Event(), threading.Event()

    def begin() -> None:
        with turns.taken():
            roster.begin_cell(1, (0,), threading.get_ident())
        begun.set()
        goes_on.wait()

    beginning = threading.Thread(target=begin)
    beginning.start()
    begun.wait()
    other = waiting(turns, done)
    assert done == []
    if how == "its thread has waited for it":
        roster.end_cell()
        turns.wake()
        other.join(60)
        assert done == ["other"]
    goes_on.set()
    beginning.join()
    other.join(60)
    assert done == ["other"]


def test_calls_of_many_threads_take_turns(monkeypatch):
    monkeypatch.setattr(calls, "_LOOK_SECONDS", 3600.0)  # a wake ends each wait
    turns, inside, most = Turns(ClusterState(1), lambda: None), list[int](), list[int]()

    def call() -> None:
        for _ in range(200):
            with turns.taken(), turns.taken(), turns.taken_if_free() as free:
                assert free
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 800
