"""What a rank does while it waits: hear who left, say who is late, see deadlocks."""

from __future__ import annotations

import threading
import time

from allranks.collectives.calls import board as fields
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.guard import list_sites
from allranks.collectives.calls.interrupts import ear
from allranks.collectives.calls.standing import Standing
from allranks.errors import WAITING, CollectiveMismatch, RankLeft, RankLost
from allranks.records.ranks import label

_ASK_BEFORE_SECONDS = 0.6
_ASKED_AT_ONCE = 8
_ARRIVING_SECONDS = 0.3
_ANYBODY = 1 << 63
"""On the board, who waits for a message of any rank; else it is one rank's number + 1."""
INTERRUPTED = "was interrupted"
"""Why a rank has left a cell: most likely this one is about to hear of the interrupt too."""


class Watch:
    """Looks after the waits of one rank."""

    def __init__(self, own: Standing) -> None:
        self.own = own
        self._call: Call | None = None
        self._edge = (0, 0)
        self._ticket = 0
        self._notice_after = 0.0
        self._asked = 0
        self._suspects: dict[int, tuple[int, int]] = {}
        self._due: dict[int, int] = {}
        """The look of each of them that makes a ring of suspects real."""
        #: The ranks that were last told of as asking a person.
        self._told_asking: tuple[int, ...] = ()

    def attend(self, call: Call, waited: float) -> None:
        """Called every 20 ms of a wait.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, and this is not the thread that hears it.
            RankLeft: a missing rank will never come.
            CollectiveMismatch: this rank and others wait for each other.
        """
        own = self.own
        if threading.get_ident() != own.main_thread and ear.heard():
            raise KeyboardInterrupt
        if own.nudge is not None:
            own.nudge()
        look = own.look()
        missing = call.missing()
        self._publish(call, missing, waited, look)
        wanted = missing or (call.unfinished() if call.moving else ())
        left = self._left(call, wanted)
        # Where any rank may send, one that is still there is enough.
        if left and (call.every or len(left) == len(wanted)):
            if call.left_at < 0:
                call.left_at = waited
            # Others may be about to arrive, or to leave: then the report names them all.
            settled = len(left) == len(wanted) and not any(INTERRUPTED in why for *_, why in left)
            arriving = 0.0 if settled else _ARRIVING_SECONDS
            call.looked += 1
            if waited - call.left_at >= max(call.grace, arriving) and call.looked >= call.looks:
                _, rank, why = min(left)
                kind = RankLost if own.peers.lost(rank) else RankLeft
                raise kind(self._left_text(call, rank, why))
        if missing:
            self._look_for_deadlock(call, look)
            self._tell_late(call, missing, waited)
        elif wanted and not own.shared_by_all:
            # Between hosts data may stand still for as long as nobody gives a host up.
            self._tell_late(call, wanted, waited)

    def _left(self, call: Call, missing: tuple[int, ...]) -> list[tuple[int, int, str]]:
        """The missing ranks that will never come: how telling it is, who, why."""
        own, found = self.own, []
        for rank in missing:
            why = own.peers.departure(rank, own.scope, own.epoch)
            # Asked last: a rank that leaves over a deadlock tells of the deadlock first.
            verdict = own.peers.deadlocked(rank, own.epoch)
            if verdict is not None:
                call.deadlock = verdict
                raise CollectiveMismatch(verdict)
            why = why or own.peers.refusal(rank, call)
            if why is not None and rank in (call.missing() or call.unfinished()):
                found.append((why[0], rank, why[1]))
        return found

    def rest(self) -> None:
        """The wait is over."""
        if self._call is not None:
            self._edge = (0, 0)
            self._suspects = {}
            self.own.doing = ""
            self.own.waits = None
            self.own.board.put(fields.TICKET, 0)
            self._call = None  # last: a rest that an interrupt ends is taken again

    def _publish(self, call: Call, missing: tuple[int, ...], waited: float, look: int) -> None:
        board = self.own.board
        edge = self._needed(call, missing) if waited >= call.patience() else 0
        if call is not self._call:
            self._call, self._edge = call, (0, 0)
            self._notice_after, self._asked = self.own.late_seconds, 0
            self._told_asking = ()
            board.write(fields.WAITING, f"{call.spec.title} at {call.site}")
        if missing:
            self.own.doing = f"waiting in {call.spec.title} for {label(missing)}"
            self.own.waits = call.started, missing[0]
        if (edge, call.stage) != self._edge:
            self._edge = edge, call.stage
            self._ticket += 1
            self._suspects = {}
            board.put(fields.TICKET, 0)
            board.put(fields.EDGE, edge)
            board.put(fields.TICKET, self._ticket)
        board.put(fields.BEAT, look)

    def _left_text(self, call: Call, rank: int, why: str) -> str:
        sites, lost = call.sites(), self.own.peers.lost
        waiting = [r for r in sites if r != rank and not lost(r)]
        advice = "Make the same calls on every rank, or use a process set of the ranks that do."
        if rank in self.own.peers.died:
            advice = "A new rank can take its place once the others have left the cell."
        elif lost(rank):
            advice = "Check that host and its network, and start the ranks again."
        said = f"{call.spec.title} needs {call.needs}: rank {rank} {why}."
        if why.startswith("finished ") and call.every and rank not in sites and waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            said = (
                f"rank {rank} {why} without calling {call.spec.title}; "
                f"{label(waiting)} {verb} for it."
            )
        lines = [f"{said} {advice}"]
        if waiting:
            lines.append(WAITING)
            lines += list_sites({r: sites[r] for r in waiting})
        return "\n".join(lines)

    def _needed(self, call: Call, missing: tuple[int, ...]) -> int:
        """Whom a call cannot go on without, as it stands on the board; 0 where that is open."""
        if not missing or (not call.ordered and self.own.threaded):
            return 0  # another thread may be about to send
        return missing[0] + 1 if call.ordered or len(missing) == 1 else _ANYBODY

    def _look_for_deadlock(self, call: Call, look: int) -> None:
        """Follows who waits for whom, as far as it goes.

        Where that leads to nobody who can go on, and back to this rank, it is real once all have
        looked again.
        """
        board, ring = self.own.board, set[int]()
        ahead, returns = [board.rank], False
        anybody: list[int] = []
        while ahead:
            rank = ahead.pop()
            edge = board.get(rank, fields.EDGE)
            if not edge or not board.get(rank, fields.TICKET):
                self._suspects = {}
                return
            ring.add(rank)
            needed = [edge - 1]
            if edge == _ANYBODY:
                anybody = anybody or self._still_there()
                needed = [other for other in anybody if other != rank]
            returns = returns or board.rank in needed
            ahead += [other for other in needed if other not in ring]
        if not returns:
            return
        beats = {r: board.get(r, fields.BEAT) for r in ring}
        seen = {r: (board.get(r, fields.TICKET), board.get(r, fields.EDGE)) for r in ring}
        if seen != self._suspects:
            self._suspects = seen
            self._due = {r: self.own.seen_at(look, beat) for r, beat in beats.items()}
        elif all(beats[r] >= self._due[r] for r in ring):
            lines = [
                f"{label(sorted(ring))} wait for each other, and none can go on. "
                "Make the same calls in the same order on every rank.",
                *(f"  rank {r} in {board.text(r, fields.WAITING)}" for r in sorted(ring)),
            ]
            call.deadlock = "\n".join(lines)
            raise CollectiveMismatch(call.deadlock)

    def _still_there(self) -> list[int]:
        """The ranks that may still send: this one, and those that have not left."""
        own = self.own
        return [
            rank
            for rank in range(own.size)
            if rank == own.rank or own.peers.departure(rank, own.scope, own.epoch) is None
        ]

    def _tell_late(self, call: Call, missing: tuple[int, ...], waited: float) -> None:
        own = self.own
        if waited > self._notice_after - _ASK_BEFORE_SECONDS and not self._asked:
            # By a clock that ranks of other hosts have as well.
            self._asked = time.time_ns()
            for rank in missing[:_ASKED_AT_ONCE]:
                own.board.ask(rank, self._asked)
        if waited < self._notice_after:
            return
        asked, self._asked = self._asked, 0
        what = f"has waited {waited:.0f} s for {label(missing)}"
        if call.moving:
            have = "has" if len(missing) == 1 else "have"
            what = (
                f"has moved no data for {waited:.0f} s; {label(missing)} {have} not finished either"
            )
        if all(self._asks_a_person(rank) for rank in missing):
            # Who thinks before typing is not late: that is told once.
            self._notice_after = waited + own.late_seconds
            if missing == self._told_asking:
                return
            self._told_asking = missing
            are = "is" if len(missing) == 1 else "are"
            what = f"waits for {label(missing)}, which {are} waiting for input"
        else:
            self._notice_after *= 2
        if not self._speaks(call, missing):
            return
        lines = [f"{call.spec.title} at {call.site} {what}:"]
        for rank in missing[:_ASKED_AT_ONCE]:
            lines.append(f"  rank {rank} {self._whereabouts(rank, asked)}")
        if len(missing) > _ASKED_AT_ONCE:
            lines.append(f"  and {len(missing) - _ASKED_AT_ONCE} more")
        own.notice("\n".join(lines))

    def _speaks(self, call: Call, missing: tuple[int, ...]) -> bool:
        """True on the one rank that tells; while data moves on the first of those that wait."""
        if not call.moving:
            return call.speaks()
        waits = [rank for rank in missing if self.own.board.get(rank, fields.TICKET)]
        return self.own.rank < min(waits, default=self.own.size)

    def _asks_a_person(self, rank: int) -> bool:
        return bool(self.own.board.get(rank, fields.ASKING))

    def _whereabouts(self, rank: int, asked: int) -> str:
        own = self.own
        state = own.peers.state(rank)
        if state.entered <= own.scope.number:
            return f"has not started {own.scope.name} yet"
        board = own.board
        if board.get(rank, fields.TICKET):
            return f"waits in {board.text(rank, fields.WAITING)}"
        if board.get(rank, fields.ANSWERED) < asked:
            return "does not answer: it is inside a call that does not return to Python"
        return f"is at {board.text(rank, fields.LINE)}"
