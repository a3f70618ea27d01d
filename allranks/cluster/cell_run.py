"""One cell on its ranks, from its start to its end, and what shows it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

from allranks.cluster import failures, variables
from allranks.cluster.connection import Connection
from allranks.cluster.failures import CellRecord, ProcessExit
from allranks.cluster.features import CellContext
from allranks.cluster.state import LOST, AllEnded, CellEvent, CellState, Replaced
from allranks.countdown import Countdown
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

#: By this time after an interrupt, a rank that reacts has left its cell, or cleans up.
NOTICE_SECONDS = 2.0
#: An interrupt that comes sooner after another one is its double click.
DOUBLE_CLICK_SECONDS = 0.5
#: So long after a rank has failed, a line names it if others still run, as in a loop of
#: ``request.Test()`` that does not end.
_FAILED_SECONDS = 10.0
#: Time to leave the cell after a timeout's interrupt.
GRACE_SECONDS = 10.0
#: The ranks are asked where they are this much earlier.
_ASK_BEFORE_SECONDS = 0.5

AskSoon = Callable[[str, dict[str, Any], Callable[[Answer], None], Iterable[int]], None]


class InterruptTimeout:
    """The state of the ranks of one interrupted cell, or member."""

    def __init__(self, ask_soon: AskSoon) -> None:
        self._ask_soon = ask_soon
        self._asked_at: float | None = None
        self._said = False
        #: The last known line of each rank.
        self.lines: dict[int, str] = {}

    def due(self, waited: float, pending: Sequence[int]) -> bool:
        """Whether to show where the ranks are; true once. The ranks are asked shortly before.

        ``waited`` is in seconds since the interrupt.
        """
        if waited >= NOTICE_SECONDS - _ASK_BEFORE_SECONDS and self._asked_at is None:
            self._asked_at = waited
            self._ask_soon(requests.STATUS, {}, self._take_status, pending)
        # The notebook may have stood still until now: the ranks need the time to answer.
        if self._asked_at is None or waited < self._asked_at + _ASK_BEFORE_SECONDS or self._said:
            return False
        self._said = True
        return True

    def _take_status(self, answer: Answer) -> None:
        line = answer.content.get("line") or self.lines.get(answer.rank)
        # A cell that awaits leaves the rank in its event loop, which is no line of the cell.
        self.lines[answer.rank] = str(line or "an await")

    def whereabouts(self, pending: Sequence[int]) -> str:
        """Returns the last known line of each of these ranks, as text."""
        lines = defaultdict[str, list[int]](list)
        for rank in pending:
            lines[self.lines.get(rank, "")].append(rank)
        return "; ".join(
            f"{label(ranks)} at {line}"
            if line
            else f"{label(ranks)}, which {'does' if len(ranks) == 1 else 'do'} not answer"
            for line, ranks in lines.items()
        )


_POLL_SECONDS = 0.1
#: After this time a cell is one that lasts.
_LASTS_SECONDS = 0.1
#: In this time comes the news of the end of a rank that the notebook has ended.
_ENDED_SECONDS = 10.0
#: Ending more ranks than this takes seconds.
_MANY_RANKS = 16
#: Poll interval while a rank asks for input.
_TYPING_SECONDS = 0.02
_rank_of = attrgetter("rank")


class View(Protocol):
    """The display of a cell's output while it runs and after it."""

    def output(self, batch: Output) -> None: ...

    def telemetry(self, record: Telemetry, payloads: list[bytes]) -> None: ...

    def left(self, rank: int, status: str) -> None:
        """Shows that a rank has left the cell: see `allranks.cluster.state.Left`."""

    def notice(self, text: str) -> None:
        """Shows a line about the cell as a whole."""

    def name_cause(self, text: str) -> None:
        """Shows in a panel why the cell, which has ended, was slow, or wrong."""

    def make_way(self) -> None:
        """Shows everything so far: an input prompt follows below it."""

    def refresh(self) -> None:
        """Shows what is new; called several times a second."""

    def finish(self) -> None:
        """Shows everything: the cell has ended."""


