"""The watch over a rank's waits: it finds ranks that have left, late ranks, and deadlocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from allranks.collectives.calls import deadlocks, frames
from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.call import Call, PointCall
from allranks.collectives.calls.deadlocks import OtherTag
from allranks.collectives.calls.mismatches import list_sites
from allranks.collectives.calls.rank_state import INTERRUPTED, Board, RankState, interrupt_pipe
from allranks.collectives.calls.sites import of_frame, with_source
from allranks.errors import WAITING, RankLeft, RankLost
from allranks.records.ranks import RUNNING, WAITS, Activity, label

_PERIOD_SECONDS = 0.25


class LineReporter(threading.Thread):
    """Publishes the line of the rank's main thread when another rank asks for it.

    It looks at the board four times a second, and never calls MPI.
    """

    def __init__(self, board: Board, rank: int, thread: int) -> None:
        super().__init__(name="allranks-whereabouts", daemon=True)
        self.board, self.rank, self.thread = board, rank, thread
        self.also: list[Callable[[], object]] = []
        """Further functions to call while the main thread is busy."""
        self.is_idle: Callable[[], bool] = lambda: False
        """Whether the main thread waits for something to run."""
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(_PERIOD_SECONDS):
            self.answer()
            for function in self.also:
                function()

    def answer(self) -> None:
        asked = self.board.get(self.rank, fields.ASKED)
        if asked == self.board.get(self.rank, fields.ANSWERED):
            return
        frame = frames.frames_of_threads().get(self.thread)
        self.board.write(fields.LINE, "" if self.is_idle() else of_frame(frame).place)
        self.board.put(fields.ANSWERED, asked or time.time_ns())

    def stop(self) -> None:
        self._stopped.set()


_ASK_BEFORE_SECONDS = 0.6
_ASKED_AT_ONCE = 8
_ARRIVING_SECONDS = 0.3
_ANYBODY = 1 << 63
"""The edge of a rank that waits for a message of any rank; otherwise a rank's number + 1."""
_IDLE = "has nothing to run: no cell, and no request of a client"
#: Below the lines about ranks, if one is idle.
_CALL_ON_ALL = (
    "This call needs all ranks: make it on all, as with the view rc[:], or use a process set of "
    "those that make it"
)


@dataclass
class Late:
    """The reports of one wait about the ranks that are late."""

    notice_after: float
    asked: int = 0
    """The time of the question to these ranks."""
    asks: bool = False
    """Whether this rank asks it."""
    reported_asking: tuple[int, ...] = ()
    """The ranks that were last reported as waiting for a person."""


