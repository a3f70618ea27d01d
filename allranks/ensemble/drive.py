"""Runs the members of an ensemble on the ranks of a cluster, and keeps what they leave."""

from __future__ import annotations

import socket
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from allranks.cluster import failures
from allranks.cluster.cluster import Cluster, stubborn
from allranks.cluster.connection import CellRecord
from allranks.cluster.crew import Crew, Slot
from allranks.ensemble.arrays import Arena, Shared
from allranks.ensemble.early import Early
from allranks.ensemble.estimate import remaining_seconds
from allranks.ensemble.member import (
    ENDED,
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    STOPPED_EARLY,
    WAITING,
    Member,
)  # fmt: skip
from allranks.ensemble.runs import Runs
from allranks.ensemble.store import Store
from allranks.errors import CellFailed, CellInterrupted, ClusterLost, UsageError
from allranks.records.ranks import label
from allranks.records.telemetry import Points, Pulse
from allranks.records.wire import Output, Report, Result
from allranks.widgets.dashboard.numbers import seconds
from allranks.widgets.ensemble.view import EnsembleView

_POLL_SECONDS = 0.1
_ESTIMATE_SECONDS = 1.0
_SCREEN_NBYTES = 128 * 1024
_LEAST_SCREEN_NBYTES = 1024
_DEATHS = 2
#: Deaths that no member is to blame for; after more, something else ends the ranks.
_BLAMELESS_DEATHS = 3


@dataclass(frozen=True)
class Plan:
    """How to run the members: the cell's source and number, and the options that concern them."""

    source: str
    number: int
    ranks_each: int = 1
    timeout: float | None = None
    metric: str | None = None


