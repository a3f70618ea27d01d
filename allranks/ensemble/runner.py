"""Runs the members of an ensemble on the ranks of a cluster, and ``Cluster.map``."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

from allranks.cluster.cells import GRACE_SECONDS, NOTICE_SECONDS, InterruptTimeout
from allranks.cluster.cluster import Cluster
from allranks.cluster.failures import culprits, ended, stubborn
from allranks.cluster.members import MemberSlots, Slot
from allranks.cluster.options import check_timeout
from allranks.ensemble.ledger import Early, Ledger
from allranks.ensemble.member import (
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    STOPPED_EARLY,
    WAITING,
    Member,
    short,
)
from allranks.ensemble.runs import Runs
from allranks.ensemble.store import Store
from allranks.ensemble.view import TextEnsemble, bar_view
from allranks.errors import (
    CellFailed,
    CellInterrupted,
    ClusterLost,
    MapFailed,
    MapInterrupted,
    UsageError,
)
from allranks.records.ranks import label
from allranks.records.wire import Output

_POLL_SECONDS = 0.1
_SCREEN_NBYTES = 128 * 1024
_LEAST_SCREEN_NBYTES = 1024
_MOST_DEATHS = 2
#: Deaths without a member as the cause; after more, something else ends the ranks.
_MOST_UNEXPLAINED_DEATHS = 3


@dataclass(frozen=True)
class EnsemblePlan:
    """The cell's source and number, and the options of a run."""

    source: str
    number: int
    ranks_each: int = 1
    timeout: float | None = None
    metric: str | None = None