class HiddenView:
    """The view of calls that are no cell of the reader's: it shows nothing.

    The next cell shows the output given to ``keep``; ``tell`` gets lines about the cell as a whole.
    ``is_read``: whether the user sees these; else the next cell shows what has replaced dead ranks.
    """

    def __init__(
        self,
        keep: Callable[[Output], object],
        tell: Callable[[str], object] = lambda text: None,
        is_read: bool = False,
    ) -> None:
        self._keep = keep
        self._tell = tell
        self.is_read = is_read

    def output(self, batch: Output) -> None:
        """Passes on what a rank has printed."""
        if batch.entries:
            self._keep(batch)

    def notice(self, text: str) -> None:
        """Passes on a line about the cell as a whole."""
        self._tell(text)

    def _drop(self, *_: object) -> None:
        """Shows nothing: the end of the cell is returned or raised."""

    telemetry = left = name_cause = make_way = refresh = finish = _drop


class CapturedOutput(HiddenView):
    """A view that shows nothing, and has what each rank printed: ``captured[0]`` is rank 0's text.

    Displays are in it as text. For the whole output, including long output, see the logs.
    """

    def __init__(self) -> None:
        self._parts = defaultdict[int, list[str]](list)
        self.notices: list[str] = []
        """Lines about the call as a whole."""
        super().__init__(self._take, self.notices.append, is_read=True)

    def _take(self, batch: Output) -> None:
        for kind, *rest in batch.entries:
            if kind in ("out", "err"):
                self._parts[batch.rank].append(rest[0])
            elif kind in ("display", "result"):
                self._parts[batch.rank].append(f"{rest[0].get('text/plain', '')}\n")

    def __getitem__(self, rank: int) -> str:
        return "".join(self._parts.get(rank, ()))


def show_late(late: list[Output], view: View) -> None:
    """Shows what ranks have written since their last cell, and removes it."""
    if isinstance(view, HiddenView):
        return
    # First: what cannot be shown must not end each later cell too.
    shown = sorted(late, key=_rank_of)
    late.clear()
    for rank, batches in groupby(shown, key=_rank_of):
        begin: list[Any] = ["notice", "written after its cell had ended:"]
        # What follows is of this cell, and looks the same.
        end: list[Any] = ["notice", "(up to here)"]
        entries = [begin, *(entry for batch in batches for entry in batch.entries), end]
        view.output(Output(rank, 0, tuple(entries), 0, 0, 0))