class Drive:
    """Runs members until none is left, or the notebook is interrupted.

    Args:
        cluster: whose ranks run them; started again if it is lost meanwhile.
        runs: the members; those that have ended already are left as they are.
        plan: how to run them.
        view: what shows them.
        store: what keeps them, if anything does.
        early: what says which of them to stop, if anything does.
    """

    def __init__(
        self,
        cluster: Cluster,
        runs: Runs,
        plan: Plan,
        view: EnsembleView,
        store: Store | None = None,
        early: Early | None = None,
    ) -> None:
        self.cluster, self.runs, self.plan, self.view = cluster, runs, plan, view
        self._store, self._early = store, early
        self._arena = Arena()
        self._queue: deque[Member] = deque()
        self._why: dict[int, str] = {}
        self._started: dict[int, float] = {}
        self._results: dict[int, tuple[Result, list[bytes]]] = {}
        self._taken: list[float] = []
        self._wanted = runs.metric()
        self._shared = sys.platform == "linux"
        self._presses = 0
        self._blameless = 0
        self._problem: UsageError | None = None
        self._estimated = (0.0, "")

    # ── the loop ─────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Runs the members; returns when all have ended.

        Raises:
            CellFailed: all of them failed.
            CellInterrupted: the notebook was interrupted; what has finished is kept.
            ClusterLost: ranks died again and again, and no member is to blame.
            StartFailed: ranks died, and could not be started again.
            UsageError: what has finished could not be stored.
        """
        with self._running():
            while self._left():
                with self._shift() as crew, crew.attending():
                    self._turn(crew, 0)
                    while not self._settled(crew):
                        self._turn(crew, crew.attend(_POLL_SECONDS))
        self._conclude()

    async def run_awaited(self) -> None:
        """Does what :meth:`run` does, and lets the event loop run meanwhile."""
        with self._running():
            while self._left():
                with self._shift() as crew, crew.attending(), crew.awaiting() as attend:
                    self._turn(crew, 0)
                    while not self._settled(crew):
                        self._turn(crew, await attend(_POLL_SECONDS))
        self._conclude()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.runs.wishes = SimpleQueue()
        self.view.ranks(list(self.cluster.hellos.values()))
        self._enlist(list(self.runs))
        try:
            yield
        finally:
            self.runs.wishes = None
            for member in self.runs:
                if member.state in (WAITING, RUNNING):
                    member.state = STOPPED
            if self._store is not None:
                self._store.close()
            self._show_all()
            self.view.members.said = self._counts()
            self.view.finish()

    @contextmanager
    def _shift(self) -> Iterator[Crew]:
        """One set of ranks, from the first member that they run to their last or their death."""
        with self.cluster.crew(self.plan.ranks_each) as crew:
            crew.deliver = self._take
            for slot in crew.slots:
                for rank in slot.ranks:
                    self.view.works_on(rank, None)
            try:
                yield crew
            except BaseException:
                for slot in crew.busy():
                    crew.interrupt(slot)
                raise
            if self.cluster.state == "running" and crew.dying():
                self._mourn(crew)
        if self.cluster.state != "running" and self._left():
            began = time.monotonic()
            self.cluster.start()
            self.view.ranks(list(self.cluster.hellos.values()))
            self.view.notice(
                f"started again {label(range(self.cluster.size))} in "
                f"{time.monotonic() - began:.1f} s"
            )

    def _left(self) -> bool:
        return bool(self._queue) and not self._presses and self._problem is None

    def _settled(self, crew: Crew) -> bool:
        if self.cluster.state != "running" or crew.dead():
            return True
        return not crew.busy() and not self._left() and not crew.dying()

    def _turn(self, crew: Crew, presses: int) -> None:
        for _ in range(presses):
            self._press(crew)
        self._grant(crew)
        if self.cluster.state == "running" and not crew.dying():
            self._interrupt_late(crew)
            while self._left() and (slot := crew.free()) is not None:
                self._start(crew, slot, self._queue.popleft())
        self.view.members.said = self._progress(crew)
        self.view.refresh()

    # ── start and stop ───────────────────────────────────────────────────────────────────────

    def _enlist(self, members: Sequence[Member]) -> None:
        """Takes up members: those that a store has are done, the others wait."""
        if self._store is not None:
            kept = self._store.read([m for m in members if m.state == WAITING])
            for member in kept:
                self._compare(member)
        for member in members:
            if member.state == WAITING:
                self._queue.append(member)
            self._show(member)

    def _start(self, crew: Crew, slot: Slot, member: Member) -> None:
        member.state, member.ranks = RUNNING, slot.ranks
        self._started[member.number] = time.monotonic()
        host = self.cluster.hellos[slot.ranks[0]].host
        try:
            crew.start(
                slot,
                member.number,
                member.values,
                source=self.plan.source,
                number=self.plan.number,
                limit_nbytes=max(_LEAST_SCREEN_NBYTES, _SCREEN_NBYTES // len(self.runs)),
                shared=self._shared and host == socket.gethostname(),
            )
        except UsageError as error:
            member.state, member.error, member.ranks = FAILED, str(error), ()
        else:
            for rank in slot.ranks:
                self.view.works_on(rank, member.number)
        self._show(member)

    def _interrupt(self, crew: Crew, slot: Slot, why: str) -> None:
        """Interrupts a member once; ``why`` says what becomes of it."""
        if slot.member is not None and slot.member not in self._why:
            self._why[slot.member] = why
            crew.interrupt(slot)

    def _stop_all(self, crew: Crew) -> None:
        for member in self._queue:
            member.state = STOPPED
            self._show(member)
        self._queue.clear()
        for slot in crew.busy():
            self._interrupt(crew, slot, STOPPED)

    def _press(self, crew: Crew) -> None:
        """The notebook was interrupted; the second time, ranks that did not settle are ended."""
        self._presses += 1
        if self._presses == 1:
            self._stop_all(crew)
            for slot in crew.busy():
                crew.interrupt(slot)
        elif self.cluster.state == "running":
            pending = [rank for slot in crew.busy() for rank in slot.ranks]
            self.cluster.give_up(stubborn(pending, self.cluster.size))

    def _grant(self, crew: Crew) -> None:
        """Does what ``runs.add`` and ``runs.stop`` have asked for."""
        assert self.runs.wishes is not None
        while True:
            try:
                kind, what = self.runs.wishes.get_nowait()
            except Empty:
                return
            if kind == "add" and not self._presses:
                self._enlist(self.runs.append(what))
            elif kind == "stop" and what is None:
                self._stop_all(crew)
            elif kind == "stop":
                member, slot = self.runs[what], crew.running(what)
                if slot is not None:
                    self._interrupt(crew, slot, STOPPED)
                elif member in self._queue:
                    self._queue.remove(member)
                    member.state = STOPPED
                    self._show(member)

    def _interrupt_late(self, crew: Crew) -> None:
        if self.plan.timeout is None:
            return
        now = time.monotonic()
        for slot in crew.busy():
            assert slot.member is not None
            if now - self._started[slot.member] > self.plan.timeout:
                self._interrupt(crew, slot, FAILED)

    # ── what members tell ────────────────────────────────────────────────────────────────────

    def _take(self, crew: Crew, slot: Slot, record: CellRecord, payloads: list[bytes]) -> None:
        assert slot.member is not None
        member = self.runs[slot.member]
        if isinstance(record, Output):
            self.view.output(member.number, record, self.cluster.hellos[record.rank].log)
        elif isinstance(record, Points):
            self._logged(crew, slot, member, record, payloads[0])
        elif isinstance(record, Pulse):
            self.view.pulse(record)
        elif isinstance(record, Result):
            if record.rank == slot.ranks[0]:
                self._results[slot.cell] = record, payloads
        elif len(slot.replies) == len(slot.ranks):
            self._ended(slot, member)

    def _logged(
        self, crew: Crew, slot: Slot, member: Member, record: Points, payload: bytes
    ) -> None:
        place = record.rank - slot.ranks[0]
        if place:
            named = tuple([n, who or f"rank {place}", count] for n, who, count in record.series)
            record = Points(record.rank, record.cell, named, record.dropped)
        self.view.points(member.number, record, payload)
        if place:
            return
        pairs = array("d", payload)
        at = 0
        for name, who, count in record.series:
            steps, values = pairs[at : at + 2 * count : 2], pairs[at + 1 : at + 2 * count : 2]
            at += 2 * count
            member.log(f"{name} {who}".strip(), steps, values)
            if self._early is not None and name == self.plan.metric and not who:
                points = zip(steps, values, strict=True)
                if self._early.report(member.number, points):
                    self._interrupt(crew, slot, STOPPED_EARLY)
        if self._wanted is None:
            self._find_metric()
        self._show(member)

    def _ended(self, slot: Slot, member: Member) -> None:
        """All ranks of a member have left it."""
        replies = [slot.replies[rank] for rank in slot.ranks]
        reports = _own(slot, [reply.report for reply in replies if reply.report is not None])
        why = self._why.pop(member.number, "")
        left = self._results.pop(slot.cell, None)
        slot.member = None
        member.seconds = max(reply.seconds for reply in replies)
        packed: bytes | Shared = b""
        if not reports:
            member.state = FINISHED
            try:
                packed = self._open(member, left)
            except OSError as error:
                # Its rank has died, or its memory cannot be seen from here.
                self._shared = False
                self._again(member, f"the result of member {member.number} was lost ({error})")
        elif why and all(r.waiting or r.etype == "KeyboardInterrupt" for r in reports):
            member.state = why
            if why == FAILED:
                member.error = f"it went past its time of {self.plan.timeout:g} s"
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
            self._keep(member, packed)
        for rank in slot.ranks:
            self.view.works_on(rank, None)
        self._find_metric()
        self._show(member)

    def _open(self, member: Member, left: tuple[Result, list[bytes]] | None) -> bytes | Shared:
        """Takes what a member has left; returns it packed.

        Raises:
            OSError: it cannot be reached.
        """
        if left is None:
            return b""
        result, payloads = left
        member.numbers, member.text = result.numbers, result.text
        member.problem = result.problem
        if result.address:
            return Shared(result.address, result.nbytes)
        return payloads[0] if payloads else b""

    def _keep(self, member: Member, packed: bytes | Shared) -> None:
        """Puts a result where it stays, and lets the others be compared with this member."""
        try:
            if self._store is not None:
                self._store.write(member, packed)
            elif len(packed):
                member.place = self._arena.put(packed)
        except UsageError as error:
            self._problem = error
        except OSError as error:
            self._problem = UsageError(f"a result of {len(packed):,} bytes cannot be kept: {error}")
        if self._problem is None and self._early is not None:
            self._early.ended(
                member.number,
                member.metrics.get(self.plan.metric or "") if member.state == FINISHED else None,
                pruned=member.state == STOPPED_EARLY,
            )

    def _compare(self, member: Member) -> None:
        """Lets the others be compared with a member that has ended in an earlier run."""
        series = member.series.get(self.plan.metric or "")
        if self._early is not None and series is not None:
            self._early.report(member.number, zip(series.steps, series.values, strict=True))
            self._early.ended(member.number, series.last[1], pruned=member.state == STOPPED_EARLY)

    # ── death ────────────────────────────────────────────────────────────────────────────────

    def _mourn(self, crew: Crew) -> None:
        """A rank died and MPI ended the others: its member runs again, once, and so do theirs."""
        culprit = crew.culprit()
        busy = crew.busy()
        blamed = next((slot for slot in busy if culprit in slot.ranks), None)
        if blamed is not None and culprit is not None and blamed.member is not None:
            text = crew.unseen(culprit)
            if text:
                said = Output(culprit, blamed.cell, (["out", text],), 0, 0, 0)
                self.view.output(blamed.member, said, self.cluster.hellos[culprit].log)
        told = self.cluster.mourn()
        first = told.partition("\n")[0]
        for slot in reversed(busy):
            assert slot.member is not None
            member = self.runs[slot.member]
            self._why.pop(member.number, None)
            if slot is blamed:
                member.deaths += 1
                if member.deaths >= _DEATHS:
                    member.state, member.traceback = FAILED, told
                    member.error = f"its rank died {member.deaths} times: {first}"
                    self._keep(member, b"")
                    self._show(member)
                    continue
            self._again(member)
        others = [s.member for s in busy if s is not blamed and s.member is not None]
        self.view.notice(first)
        if blamed is not None and blamed.member is not None:
            again = "has failed" if self.runs[blamed.member].state == FAILED else "runs again, once"
            self.view.notice(f"it ran member {blamed.member}, which {again}")
        else:
            self._blameless += 1
        if others:
            self.view.notice(f"{label(others, 'member')}, interrupted by that, will run again")
        if self._blameless > _BLAMELESS_DEATHS:
            raise ClusterLost(
                f"{told}\nThe ranks have died {self._blameless} times, and no member is to blame."
            )

    def _again(self, member: Member, notice: str = "") -> None:
        """Puts a member back, to run before those that wait."""
        if notice:
            self.view.notice(f"{notice}: it runs again")
        member.again()
        self.view.again(member.number)
        if self._presses:
            member.state = STOPPED
        else:
            self._queue.appendleft(member)
        self._show(member)

    # ── what is shown ────────────────────────────────────────────────────────────────────────

    def _find_metric(self) -> None:
        wanted = self.runs.metric()
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

    def _counts(self) -> str:
        counts: dict[str, int] = {}
        for member in self.runs:
            counts[member.state] = counts.get(member.state, 0) + 1
        finished = counts.pop(FINISHED, 0)
        others = [f"{count} {state}" for state, count in counts.items()]
        return ", ".join([f"{finished} of {len(self.runs)} finished", *others])

    def _progress(self, crew: Crew) -> str:
        now = time.monotonic()
        if now - self._estimated[0] >= _ESTIMATE_SECONDS:
            running = [now - self._started[s.member] for s in crew.busy() if s.member is not None]
            found = remaining_seconds(self._taken, running, len(self._queue), len(crew.slots))
            said = "" if found is None else _between(*found)
            self._estimated = now, said
        said = self._estimated[1] if crew.busy() or self._queue else ""
        return self._counts() + (f"; {said} left" if said else "")

    def _conclude(self) -> None:
        """Says what has become of all of them, and raises where that is nothing good."""
        if self._problem is not None:
            raise self._problem
        if self._presses:
            why = self.cluster.lost_because if self.cluster.state == "lost" else "interrupted"
            kept = f" and in {self._store.shown}" if self._store is not None else ""
            raise CellInterrupted(f"{why}: {self._counts()}. What has finished is in runs{kept}.")
        failed = [member for member in self.runs if member.state == FAILED]
        if failed and len(failed) == len(self.runs):
            first = failed[0]
            message = f"all {label(range(len(failed)), 'member')} failed; the first: {first.error}"
            if len(failed) == 1:
                message = f"the only member failed: {first.error}"
            raise CellFailed(message, f"{message}\n\n{first.traceback}")


def _own(slot: Slot, reports: Sequence[Report]) -> list[Report]:
    """Returns reports with the ranks as the member counts them, as its own messages do.

    Where it has one rank only, that is called by its number in the cluster.
    """
    first = slot.ranks[0] if len(slot.ranks) > 1 else 0
    return [replace(report, rank=report.rank - first) for report in reports]


def _between(low: float, high: float) -> str:
    """Returns ``about 12 s`` or ``about 12 s to 1 min 5 s``."""
    least, most = seconds(max(1.0, round(low))), seconds(max(1.0, round(high)))
    return f"about {least}" if least == most else f"about {least} to {most}"
