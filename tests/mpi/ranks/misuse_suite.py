"""Every mistake ends with an error that says who and where, and the next cell is unharmed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import pytest
from conftest import (
    ODD,
    PATIENCE_SECONDS,
    enter,
    everybody,
    in_a_cell,
    interrupted_after,
    next_cell_works,
    odd,
    settle,
    until,
)
from mpi4py import MPI

import allranks.collectives as c
from allranks.collectives import world
from allranks.collectives.calls import call
from allranks.collectives.calls.call import Pause
from allranks.collectives.calls.rank_state import FINISHED, LEFT
from allranks.collectives.mpi import transport as of_mpi
from allranks.errors import CollectiveError, CollectiveMismatch, Deadlock, RankLeft, StaleHandle
from tests.agents import numbers

pytestmark = pytest.mark.skipif(c.size() < 2, reason="a mistake takes two ranks")
TIMES = int(os.environ.get("ALLRANKS_TEST_TIMES", "2"))
X = np.ones(4)
_SIGNALS = 20


def many(reverse: bool) -> list[object]:
    """Ten arrays, of which the last two may stand in the other order."""
    last = [np.ones((8, 16)), np.ones((16, 8))]
    return [X] * 8 + (last[::-1] if reverse else last)


def mixed(otherwise: bool) -> list[object]:
    """Arrays of the same shapes and of the same two dtypes, which another array may have."""
    dtypes = ["f4", "f8", "f8"] if otherwise else ["f4", "f8", "f4"]
    return [np.ones(3, dtype) for dtype in dtypes]


MISMATCHES: dict[str, Callable[[], object]] = {
    "shape": lambda: c.allreduce(np.ones(4 if odd() else 5)),
    "dtype": lambda: c.allreduce(X.astype("float32" if odd() else "float64")),
    "reduction": lambda: c.allreduce(X, c.Max if odd() else c.Sum),
    "root": lambda: c.broadcast(X, 1 if odd() else 0),
    "operation": lambda: c.broadcast(X) if odd() else c.allreduce(X),
    "number of elements|shape": lambda: c.grouped_allreduce([X] * (2 if odd() else 3)),
    "shape: of the ninth": lambda: c.grouped_allreduce(many(odd()), c.Sum),
    "shape: of a mixed group": lambda: c.grouped_allreduce(mixed(odd()), c.Sum),
    "shape: of the ninth that is gathered": lambda: c.grouped_allgather(many(odd())),
    "factors": lambda: c.allreduce(X, prescale_factor=2.0 if odd() else 1.0),
    "transport": lambda: c.allreduce(X, transport="mpi" if odd() else None),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_a_difference_is_named_on_every_rank(what):
    for _ in range(TIMES):
        error = in_a_cell(MISMATCHES[what])
        assert isinstance(error, CollectiveMismatch)
        assert any(
            f"needs the same {word}" in str(error) for word in what.split(": ")[0].split("|")
        )
        assert "rank 1 ha" in str(error)
        assert "misuse_suite.py" in str(error)
        next_cell_works()


def test_a_mismatch_leaves_the_epoch_clean():
    before = c.epoch()
    for what in MISMATCHES:
        with pytest.raises(CollectiveMismatch):
            MISMATCHES[what]()
        assert c.allreduce(1, c.Sum) == c.size()
    assert not c.dirty()
    assert c.epoch() == before


def test_calls_in_another_order_are_named_with_both_lines():
    def swapped():
        if odd():
            c.broadcast(X)
        c.allreduce(X)
        if not odd():
            c.broadcast(X)

    for _ in range(TIMES):
        error = in_a_cell(swapped)
        assert isinstance(error, CollectiveMismatch)
        assert ": c.broadcast(X)" in str(error)
        assert ": c.allreduce(X)" in str(error)
        next_cell_works()


WAITING: dict[str, Callable[[], object]] = {
    "allreduce": lambda: c.allreduce(X),
    "allreduce of megabytes": lambda: c.allreduce(np.ones(500_000)),
    "broadcast": lambda: c.broadcast(X),
    "over MPI": lambda: c.allreduce(X, transport="mpi"),
    "handle": lambda: c.allreduce_async(X).synchronize(),
    "communicator": lambda: c.comm.Allreduce(X, X.copy()),
    "object": lambda: c.comm.bcast(None),
    "receive": lambda: c.comm.recv(source=ODD),
    "Receive": lambda: c.comm.Recv(np.empty(1), source=ODD),
    "probe": lambda: c.comm.probe(source=ODD),
}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("what", WAITING)
def test_a_rank_that_leaves_is_named_with_its_reason(what, raises):
    def leaves():
        if not odd():
            WAITING[what]()
        elif raises:
            raise ValueError("bad batch")

    for _ in range(TIMES):
        error = in_a_cell(leaves)
        if odd():
            assert isinstance(error, ValueError if raises else type(None))
        else:
            assert isinstance(error, RankLeft)
            assert "rank 1 has left this cell" in str(error)
            assert "misuse_suite.py" in str(error)
            assert not raises or "at cell:1 (ValueError: bad batch" in str(error)
        next_cell_works()


@pytest.mark.parametrize("what", ["allreduce", "receive", "Receive"])
def test_a_rank_that_renews_while_others_wait_for_it_is_named(what):
    def renews():
        if not odd():
            with pytest.raises(RankLeft, match=r"rank 1 has called renew\(\) at .*misuse_suite"):
                WAITING[what]()
        c.renew()

    assert in_a_cell(renews) is None
    next_cell_works()


@pytest.mark.parametrize("raises", [False, True])
def test_a_rank_that_leaves_while_others_renew_is_named(raises):
    enter()
    reason = "ValueError: bad batch" if raises else "it ended"
    if not odd():
        with pytest.raises(RankLeft, match=r"renew\(\) needs all of ranks 0–.*: rank 1 has left"):
            c.renew()
    # What was left keeps MPI from making other communicators: it has to end before the next cell.
    assert c.dirty() is not odd()
    c.scope.leave(reason, failed=raises)
    MPI.Intracomm(c.comm).Barrier()  # MPI's own: all are still in the epoch of before
    enter()
    # What was left goes on, also with another number.
    c.renew(c.epoch() + 5)
    assert c.allreduce(np.ones(3), c.Sum)[0] == c.size()
    c.scope.leave("it ended")
    next_cell_works()


def test_a_rank_that_has_left_a_renewal_is_named_to_those_that_come_later(monkeypatch):
    class Pressed(Pause):
        def __call__(self, *_):
            raise KeyboardInterrupt

    enter()
    with monkeypatch.context() as pressed:
        pressed.setattr(of_mpi, "Pause", Pressed)
        if odd():
            with pytest.raises(KeyboardInterrupt):
                c.renew()
            c.scope.leave("KeyboardInterrupt", failed=True)
    MPI.Intracomm(c.comm).Barrier()
    if not odd():
        with pytest.raises(RankLeft, match="rank 1 has left this cell"):
            c.renew()
    MPI.Intracomm(c.comm).Barrier()
    c.scope.leave("it ended")
    enter()
    c.renew()
    c.scope.leave("it ended")
    next_cell_works()


def test_a_renewal_that_is_left_anywhere_is_followed_by_one_to_a_later_epoch(monkeypatch):
    class Pressed(Pause):
        def __call__(self, *arguments):
            press_later.pop()
            return super().__call__(*arguments)

    monkeypatch.setattr(of_mpi, "Pause", Pressed)
    for count in range(24):
        first = c.epoch() + 1
        press_later = [None] * (count if odd() else 10**6)
        # As after a renewal between two cells that was interrupted on this rank only.
        with suppress(IndexError):
            c.renew(first)
        press_later = [None] * 10**6
        if c.epoch() <= first:
            c.renew(first + 1)
        assert c.epoch() == first + 1
        assert c.comm.allreduce(1) == c.size()


def interrupted_at_the_end_of_a_renewal(monkeypatch, epoch):
    """Presses Ctrl-C on rank 1 once it has done all but the last step, which others do later."""
    own, posted = of_mpi.complete, []

    def complete(*arguments, **options):
        posted.append(True)
        yield from own(*arguments, **options)

    class Slow(Pause):
        def __call__(self, *arguments):
            if odd() and posted:
                raise KeyboardInterrupt
            if not odd():
                time.sleep(0.02)
            return super().__call__(*arguments)

    with monkeypatch.context() as pressed:
        pressed.setattr(of_mpi, "complete", complete)
        pressed.setattr(of_mpi, "Pause", Slow)
        c.renew(epoch)


def test_a_renewal_that_is_left_at_its_end_is_followed_by_one_to_a_later_epoch(monkeypatch):
    """On several hosts, too, where ranks that have ended it make communicators of hosts."""
    for _ in range(5):
        first = c.epoch() + 1
        # It may have ended at once.
        with suppress(KeyboardInterrupt):
            interrupted_at_the_end_of_a_renewal(monkeypatch, first)
        if c.epoch() <= first:
            c.renew(first + 1)
        assert c.epoch() == first + 1
        assert c.allreduce(1, c.Sum) == c.size()


def test_no_rank_waits_for_one_that_has_left_a_renewal_at_its_end(monkeypatch):
    enter()
    before, board = c.epoch(), world.current().board
    with suppress(KeyboardInterrupt, RankLeft):
        interrupted_at_the_end_of_a_renewal(monkeypatch, before + 1)
    c.scope.leave("it ended")
    # Without a call of MPI, in which this rank would do its part for the others.
    own = board.get(c.rank(), LEFT)
    while odd() and min(board.get(rank, LEFT) for rank in board.ranks) < own:
        time.sleep(0)
    enter()
    # One that had not left the renewal may have got the later epoch by it.
    if c.epoch() < before + 2:
        c.renew(before + 2)
    c.scope.leave("it ended")
    next_cell_works()


def test_the_number_of_an_epoch_may_be_any_integer():
    c.renew(np.int32(c.epoch() + 1))
    assert c.allreduce(1, c.Sum) == c.size()


def test_an_interrupt_once_an_epoch_has_begun_leaves_it_intact(monkeypatch):
    mpi = world.current().mpi
    begun = mpi.renewed

    def renewed(epoch):
        begun(epoch)
        if odd():
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as pressed:
        pressed.setattr(mpi, "renewed", renewed)
        if odd():
            with pytest.raises(KeyboardInterrupt):
                c.renew()
        else:
            c.renew()
    assert not c.dirty()
    assert c.allreduce(1, c.Sum) == c.size()


def test_ranks_that_renew_several_times_do_not_wait_for_those_that_are_slower():
    def renews():
        for _ in range(20):
            c.renew()
            c.renew()
            assert c.allreduce(np.ones(2), c.Sum)[0] == c.size()

    assert in_a_cell(renews) is None
    next_cell_works()


def test_a_rank_outside_of_the_cell_is_named():
    if odd():
        return
    number = c.world.current().scope.number
    c.scope.enter("this cell", tuple(r for r in range(c.size()) if r != ODD), number)
    with pytest.raises(RankLeft, match=r"rank 1 does not run this cell \(-r 0"):
        c.allreduce(X)
    c.scope.leave("it ended")


def test_a_rank_that_has_made_the_call_before_in_the_cell_did_not_make_it_again():
    texts = []
    for times in (1, 3, 1):
        enter()
        try:
            for _ in range(times - odd()):
                c.allreduce(X)
        except RankLeft as error:
            texts.append(str(error))
        c.scope.leave(FINISHED)
        settle()
        next_cell_works()
    if not odd():
        said = ["again; " in text for text in texts]
        assert said == [False, True, False], texts


def test_ranks_that_wait_for_each_other_are_told_so():
    def crossed():
        if c.rank() == 0:
            c.comm.recv(source=ODD)
        else:
            c.allreduce(X)

    for _ in range(TIMES):
        error = in_a_cell(crossed)
        assert isinstance(error, CollectiveMismatch)
        assert "ranks 0–1 wait for each other" in str(error)
        assert ": c.comm.recv(source=ODD)" in str(error)
        next_cell_works()


@pytest.mark.parametrize("also", ["receives", "has left", "waits for a rank", "synchronizes"])
def test_ranks_that_receive_from_anybody_and_none_sends_are_told_so(also):
    def nobody_sends():
        if c.rank() > 1 or also == "receives":
            c.comm.recv()
        elif c.rank() == 0:
            c.comm.Probe()
        elif also == "waits for a rank":
            c.comm.recv(source=0)
        elif also == "synchronizes":
            c.comm.Barrier()

    error = in_a_cell(nobody_sends)
    if c.rank() == ODD and also == "has left":
        assert error is None
    elif c.size() == 2 and also == "has left":
        assert isinstance(error, RankLeft)
    else:
        assert isinstance(error, CollectiveMismatch)
        assert "wait for each other" in str(error)
    next_cell_works()


@pytest.mark.parametrize("method", ["reduce", "allreduce", "scan", "exscan"])
@pytest.mark.parametrize(
    ("op", "other", "names"),
    [
        (MPI.SUM, MPI.MAX, ("SUM", "MAX")),
        (MPI.SUM, max, ("SUM", "max")),
        (min, max, ("min", "max")),
        (partial(max), np.add, ("a function", "add")),
    ],
)
def test_objects_are_reduced_with_one_op(method, op, other, names):
    error = in_a_cell(lambda: getattr(c.comm, method)(1.0, op=other if odd() else op))
    assert isinstance(error, CollectiveMismatch)
    usual, odd_one = names
    assert f"comm.{method} needs the same reduction on every rank: " in str(error)
    assert f"rank 1 has {odd_one}" in str(error)
    assert f" {usual}" in str(error)
    next_cell_works()


def test_a_rank_that_skips_a_reduction_of_objects_is_named():
    def skips():
        if not odd():
            c.comm.allreduce(1)

    error = in_a_cell(skips)
    if not odd():
        assert isinstance(error, RankLeft)
        assert "comm.allreduce(SUM) needs all of ranks 0–" in str(error)
        assert "rank 1 has left this cell" in str(error)
    next_cell_works()


@pytest.mark.parametrize("receive", ["recv", "Recv", "irecv", "probe", "sendrecv", "of an array"])
@pytest.mark.parametrize("then", ["leaves", "waits"])
def test_a_message_with_another_tag_is_named_with_both_tags(receive, then, monkeypatch):
    # A posted receive is waited for as long as a message of its length may take: irecv has none.
    monkeypatch.setattr(call.PointCall, "patience", lambda one: 1e9 if one.nbytes > 1e6 else 0.0)
    receives: dict[str, Callable[[], object]] = {
        "recv": lambda: c.comm.recv(source=0, tag=2),
        "Recv": lambda: c.comm.Recv(np.ones(3), source=0, tag=2),
        "irecv": lambda: c.comm.irecv(source=0, tag=2).wait(),
        "probe": lambda: c.comm.probe(source=0, tag=2),
        "sendrecv": lambda: c.comm.sendrecv(1, dest=ODD, source=0, recvtag=2),
        "of an array": lambda: c.recv(0, tag=2),
    }
    send = partial(c.send, X) if receive == "of an array" else partial(c.comm.send, "data")

    def tags_differ():
        if odd():
            receives[receive]()
        elif c.rank() == 0:
            send(dest=ODD, tag=1)
        if then == "waits":
            c.comm.Barrier()

    error = in_a_cell(tags_differ)
    said = "Rank 0 has sent a message with tag 1, and rank 1 waits for tag 2. Send and receive with"
    if then == "waits":
        assert isinstance(error, Deadlock)
        assert said in str(error)
    elif odd():
        assert isinstance(error, RankLeft)
        assert said in str(error)
    c.renew()  # drops the message, as the end of a failed cell does
    next_cell_works()


def test_who_receives_from_anybody_waits_for_one_that_sends_late():
    def late():
        if odd():
            time.sleep(0.5)
            for rank in set(range(c.size())) - {ODD}:
                c.comm.send(rank, rank)
        else:
            assert c.comm.recv() == c.rank()

    assert in_a_cell(late) is None
    next_cell_works()


def test_ranks_that_wait_for_a_late_one_sleep_as_long_as_they_may(monkeypatch):
    # How much of a core is left to a wait: benchmarks/collectives.py, and a test of its schedule.
    communicators = c.world.current().mpi
    assert communicators is not None
    asleep: list[MPI.Request] = []

    def sleeps(sleep: Callable[[float], None], seconds: float) -> None:
        if seconds == call.LONGEST_SLEEP and not asleep:
            asleep.append(communicators.pristine.Ibarrier())
        sleep(seconds)

    class Pause(call.Pause):
        def __call__(self, longest: float, sleep: Callable[[float], None] | None = None) -> float:
            return super().__call__(longest, sleep and partial(sleeps, sleep))

    def late():
        if odd():
            asleep.append(communicators.pristine.Ibarrier())
            until(asleep[0].Test)
        c.allreduce(X)

    with monkeypatch.context() as patch:
        patch.setattr(call, "Pause", Pause)
        patch.setattr(call, "sleep", partial(sleeps, time.sleep))
        assert in_a_cell(late) is None
    asleep[0].Wait()
    next_cell_works()


@pytest.mark.parametrize("what", WAITING)
def test_an_interrupt_is_heard_inside_a_collective(what):
    def waits():
        try:
            if not odd():
                with interrupted_after(0.05):
                    WAITING[what]()
                    time.sleep(PATIENCE_SECONDS)
        finally:
            everybody(False)  # who left before the others have heard would end their wait

    for _ in range(TIMES):
        error = in_a_cell(waits)
        assert isinstance(error, type(None) if odd() else KeyboardInterrupt)
        next_cell_works()


@pytest.mark.parametrize("what", WAITING)
def test_an_interrupt_of_a_wait_names_the_rank_that_was_late(what):
    def waits():
        try:
            if not odd():
                this = c.world.current()
                with interrupted_after(0.0, lambda: this.doing.waits_for == "rank 1"):
                    WAITING[what]()
                    time.sleep(PATIENCE_SECONDS)
        finally:
            everybody(False)

    error = in_a_cell(waits)
    if not odd():
        assert isinstance(error, KeyboardInterrupt)
        assert vars(error)["waited"].waits_for == "rank 1"
    next_cell_works()


@pytest.mark.parametrize("what", ["allreduce", "over MPI", "communicator", "receive"])
def test_an_interrupt_in_the_first_moment_of_a_wait_names_it_too(what, monkeypatch):
    class Interrupts(call.Pause):
        def __call__(self, *_: object) -> float:
            raise KeyboardInterrupt

    def waits():
        try:
            if not odd():
                with monkeypatch.context() as patch:
                    patch.setattr(call, "Pause", Interrupts)
                    WAITING[what]()
        finally:
            everybody(False)

    error = in_a_cell(waits)
    if not odd():
        assert isinstance(error, KeyboardInterrupt)
        _, _, missing = vars(error)["waited"].waits_for.partition(" ")
        assert 1 in numbers(missing)
    next_cell_works()


def test_an_interrupt_at_any_moment_leaves_the_next_cell_whole():
    def busy():
        with interrupted_after(0.01 + 0.003 * np.random.default_rng().random()):
            while True:
                c.allreduce(X)
                c.allreduce(np.ones(200_000, "float32"), c.Sum)
                c.allgather(X[: c.rank()])

    for _ in range(4 * TIMES):
        error = in_a_cell(busy)
        assert isinstance(error, KeyboardInterrupt | RankLeft)
        next_cell_works()


WITHIN: dict[str, Callable[[], object]] = {
    "a small array": lambda: c.allreduce(X, c.Sum)[0],
    "a large array": lambda: c.allreduce(np.ones(500_000), c.Sum)[-1],
    "over MPI": lambda: c.allreduce(X, c.Sum, transport="mpi")[0],
    "a communicator": lambda: c.comm.allreduce(1),
}


@pytest.mark.parametrize("outer", WITHIN.values(), ids=WITHIN)
def test_a_call_within_another_one_is_refused_and_changes_no_result(outer):
    """As by a function that a program has set for a signal, or by ``__del__``."""
    raised, late, others = list[BaseException](), 1, c.comm.Dup()
    alone = others.Split(c.rank())

    def call_within(*_):
        assert alone.allreduce(1) == 1  # a group of its own
        for within in (c.allreduce, c.allreduce_async):
            with pytest.raises(CollectiveError) as caught:
                within(100 * X, c.Sum)
            raised.append(caught.value)
        c.send(X, late)

    def signal_once_it_waits():
        until(lambda: c.activity() != "")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def body():
        if c.rank() == 0:
            before = signal.signal(signal.SIGUSR1, call_within)
            thread = threading.Thread(target=signal_once_it_waits)
            thread.start()
        if c.rank() == late:
            c.recv(0)
        assert outer() == c.size()
        if c.rank() == 0:
            thread.join()
            signal.signal(signal.SIGUSR1, before)

    assert in_a_cell(body) is None
    for error in raised:
        assert "needs the end of the call before: this rank is within" in str(error)
    assert len(raised) == 2 * (c.rank() == 0)
    alone.Free()
    others.Free()
    next_cell_works()


def test_a_call_after_a_handle_that_let_another_thread_go_first_is_in_none():
    others = c.comm.Dup()

    def call_once_the_handle_waits():
        if c.rank() > 0:
            until(lambda: c.activity() != "")
        assert others.allreduce(1) == c.size()

    def body():
        thread = threading.Thread(target=call_once_the_handle_waits)
        if c.rank() > 0:
            handle = c.allreduce_async(X, c.Sum)
            thread.start()
        else:
            call_once_the_handle_waits()
            handle = c.allreduce_async(X, c.Sum)
        assert handle.synchronize()[0] == c.size()
        assert c.allreduce(X, c.Sum)[0] == c.size()
        if c.rank() > 0:
            thread.join()

    assert in_a_cell(body) is None
    others.Free()
    next_cell_works()


def test_a_call_of_another_thread_that_outlasts_one_behind_a_handle_is_in_none():
    others, ended = c.comm.Dup(), threading.Event()

    def call_while_the_main_thread_waits():
        until(lambda: c.activity() != "")
        others.Barrier()
        ended.set()

    def report_that_it_waits():
        until(lambda: "Barrier" in c.activity())
        c.send(X, 0)

    def body():
        functions = call_while_the_main_thread_waits, report_that_it_waits
        threads = [threading.Thread(target=one) for one in functions]
        if c.rank() > 0:
            handle = c.allreduce_async(X, c.Sum)
            for thread in threads:
                thread.start()
        else:
            for rank in range(1, c.size()):
                c.recv(rank)
            handle = c.allreduce_async(X, c.Sum)
        assert c.allreduce(X, c.Sum)[0] == handle.synchronize()[0] == c.size()
        if c.rank() == 0:
            others.Barrier()
        else:
            for thread in threads:
                thread.join()
            assert ended.is_set()
        assert c.allreduce(X, c.Sum)[0] == c.size()

    assert in_a_cell(body) is None
    others.Free()
    next_cell_works()


@contextmanager
def timer(function: Callable[..., object], seconds: float, *, again: bool = True) -> Iterator[None]:
    """A program's function for a signal, on one rank."""
    if c.rank() > 0:
        yield
        return
    before = signal.signal(signal.SIGALRM, function)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds if again else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_call_within_one_that_lets_another_thread_go_first_is_refused():
    others, refused, late = c.comm.Dup(), list[str](), 1

    def call_within(*_):
        if c.activity() != "" or refused:
            with pytest.raises(CollectiveError) as caught:
                c.allreduce(100 * X, c.Sum)
            refused.append(str(caught.value))
        if len(refused) < _SIGNALS:
            signal.setitimer(signal.ITIMER_REAL, 0.013)
        else:
            c.send(X, late)

    def body():
        thread = threading.Thread(target=others.allreduce, args=(1,))
        if c.rank() == 0:
            thread.start()
        if c.rank() == late:
            c.recv(0)
        with timer(call_within, 0.013, again=False):
            assert c.allreduce(X, c.Sum)[0] == c.size()
        if c.rank() == 0:
            thread.join()
        else:
            others.allreduce(1)

    assert in_a_cell(body) is None
    assert len(refused) == _SIGNALS * (c.rank() == 0)
    assert all("this rank is within allreduce(Sum)" in text for text in refused)
    others.Free()
    next_cell_works()


