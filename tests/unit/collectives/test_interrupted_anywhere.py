"""An interrupt may come between any two steps of a call: what it leaves does no harm later."""

import gc
import signal
import sys
import threading
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import allranks.collectives as c
from allranks.collectives import loopback
from allranks.collectives import world as worlds
from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.call import NOTHING, Call, Members
from allranks.collectives.calls.rank_state import Board, RankState
from allranks.collectives.calls.specs import Packed
from allranks.collectives.calls.watch import Watch
from allranks.collectives.gpu.nccl import _at_once
from allranks.collectives.host import memory
from allranks.collectives.host.memory import Window
from allranks.collectives.host.shared_memory import Channel
from allranks.collectives.world.world import World
from allranks.errors import RankLeft
from allranks.records.deferred import deferred
from tests.unit.interrupts import HEARD, press, pressed_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


@pytest.fixture
def alone():
    """A world of one rank, in the main thread, where interrupts are heard."""
    world = loopback.worlds_of(1)[0]
    worlds.set_thread(world)
    world.begin()
    yield world
    worlds.set_thread(None)


CALLS = {
    "allreduce": lambda: c.allreduce(np.full(4, 99.0), c.Sum),
    "allreduce in blocks": lambda: c.allreduce(np.full(4, 99.0)[::2], c.Sum),
    "allreduce by slices": lambda: c.allreduce(np.full(9_000, 99.0), c.Sum),
    "broadcast": lambda: c.broadcast(np.full(4, 99.0)),
    "allgather": lambda: c.allgather(np.full(4, 99.0)),
    "reducescatter": lambda: c.reducescatter(np.full(4, 99.0), c.Sum),
    "alltoall": lambda: c.alltoall(np.full(4, 99.0)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_left_before_it_counts_changes_no_later_result(call, monkeypatch):
    arrive, left = Channel.arrive, []

    def interrupted(agreement, *arguments, **options):
        if agreement.members.rank == 0 and not left:
            left.append(call)
            raise KeyboardInterrupt
        return arrive(agreement, *arguments, **options)

    def body():
        if c.rank() == 0:
            with pytest.raises(KeyboardInterrupt):
                CALLS[call]()
        assert not c.dirty()
        return [float(c.allreduce(np.array([10.0 * i + c.rank()]), c.Sum)[0]) for i in range(4)]

    monkeypatch.setattr(Channel, "arrive", interrupted)
    assert loopback.run(2, body) == 2 * [[1.0, 21.0, 41.0, 61.0]]
    assert left == [call]


def test_a_posted_call_that_is_not_yet_counted_ends_the_epoch_with_its_cell(alone):
    class Left(deque):
        def append(self, call):
            super().append(call)
            raise KeyboardInterrupt

    alone.groups[0].queue = Left()
    c.scope.enter("this cell", None, 1)
    with pytest.raises(KeyboardInterrupt):
        c.allreduce_async(np.ones(3))
    c.scope.leave("KeyboardInterrupt", failed=True)
    assert c.dirty()


@pytest.mark.parametrize("where", [(Channel, "arrive"), (World, "finish")])
def test_a_posted_call_that_is_left_halfway_is_not_taken_for_done(where, monkeypatch):
    room, name = where
    real, left = getattr(room, name), []

    def interrupted(self, *arguments):
        if getattr(self, "members", self).rank == 0 and not left:
            left.append(self)
            raise KeyboardInterrupt
        return real(self, *arguments)

    def body():
        if c.rank() == 0:
            with pytest.raises(KeyboardInterrupt):
                c.allreduce_async(np.ones(3), c.Sum).synchronize()
            assert c.dirty()
        else:
            handle = c.allreduce_async(np.ones(3), c.Sum)
            if name == "arrive":
                with pytest.raises(RankLeft):
                    handle.synchronize()
        with pytest.raises(RankLeft):
            c.allreduce(np.ones(3))

    monkeypatch.setattr(room, name, interrupted)
    loopback.run(2, body)
    assert left


def test_an_interrupt_that_was_kept_back_is_heard_though_the_block_raises():
    def block():
        with deferred():
            press()
            raise ValueError("the block's own")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_process_set_is_there_or_not_wherever_the_interrupt_comes(monkeypatch):
    world = loopback.worlds_of(2)[0]
    worlds.set_thread(world)
    # The others have gone on: from here on they have the set, or have it no more.
    monkeypatch.setattr(World, "run", lambda world, call: press())
    made = c.ProcessSet([0])
    try:
        with pytest.raises(KeyboardInterrupt):
            c.add_process_set(made)
        assert (made.process_set_id, list(world.sets)) == (1, [1])
        with pytest.raises(KeyboardInterrupt):
            c.remove_process_set(made)
        assert (made.process_set_id, list(world.sets)) == (None, [])
    finally:
        worlds.set_thread(None)


def test_a_fence_that_is_left_harms_no_later_one():
    step = 1
    while pressed_at(step, memory._fence_by_lock):
        memory._fence_by_lock()
        step += 1
    assert step > 3


def test_a_group_of_nccls_calls_is_closed_wherever_the_interrupt_comes():
    called = []
    nccl = SimpleNamespace(
        groupStart=lambda: called.append("start") or press(), groupEnd=lambda: called.append("end")
    )
    with pytest.raises(KeyboardInterrupt), _at_once(nccl):
        called.append("inside")
    assert called == ["start", "inside", "end"]


def an_array(window, count):
    return window.empty((count,), np.dtype("uint8"), count)


@pytest.fixture
def small_collections():
    """Garbage collections look at what the test itself has made, and not at all of pytest's."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_collections")
def test_the_window_loses_no_memory_wherever_the_interrupt_comes(monkeypatch):
    monkeypatch.setattr(memory, "_FIRST_BYTES", 1 << 16)  # populating 16 MB takes long

    def whole(window):
        free = sum(size for pieces in window._free for _, size in pieces)
        leased = sum(lease.where[2] for lease in window._leases.values())
        return free + leased == sum(segment.nbytes for segment in window._segments)

    steps = []
    for count in (4096, 8192):  # as large as a piece that was used before, and larger
        step, goes_on = 1, True
        while goes_on:
            segment = memory.Segment(Board.nbytes(1))
            window = Window(Board(segment.memory, (0,), 0))
            empty = partial(an_array, window)
            kept, used = empty(64), empty(4096)
            del used
            goes_on = pressed_at(step, empty, count)
            gc.collect()
            assert whole(window)
            arrays = [kept, *(empty(4096) for _ in range(3))]
            assert len({window.place_of(array) for array in arrays}) == 4
            step += 1
        steps.append(step)
    assert min(steps) > 5


def test_what_a_rank_said_last_is_written_again_where_that_was_interrupted():
    segment = memory.Segment(Channel.nbytes(1))
    own = RankState(0, (0,), Board(memory.Segment(Board.nbytes(1)).memory, (0,), 0))
    members = Members(0, (0,), 0)
    first, other = (Call(None, Packed(None, n, text)) for n, text in ((7, b"one"), (8, b"two")))
    step, goes_on = 1, True
    while goes_on:
        channel = Channel(own, members, segment.memory)
        channel.arrive(first, NOTHING)
        channel.renew()
        goes_on = pressed_at(step, channel.arrive, other, NOTHING)
        for call in (first, other):
            channel.renew()
            channel.arrive(call, NOTHING)
            lies = segment.memory[2304:4096]
            assert lies.startswith(call.packed.fingerprint.to_bytes(8, "little"))
            assert call.packed.text in lies
        step += 1
    assert step > 3


def test_a_rank_that_no_longer_waits_says_so_wherever_the_interrupt_comes(alone):
    step, goes_on = 1, True
    while goes_on:
        watch = Watch(alone)
        watch.call = SimpleNamespace()
        alone.board.put(fields.TICKET, 7)
        goes_on = pressed_at(step, watch.rest)
        watch.rest()
        assert alone.board.get(0, fields.TICKET) == 0
        step += 1
    assert step > 2


def is_free(lock):
    """Whether another thread can take a lock."""
    found = []

    def look():
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    other = threading.Thread(target=look)
    other.start()
    other.join()
    return found[0]


ASKS = {
    **CALLS,
    "allreduce_async": lambda: c.allreduce_async(np.ones(3)).synchronize(),
    "empty": lambda: c.empty(8),
}


@pytest.mark.parametrize("call", ASKS)
def test_the_lock_of_the_world_is_free_wherever_the_interrupt_comes(call):
    step, goes_on = 1, True
    while goes_on:
        world = loopback.worlds_of(1)[0]
        worlds.set_thread(world)
        world.begin()
        try:
            goes_on = pressed_at(step, ASKS[call], events=HEARD)
        finally:
            worlds.set_thread(None)
        assert is_free(world.lock)
        step += 1
    assert step > 5


def test_a_wait_that_leaves_a_turn_to_other_threads_has_the_lock_again_at_an_interrupt(alone):
    step, goes_on = 1, True

    def waits():
        with alone.lock:
            alone._attend(own, 0.02)

    while goes_on:
        own = Call(alone.groups[0].agreement, Packed(None, 7, b"one"))
        other = SimpleNamespace(ordered=False)
        alone._queued[:] = [other]
        alone.watch = SimpleNamespace(rest=list, attend=lambda *_: None)
        goes_on = pressed_at(step, waits, events=HEARD)
        assert is_free(alone.lock)
        assert alone._queued == [other]
        step += 1
    assert step > 10


def test_a_call_that_is_interrupted_before_its_turn_is_queued_no_more(alone):
    step, goes_on = 1, True
    while goes_on:
        call = Call(alone.groups[0].agreement, Packed(None, 7, b"one"))
        goes_on = pressed_at(step, alone._in_turn, call, list, events=HEARD)
        assert is_free(alone.lock)
        assert alone._queued == []
        step += 1
    assert step > 3
