"""One cell on its ranks, from its start to its end, and what shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from allranks.cluster import failures, variables
from allranks.cluster.connection import Connection
from allranks.cluster.features import CellContext
from allranks.errors import (
    CellFailed,
    CellInterrupted,
    CellTimeout,
    ClusterLost,
    RankDied,
    Report,
    UsageError,
)
from allranks.records import requests
from allranks.records.ranks import label
from allranks.records.telemetry import Pulse, Telemetry
from allranks.records.wire import Answer, Interrupt, Output, Reply
from allranks.widgets.text import front_end, of_this_process

NOTICE_SECONDS = 2.0
"""By this time after an interrupt, a rank that reacts has left its cell, or cleans up."""
GRACE_SECONDS = 10.0
"""Time to leave the cell after a timeout's interrupt."""
_ASK_BEFORE_SECONDS = 0.5
"""The ranks are asked where they are this much earlier."""

AskSoon = Callable[[str, dict[str, Any], Callable[[Answer], None], Iterable[int]], None]


class InterruptTimeout:
    """The state of the ranks of one interrupted cell, or member."""

    def __init__(self, ask_soon: AskSoon) -> None:
        self._ask_soon = ask_soon
        self._asked = self._said = False
        #: The last known line of each rank.
        self.lines: dict[int, str] = {}

    def due(self, waited: float, pending: Sequence[int]) -> bool:
        """Whether to show where the ranks are; true once. The ranks are asked shortly before.

        ``waited`` is in seconds since the interrupt.
        """
        if waited >= NOTICE_SECONDS - _ASK_BEFORE_SECONDS and not self._asked:
            self._asked = True
            self._ask_soon(requests.STATUS, {}, self._take_status, pending)
        if waited < NOTICE_SECONDS or self._said:
            return False
        self._said = True
        return True

    def _take_status(self, answer: Answer) -> None:
        line = str(answer.content.get("line") or "")
        if line:
            self.lines[answer.rank] = line

    def whereabouts(self, pending: Sequence[int]) -> str:
        lines: dict[str, list[int]] = {}
        for rank in pending:
            lines.setdefault(self.lines.get(rank, ""), []).append(rank)
        return "; ".join(
            f"{label(ranks)} at {line}" if line else f"{label(ranks)}, which does not answer"
            for line, ranks in lines.items()
        )


_POLL_SECONDS = 0.1
_MANY_RANKS = 16
"""Ending more ranks than this takes seconds."""
_TYPING_SECONDS = 0.02
"""Poll interval while a rank asks for input."""


class View(Protocol):
    """The display of a cell's output while it runs and after it."""

    def output(self, batch: Output) -> None: ...

    def telemetry(self, record: Telemetry, payloads: list[bytes]) -> None: ...

    def left(self, rank: int, status: str) -> None:
        """Handles the end of a cell on a rank: a reply's status, ``lost``, or ``replaced``.

        ``waiting`` comes for a rank that has left already.
        """

    def notice(self, text: str) -> None:
        """Shows a line about the cell as a whole."""

    def make_way(self) -> None:
        """Shows everything so far: an input prompt follows below it."""

    def refresh(self) -> None:
        """Shows what is new; called several times a second."""

    def finish(self) -> None:
        """Shows everything: the cell has ended."""


