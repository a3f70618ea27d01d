"""The states of an ensemble's members, early stopping, and estimates of the remaining time.

Optuna's pruners decide which poor members are stopped. Optuna runs in this process: it starts
nothing and writes nothing to disk. Its successive halving is the asynchronous one (Li et al., A
System for Massively Parallel Hyperparameter Tuning, MLSys 2020): no rank waits for others to reach
its step.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from allranks.cluster import failures
from allranks.cluster.failures import CellRecord
from allranks.cluster.members import MemberSlots, Slot
from allranks.ensemble.member import (
    ENDED,
    FAILED,
    FINISHED,
    STOPPED,
    STOPPED_EARLY,
    WAITING,
    Arena,
    Member,
    SharedResult,
)
from allranks.ensemble.runs import Runs
from allranks.ensemble.store import Store
from allranks.ensemble.view import TextEnsemble
from allranks.errors import MissingDependency, Report, UsageError
from allranks.records.ranks import label
from allranks.records.telemetry import Points, Pulse
from allranks.records.wire import Output, Reply, Result
from allranks.widgets.dashboard.curves import parts
from allranks.widgets.dashboard.tables import seconds

_ESTIMATE_SECONDS = 1.0
_COUNT_SECONDS = 0.2
_AGAIN_SECONDS = 5.0


class Ledger:
    """The state of every member, from the messages of its ranks.

    ``metric`` is the name of the values that ``early`` compares; ``timeout`` is for messages.
    """

    def __init__(
        self,
        runs: Runs,
        view: TextEnsemble,
        metric: str | None,
        timeout: float | None,
        store: Store | None,
        early: Early | None,
    ) -> None:
        self.runs, self.view = runs, view
        self._metric, self._timeout = metric, timeout
        self._store, self._early = store, early
        #: The number of members from the store.
        self._stored = 0
        self._arena = Arena()
        #: Members to run, in this order; after `closed` none are put back.
        self.waiting: deque[Member] = deque()
        self.closed = False
        #: The next states of interrupted members; the start times of running ones.
        self.why: dict[int, str] = {}
        self.started: dict[int, float] = {}
        #: The log file of each rank; whether shared memory can carry large results.
        self.logs: dict[int, str] = {}
        self.shared = sys.platform == "linux"
        #: The reason why the store accepts no further member.
        self.problem: UsageError | None = None
        self._results: dict[int, tuple[Result, list[bytes]]] = {}
        self._interrupted: dict[int, float] = {}
        self._first_interrupt: dict[int, float] = {}
        self._taken: list[float] = []
        self._wanted = runs.metric()
        self._estimated = self._counted = (0.0, "")

    def enlist(self, members: Sequence[Member]) -> None:
        # Members in the store have ended already; the others wait.
        if self._store is not None:
            kept = self._store.read([m for m in members if m.state == WAITING])
            self._stored += len(kept)
            for member in kept:
                self._compare(member)
            if self._wanted is None:
                self._find_metric()
        for member in members:
            if member.state == WAITING:
                self.waiting.append(member)
            self.show(member)

    def take(
        self, crew: MemberSlots, slot: Slot, record: CellRecord, payloads: list[bytes]
    ) -> None:
        assert slot.member is not None
        member = self.runs[slot.member]
        if isinstance(record, Output):
            self.view.output(member.number, record, self.logs[record.rank])
        elif isinstance(record, Points):
            self._logged(crew, slot, member, record, payloads[0])
        elif isinstance(record, Pulse):
            self.view.pulse(record)
        elif isinstance(record, Result):
            if record.rank == slot.ranks[0]:
                self._results[slot.cell] = record, payloads
        elif isinstance(record, Reply) and len(slot.replies) == len(slot.ranks):
            self._ended(crew, slot, member)

    def _logged(
        self, crew: MemberSlots, slot: Slot, member: Member, record: Points, payload: bytes
    ) -> None:
        place = record.rank - slot.ranks[0]
        if place:
            named = tuple([n, who or f"rank {place}", count] for n, who, count in record.series)
            record = Points(record.rank, record.cell, named, record.dropped)
        self.view.points(member.number, record, payload)
        if place:
            return
        for name, who, steps, values in parts(record, payload):
            member.log(f"{name} {who}".strip(), steps, values)
            if self._early is not None and name == self._metric and not who:
                points = zip(steps, values, strict=True)
                if self._early.report(member.number, points):
                    self.interrupt(crew, slot, STOPPED_EARLY)
        if self._wanted is None:
            self._find_metric()
        self.show(member)

    def _ended(self, crew: MemberSlots, slot: Slot, member: Member) -> None:
        replies = [slot.replies[rank] for rank in slot.ranks]
        reports = _own(slot, [reply.report for reply in replies if reply.report is not None])
        why = self.why.pop(member.number, "")
        left = self._results.pop(slot.cell, None)
        slot.member = None
        member.seconds = max(reply.seconds for reply in replies)
        packed: bytes | SharedResult = b""
        if not reports:
            member.state = FINISHED
            try:
                packed = self._open(member, left)
            except OSError as error:
                # Its rank has died, or its memory cannot be seen from here.
                self.shared = self.shared and bool(crew.ranks.roster.ends)
                self.again(member, f"the result of member {member.number} was lost ({error})")
        elif why and all(r.waiting or r.etype == "KeyboardInterrupt" for r in reports):
            member.state = why
            if why == FAILED:
                member.error = f"it exceeded its timeout of {self._timeout:g} s"
        else:
            member.state = FAILED
            member.error = failures.plain(failures.headline(reports, len(slot.ranks)))
            member.error = member.error.partition(": ")[2] or member.error
        if member.state == FAILED:
            own = slot.ranks if len(slot.ranks) == 1 else range(len(slot.ranks))
            member.traceback = failures.describe(reports, own)
            if len(slot.ranks) > 1:
                member.traceback += (
                    f"\n\n{label(range(len(slot.ranks)))} of member {member.number} are "
                    f"{label(slot.ranks)} of the cluster."
                )
        if member.state in ENDED:
            self._taken.append(member.seconds)
            self.keep(member, packed)
        for rank in slot.ranks:
            self.view.works_on(rank, None)
        if self._wanted is None or (member.numbers and self._wanted[0] not in member.numbers):
            self._find_metric()
        self.show(member)

    @staticmethod
    def _open(member: Member, left: tuple[Result, list[bytes]] | None) -> bytes | SharedResult:
        if left is None:
            return b""
        result, payloads = left
        member.numbers, member.text = result.numbers, result.text
        member.problem = result.problem
        if result.address:
            return SharedResult(result.address, result.nbytes)
        return payloads[0] if payloads else b""

    def keep(self, member: Member, packed: bytes | SharedResult) -> None:
        try:
            if self._store is not None:
                self._store.write(member, packed)
        except UsageError as error:
            self.problem = error
        try:
            if member.place is None and len(packed):
                member.place = self._arena.put(packed)
        except OSError as error:
            member.problem = f"its {len(packed):,} bytes could not be kept ({error})"
            self.problem = self.problem or UsageError(
                f"the result of member {member.number} could not be kept: {error}. "
                "Make room, or leave less in it."
            )
        if self.problem is None and self._early is not None:
            self._early.ended(
                member.number,
                member.metrics.get(self._metric or "") if member.state == FINISHED else None,
                pruned=member.state == STOPPED_EARLY,
            )

    def _compare(self, member: Member) -> None:
        series = member.series.get(self._metric or "")
        if self._early is not None and series is not None:
            self._early.report(member.number, zip(series.steps, series.values, strict=True))
            self._early.ended(member.number, series.last[1], pruned=member.state == STOPPED_EARLY)

    def again(self, member: Member, notice: str = "") -> None:
        # It runs before the members that wait.
        if notice:
            self.view.notice(f"{notice}: it runs again")
        member.again()
        self.view.again(member.number)
        if self.closed:
            member.state = STOPPED
        else:
            self.waiting.appendleft(member)
        self.show(member)

    def _find_metric(self) -> None:
        wanted = self.runs.metric()
        if wanted != self._wanted:
            self._wanted = wanted
            self.show_all()

    def show_all(self) -> None:
        for member in self.runs:
            self.show(member)

    def show(self, member: Member) -> None:
        if self._wanted is not None:
            self.view.members.metric, self.view.members.lower = self._wanted
        self.view.row(self.runs.row(member, self._wanted))

    def counts(self) -> str:
        counts = Counter(member.state for member in self.runs)
        finished = counts.pop(FINISHED, 0)
        others = [f"{count} {state}" for state, count in counts.items()]
        if self._stored and self._store is not None:
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self._store.oldest))
            others.append(f"{self._stored} from the store, computed on {since} or later")
        return ", ".join([f"{finished} of {len(self.runs)} finished", *others])

    def progress(self, crew: MemberSlots) -> str:
        now = time.monotonic()
        if now - self._counted[0] >= _COUNT_SECONDS:
            self._counted = now, self.counts()
        if now - self._estimated[0] >= _ESTIMATE_SECONDS:
            running = [now - self.started[s.member] for s in crew.at_work() if s.member is not None]
            found = remaining_seconds(self._taken, running, len(self.waiting), len(crew.slots))
            said = "" if found is None else _between(*found)
            self._estimated = now, said
        said = self._estimated[1] if crew.at_work() or self.waiting else ""
        return self._counted[1] + (f"; {said} left" if said else "")

    def interrupt(self, crew: MemberSlots, slot: Slot, why: str) -> None:
        """Interrupts a member; ``why`` is its state afterwards.

        An interrupted member that still runs is interrupted again: a library may have caught the
        first KeyboardInterrupt.
        """
        now = time.monotonic()
        if slot.member is None or now - self._interrupted.get(slot.cell, 0.0) < _AGAIN_SECONDS:
            return
        self.why.setdefault(slot.member, why)
        self._interrupted[slot.cell] = now
        self._first_interrupt.setdefault(slot.cell, now)
        crew.interrupt(slot)

    def since_interrupt(self, slot: Slot) -> float:
        # Since the first interrupt, not the last; 0 without one.
        first = self._first_interrupt.get(slot.cell)
        return 0.0 if first is None else time.monotonic() - first


def _own(slot: Slot, reports: Sequence[Report]) -> list[Report]:
    # The messages of a member count its own ranks, but one rank keeps its number in the cluster.
    first = slot.ranks[0] if len(slot.ranks) > 1 else 0
    return [replace(report, rank=report.rank - first) for report in reports]


def _between(low: float, high: float) -> str:
    least, most = seconds(max(1.0, round(low))), seconds(max(1.0, round(high)))
    return f"about {least}" if least == most else f"about {least} to {most}"


class Early:
    """Decides which members are stopped.

    Args:
        kind: ``halving``: at steps ``grace``, 3 · ``grace``, 9 · ``grace``, … a member goes on if
            it is among the best third of those that came so far. ``median``: from step ``grace`` on
            it goes on while its best value is no worse than the median of the finished ones' at
            that step, once there are four.
        lower: whether lower values are better.
        grace: no member is stopped before this step; None leaves it to Optuna.

    Raises:
        MissingDependency: Optuna is not installed.
    """

    def __init__(self, kind: str, lower: bool, grace: int | None) -> None:
        try:
            import optuna
        except ImportError as error:
            raise MissingDependency(
                f"--stop {kind} needs Optuna, and it is not installed. "
                "Type: pip install 'allranks[early]'"
            ) from error
        self._ended = optuna.trial.TrialState
        self._trials: dict[int, Any] = {}
        self._last: dict[int, int] = {}
        pruners = optuna.pruners
        pruner: optuna.pruners.BasePruner
        if kind == "halving":
            resource = "auto" if grace is None else grace
            pruner = pruners.SuccessiveHalvingPruner(min_resource=resource, reduction_factor=3)
        else:
            pruner = pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=grace or 0)
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(
                direction="minimize" if lower else "maximize", pruner=pruner
            )
        finally:
            optuna.logging.set_verbosity(before)

    def report(self, member: int, points: Iterable[tuple[float, float]]) -> bool:
        # True to stop the member.
        trial = self._trials.get(member)
        if trial is None:
            trial = self._trials[member] = self._study.ask()
        stop = False
        for step, value in points:
            # Optuna counts steps in whole numbers, each once.
            comes = value == value and math.isfinite(step)
            if comes and int(step) > self._last.get(member, -1):
                self._last[member] = int(step)
                trial.report(value, int(step))
                stop = stop or trial.should_prune()
        return stop

    def ended(self, member: int, value: float | None, *, pruned: bool = False) -> None:
        # From now on Optuna compares other members with this one.
        trial = self._trials.pop(member, None)
        self._last.pop(member, None)
        if trial is None:
            return
        if pruned:
            self._study.tell(trial, state=self._ended.PRUNED)
        elif value is None or value != value:
            self._study.tell(trial, state=self._ended.FAIL)
        else:
            self._study.tell(trial, value)


#: Fewer durations do not show how durations vary.
_LEAST_SEEN = 3
_DRAWS = 40
_STEPS = 8000


def remaining_seconds(
    taken: Sequence[float], running: Sequence[float], waiting: int, slots: int
) -> tuple[float, float] | None:
    """Returns the least and the most remaining seconds, right eight times in ten.

    None until three members have ended. A simulation draws the durations of the remaining members
    from those in ``taken``; for a running member, from those longer than its seconds so far. The
    estimate is wrong if the remaining members are of another kind.
    """
    if len(taken) < _LEAST_SEEN or slots < 1:
        return None
    # The same draws each time: otherwise the estimate would change while nothing happens.
    source = random.Random(0)
    ends = []
    for _ in range(max(5, min(_DRAWS, _STEPS // (waiting + 1)))):
        free = [_left(source, taken, elapsed) for elapsed in running]
        free += [0.0] * (slots - len(free))
        heapq.heapify(free)
        for _ in range(waiting):
            # The next member starts on the slot that is free first.
            heapq.heapreplace(free, free[0] + source.choice(taken))
        ends.append(max(free))
    ends.sort()
    # The tenth and the ninetieth percentile.
    return ends[len(ends) // 10], ends[-1 - len(ends) // 10]


def _left(source: random.Random, taken: Sequence[float], elapsed: float) -> float:
    longer = [seconds for seconds in taken if seconds > elapsed]
    if longer:
        return source.choice(longer) - elapsed
    # Longer than any member before. The guess: at most the same time again.
    return elapsed * source.random()