class Watch:
    """Observes the waits of one rank."""

    def __init__(self, own: RankState) -> None:
        self.own = own
        self.call: Call | None = None
        self._edge = (0, 0)
        self._ticket = 0
        self._late = Late(0.0)
        self._suspects: dict[int, tuple[int, int]] = {}
        self._due: dict[int, int] = {}
        """The snapshot of each suspect that confirms the cycle."""

    def attend(self, call: Call, waited: float) -> None:
        """Called every 20 ms of a wait. Raises `RankLeft` if a missing rank will never arrive, and
        `CollectiveMismatch` if this rank and others wait for each other.
        """
        own = self.own
        # Python raises KeyboardInterrupt in the main thread only.
        if threading.get_ident() != own.main_thread and interrupt_pipe.received():
            raise KeyboardInterrupt
        if own.nudge is not None:
            own.nudge()
        self.look(call, waited)
        self._publish_other_tag(call)

    def look(self, call: Call, waited: float) -> None:
        """As `attend`, for a thread that watches the wait of another one: it neither calls MPI nor
        takes the interrupts of the thread that waits. It holds the lock of the world.
        """
        own = self.own
        snapshot = own.snapshot_number()
        missing = call.missing()
        self._publish(call, missing, waited, snapshot)
        wanted = missing or (call.unfinished() if call.moving else ())
        left = self._left(call, wanted)
        # If any rank may send, one that is still there is enough.
        if left and (call.every or len(left) == len(wanted)):
            if call.left_at < 0:
                call.left_at = waited
            # Others may be about to arrive or to leave: after a moment the report names them all.
            settled = len(left) == len(wanted) and not any(INTERRUPTED in why for *_, why in left)
            arriving = 0.0 if settled else _ARRIVING_SECONDS
            _, rank, why = min(left)
            lost = own.is_lost(rank)
            if not missing and not lost:  # its data may be on the way
                arriving = max(arriving, call.patience())
            call.polls += 1
            if waited - call.left_at >= max(call.grace, arriving) and call.polls >= call.min_polls:
                kind = RankLost if lost else RankLeft
                raise kind(self._left_text(call, rank, why))
        if missing:
            self._look_for_deadlock(call, snapshot)
            self._report_late(call, missing, waited)
        elif call.moving and call.peers:  # the request of a collective
            self._look_for_deadlock(call, snapshot)
            self._report_late(call, call.peers, waited)
        elif wanted and not own.shared_by_all:
            # Between hosts, data may stop until a host is declared lost.
            self._report_late(call, wanted, waited)

    def _left(self, call: Call, missing: tuple[int, ...]) -> list[tuple[int, int, str]]:
        """The missing ranks that will never arrive: order of the reason, rank, reason."""
        own, found = self.own, []
        for rank in missing:
            why = own.departure(rank)
            # Read last: a rank that leaves because of a deadlock publishes the deadlock first.
            verdict = own.deadlocked(rank)
            if verdict is not None:
                call.deadlock = verdict
                raise deadlocks.error(with_source(verdict))
            why = why or own.refusal(rank, call)
            if why is not None:
                awaited = call.missing() or call.unfinished()
            elif (why := own.renewal(rank) or own.omission(rank, call)) is not None:
                awaited = call.missing()  # read last, as the states of all members take long
            else:
                continue
            if rank in awaited:
                found.append((why[0], rank, why[1]))
        return found

    def rest(self) -> None:
        if self.call is not None:
            self._edge = (0, 0)
            self._suspects = {}
            self.own.doing = RUNNING
            self.own.waits = None
            self.own.board.put(fields.TICKET, 0)
            self.call = None  # last: an interrupted `rest` is repeated

    def _publish(self, call: Call, missing: tuple[int, ...], waited: float, snapshot: int) -> None:
        board = self.own.board
        # The data of a collective's request move while any of its ranks waits: if all of them wait
        # longer than that takes, they have posted different calls.
        needed = missing or (call.peers if call.moving else ())
        edge = self._needed(call, needed) if waited >= call.patience() else 0
        if call is not self.call:
            self.rest()  # of a call that another thread has watched
            self.call, self._edge = call, (0, 0)
            # Another thread may have watched its own wait in between.
            self._late = call.late = call.late or Late(self.own.late_seconds)
            board.write(fields.WAITING, f"{call.spec.title} at {call.site.place}")
            # Not in `rest`: another rank that finds the same deadlock may still read it.
            board.put(fields.OTHER_TAG, 0)
        if missing:
            self.own.doing = Activity(WAITS, call.spec.title, label(missing))
            self.own.waits = call.started, missing[0]
        elif self.own.waits is not None:
            # All have come: what is left is the transfer.
            self.own.doing, self.own.waits = RUNNING, None
        if (edge, call.stage) != self._edge:
            self._edge = edge, call.stage
            self._ticket += 1
            self._suspects = {}
            # Ticket 0 hides the edge while it changes.
            board.put(fields.TICKET, 0)
            board.put(fields.EDGE, edge)
            board.put(fields.TICKET, self._ticket)
        board.put(fields.BEAT, snapshot)

    def _publish_other_tag(self, call: Call) -> None:
        # None also for a call that has received its message, and now waits for something else.
        found = None if call.other_tag is None else call.other_tag()
        board = self.own.board
        if found is not None:
            board.put(fields.WANTED_TAG, found.wanted)
        board.put(fields.OTHER_TAG, 0 if found is None else found.source + 1 << 32 | found.sent)

    def _other_tags(self, ranks: Iterable[int]) -> list[OtherTag]:
        """The messages that have come with another tag than these ranks wait for."""
        board = self.own.board
        found = {rank: board.get(rank, fields.OTHER_TAG) for rank in ranks}
        return [
            OtherTag(rank, (one >> 32) - 1, one & 0xFFFFFFFF, board.get(rank, fields.WANTED_TAG))
            for rank, one in found.items()
            if one
        ]

    def _left_text(self, call: Call, rank: int, why: str) -> str:
        sites, lost = call.sites(), self.own.is_lost
        waiting = [r for r in sites if r != rank and not lost(r)]
        partner = f"rank {rank}" if len(call.missing()) == 1 else "another rank"
        open_there = isinstance(call, PointCall) and call.moving
        advice = (
            self.own.advice(rank, why)
            or ("Wait for it on every rank: request.Wait()." if open_there else "")
            or deadlocks.advice_on(self._other_tags((self.own.rank,)))
            or deadlocks.advice_alone(call.spec.title, self.own.rank, partner)
            or deadlocks.advice_for_some(call.spec.title)
        )
        said = f"{call.spec.title} needs {call.needs}: rank {rank} {why}."
        if why.startswith("finished ") and call.every and rank not in sites and waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            repeated = self.own.has_repeated(call) and not self.own.request  # else in another one
            without = f"calling {call.spec.title}{' again' if repeated else ''}"
            if open_there:
                without = f"waiting for the request of {call.spec.title}"
            elif isinstance(call, PointCall) and call.posts and call.posts.is_persistent:
                without = f"starting the request of {call.spec.title}"
            said = f"rank {rank} {why} without {without}; {label(waiting)} {verb} for it."
        lines = [f"{said} {advice}"]
        if waiting:
            lines.append(WAITING)
            lines += list_sites({r: sites[r] for r in waiting})
        return "\n".join(lines)

    def _needed(self, call: Call, missing: tuple[int, ...]) -> int:
        """The edge of the wait-for graph for the board; 0 if another thread may end the wait."""
        if not missing or (self.own.calls_in_threads if call.ordered else self.own.threaded):
            return 0  # another thread may send, or make the call, soon
        return missing[0] + 1 if call.ordered or len(call.peers) == 1 else _ANYBODY

    def _look_for_deadlock(self, call: Call, snapshot: int) -> None:
        board, ring = self.own.board, set[int]()
        ahead, returns = [board.rank], False
        anybody: list[int] = []
        while ahead:
            rank = ahead.pop()
            edge = board.get(rank, fields.EDGE)
            # One rank that can go on may free all others.
            if not edge or not board.get(rank, fields.TICKET):
                self._suspects = {}
                return
            ring.add(rank)
            needed = [edge - 1]
            if edge == _ANYBODY:
                # The ranks that may still send: this one, and those that have not left.
                anybody = anybody or [
                    other
                    for other in range(self.own.size)
                    if other == self.own.rank or self.own.departure(other) is None
                ]
                needed = [other for other in anybody if other != rank]
            returns = returns or board.rank in needed
            ahead += [other for other in needed if other not in ring]
        if not returns:
            return
        beats = {r: board.get(r, fields.BEAT) for r in ring}
        seen = {r: (board.get(r, fields.TICKET), board.get(r, fields.EDGE)) for r in ring}
        # A cycle through this rank is a deadlock if all ranks in it confirm it with a second
        # snapshot.
        if seen != self._suspects:
            self._suspects = seen
            self._due = {r: self.own.seen_by(snapshot, beat) for r, beat in beats.items()}
        elif all(beats[r] >= self._due[r] for r in ring):
            waits = {r: board.text(r, fields.WAITING) for r in sorted(ring)}
            lines = [
                deadlocks.text(
                    [*waits],
                    [where.partition(" at ")[0] for where in waits.values()],
                    self._other_tags(waits),
                ),
                *(f"  rank {r} in {where}" for r, where in waits.items()),
            ]
            call.deadlock = "\n".join(lines)
            raise deadlocks.error(with_source(call.deadlock))

    def _report_late(self, call: Call, missing: tuple[int, ...], waited: float) -> None:
        own, late = self.own, self._late
        if waited > late.notice_after - _ASK_BEFORE_SECONDS and not late.asked:
            # Wall-clock time: ranks of other hosts compare it.
            late.asked = time.time_ns()
            # Each question, and each answer, crosses the network.
            late.asks = self._reports_late(call, missing)
            for rank in missing[:_ASKED_AT_ONCE] if late.asks else ():
                own.board.ask(rank, late.asked)
        if waited < late.notice_after:
            return
        asked, late.asked = late.asked, 0
        what = f"has waited {waited:.0f} s for {label(missing)}"
        if call.moving and call.peers:
            what = (
                f"has waited {waited:.0f} s for the data of {label(missing)}, "
                "which move in calls of MPI only"
            )
        elif call.moving:
            have = "has" if len(missing) == 1 else "have"
            what = (
                f"has moved no data for {waited:.0f} s; {label(missing)} {have} not finished either"
            )
        if all(own.board.get(rank, fields.ASKING) for rank in missing):
            # A rank that waits for a person is not late: it is reported once.
            late.notice_after = waited + own.late_seconds
            if missing == late.reported_asking:
                return
            late.reported_asking = missing
            are = "is" if len(missing) == 1 else "are"
            doing = sorted({own.board.text(rank, fields.ASKS) for rank in missing})
            what = f"waits for {label(missing)}, which {are} {' or '.join(doing)}"
        else:
            late.notice_after *= 2
        if not self._reports_late(call, missing):
            return
        if not late.asks:  # the rank that was to report has gone on
            late.notice_after = waited + _ASK_BEFORE_SECONDS
            return
        lines, idle = [f"{call.spec.title} at {call.site} {what}:"], False
        for rank in missing[:_ASKED_AT_ONCE]:
            place = self._location(rank, asked)
            lines.append(f"  rank {rank} {place}")
            idle = idle or place == _IDLE
        if len(missing) > _ASKED_AT_ONCE:
            lines.append(f"  and {len(missing) - _ASKED_AT_ONCE} more")
        # Not a receive, which needs one rank, nor a call of some ranks.
        if idle and call.every and call.members.size == own.size:
            lines.append(f"  {_CALL_ON_ALL}")
        own.notice("\n".join(lines))

    def _reports_late(self, call: Call, missing: tuple[int, ...]) -> bool:
        """True on one rank; while data moves, on the first rank that waits."""
        if not call.moving:
            return call.reports_late()
        waits = [rank for rank in missing if self.own.board.get(rank, fields.TICKET)]
        return self.own.rank < min(waits, default=self.own.size)

    def _location(self, rank: int, asked: int) -> str:
        own, board = self.own, self.own.board
        if board.get(rank, fields.ENTERED) <= own.scope.number:
            return f"has not started {own.scope.name} yet"
        waits = ""
        if board.get(rank, fields.TICKET):
            waits = f"waits in {with_source(board.text(rank, fields.WAITING))}"
        if board.get(rank, fields.ANSWERED) < asked:
            why = (
                "it is stopped, inside a call that does not return to Python, or gets no core "
                "because the machine is busy"
            )
            if waits:
                # While a rank waits, another of its threads answers.
                why = f"it {waits}, and is stopped or gets no processor time"
            if own.host_names and own.hosts[rank] != own.hosts[own.rank]:
                why += f", or its host {own.host_names[rank]} cannot be reached"
            return f"does not answer: {why}"
        line = board.text(rank, fields.LINE)
        return waits or (f"is at {with_source(line)}" if line else _IDLE)
