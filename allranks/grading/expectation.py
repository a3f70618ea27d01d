"""`expect`: compares the communication of a function with what it should be. Runs in every rank."""

from __future__ import annotations

from contextlib import ContextDecorator, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from IPython import get_ipython

from allranks.collectives import world
from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.call import Pause
from allranks.collectives.ops import operations
from allranks.collectives.start import runtime
from allranks.collectives.world import World
from allranks.errors import (
    CheckFailed,
    CollectiveError,
    CollectiveMismatch,
    RankLeft,
    RankLost,
    UsageError,
)
from allranks.grading.patterns import Pattern
from allranks.grading.traffic import RankRecord, Traffic
from allranks.records.config import size_text
from allranks.records.ranks import label

if TYPE_CHECKING:
    from allranks.grading.recording import CallRecorder

_LEAST, _MOST = 0.75, 1.25
"""Pieces of an array differ in size, and pickled lists are larger than arrays."""
_HEADER_NBYTES = 512
"""For a message, as a pickled array has a header."""


class ExpectationFailed(CollectiveError, CheckFailed):
    """A function communicates in another way than `expect` demands; raised on every rank, and shown
    in a box without a traceback.
    """


class expect(ContextDecorator):
    """Records the messages and collectives within, and compares them with what is expected.

    As a context manager, or as a decorator of a function::

        with expect(ring(rounds=size - 1), no_rank_above=2 * array.nbytes):
            result = my_allgather(array)

    Args:
        pattern: `ring`, `tree`, `line` or `collective`; any communication if it is None.
        bytes_per_rank: the bytes that each rank sends, within 25 % and 512 bytes for each message.
        no_deadlock: sends end only when they are received, so that an order of sends and receives
            which needs the buffers of MPI is found with messages of any size.
        no_rank_above: the most bytes that one rank may send, or receive, with 512 more for each
            message.
        longest_chain: the most messages that may wait for each other: each is sent after its sender
            has received the one before.

    Attributes:
        traffic: afterwards, the messages and collectives of all ranks; ``print(traffic)`` lists
            them.

    Raises:
        ExpectationFailed: the communication differs, or ranks wait for each other.
        RankLeft: another rank raised an exception of its own.
        UsageError: within, a call is made that is not recorded, such as ``comm.Mprobe``; or not all
            ranks run the cell.

    Collective over all ranks. An exception of the function is raised on its rank.
    """

    def __init__(
        self,
        pattern: Pattern | None = None,
        *,
        bytes_per_rank: float | None = None,
        no_deadlock: bool = True,
        no_rank_above: float | None = None,
        longest_chain: int | None = None,
    ) -> None:
        self.pattern = pattern
        self.bytes_per_rank = bytes_per_rank
        self.no_deadlock = no_deadlock
        self.no_rank_above = no_rank_above
        self.longest_chain = longest_chain
        self.traffic = Traffic([])
        self._recorder: CallRecorder | None = None

    def __enter__(self) -> Self:
        # Not at the top of the file: this import starts MPI.
        from allranks.grading.recording import CallRecorder

        this = world.current()
        if self._recorder is not None:
            raise UsageError("expect() expected one use at a time, found it within itself.")
        if this.scope.ranks is not None and len(this.scope.ranks) < this.size:
            raise UsageError(
                f"expect() needs a cell of all {this.size} ranks. Leave -r out, or start fewer "
                "ranks with -n."
            )
        # Together: a message of a rank that is ahead is then recorded as it is sent.
        this.run(operations.begin_barrier(name="expect"))
        if shell := get_ipython():
            # Python 3.13.0 skips the end of a `with` where an interrupt meets the jump back of a
            # loop, as in ``while waits: pass``. The end of the cell then takes its place.
            shell.events.register("post_execute", self._abandon)
        self._recorder = CallRecorder(this, synchronous=self.no_deadlock)
        self._recorder.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorder = self._stopped()
        if recorder is None:
            if error is None:
                raise UsageError(
                    "expect() needs its begin and its end in one cell: found the end of a cell "
                    "within, as get_ipython().run_cell() has one. Leave that out."
                )
            return
        ends = isinstance(error, RankLost) or not isinstance(error, Exception | SystemExit)
        this = world.current()
        if error is not None and ends:
            # Other ranks may be interrupted too, or have died: then they do not come.
            _leave(recorder)
            return
        records = gathered(this, recorder.record(error))
        self.traffic = Traffic(records)
        if self.traffic.lost or any(record.unfinished for record in records):
            # The next program would receive these messages.
            runtime.renew()
        failed = {rank: record.error for rank, record in enumerate(records) if record.error}
        if this.rank in failed and isinstance(error, Exception):
            return
        if failed:
            rank, text = next(iter(failed.items()))
            if this.rank in failed:
                raise ExpectationFailed(f"expected a function that returns; found {text}") from None
            raise RankLeft(f"expect needs all ranks: rank {rank} failed: {text}") from None
        if problem := self._problem():
            raise ExpectationFailed(problem) from None

    def _stopped(self) -> CallRecorder | None:
        if recorder := self._recorder:
            recorder.stop()
        self._recorder = None
        if shell := get_ipython():
            with suppress(ValueError):  # the end of a cell has done so
                shell.events.unregister("post_execute", self._abandon)
        return recorder

    def _abandon(self) -> None:
        """The cell has ended within."""
        if recorder := self._stopped():
            _leave(recorder)

    def _problem(self) -> str:
        """The first difference, as a message; empty if there is none."""
        traffic, pattern = self.traffic, self.pattern
        if any(record.stuck for record in traffic.records):
            return deadlock(traffic)
        for rank, record in enumerate(traffic.records):
            if record.unfinished:
                return (
                    "expected a wait for each receive that is posted; found none for that of rank "
                    f"{rank} at {record.unfinished[0]}. Call wait() on its request."
                )
        if traffic.lost:
            one = traffic.lost[0]
            return (
                f"expected a receive for each message; found that rank {one.dest} never received a "
                f"message of {size_text(one.nbytes)} from rank {one.source}. Receive it."
            )
        if pattern is not None:
            found = list(pattern.problems(traffic))
            if found:
                expected = pattern.expected(traffic.size, self._each())
                return message(expected, found, pattern.advice())
        return self._wrong_amount()

    def _wrong_amount(self) -> str:
        traffic = self.traffic
        for rank in range(traffic.size):
            sent, received = traffic.sent(rank), traffic.received(rank)
            more = traffic.collective_nbytes(rank)
            out = sum(one.nbytes for one in sent) + more
            into = sum(one.nbytes for one in received) + more
            room = _HEADER_NBYTES * max(len(sent), len(received), 1)
            wanted, limit = self.bytes_per_rank, self.no_rank_above
            if wanted is not None and not _LEAST * wanted <= out <= _MOST * wanted + room:
                return message(
                    f"{size_text(wanted)} sent by each rank",
                    [f"{size_text(out)}: {traffic.describe(rank)}"],
                    "Send only what the other rank needs.",
                )
            if limit is not None and max(out, into) > limit + room:
                verb = "sends" if out >= into else "receives"
                return message(
                    f"no rank that sends or receives more than {size_text(limit)}",
                    [f"rank {rank} {verb} {size_text(max(out, into))}: {traffic.describe(rank)}"],
                    "Share the work among the ranks.",
                )
        longest = self.longest_chain
        if longest is not None and traffic.longest_chain > longest:
            return message(
                f"at most {longest} messages that wait for each other",
                [f"{traffic.longest_chain}"],
                "Let more ranks send at the same time.",
            )
        return ""

    def _each(self) -> float | None:
        rounds = getattr(self.pattern, "rounds", None) or getattr(self.pattern, "messages", None)
        return self.bytes_per_rank / rounds if self.bytes_per_rank and rounds else None