class CellRun:
    """One cell on its ranks; ``timeout`` is in seconds."""

    def __init__(
        self,
        cell: int,
        ranks: Sequence[int],
        connection: Connection,
        view: View,
        timeout: float | None,
    ) -> None:
        self.cell = cell
        self.ranks = tuple(ranks)
        self.size = connection.size
        self.view = view
        self._connection = connection
        self.replies: dict[int, Reply] = {}
        self.presses = 0
        self.timed_out = False
        self.timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._values: dict[int, bytes] = {}
        self._interrupted_at: float | None = None
        self._unheard = InterruptTimeout(connection.ask_soon)
        self._interrupts = 0
        self._asks_user = False
        """Whether a feature waits for the user, as at a prompt of a rank."""
        self._stepped_at = time.monotonic()
        self._died: dict[int, Report] = {}
        self._hooks = connection.hooks
        self._connection.roster.lines.clear()
        self._hooks.cell_started(self._context())

    def _context(self) -> CellContext:
        ranks = self._connection
        return CellContext(
            number=self.cell,
            ranks=self.ranks,
            shown=not isinstance(self.view, variables.HiddenView),
            kernel=of_this_process(),
            front_end=front_end(),
            pending=lambda: self.pending,
            interrupts=lambda: self._interrupts,
            notice=self.view.notice,
            show_output=self.view.make_way,
            ask=lambda name, arguments, chosen, seconds: ranks.ask(
                name, arguments, ranks=chosen, seconds=seconds, strict=False
            ),
            ask_soon=ranks.ask_soon,
            poll=self._hooks.polls.append,
        )

    @property
    def pending(self) -> tuple[int, ...]:
        """The ranks that have not replied yet, and may."""
        gone = self._died
        return tuple(rank for rank in self.ranks if rank not in self.replies and rank not in gone)

    def died(self, end: failures.ExitReport) -> None:
        """Handles the death of a rank that the others survive."""
        rank, roster = end.rank, self._connection.roster
        if rank not in self.ranks or rank in self.replies:
            self.view.notice(f"rank {rank} {failures.ending(end.code, end.memory)}")
            return
        self.view.left(rank, "lost")
        text = roster.unseen(rank)
        if text:
            self.view.output(Output(rank, self.cell, (["out", text],), 0, 0, 0))
        self._died[rank] = roster.report(end)
        others = [rank for rank in self.pending if rank != end.rank]
        if others:
            # The report at the end of the cell explains the signal.
            how = failures.ending(end.code, explain=False)
            self.view.notice(
                f"rank {rank} {how}; {label(others)} keep{'s' * (len(others) == 1)} running"
            )

    @property
    def ended_well(self) -> bool:
        finished = [rank for rank, reply in self.replies.items() if reply.status == "ok"]
        return set(finished) == set(self.ranks)

    def step(self, seconds: float) -> None:
        """Handles what comes within ``seconds``, and shows it."""
        for _ in self._connection.step(seconds):
            self.press()
        self._poll_features()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self.timed_out = True
            self.view.notice(
                f"timeout of {self.timeout:g} s reached: interrupting {label(self.pending)}"
            )
            self.interrupt()
        if self._interrupted_at is not None and self.pending and not self._connection.closed:
            self._insist(time.monotonic() - self._interrupted_at)
        self.view.refresh()

    def _poll_features(self) -> None:
        before, self._stepped_at = self._stepped_at, time.monotonic()
        asked = self._asks_user
        try:
            self._asks_user = bool(self._hooks.polls) and self._hooks.polled()
        except KeyboardInterrupt:
            self.press()
        if (asked or self._asks_user) and self._deadline is not None:
            # Time at an input prompt does not count towards the timeout.
            self._deadline += self._stepped_at - before

    @property
    def poll_seconds(self) -> float:
        return _TYPING_SECONDS if self._asks_user else _POLL_SECONDS

    def settled(self) -> bool:
        if not self.pending:
            return True
        ranks = self._connection
        return (bool(ranks.roster.ends) or ranks.state != "running") and ranks.over

    def press(self) -> None:
        """Interrupts the cell; the second call ends the ranks that did not settle."""
        if self._connection.closed:
            return
        self.presses += 1
        if self.presses == 1:
            self.interrupt()
        else:
            self._connection.close("lost", failures.stubborn(self.pending, self.size))

    def interrupt(self) -> None:
        self._interrupts += 1
        self._connection.send(self.pending, Interrupt(self.cell))
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()

    def _insist(self, waited: float) -> None:
        """Shows which ranks are still in an interrupted cell; a timeout ends them."""
        if self._unheard.due(waited, self.pending):
            left = GRACE_SECONDS - NOTICE_SECONDS
            then = f"in {left:g} s" if self.timed_out else "by the next interrupt"
            self.view.notice(
                f"still in the cell {NOTICE_SECONDS:g} s after the interrupt: "
                f"{self._unheard.whereabouts(self.pending)}; all ranks will be killed {then}"
            )
        if waited >= GRACE_SECONDS and self.timed_out:
            where = self._unheard.whereabouts(self.pending)
            self._connection.close(
                "lost",
                f"{self._late}, and {GRACE_SECONDS:g} s after the interrupt it was still running "
                f"on {where}, so {failures.ended(self.size)}",
            )

    @property
    def _late(self) -> str:
        return f"the cell exceeded its timeout of {self.timeout:g} s"

    def take(self, record: Output | Reply | Telemetry, payloads: list[bytes]) -> None:
        if isinstance(record, Output):
            self.view.output(record)
        elif isinstance(record, Telemetry):
            if isinstance(record, Pulse) and record.line:
                self._unheard.lines[record.rank] = record.line
            self.view.telemetry(record, payloads)
        else:
            self.view.left(record.rank, record.shown_status)
            self.replies[record.rank] = record
            if record.has_value:
                self._values[record.rank] = payloads[0]

    def end(self) -> None:
        """Handles the remaining events of a settled cell.

        Raises ClusterLost if a rank died; CellInterrupted or CellTimeout if the ranks were ended
        for it.
        """
        self._connection.step(0)
        if self._connection.closed:
            kind = CellTimeout if self.timed_out else CellInterrupted
            raise kind(self._connection.lost_because or "the ranks were stopped")
        if self._connection.roster.ends:
            raise ClusterLost(self._lose())

    def _lose(self) -> str:
        """Shows the unsent output of dead ranks, and returns what happened."""
        if self.size > _MANY_RANKS:
            self.view.notice(
                f"{failures.describe_exits(self._connection.roster.ends)} Killing the others."
            )
            self.view.refresh()
        why = self._connection.lose(shown=True)
        for rank in self.ranks:
            text = self._connection.roster.unseen(rank)
            if rank in self.pending:
                self.view.left(rank, "lost")
            if text:
                self.view.output(Output(rank, self.cell, (["out", text],), 0, 0, 0))
        return why

    @property
    def failed_first(self) -> int | None:
        """The rank that failed first, without ranks that merely waited for others."""
        failed = [reply for reply in self.replies.values() if reply.report]
        failed.sort(key=lambda reply: reply.report is not None and reply.report.waiting)
        return failed[0].rank if failed else None

    def check(self) -> None:
        """Raises CellFailed, CellInterrupted or CellTimeout, unless the cell ended well."""
        replies = sorted(self.replies.items())
        reports = [reply.report for _, reply in replies if reply.report]
        reports[:0] = self._died.values()
        late = self._late if self.timed_out else ""
        if not reports:
            if late:
                raise CellTimeout(late)
            return
        failed = any(
            reply.status == "error" and not reply.report.waiting
            for _, reply in replies
            if reply.report
        )
        kind: type[CellFailed] = CellFailed
        if self._died:
            kind = RankDied
        elif not failed and (self.timed_out or self.presses):
            kind = CellTimeout if self.timed_out else CellInterrupted
        if kind is CellTimeout:
            reports = [failures.as_timeout(report, late) for report in reports]
        message = failures.plain(failures.headline(reports, self.size))
        if kind is CellTimeout and late not in message:  # all other ranks only waited
            message = f"{late}. {message}"
        error = kind(message, failures.describe(reports, self.ranks), reports)
        # A notebook shows the text by itself; a script's traceback ends with the notes.
        error.add_note(failures.plain(error.text))
        raise error

    def values(self) -> list[Any]:
        """Returns the value of the last expression on each rank, in order of rank.

        Raises UsageError if a value could not be sent to the notebook, or cannot be read there.
        """
        for rank, reply in sorted(self.replies.items()):
            if reply.value_problem:
                raise UsageError(
                    f"expected a last expression that can be pickled, found on rank {rank}: "
                    f"{reply.value_problem}. The cell has run; its variables are on the ranks. "
                    "End it with a plain value, as list(...) or an array."
                )
        return [
            variables.load(self._values[rank], rank) if rank in self._values else None
            for rank in self.ranks
        ]
