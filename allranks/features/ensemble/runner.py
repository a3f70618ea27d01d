"""Runs the members of an ensemble on the ranks of a cluster."""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from uuid import uuid4

from allranks.cluster import failures
from allranks.cluster.cell_run import (
    DOUBLE_CLICK_SECONDS,
    GRACE_SECONDS,
    NOTICE_SECONDS,
    InterruptTimeout,
)
from allranks.cluster.cluster import Cluster
from allranks.cluster.failures import CellRecord, culprits, ended, stubborn
from allranks.countdown import Countdown
from allranks.errors import CellFailed, CellInterrupted, ClusterLost, UsageError
from allranks.features.ensemble.early import Early, remaining_seconds
from allranks.features.ensemble.grid import Options
from allranks.features.ensemble.member import (
    ENDED,
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    STOPPED_EARLY,
    WAITING,
    Arena,
    Member,
    SharedResult,
)
from allranks.features.ensemble.runs import Runs
from allranks.features.ensemble.slots import MemberSlots, Slot, member_slots
from allranks.features.ensemble.store import Store
from allranks.features.ensemble.view import TextEnsemble
from allranks.records.ranks import label
from allranks.records.telemetry import Points, Pulse
from allranks.records.wire import Output, Reply, Result
from allranks.widgets.dashboard.curves import parts
from allranks.widgets.dashboard.tables import seconds

_POLL_SECONDS = 0.1
_ESTIMATE_SECONDS = 1.0
_COUNT_SECONDS = 0.2
_AGAIN_SECONDS = 5.0
_SCREEN_NBYTES = 128 * 1024
_LEAST_SCREEN_NBYTES = 1024
_MOST_DEATHS = 2
#: Deaths without a member as the cause; after more, something else ends the ranks.
_MOST_UNEXPLAINED_DEATHS = 3


@dataclass
class _Attempt:
    """A member that runs now. ``why`` is its state once an interrupt has ended it."""

    member: Member
    slot: Slot
    unheard: InterruptTimeout
    began: float = field(default_factory=time.monotonic)
    why: str = ""
    #: The time of the last interrupt; the grace begins with the first one.
    interrupted_at: float = 0.0
    grace: Countdown | None = None
    result: Result | None = None
    payloads: list[bytes] = field(default_factory=list)