def test_a_function_for_a_signal_may_look_at_a_handle_at_any_moment():
    handles = list[c.Handle]()

    def body():
        for _ in range(20 * TIMES):
            handles[:] = [c.allreduce_async(np.ones(1_000_000), c.Sum) for _ in range(2)]
            assert all(handle.synchronize()[-1] == c.size() for handle in handles)

    def look(*_):
        for handle in handles:
            handle.poll()
        signal.setitimer(signal.ITIMER_REAL, 0.003)

    with timer(look, 0.003, again=False):
        assert in_a_cell(body) is None
    next_cell_works()


def test_a_poll_does_not_wait_for_a_thread_that_waits_for_its_handle():
    def body():
        if c.rank() == 1:
            c.recv(0)
        handle = c.allreduce_async(X, c.Sum)
        if c.rank() == 0:
            thread = threading.Thread(target=handle.synchronize)
            thread.start()
            until(lambda: c.activity() != "")
            for _ in range(100):
                assert not handle.poll()
            c.send(X, 1)
            thread.join()
        assert handle.synchronize()[0] == c.size()

    assert in_a_cell(body) is None
    next_cell_works()


def test_a_call_that_waits_within_another_one_keeps_the_place_of_that():
    others = c.comm.Dup()

    def call_within(*_):
        c.send(X, 1)
        assert others.allreduce(2) == 2 * c.size()  # behind that of the thread

    def signal_once_it_waits():
        this = world.current()
        until(lambda: this.within is not None and this.within.members is this.groups[0].members)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def in_thread():
        assert others.allreduce(1) == c.size()
        assert c.allreduce(2 * X, c.Sum)[0] == 2 * c.size()  # behind that of the main thread

    def body():
        if c.rank() > 0:
            if c.rank() == 1:
                c.recv(0)
            assert others.allreduce(1) == c.size()
            assert others.allreduce(2) == 2 * c.size()
            assert c.allreduce(X, c.Sum)[0] == c.size()
            assert c.allreduce(2 * X, c.Sum)[0] == 2 * c.size()
            return
        before = signal.signal(signal.SIGUSR1, call_within)
        threads = [threading.Thread(target=one) for one in (in_thread, signal_once_it_waits)]
        threads[0].start()
        until(lambda: c.activity() != "")
        threads[1].start()
        assert c.allreduce(X, c.Sum)[0] == c.size()
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGUSR1, before)

    for _ in range(4 * TIMES):
        assert in_a_cell(body) is None
    others.Free()
    next_cell_works()