class EnsembleRunner:
    """Runs members until all have ended, or the notebook is interrupted.

    The cluster is started again if it is lost meanwhile. Members that have ended do not run again.
    """

    def __init__(
        self,
        cluster: Cluster,
        runs: Runs,
        plan: EnsemblePlan,
        view: TextEnsemble,
        store: Store | None = None,
        early: Early | None = None,
    ) -> None:
        self.cluster, self.runs, self.plan, self.view = cluster, runs, plan, view
        self._store = store
        self.ledger = Ledger(runs, view, plan.metric, plan.timeout, store, early)
        self._name = uuid4().hex
        self._interrupts = 0
        self._unexplained_deaths = 0
        #: The positions of the ranks of each interrupted cell.
        self._unheard: dict[int, InterruptTimeout] = {}

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
                with self._crew() as crew, crew.attending():
                    self._step(crew, 0)
                    while not self._is_done(crew):
                        self._step(crew, crew.attend(_POLL_SECONDS))
        self._raise_outcome()

    async def run_awaited(self) -> None:
        # Like `run`, but the event loop runs meanwhile.
        with self._running():
            while self._has_work():
                with self._crew() as crew, crew.attending(), crew.awaiting() as attend:
                    self._step(crew, 0)
                    while not self._is_done(crew):
                        self._step(crew, await attend(_POLL_SECONDS))
        self._raise_outcome()

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            self.runs.requests = SimpleQueue()
            self._update_ranks()
            self.ledger.enlist(list(self.runs))
            yield
        finally:
            if self._store is not None:
                self._store.close()
            self.runs.requests = None
            for member in self.runs:
                if member.state in (WAITING, RUNNING):
                    member.state = STOPPED
            self.ledger.show_all()
            self.view.members.said = self.ledger.counts()
            self.view.finish()

    def _update_ranks(self) -> None:
        hellos = self.cluster.hellos
        self.view.ranks(list(hellos.values()))
        self.ledger.logs = {rank: hello.log for rank, hello in hellos.items()}

    @contextmanager
    def _crew(self) -> Iterator[MemberSlots]:
        with self.cluster.crew(self.plan.ranks_each) as crew:
            crew.deliver = self.ledger.take
            for slot in crew.slots:
                for rank in slot.ranks:
                    self.view.works_on(rank, None)
            try:
                yield crew
            except BaseException:
                for slot in crew.at_work():
                    crew.interrupt(slot)
                raise
            if crew.ranks.roster.ends and not crew.ranks.closed:
                self._handle_death(crew)
        if self.cluster.state != "running" and self._has_work():
            began = time.monotonic()
            self.cluster.start()
            self._update_ranks()
            self.view.notice(
                f"started again {label(range(self.cluster.size))} in "
                f"{time.monotonic() - began:.1f} s"
            )

    def _has_work(self) -> bool:
        return bool(self.ledger.waiting) and not self._interrupts and self.ledger.problem is None

    def _is_done(self, crew: MemberSlots) -> bool:
        if crew.ranks.over:
            return True
        return not crew.at_work() and not self._has_work() and crew.ranks.up

    def _step(self, crew: MemberSlots, presses: int) -> None:
        for _ in range(presses):
            self._handle_interrupt(crew)
        self._handle_requests(crew)
        if self.ledger.problem is not None and not self.ledger.closed:
            self.ledger.closed = True
            self._stop_all(crew)
        if crew.ranks.up:
            self._interrupt_late(crew)
            self._report_unheard(crew)
        if crew.ranks.up:
            while self._has_work() and (slot := crew.free()) is not None:
                self._start(crew, slot, self.ledger.waiting.popleft())
        self.view.members.said = self.ledger.progress(crew)
        self.view.refresh()

    def _start(self, crew: MemberSlots, slot: Slot, member: Member) -> None:
        member.state, member.ranks = RUNNING, slot.ranks
        self.ledger.started[member.number] = time.monotonic()
        host = self.cluster.hellos[slot.ranks[0]].host
        try:
            crew.start(
                slot,
                member.number,
                member.values,
                ensemble=self._name,
                source=self.plan.source,
                number=self.plan.number,
                limit_nbytes=max(_LEAST_SCREEN_NBYTES, _SCREEN_NBYTES // len(self.runs)),
                shared=self.ledger.shared and host == socket.gethostname(),
            )
        except UsageError as error:
            member.state, member.error, member.ranks = FAILED, str(error), ()
        else:
            for rank in slot.ranks:
                self.view.works_on(rank, member.number)
        self.ledger.show(member)

    def _stop_all(self, crew: MemberSlots) -> None:
        for member in self.ledger.waiting:
            member.state = STOPPED
            self.ledger.show(member)
        self.ledger.waiting.clear()
        for slot in crew.at_work():
            self.ledger.interrupt(crew, slot, STOPPED)

    def _handle_interrupt(self, crew: MemberSlots) -> None:
        self._interrupts += 1
        self.ledger.closed = True
        if self._interrupts == 1:
            self._stop_all(crew)
        elif not crew.ranks.closed:
            pending = [rank for slot in crew.at_work() for rank in slot.ranks]
            crew.ranks.close("lost", stubborn(pending, self.cluster.size))

    def _handle_requests(self, crew: MemberSlots) -> None:
        assert self.runs.requests is not None
        while True:
            try:
                kind, what = self.runs.requests.get_nowait()
            except Empty:
                return
            if kind == "add" and not self._interrupts:
                self.ledger.enlist(self.runs.append(what))
            elif kind == "stop" and what is None:
                self._stop_all(crew)
            elif kind == "stop":
                member, slot = self.runs[what], crew.running(what)
                # It may have ended between the click and this.
                if slot is not None:
                    self.ledger.interrupt(crew, slot, STOPPED)
                elif member in self.ledger.waiting:
                    self.ledger.waiting.remove(member)
                    member.state = STOPPED
                    self.ledger.show(member)

    def _interrupt_late(self, crew: MemberSlots) -> None:
        if self.plan.timeout is None:
            return
        now = time.monotonic()
        for slot in crew.at_work():
            assert slot.member is not None
            if now - self.ledger.started[slot.member] > self.plan.timeout:
                self.ledger.interrupt(crew, slot, FAILED)

    def _report_unheard(self, crew: MemberSlots) -> None:
        for slot in crew.at_work():
            waited = self.ledger.since_interrupt(slot)
            pending = [rank for rank in slot.ranks if rank not in slot.replies]
            if not waited or slot.member is None:
                continue
            unheard = self._unheard.setdefault(slot.cell, InterruptTimeout(self.cluster.ask_soon))
            late = self.ledger.why.get(slot.member) == FAILED
            if unheard.due(waited, pending):
                twice = (
                    "the next interrupt" if self._interrupts else "two interrupts of the notebook"
                )
                # Without a timeout only the user may decide to lose the other members' work.
                then = f"in {GRACE_SECONDS - NOTICE_SECONDS:g} s" if late else f"by {twice}"
                self.view.notice(
                    f"member {slot.member} has not ended {NOTICE_SECONDS:g} s after its "
                    f"interrupt: {unheard.whereabouts(pending)}; all ranks will be killed {then}"
                )
            if late and waited >= GRACE_SECONDS:
                self._kill_ranks(crew, slot, unheard.whereabouts(pending))
                return

    def _kill_ranks(self, crew: MemberSlots, stuck: Slot, where: str) -> None:
        assert stuck.member is not None
        size, busy = self.cluster.size, crew.at_work()
        why = (
            f"it exceeded its timeout of {self.plan.timeout:g} s, and {GRACE_SECONDS:g} s after "
            f"the interrupt it was still running on {where}"
        )
        crew.ranks.close("lost", f"member {stuck.member}: {why}, so {ended(size)}")
        self.view.notice(f"member {stuck.member}: {why}, so all {size} ranks were killed")
        self._fail(self.runs[stuck.member], why, why)
        again = self._put_back([slot for slot in busy if slot is not stuck])
        if again:
            self.view.notice(f"{label(again, 'member')}, interrupted by that, will run again")

    def _put_back(self, slots: list[Slot]) -> list[int]:
        """Queues members again unless they were stopped; returns the numbers of those queued."""
        again = []
        # Reversed, because each is put before those that wait.
        for slot in reversed(slots):
            if slot.member is None:
                continue  # its member has ended meanwhile
            member = self.runs[slot.member]
            why = self.ledger.why.pop(member.number, "")
            if why in (STOPPED, STOPPED_EARLY):
                member.state = why
                self.ledger.show(member)
            else:
                self.ledger.again(member)
                again.append(member.number)
        return sorted(again)

    def _handle_death(self, crew: MemberSlots) -> None:
        died = culprits(crew.ranks.roster.ends)
        culprit = died[0].rank if died else None
        # One death ends all ranks. Only the member on the rank that died first counts as the cause.
        busy = crew.at_work()
        blamed = next((slot for slot in busy if culprit in slot.ranks), None)
        if blamed is not None and culprit is not None and blamed.member is not None:
            # Unsent output of the rank, from its log; it may contain the reason of the death.
            text = crew.ranks.roster.unsent_output(culprit)
            if text:
                said = Output(culprit, blamed.cell, (["out", text],), 0, 0, 0)
                self.view.output(blamed.member, said, self.cluster.hellos[culprit].log)
        told = crew.ranks.lose()
        first = told.partition("\n")[0]
        failed = blamed is not None and self._count_death(blamed, told)
        again = self._put_back([slot for slot in busy if not (failed and slot is blamed)])
        others = [number for number in again if blamed is None or number != blamed.member]
        self.view.notice(first)
        if blamed is not None and blamed.member is not None:
            what = "has failed" if failed else "runs again, once"
            self.view.notice(f"it ran member {blamed.member}, which {what}")
        else:
            self._unexplained_deaths += 1
        if others:
            self.view.notice(f"{label(others, 'member')}, interrupted by that, will run again")
        if self._unexplained_deaths > _MOST_UNEXPLAINED_DEATHS:
            raise ClusterLost(
                f"{told}\nThe ranks have died {self._unexplained_deaths} times, "
                "and no member is to blame."
            )

    def _count_death(self, slot: Slot, told: str) -> bool:
        # True if the member has failed by this death.
        if slot.member is None or self.ledger.why.get(slot.member) in (STOPPED, STOPPED_EARLY):
            return False
        member = self.runs[slot.member]
        member.deaths += 1
        if member.deaths < _MOST_DEATHS:
            return False
        first = told.partition("\n")[0]
        self._fail(member, f"its rank died {member.deaths} times: {first}", told)
        return True

    def _fail(self, member: Member, error: str, told: str) -> None:
        member.state, member.error, member.traceback = FAILED, error, told
        self.ledger.keep(member, b"")
        self.ledger.show(member)

    def _raise_outcome(self) -> None:
        if self.ledger.problem is not None:
            raise self.ledger.problem
        if self._interrupts:
            lost = self.cluster.state == "lost"
            why = f"{self.cluster.lost_because}\n" if lost else "interrupted: "
            kept = f" and in {self._store.shown}" if self._store is not None else ""
            raise CellInterrupted(
                f"{why}{self.ledger.counts()}. What has finished is in runs{kept}."
            )
        failed = [member for member in self.runs if member.state == FAILED]
        if failed and len(failed) == len(self.runs):
            first = failed[0]
            message = f"all {label(range(len(failed)), 'member')} failed; the first: {first.error}"
            if len(failed) == 1:
                message = f"the only member failed: {first.error}"
            raise CellFailed(message, f"{message}\n\n{first.traceback}")


_SOURCE = "result = function(*arguments)"
_SHOWN = 3


def map_items(
    cluster: Cluster, function: Any, items: tuple[Iterable[Any], ...], timeout: float | None
) -> list[Any]:
    if not callable(function) or not items:
        raise UsageError(
            f"expected a function and a list of items, found {function!r} and {len(items)} "
            "lists. Type for example: ranks.map(train, [0.1, 0.01])"
        )
    check_timeout(timeout)
    calls = list(zip(*items, strict=False))
    members = [
        Member(number, {"function": function, "arguments": call})
        for number, call in enumerate(calls)
    ]
    # With a named metric, no item is searched for one.
    mapping = _Mapping(
        cluster,
        Runs(members, _SOURCE, ("result", True)),
        EnsemblePlan(_SOURCE, 0, timeout=timeout),
        bar_view(len(members), getattr(function, "__name__", "function")),
    )
    if members:
        mapping.run()
    return mapping.results()


class _Mapping(EnsembleRunner):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._read: dict[int, Any] = {}

    def results(self) -> list[Any]:
        return [self._read.get(member.number) for member in self.runs]

    def _raise_outcome(self) -> None:
        if self.ledger.problem is not None:
            raise self.ledger.problem
        failed = {m.number: m.traceback or m.error for m in self.runs if m.state == FAILED}
        for member in self.runs:
            if member.problem:
                failed[member.number] = f"its result could not be sent: {member.problem}"
            elif member.state == FINISHED:
                try:
                    self._read[member.number] = member.result
                except UsageError as error:
                    failed[member.number] = str(error)
        if self._interrupts:
            lost = self.cluster.state == "lost"
            why = f"{self.cluster.lost_because}\n" if lost else "interrupted: "
            message = f"{why}{self.ledger.counts()}. What has finished is in its .results"
            raise MapInterrupted(message, message, self.results(), failed)
        if failed:
            raise MapFailed(self._headline(failed), self._text(failed), self.results(), failed)

    def _headline(self, failed: dict[int, str]) -> str:
        first = self.runs[min(failed)]
        return (
            f"{len(failed)} of {len(self.runs)} items failed; the first, "
            f"{_named(first)}: {first.error or failed[first.number]}"
        )

    def _text(self, failed: dict[int, str]) -> str:
        parts = [self._headline(failed)]
        for number in sorted(failed)[:_SHOWN]:
            parts.append(f"{_named(self.runs[number])}\n{failed[number]}")
        if len(failed) > _SHOWN:
            others = ", ".join(str(number) for number in sorted(failed)[_SHOWN:])
            parts.append(f"and items {others}")
        parts.append(
            "The error's .failed has each item's report, .results what the others returned."
        )
        return "\n\n".join(parts)


def _named(member: Member) -> str:
    return f"item {member.number} ({', '.join(map(short, member.values['arguments']))})"