class CellRun:
    """One cell on its ranks; ``timeout`` is in seconds.

    With ``interrupt_kills`` the first interrupt already ends its ranks.
    """

    def __init__(
        self,
        cell: int,
        ranks: Sequence[int],
        connection: Connection,
        view: View,
        timeout: float | None,
        interrupt_kills: bool = False,
    ) -> None:
        self.size = connection.size
        self.view = view
        self._connection = connection
        self.presses = 0
        self._interrupt_kills = interrupt_kills
        self.timed_out = False
        self.timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._values: dict[int, bytes] = {}
        #: From the first interrupt on.
        self._grace: Countdown | None = None
        self._unheard = InterruptTimeout(connection.ask_soon)
        #: From the first failure of a rank on.
        self._ends_alone: Countdown | None = None
        self._interrupts = 0
        #: Whether a feature waits for the user, as at a prompt of a rank.
        self._asks_user = False
        self._began = self._stepped_at = time.monotonic()
        #: Whether features know that it lasts.
        self._lasts = False
        #: Which ranks stayed in the interrupted cell, in words; those that were killed because of
        #: it, the time for their ends, and what has replaced them.
        self._stayed = ""
        self._killed: tuple[int, ...] = ()
        self._ends_within: Countdown | None = None
        self._replaced = ""
        #: Of the ranks that have died in it, written at once: their logs go on.
        self._death_reports: dict[int, Report] = {}
        #: The ranks whose deaths it has heard of.
        self.told = set[int]()
        self._hooks = connection.hooks
        #: The cell as far as it is shown; that of the roster may be further.
        self.state = CellState(cell, ranks)
        self.cell, self.ranks = cell, self.state.ranks
        connection.begin_cell(cell, self.ranks, self)
        self._hooks.cell_started(
            CellContext(
                number=cell,
                ranks=self.ranks,
                shown=not isinstance(view, HiddenView),
                kernel=of_this_process(),
                front_end=front_end(),
                pending=lambda: self.pending,
                interrupts=lambda: self._interrupts,
                notice=view.notice,
                name_cause=view.name_cause,
                show_output=view.make_way,
                ask=lambda name, arguments, chosen, seconds: connection.ask(
                    name, arguments, ranks=chosen, seconds=seconds, strict=False
                ),
                ask_soon=connection.ask_soon,
                poll=self._hooks.polls.append,
                replies=lambda: self.state.replies,
                began=self._began,
            )
        )

    @property
    def pending(self) -> tuple[int, ...]:
        """The ranks that have not left it yet."""
        return self.state.pending

    def apply(self, event: CellEvent) -> bool:
        """Shows which ranks have left the cell with this event; returns whether any has."""
        left = self.state.apply(event)
        for each in left:
            self.view.left(each.rank, each.status)
        return bool(left)

    def died(self, ends: Sequence[ProcessExit]) -> None:
        """Shows the death of a rank, or of the ranks of a lost host, that the others survive."""
        ends = [end for end in ends if end.rank not in self._death_reports]
        if not ends:
            return
        self.told |= {end.rank for end in ends}
        hit = {left.rank: left.status for end in ends for left in self.state.apply(end)}
        for end in ends:
            if end.rank in hit:
                self.view.left(end.rank, hit[end.rank])
                self._show_unsent(end.rank)
                self._death_reports[end.rank] = self._connection.words.report(end)
        lost_host = any(end.why for end in ends)
        others = list(self.pending) if hit else []
        if hit and not others and not lost_host:
            return
        if self._killed and not lost_host and {end.rank for end in ends} <= set(self._killed):
            return
        # The report at the end of the cell explains the signal.
        (first, *_) = ends
        said = f"rank {first.rank} {first.how(explain=not hit)}"
        said = failures.death_lines(ends) if lost_host else said
        running = f"; {label(others)} keep{'s' * (len(others) == 1)} running" if others else ""
        self.view.notice(said + running)

    def _name_failed(self) -> None:
        replies = [reply.report for _, reply in sorted(self.state.replies.items())]
        failed = [report for report in replies if report is not None and not report.waiting]
        if failed and self.pending and not self.presses and not self.timed_out:
            said = failures.plain(failures.headline(failed, self.size))
            run = f"{label(self.pending)} still run{'s' * (len(self.pending) == 1)}"
            self.view.notice(f"{said}; {run}. An interrupt ends the cell")

    @property
    def ended_well(self) -> bool:
        well = {rank for rank, reply in self.state.replies.items() if reply.status == "ok"}
        return well == set(self.ranks)

    def step(self, seconds: float) -> None:
        """Handles what comes within ``seconds``, and shows it."""
        for _ in self._connection.step(seconds):
            self.press()
        before, self._stepped_at = self._stepped_at, time.monotonic()
        if not self._lasts and (
            self._interrupts or self._stepped_at - self._began >= _LASTS_SECONDS
        ):
            self._lasts = True
            self._hooks.cell_lasts()
        if self._hooks.polls or self._asks_user:
            asked = self._asks_user
            try:
                self._asks_user = self._hooks.polled()
            except KeyboardInterrupt:
                self.press()
            if (asked or self._asks_user) and self._deadline is not None:
                # Time at an input prompt does not count towards the timeout.
                self._deadline += self._stepped_at - before
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self.timed_out = True
            self.view.notice(
                f"timeout of {self.timeout:g} s reached: interrupting {label(self.pending)}"
            )
            self.interrupt()
        if self._ends_alone is not None and self._ends_alone.left() <= 0:
            self._ends_alone = None
            self._name_failed()
        if self._grace is not None and self.pending and not self._connection.closed:
            self._insist(GRACE_SECONDS - self._grace.left())
        if self._ends_within is not None and self.pending and self._ends_within.left() <= 0:
            # A host that is cut off comes back, and hears of it then, or is lost with these ranks.
            if self._connection.is_in_doubt(self.pending):
                self._ends_within = Countdown(_ENDED_SECONDS)
            else:
                self._kill_stuck(self._stayed)
        self.view.refresh()

    @property
    def poll_seconds(self) -> float:
        return _TYPING_SECONDS if self._asks_user else _POLL_SECONDS

    def settled(self) -> bool:
        return not self.state.pending or self._connection.is_left(self.state)

    def press(self) -> None:
        """Interrupts the cell. The second call kills the ranks that are still in it, the third all
        ranks. The second one of a double click does not count: it must cost no variables.
        """
        if self._connection.closed or not self._next_counts:
            return
        self.presses += 1
        if self.presses == 1 and self._interrupt_kills:
            for rank in self.pending:
                self._connection.end_rank(rank, "the notebook was interrupted")
        elif self.presses == 1:
            self.interrupt()
        else:
            self._kill_stuck(failures.stubborn(self.pending))

    @property
    def _next_counts(self) -> bool:
        if self._ends_within is not None:
            return _ENDED_SECONDS - self._ends_within.left() >= DOUBLE_CLICK_SECONDS
        if self._grace is None or not self.presses:
            return True
        return GRACE_SECONDS - self._grace.left() >= DOUBLE_CLICK_SECONDS

    def _kill_stuck(self, stayed: str) -> None:
        """Kills the ranks that are still in the cell; all ranks if no other would survive that, or
        if ranks have been killed before. ``stayed`` is a text with those that stayed, and when.
        """
        ranks, stuck = self._connection, self.pending
        kept = self._survivors(stuck)
        if not stuck or ranks.closed:
            return
        if self._killed or not kept:
            because = self._why_all(stuck)
            if self._killed:
                because = f"{label(stuck)} had been killed and did not end"
            ranks.close("lost", f"{stayed}, so {failures.ended(self.size, because)}")
            return
        self._stayed, self._ends_within = stayed, Countdown(_ENDED_SECONDS)
        self._killed = tuple(rank for rank in ranks.roster.alive if rank not in kept)
        for rank in self._killed:
            it = "it" if rank in stuck else "a rank that it needs"
            ranks.end_rank(rank, f"{it} stayed in an interrupted cell")

    def _survivors(self, stuck: Sequence[int]) -> Sequence[int]:
        """Returns the ranks that keep their variables if these are killed."""
        ranks = self._connection
        kept = ranks.roster.survivors(stuck)
        # Also those that are dead, or end with the cell.
        stay = set(kept) - ranks.roster.ending.keys()
        return kept if ranks.can_replace(ranks.roster.size - len(stay)) else ()

    def _why_all(self, stuck: Sequence[int]) -> str:
        """Returns why all ranks end if these do, in words; "" if no other is left."""
        roster = self._connection.roster
        if not roster.can_replace and set(roster.alive) - set(stuck):
            why = self._connection.why_not_replaced()
            return ": ".join(filter(None, ["dead ranks are not replaced here", why]))
        if roster.survivors(stuck):
            return "the hosts have too few spare processes in which these ranks could begin again"
        return roster.why_no_survivors(stuck)

    def _what_comes(self, then: str) -> str:
        """Returns which ranks will be killed ``then``, and which variables are kept."""
        roster, stuck = self._connection.roster, self.pending
        kept = self._survivors(stuck)
        if not kept:
            why = self._why_all(stuck)
            because = f", because {why}" if why else ""
            return f"all ranks will be killed {then}{because}; no rank will keep its variables"
        killed = [rank for rank in roster.alive if rank not in kept]
        its = "its" if len(killed) == 1 else "their"
        by_itself = roster.replacing == "on"
        new = "replaced" if by_itself else f"can be replaced ({self._hooks.replaces_ranks})"
        return (
            f"{label(killed)} will be killed {then} and {new}: of {its} variables, only those "
            f"given to keep come back; {label(kept)} will keep all variables"
        )

    @property
    def next_press(self) -> str:
        """What the next interrupt does; "" before the first one, and after the second."""
        if not self.presses or self._killed or self._interrupt_kills or not self.pending:
            return ""
        return self._what_comes("by the next interrupt")

    def interrupt(self) -> None:
        self._interrupts += 1
        self._connection.send(self.pending, Interrupt(self.cell))
        if self._grace is None:
            self._grace = Countdown(GRACE_SECONDS)

    def _insist(self, waited: float) -> None:
        """Shows which ranks are still in an interrupted cell; a timeout ends them."""
        if self._killed:
            return
        if self._unheard.due(waited, self.pending):
            left = GRACE_SECONDS - NOTICE_SECONDS
            then, wait = f"in {left:g} s", ""
            if not self.timed_out:
                they = "it" if len(self.pending) == 1 else "they"
                then, wait = "by the next interrupt", f"; {they} may still end if you wait"
            self.view.notice(
                f"still in the cell {NOTICE_SECONDS:g} s after the interrupt: "
                f"{self._unheard.whereabouts(self.pending)}{wait}; {self._what_comes(then)}"
            )
        if waited >= GRACE_SECONDS and self.timed_out:
            where = self._unheard.whereabouts(self.pending)
            self._kill_stuck(
                f"{self._exceeded}, and {GRACE_SECONDS:g} s after the interrupt it was still "
                f"running on {where}"
            )

    @property
    def _exceeded(self) -> str:
        return f"the cell exceeded its timeout of {self.timeout:g} s"

    def take(self, record: CellRecord, payloads: list[bytes]) -> None:
        if isinstance(record, Output):
            self.view.output(record)
        elif isinstance(record, Telemetry):
            if isinstance(record, Pulse) and record.line:
                self._unheard.lines[record.rank] = record.line
            self.view.telemetry(record, payloads)
        elif isinstance(record, Reply):
            if record.status == "error" and self.failed_first is None:
                self._ends_alone = Countdown(_FAILED_SECONDS)
            self.apply(record)
            if record.has_value:
                self._values[record.rank] = payloads[0]

    def show_late(self) -> None:
        show_late(self._connection.late, self.view)

    def end(self) -> None:
        """Handles the remaining events of a settled cell.

        Raises ClusterLost if a rank died; CellInterrupted or CellTimeout if the ranks were ended
        for it. The error has the reports of ranks that had failed before.
        """
        self._connection.step(0)
        self._end_ranks()
        if self._connection.closed:
            why = self._connection.roster.lost_because or "the ranks were stopped"
            causes, told = self._failed_before()
            raise self._stopped(why, causes, causes, told)
        if self._connection.roster.ends:
            why = self._lose()
            _, told = self._failed_before()
            raise ClusterLost("\n\n".join(filter(None, [why, failures.plain(told)])))

    def _failed_before(self) -> tuple[list[Report], str]:
        """Returns the reports of ranks that raised an exception of their own, and their text."""
        replies = sorted(self.state.replies.items())
        failed = [reply for _, reply in replies if reply.status == "error"]
        reports = [reply.report for reply in failed if reply.report]
        return reports, failures.describe(reports, [report.rank for report in reports])

    def _stopped(
        self, why: str, causes: Sequence[Report], reports: Sequence[Report], told: str
    ) -> CellFailed:
        """Returns the error of an interrupted cell whose ranks were killed, or some of them."""
        kind = CellTimeout if self.timed_out else CellInterrupted
        if not reports:
            return kind(why)
        cause = f"{failures.plain(failures.headline(causes, self.size))}; " if causes else ""
        error = kind(f"{cause}{why}", f"{told}\n\n{why}", reports)
        error.add_note(failures.plain(error.text))
        return error

    def _stopped_alone(self) -> CellFailed:
        """Returns the error of an interrupted cell after the ranks that stayed were killed."""
        deaths = self._death_reports
        causes = [report for rank, report in deaths.items() if rank not in self._killed]
        causes += self._failed_before()[0]
        killed = [report for rank, report in sorted(deaths.items()) if rank in self._killed]
        given = [reply.report for _, reply in sorted(self.state.replies.items()) if reply.report]
        reports = [*causes, *killed, *(report for report in given if report not in causes)]
        if self.timed_out:
            reports = [failures.as_timeout(report, self._exceeded) for report in reports]
        roster, then = self._connection.roster, self._replaced
        if not then and roster.phase == "running":
            keep = "keeps its" if len(roster.alive) == 1 else "keep their"
            type_this = f"Type: {self._hooks.replaces_ranks}"
            then = f"{label(roster.alive)} {keep} variables. {type_this}"
        were = "was" if len(self._killed) == 1 else "were"
        killed_too = f"{self._stayed}, so {label(self._killed)} {were} killed"
        why = "; ".join(filter(None, [killed_too, then]))
        return self._stopped(why, causes, reports, failures.describe(reports, self.ranks))

    def _end_ranks(self) -> None:
        # Only now, because the other ranks have their reports: they name an error, and no death.
        ranks, ending = self._connection, self._connection.roster.ending
        gone = {*ending, *self._killed}
        if not gone or ranks.over:
            return
        for rank, why in ending.items():
            ranks.end_rank(rank, why)
        roster = ranks.roster
        ranks.wait_until(lambda: bool(roster.ends) or gone <= roster.dead.keys(), _ENDED_SECONDS)

    def _lose(self) -> str:
        """Shows the unsent output of dead ranks, and returns what happened."""
        if self.size > _MANY_RANKS:
            self.view.notice(
                f"{failures.describe_exits(self._connection.roster.ends)} Killing the others."
            )
            self.view.refresh()
        why = self._connection.lose(shown=True)
        self.apply(AllEnded())
        for rank, status in self.state.left.items():
            if status == LOST:  # also those whose death has left no rank
                self.view.left(rank, status)
        for rank in self.ranks:
            self._show_unsent(rank)
        return why

    def replaced(self, ranks: Iterable[int], told: str) -> None:
        """Shows that new processes have taken the places of ranks that have died in it."""
        for rank in ranks:
            self.apply(Replaced(rank))
        self._replaced = told
        if not self._killed or isinstance(self.view, HiddenView):  # else it is in the error
            self.view.notice(told)

    def _show_unsent(self, rank: int) -> None:
        if text := self._connection.words.unsent_output(rank):
            self.view.output(Output(rank, self.cell, (["out", text],), 0, 0, 0))

    @property
    def failed_first(self) -> int | None:
        """The rank that failed first, without ranks that merely waited for others."""
        # In the order of arrival: the first reply is that of the first failure.
        failed = [reply.report for reply in self.state.replies.values() if reply.report]
        first = min(failed, key=attrgetter("waiting"), default=None)
        return first.rank if first is not None else None

    def check(self) -> None:
        """Raises CellFailed, CellInterrupted or CellTimeout, unless the cell ended well."""
        if self._killed:
            raise self._stopped_alone()
        replies = self.state.replies
        given = [reply.report for _, reply in sorted(replies.items()) if reply.report]
        # Those of dead ranks come first: they are the cause.
        reports = [*self._death_reports.values(), *given]
        late = self._exceeded if self.timed_out else ""
        if not reports:
            if late:
                raise CellTimeout(late)
            return
        failed = any(reply.status == "error" for reply in replies.values())
        kind: type[CellFailed] = CellFailed
        if self._death_reports:
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

    def exception(self, rank: int | None) -> Exception | None:
        """Returns the exception of a rank that has failed, if it could be sent and read."""
        packed = self._values.get(rank) if rank is not None else None
        if packed is None or self.state.replies[rank].status == "ok":  # type: ignore[index]
            return None
        try:
            found = variables.load(packed, rank)  # type: ignore[arg-type]
        except UsageError:
            return None
        return found if isinstance(found, Exception) else None

    def values(self) -> list[Any]:
        """Returns the value of the last expression on each rank, in order of rank.

        Raises UsageError if a value could not be sent to the notebook, or cannot be read there.
        """
        for rank, reply in sorted(self.state.replies.items()):
            if reply.value_problem:
                raise UsageError(
                    f"expected a last expression that can be pickled, found on rank {rank}: "
                    f"{reply.value_problem}. The cell has run; its variables are on the ranks. "
                    "End it with a plain value, such as list(...) or an array."
                )
        return [
            variables.load(self._values[rank], rank) if rank in self._values else None
            for rank in self.ranks
        ]