class EnsembleRunner:
    """Runs members until all have ended, or the notebook is interrupted.

    The cluster is started again if it is lost meanwhile. Members that have ended do not run again.

    Args:
        source: the cell as it is sent, and ``number`` its number.
    """

    _slots: MemberSlots

    def __init__(
        self,
        cluster: Cluster,
        runs: Runs,
        options: Options,
        view: TextEnsemble,
        source: str,
        number: int = 0,
        store: Store | None = None,
        early: Early | None = None,
    ) -> None:
        self.cluster, self.runs, self.options, self.view = cluster, runs, options, view
        self.source, self.number = source, number
        wanted = options.wanted()
        self._metric = wanted[0] if wanted is not None else ""
        self._store, self._early = store, early
        self._name = uuid4().hex
        self._interrupts = 0
        self._unexplained_deaths = 0
        hooks = cluster.cells.hooks
        #: What finds values that have become NaN, if a feature does.
        self._logged = hooks.command("members") if "members" in hooks.commands else None
        #: Members to run, in this order; after `_closed` none are put back.
        self._waiting: deque[Member] = deque()
        self._closed = False
        #: By the numbers of their cells.
        self._attempts: dict[int, _Attempt] = {}
        self._arena = Arena()
        #: Whether shared memory can carry large results.
        self._shared = sys.platform == "linux"
        #: The reason why the store accepts no further member.
        self._problem: UsageError | None = None
        self._stored = 0
        self._taken: list[float] = []
        self._wanted = runs.metric()
        self._estimated = self._counted = (0.0, "")

    def run(self) -> None:
        """Runs the members; returns when all have ended.

        Raises:
            CellFailed: all of them failed.
            CellInterrupted: the notebook was interrupted; finished members are kept.
            ClusterLost: ranks died repeatedly, and no member is the cause.
            StartFailed: ranks died, and could not be started again.
            UsageError: a finished member could not be stored.
        """
        with self._running():
            while self._has_work():
                with self._crew() as crew, crew.ranks.inbox.hearing_interrupts():
                    self._step(0)
                    while not self._is_done():
                        self._step(len(crew.ranks.step(_POLL_SECONDS)))
        self._raise_outcome()

    async def run_awaited(self) -> None:
        # Like `run`, but the event loop runs meanwhile.
        with self._running():
            while self._has_work():
                with (
                    self._crew() as crew,
                    crew.ranks.inbox.hearing_interrupts(),
                    crew.ranks.inbox.waking() as next_event,
                ):
                    self._step(0)
                    while not self._is_done():
                        await next_event(_POLL_SECONDS)
                        self._step(len(crew.ranks.step(0)))
        self._raise_outcome()

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            self.runs.requests = SimpleQueue()
            self.view.ranks(list(self.cluster.hellos.values()))
            self._enlist(list(self.runs))
            yield
        finally:
            if self._store is not None:
                self._store.close()
            self.runs.requests = None
            for member in self.runs:
                if member.state in (WAITING, RUNNING):
                    member.state = STOPPED
            self._find_metric()
            self._show_all()
            self.view.members.said = self.counts()
            if self._logged is not None and (cause := self._logged.cause_in_members()):
                self.view.notice(cause)
            self.view.finish()

    @contextmanager
    def _crew(self) -> Iterator[MemberSlots]:
        with member_slots(self.cluster.cells, self.options.ranks_each) as crew:
            self._slots, self._attempts = crew, {}
            crew.deliver = self._take
            for slot in crew.slots:
                self._works_on(slot, None)
            try:
                yield crew
            except BaseException:
                for slot in crew.at_work():
                    crew.interrupt(slot)
                raise
            if crew.ranks.roster.ends and not crew.ranks.closed:
                self._handle_death()
        if self.cluster.state != "running" and self._has_work():
            began = time.monotonic()
            self.cluster.start()
            self.view.ranks(list(self.cluster.hellos.values()))
            self.view.notice(
                f"started again {label(range(self.cluster.size))} in "
                f"{time.monotonic() - began:.1f} s"
            )

    def _has_work(self) -> bool:
        return bool(self._waiting) and not self._interrupts and self._problem is None

    def _is_done(self) -> bool:
        if self._slots.ranks.over:
            return True
        return not self._attempts and not self._has_work() and self._slots.ranks.up

    def _step(self, presses: int) -> None:
        for _ in range(presses):
            self._handle_interrupt()
        self._handle_requests()
        if self._problem is not None and not self._closed:
            self._closed = True
            self._stop_all()
        ranks = self._slots.ranks
        if ranks.up:
            self._interrupt_late()
            self._report_unheard()
        if ranks.up:
            while self._has_work() and (slot := self._slots.running(None)) is not None:
                self._start(slot, self._waiting.popleft())
        self.view.members.said = self._progress()
        self.view.refresh()

    def _enlist(self, members: Sequence[Member]) -> None:
        # Members in the store have ended already; the others wait.
        if self._store is not None:
            kept = self._store.read([m for m in members if m.state == WAITING])
            self._stored += len(kept)
            for member in kept:
                self._compare_stored(member)
            if self._wanted is None:
                self._find_metric()
        for member in members:
            if member.state == WAITING:
                self._waiting.append(member)
            self._show(member)

    def _start(self, slot: Slot, member: Member) -> None:
        member.state, member.ranks = RUNNING, slot.ranks
        host = self.cluster.hellos[slot.ranks[0]].host
        try:
            self._slots.start(
                slot,
                member.number,
                member.values,
                ensemble=self._name,
                source=self.source,
                number=self.number,
                limit_nbytes=max(_LEAST_SCREEN_NBYTES, _SCREEN_NBYTES // len(self.runs)),
                shared=self._shared and host == socket.gethostname(),
            )
        except UsageError as error:
            member.state, member.error, member.ranks = FAILED, str(error), ()
        else:
            unheard = InterruptTimeout(self.cluster.cells.ask_soon)
            self._attempts[slot.cell] = _Attempt(member, slot, unheard)
            self._works_on(slot, member.number)
        self._show(member)

    def _works_on(self, slot: Slot, member: int | None) -> None:
        for rank in slot.ranks:
            self.view.figures.tiles.works_on(rank, member)

    def _take(self, slot: Slot, record: CellRecord, payloads: list[bytes]) -> None:
        attempt = self._attempts.get(slot.cell)
        if attempt is None:
            return  # its ranks have been killed
        if isinstance(record, Output):
            log = self._slots.ranks.roster.hellos[record.rank].log
            self.view.output(attempt.member.number, record, log)
        elif isinstance(record, Points):
            self._take_points(attempt, record, payloads[0])
        elif isinstance(record, Pulse):
            self.view.figures.tiles.take(record)
        elif isinstance(record, Result):
            if record.rank == slot.ranks[0]:
                attempt.result, attempt.payloads = record, payloads
        elif isinstance(record, Reply) and not slot.state.pending:
            self._end(attempt)

    def _take_points(self, attempt: _Attempt, record: Points, payload: bytes) -> None:
        member, place = attempt.member, record.rank - attempt.slot.ranks[0]
        series = record.series
        if place:
            series = tuple([n, who or f"rank {place}", count] for n, who, count in series)
        shown = replace(record, rank=member.number, series=series)
        self.view.figures.curves.take(shown, payload)
        if self._logged is not None:
            self._logged.take(shown, payload)
        if place:
            return
        for name, who, steps, values in parts(record, payload):
            member.log(f"{name} {who}".strip(), steps, values)
            if self._early is not None and name == self._metric and not who:
                points = zip(steps, values, strict=True)
                if self._early.report(member.number, points):
                    self._interrupt(attempt, STOPPED_EARLY)
        if self._wanted is None:
            self._find_metric()
        self._show(member)

    def _end(self, attempt: _Attempt) -> None:
        slot, member, why = attempt.slot, attempt.member, attempt.why
        replies = [slot.state.replies[rank] for rank in slot.ranks]
        # The messages of a member count its own ranks, but one rank keeps its number.
        first = slot.ranks[0] if len(slot.ranks) > 1 else 0
        given = [reply.report for reply in replies if reply.report is not None]
        reports = [replace(report, rank=report.rank - first) for report in given]
        del self._attempts[slot.cell]
        slot.member = None
        member.seconds = max(reply.seconds for reply in replies)
        packed: bytes | SharedResult = b""
        if not reports:
            member.state = FINISHED
            try:
                packed = _open(attempt)
            except OSError as error:
                # Its rank has died, or its memory cannot be seen from here.
                self._shared = self._shared and bool(self._slots.ranks.roster.ends)
                self.view.notice(
                    f"the result of member {member.number} was lost ({error}): it runs again"
                )
                self._run_again(member)
        elif why and all(r.waiting or r.etype == "KeyboardInterrupt" for r in reports):
            member.state = why
            if why == FAILED:
                member.error = f"it exceeded its timeout of {self.options.timeout:g} s"
        else:
            member.state = FAILED
            member.error = failures.plain(failures.headline(reports, len(slot.ranks)))
            member.error = member.error.partition(": ")[2] or member.error
        if member.state == FAILED:
            several = len(slot.ranks) > 1
            own = range(len(slot.ranks)) if several else slot.ranks
            member.traceback = failures.describe(reports, own)
            if several:
                member.traceback += (
                    f"\n\n{label(own)} of member {member.number} are "
                    f"{label(slot.ranks)} of the cluster."
                )
        if member.state in ENDED:
            self._taken.append(member.seconds)
            self._keep(member, packed)
        self._works_on(slot, None)
        if self._wanted is None or (member.numbers and self._wanted[0] not in member.numbers):
            self._find_metric()
        self._show(member)

    def _keep(self, member: Member, packed: bytes | SharedResult) -> None:
        try:
            if self._store is not None:
                self._store.write(member, packed)
        except UsageError as error:
            self._problem = error
        try:
            if member.place is None and len(packed):
                member.place = self._arena.put(packed)
        except OSError as error:
            member.problem = f"its {len(packed):,} bytes could not be kept ({error})"
            self._problem = self._problem or UsageError(
                f"the result of member {member.number} could not be kept: {error}. "
                "Make room, or leave less in it."
            )
        if self._problem is None and self._early is not None:
            value = member.metrics.get(self._metric)
            self._early.ended(
                member.number,
                value if member.state == FINISHED else None,
                pruned=member.state == STOPPED_EARLY,
            )

    def _compare_stored(self, member: Member) -> None:
        series = member.series.get(self._metric)
        if self._early is not None and series is not None:
            self._early.report(member.number, zip(series.steps, series.values, strict=True))
            self._early.ended(member.number, series.last[1], pruned=member.state == STOPPED_EARLY)

    def _run_again(self, member: Member) -> None:
        # It runs before the members that wait.
        member.again()
        self.view.figures.curves.forget(member.number)
        if self._logged is not None:
            self._logged.forget(member.number)
        if self._closed:
            member.state = STOPPED
        else:
            self._waiting.appendleft(member)
        self._show(member)

    def _find_metric(self) -> None:
        wanted = self.runs.metric()
        self.view.members.order = self.runs.order()
        if wanted != self._wanted:
            self._wanted = wanted
            self._show_all()

    def _show_all(self) -> None:
        for member in self.runs:
            self._show(member)

    def _show(self, member: Member) -> None:
        if self._wanted is not None:
            self.view.members.metric, self.view.members.lower = self._wanted
        self.view.row(self.runs.row(member, self._wanted))

    def counts(self) -> str:
        """Returns how many members are in which state, as text."""
        counts = Counter(member.state for member in self.runs)
        finished = counts.pop(FINISHED, 0)
        others = [f"{count} {state}" for state, count in counts.items()]
        if self._stored and self._store is not None:
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self._store.oldest))
            others.append(f"{self._stored} from the store, computed on {since} or later")
        return ", ".join([f"{finished} of {len(self.runs)} finished", *others])

    def _progress(self) -> str:
        now = time.monotonic()
        if now - self._counted[0] >= _COUNT_SECONDS:
            self._counted = now, self.counts()
        if now - self._estimated[0] >= _ESTIMATE_SECONDS:
            running = [now - attempt.began for attempt in self._attempts.values()]
            slots = len(self._slots.slots)
            found = remaining_seconds(self._taken, running, len(self._waiting), slots)
            self._estimated = now, "" if found is None else f"; {_between(*found)} left"
        busy = self._attempts or self._waiting
        return self._counted[1] + (self._estimated[1] if busy else "")

    def _interrupt(self, attempt: _Attempt, why: str) -> None:
        now = time.monotonic()
        # One that still runs is interrupted again: a library may have caught the first interrupt.
        if attempt.grace is None or now - attempt.interrupted_at >= _AGAIN_SECONDS:
            attempt.grace = attempt.grace or Countdown(GRACE_SECONDS)
            attempt.why = attempt.why or why
            attempt.interrupted_at = now
            self._slots.interrupt(attempt.slot)

    def _stop_waiting(self, members: Sequence[Member]) -> None:
        for member in members:
            self._waiting.remove(member)
            member.state = STOPPED
            self._show(member)

    def _stop_all(self) -> None:
        self._stop_waiting(list(self._waiting))
        for attempt in self._attempts.values():
            self._interrupt(attempt, STOPPED)

    def _handle_interrupt(self) -> None:
        graces = [one.grace for one in self._attempts.values() if one.grace is not None]
        waited = max((GRACE_SECONDS - one.left() for one in graces), default=DOUBLE_CLICK_SECONDS)
        if self._interrupts and waited < DOUBLE_CLICK_SECONDS:
            return  # it must cost no variables
        self._interrupts += 1
        self._closed = True
        if self._interrupts == 1:
            self._stop_all()
        elif not self._slots.ranks.closed:
            pending = [rank for attempt in self._attempts.values() for rank in attempt.slot.ranks]
            why = f"{stubborn(pending)}, so {ended(self.cluster.size)}"
            self._slots.ranks.close("lost", why)

    def _handle_requests(self) -> None:
        assert self.runs.requests is not None
        while True:
            try:
                kind, what = self.runs.requests.get_nowait()
            except Empty:
                return
            if kind == "add" and not self._interrupts:
                self._enlist(self.runs.append(what))
            elif kind == "stop" and what is None:
                self._stop_all()
            elif kind == "stop":
                # It may have ended between the click and this.
                self._stop_waiting([one for one in self._waiting if one.number == what])
                for attempt in self._attempts.values():
                    if attempt.member.number == what:
                        self._interrupt(attempt, STOPPED)

    def _interrupt_late(self) -> None:
        if self.options.timeout is not None:
            for attempt in self._attempts.values():
                if time.monotonic() - attempt.began > self.options.timeout:
                    self._interrupt(attempt, FAILED)

    def _report_unheard(self) -> None:
        for attempt in self._attempts.values():
            if attempt.grace is None:
                continue
            waited = GRACE_SECONDS - attempt.grace.left()
            pending = attempt.slot.state.pending
            late, where = attempt.why == FAILED, attempt.unheard.whereabouts
            if attempt.unheard.due(waited, pending):
                twice = (
                    "the next interrupt" if self._interrupts else "two interrupts of the notebook"
                )
                # Without a timeout only the user may decide to lose the other members' work.
                then = f"in {GRACE_SECONDS - NOTICE_SECONDS:g} s" if late else f"by {twice}"
                self.view.notice(
                    f"member {attempt.member.number} has not ended {NOTICE_SECONDS:g} s after its "
                    f"interrupt: {where(pending)}; all ranks will be killed {then}"
                )
            if late and waited >= GRACE_SECONDS:
                self._kill_ranks(attempt, where(pending))
                return

    def _kill_ranks(self, stuck: _Attempt, where: str) -> None:
        size, name = self.cluster.size, f"member {stuck.member.number}"
        busy = [attempt for attempt in self._attempts.values() if attempt is not stuck]
        why = (
            f"it exceeded its timeout of {self.options.timeout:g} s, and {GRACE_SECONDS:g} s after "
            f"the interrupt it was still running on {where}"
        )
        self._slots.ranks.close("lost", f"{name}: {why}, so {ended(size)}")
        self.view.notice(f"{name}: {why}, so all {size} ranks were killed")
        self._fail(stuck, why, why)
        self._put_back(busy)

    def _put_back(self, attempts: list[_Attempt], blamed: _Attempt | None = None) -> None:
        # Members that were interrupted by another one's end run again, unless they were stopped.
        again = []
        # Reversed, because each is put before those that wait.
        for attempt in reversed(attempts):
            member = attempt.member
            if self._attempts.pop(attempt.slot.cell, None) is None:
                continue  # it has ended meanwhile
            if attempt.why in (STOPPED, STOPPED_EARLY):
                member.state = attempt.why
                self._show(member)
            else:
                self._run_again(member)
                if attempt is not blamed:
                    again.append(member.number)
        if again:
            names = label(sorted(again), "member")
            self.view.notice(f"{names}, interrupted by that, will run again")

    def _handle_death(self) -> None:
        ranks = self._slots.ranks
        # What came before: the state of the ranks is ahead of it. Their end drops interrupts.
        for _ in ranks.step(0):
            self._handle_interrupt()
        died = culprits(ranks.roster.ends)
        culprit = died[0].rank if died else None
        # One death ends all ranks. Only the member on the rank that died first counts as the cause.
        busy = list(self._attempts.values())
        blamed = next((attempt for attempt in busy if culprit in attempt.slot.ranks), None)
        if blamed is not None and culprit is not None:
            # Unsent output of the rank, from its log; it may contain the reason of the death.
            text = ranks.words.unsent_output(culprit)
            if text:
                said = Output(culprit, blamed.slot.cell, (["out", text],), 0, 0, 0)
                log = self.cluster.hellos[culprit].log
                self.view.output(blamed.member.number, said, log)
        told = ranks.lose()
        if blamed is not None and blamed.slot.cell not in self._attempts:
            blamed = None  # its last messages have ended it
        failed = blamed is not None and self._count_death(blamed, told)
        self.view.notice(told.partition("\n")[0])
        if blamed is not None:
            what = "has failed" if failed else "runs again, once"
            if blamed.why in (STOPPED, STOPPED_EARLY):
                what = "was stopped"
            self.view.notice(f"it ran member {blamed.member.number}, which {what}")
        else:
            self._unexplained_deaths += 1
        self._put_back(busy, blamed)
        if self._unexplained_deaths > _MOST_UNEXPLAINED_DEATHS:
            raise ClusterLost(
                f"{told}\nThe ranks have died {self._unexplained_deaths} times, "
                "and no member is to blame."
            )

    def _count_death(self, attempt: _Attempt, told: str) -> bool:
        # True if the member has failed by this death.
        member = attempt.member
        if attempt.why in (STOPPED, STOPPED_EARLY):
            return False
        member.deaths += 1
        if member.deaths < _MOST_DEATHS:
            return False
        first = told.partition("\n")[0]
        self._fail(attempt, f"its rank died {member.deaths} times: {first}", told)
        return True

    def _fail(self, attempt: _Attempt, error: str, told: str) -> None:
        member = attempt.member
        del self._attempts[attempt.slot.cell]
        member.state, member.error, member.traceback = FAILED, error, told
        self._keep(member, b"")
        self._show(member)

    def _raise_outcome(self) -> None:
        if self._problem is not None:
            raise self._problem
        if self._interrupts:
            lost = self.cluster.state == "lost"
            why = f"{self.cluster.lost_because}\n" if lost else "interrupted: "
            raise self._interrupted(f"{why}{self.counts()}. What has finished is in")
        self._raise_failures()

    def _interrupted(self, said: str) -> CellInterrupted:
        kept = f" and in {self._store.shown}" if self._store is not None else ""
        return CellInterrupted(f"{said} runs{kept}.")

    def _raise_failures(self) -> None:
        failed = [member for member in self.runs if member.state == FAILED]
        if failed and len(failed) == len(self.runs):
            first = failed[0]
            message = f"all {label(range(len(failed)), 'member')} failed; the first: {first.error}"
            if len(failed) == 1:
                message = f"the only member failed: {first.error}"
            raise CellFailed(message, f"{message}\n\n{first.traceback}")


def _open(attempt: _Attempt) -> bytes | SharedResult:
    member, result = attempt.member, attempt.result
    if result is None:
        return b""
    member.numbers, member.text = result.numbers, result.text
    member.problem = result.problem
    if result.address:
        return SharedResult(result.address, result.nbytes)
    return attempt.payloads[0] if attempt.payloads else b""


def _between(low: float, high: float) -> str:
    least, most = seconds(max(1.0, round(low))), seconds(max(1.0, round(high)))
    return f"about {least}" if least == most else f"about {least} to {most}"