def test_a_handle_left_behind_ends_the_epoch():
    before = c.epoch()
    handles: list[c.Handle] = []
    in_a_cell(lambda: handles.append(c.allreduce_async(X)) if not odd() else None)
    assert c.epoch() == before + 1
    for handle in handles:
        with pytest.raises(StaleHandle, match="Post it again"):
            handle.synchronize()
    next_cell_works()


def test_an_epoch_that_is_over_for_a_rank_is_over_at_once():
    def twice():
        if odd():
            return
        with pytest.raises(RankLeft):
            c.allreduce(X)
        with pytest.raises(RankLeft, match="needs an intact epoch"):
            c.allreduce(X)

    assert in_a_cell(twice) is None
    next_cell_works()


def test_process_sets_survive_an_epoch(sets):
    half = sets["half"]
    in_a_cell(lambda: None if odd() else c.allreduce(X))
    for transport in ("shared", "mpi"):
        assert c.allreduce(1, c.Sum, process_set=half, transport=transport) == half.size()


def test_a_communicator_stands_for_every_epoch():
    comm = c.comm
    in_a_cell(lambda: None if odd() else c.allreduce(X))
    assert c.comm is comm
    request = comm.Ibarrier()
    while not request.Test():
        continue
    assert comm.allreduce(1) == c.size()