def _leave(recorder: CallRecorder) -> None:
    """Ends a recording without the other ranks."""
    if recorder.is_receiving:
        # They would take the messages of the next cell.
        world.current().spoil("was interrupted within expect()")


def message(expected: str, found: list[str], advice: str) -> str:
    return "\n".join([f"expected {expected}.", *(f"found: {each}." for each in found), advice])


def deadlock(traffic: Traffic) -> str:
    stuck = {rank: record.stuck for rank, record in enumerate(traffic.records) if record.stuck}
    ended = sorted(set(range(traffic.size)) - stuck.keys())
    lines = ["expected a function that ends; found ranks that wait for each other:"]
    if ended:
        lines = ["expected a function that ends; found waits that never end:"]
    lines += [f"  rank {rank} waits at {line}" for rank, line in stuck.items()]
    if ended:
        lines.append(f"  {label(ended)} {'has' if len(ended) == 1 else 'have'} returned")
    lines.append(
        "Short messages fit into a buffer of MPI, so an order of calls may work with them by "
        "chance. Make a receive for each send; let some ranks receive first, or use sendrecv."
    )
    return "\n".join(lines)


def gathered(this: World, record: RankRecord) -> list[RankRecord]:
    """The records of all ranks, in a new epoch if a rank has left a call of this one."""
    for is_last in (False, True):
        try:
            group = this.groups[0]
            found: list[RankRecord] = this.run(
                operations.begin_object_gather(group, "expect", record)
            )
            return found
        except (CollectiveMismatch, RankLeft) as error:
            if is_last or isinstance(error, RankLost):
                raise
        # Ranks that still wait for this one learn that it does not come.
        this.spoil("has left the function that expect() records")
        await_others(this)
        runtime.renew()
    raise AssertionError("unreachable")


def await_others(this: World) -> None:
    """Ends when every rank has left its calls of this epoch. Raises `RankLost` if one has died."""
    pause = Pause()

    def broken(rank: int) -> bool:
        return this.board.get(rank, fields.BROKEN) >> 1 == this.epoch + 1

    while waiting := [rank for rank in range(this.size) if not broken(rank)]:
        lost = [rank for rank in range(this.size) if this.is_lost(rank)]
        if lost:
            raise RankLost(f"expect needs all ranks: rank {lost[0]} has died.")
        pause()
        if this.nudge is not None and waiting:
            this.nudge()
