"""The cells of one cluster, one after the other, and what happens to its ranks between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from operator import attrgetter
from typing import Any

import cloudpickle

from allranks import own_files
from allranks.cluster.calls import CapturedOutput, Turns
from allranks.cluster.cell_run import CellRun, HiddenView, View
from allranks.cluster.connection import Connection
from allranks.cluster.epochs import Epoch
from allranks.cluster.failures import (
    NEXT_CELL,
    CellRecord,
    ProcessExit,
    RankStatus,
    plain,
    read_statuses,
    refused_by_all,
)
from allranks.cluster.features import NotebookHooks
from allranks.cluster.healing import HEALING, AfterCells, RecoveryDriver
from allranks.cluster.kept_folders import KeptFolders
from allranks.cluster.log_folder import refused_log_folder
from allranks.cluster.members import MemberSlots
from allranks.cluster.options import check_source, check_timeout
from allranks.cluster.recovered import listed, text_of, text_of_kept
from allranks.cluster.recovery import Recovery
from allranks.cluster.renewal import Renewal
from allranks.cluster.sessions import AttachedHostAgent
from allranks.cluster.sockets import Answers, InterruptRequested
from allranks.cluster.state import Replaced
from allranks.cluster.variables import OnRank
from allranks.errors import AllranksError, CellFailed, ClusterLost, UsageError
from allranks.records import requests
from allranks.records.ranks import among, label
from allranks.records.wire import Answer, Interrupt, Output, Record, Reply, Result, RunCell
from allranks.widgets.dashboard.view import text_view

_rank_of = attrgetter("rank")
_keep_here = OnRank("allranks.collectives.ops.keeping", "keep")
#: The ranks share what is shown of a cell; the rest is in their logs.
_SCREEN_NBYTES, _LEAST_SCREEN_NBYTES = 128 * 1024, 4096
#: How long the next cell waits for one that was interrupted and left.
_DETACHED_SECONDS = 10.0
#: After this time the ranks are asked whether they are still in it: a reply may be lost.
_REPLY_SECONDS = 1.0


class Cells:
    """Numbers the cells, sends them, and passes on the records of the one that runs.

    After a cell that left its communicator unusable, the ranks move to a fresh one before the next
    cell. Output that comes after the end of its cell is shown with the next one. Ranks that die are
    replaced, and then have again what they had kept. ``connect`` makes the connection to the ranks.
    """

    def __init__(
        self, size: int, connect: Callable[..., Connection], show_output: bool = True
    ) -> None:
        self.size = size
        self.show_output = show_output
        self.hooks = NotebookHooks()
        """Those of the features; a notebook's clusters share one object."""
        self.turns = Turns(lambda: self._caller if self.busy else 0, self._refuse_call)
        self.count = 0
        """How many cells these ranks have been sent, by any notebook."""
        self.failed_first: int | None = None
        """The rank that was the first to fail in the last cell that failed."""
        self.healing = "on"
        """When ranks that die are replaced: ``on``, ``ask`` for it, or ``off``."""
        self.goes_on = 0
        """The commit that a training which a death has ended can go on from; else 0."""
        self.keeping: AfterCells | None = None
        """What the ranks keep when a cell has ended."""
        self.kept: KeptFolders | None = None
        """Where they keep it."""
        self.news: list[str] = []
        """Lines about events between cells, which the next cell shows."""
        self._connect = connect
        self._connection: Connection | None = None
        self._late: list[Output] = []
        self._running: CellRun | None = None
        #: A cell whose ranks may still be in it, after an exception has ended the wait for it.
        self._abandoned: CellRun | None = None
        self._crew: MemberSlots | None = None
        #: The thread that waits for the cell or the ensemble.
        self._caller = 0
        self._epoch = Epoch()
        #: Ranks that have saved their variables for their replacement.
        self._saved = set[int]()

    # The ranks.

    @property
    def connection(self) -> Connection:
        """The connection to the ranks."""
        if self._connection is None:
            raise ClusterLost(
                "the cluster has not been started. Call its method start() first, or write: "
                "with Cluster(n=2) as cluster:"
            )
        return self._connection

    @property
    def state(self) -> str:
        """The state of the ranks: see `Cluster`."""
        return self._connection.state if self._connection is not None else "new"

    @property
    def can_heal(self) -> bool:
        """Whether ranks that die can be replaced, where and as these run."""
        return self.connection.can_heal

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks that have died, and can be replaced."""
        return tuple(sorted(self.connection.roster.dead))

    def connect(self, taken: AttachedHostAgent | None = None) -> Connection:
        """Makes a connection to new ranks, or to those that another notebook has left."""
        self._connection = self._connect(
            take_record=self._take,
            on_deaths=self._take_deaths,
            spares_others=self._spares_others,
            hooks=self.hooks,
            kept_dirs=self.kept.paths if self.kept is not None else (),
            taken=taken,
        )
        return self._connection

    def start(
        self,
        several_hosts: bool,
        tell: Callable[[str], None],
        progress: Callable[[int, int, str], None],
    ) -> None:
        """Starts the ranks: see `Connection.start`."""
        self.failed_first = None
        # The relays of several hosts have removed their folders.
        if self.kept is not None and (several_hosts or not self.kept.have_files):
            self.forget_kept()
        fresh = self.kept is None
        if fresh:
            self.kept = KeptFolders(on_several_hosts=several_hosts)
        connection = self.connect()
        self._begin(Epoch())
        try:
            connection.start(tell, progress)
        except BaseException:
            if fresh:
                self.forget_kept()
            raise
        assert self.kept is not None
        self.kept.hold()
        self.news += filter(None, [refused_log_folder(), *connection.notices])
        # Folders of a lost cluster: the new ranks begin with what its ranks had kept.
        if not fresh:
            self.news += filter(None, [text_of_kept(self.restore(range(self.size), tell))])

    def stop(self) -> None:
        """Ends the ranks, and deletes what they have kept."""
        if self.state == "running":
            self.connection.close()
        self.forget_kept()

    def forget_kept(self) -> None:
        if self.kept is not None:
            self.kept.close()
            self.kept = None

    def attached(self, count: int, epoch: Epoch, saved: set[int]) -> None:
        """Handles that another notebook has sent the ranks ``count`` cells."""
        self.count, self._saved = count, saved
        self._begin(epoch)

    def _begin(self, epoch: Epoch) -> None:
        self._epoch, self._abandoned = epoch, None
        self._late.clear()

    def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        *payloads: bytes,
        ranks: Iterable[int] | None = None,
    ) -> Answers:
        """Returns the ranks' answers to a request of ``allranks.records.requests``."""
        self.catch_up()
        return self.connection.ask(name, arguments, *payloads, ranks=among(ranks, self.size))

    def statuses(self) -> list[RankStatus]:
        """Returns the state of every rank, and its current line."""
        self._look()
        self._check_up()
        every, ranks = range(self.size), self.connection
        answers = ranks.ask(requests.STATUS, {}, ranks=every, seconds=1.0, strict=False)
        found = {rank: content for rank, (content, _) in answers.items()}
        return read_statuses(ranks.roster.hellos, found, ranks.roster.dead)

    def log_end(self, rank: int, nbytes: int) -> str:
        """Returns the last bytes of a rank's log, which may lie on another host, as text."""
        path = self.connection.roster.hellos[rank].log
        try:
            return own_files.end_of(path, nbytes)
        except FileNotFoundError:  # on another host
            asked = {"path": path, "nbytes": nbytes}
            content, _ = self.ask(requests.LOG, asked, ranks=(rank,))[rank]
            return str(content["text"])

    def ask_soon(
        self,
        name: str,
        arguments: dict[str, Any],
        deliver: Callable[[Answer], None],
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Makes a request of ranks while a cell runs; answers are delivered as they come."""
        if self.state == "running":
            chosen = range(self.size) if ranks is None else ranks
            self.connection.ask_soon(name, arguments, deliver, chosen)

    # Before a cell.

    @property
    def busy(self) -> bool:
        """Whether a cell, a function or an ensemble runs."""
        return self._running is not None or self._crew is not None

    @property
    def _occupied(self) -> bool:
        # Ranks may still be in a cell that was interrupted.
        return self._abandoned is not None and not self._abandoned.settled()

    def _refuse_call(self) -> None:
        """Raises an error if the thread of the running call makes another one."""
        self.catch_up()
        self.check_idle()

    def check_idle(self) -> None:
        """Raises UsageError while another cell runs: an awaited cell lets its event loop run."""
        if self._running is not None:
            if not self._running.settled():
                raise UsageError(
                    "expected idle ranks, found them running a cell. Wait for its end, or "
                    "interrupt it: cluster.interrupt()"
                )
            # An interrupt came before the wait for the cell began, so nothing has ended it.
            self._end(self._running)
        if self._crew is not None:
            raise UsageError(
                "expected idle ranks, found them running an ensemble. Wait for its end, or type: "
                "runs.stop()"
            )

    def check_unoccupied(self) -> None:
        """Raises UsageError unless the ranks can be left to another notebook."""
        self.catch_up()
        self.check_idle()
        if self._occupied:
            raise UsageError("expected idle ranks, found one in a cell that was interrupted")

    @property
    def _heals_by_itself(self) -> bool:
        waiting = self.state == "running" and self.healing == "on"
        return waiting and not self.connection.roster.ends and bool(self.dead)

    def is_up(self, tell: Callable[[str], None] | None = None) -> bool:
        """Handles events since the last cell; returns whether the ranks are up. With automatic
        healing it replaces dead ranks.
        """
        self._look()
        if self._heals_by_itself and not self.busy and not self._occupied:
            tell = tell or self.news.append
            tell(self.connection.words.deaths_text())
            with suppress(ClusterLost):  # then the state is lost, with the reason
                tell(self.heal(tell))
        return self.state == "running"

    def _look(self) -> None:
        """Handles events since the last cell."""
        if self.state == "running":
            self.connection.step(0)
            if self.connection.roster.ends and not self.busy:
                self.connection.lose()

    def catch_up(self) -> None:
        """Handles events since the last cell; raises ClusterLost if the ranks are not up."""
        self.is_up()
        self._check_up()

    def _check_up(self) -> None:
        """Raises ClusterLost if the ranks are not up."""
        why = self.connection.lost_because  # raises where nothing was ever started
        if self.state != "running":
            raise ClusterLost(
                why.replace(NEXT_CELL, "To start them again, type: .start()")
                or "the ranks are stopped. Type: %distributed start   or, of a Cluster: .start()"
            )

    def after_clients(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        """Returns ranks, once they have answered the requests of ipyparallel's clients."""
        self.catch_up()
        chosen = among(ranks, self.size)
        self.connection.await_clients(chosen, lambda line: None)
        return chosen

    # A cell.

    def begin(
        self,
        text: str,
        *,
        call: bytes | None = None,
        name: str = "cell",
        number: int | None = None,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        view: View | None = None,
        want_value: bool = False,
        checked: bool = False,
        interrupt_kills: bool = False,
    ) -> CellRun:
        """Sends a cell to all of its ranks or to none, and returns it in flight.

        ``call`` is a pickled ``(function, args, kwargs)`` instead of source; ``number`` is the
        notebook's number of the cell, for tracebacks. Raises before anything is sent. If the caller
        has ``checked`` source, options and ranks, this is not repeated. With ``interrupt_kills`` an
        interrupt ends the ranks that are in the cell.
        """
        with self.turns.taken():
            if not checked:
                if call is None:
                    check_source(text)
                self.catch_up()
                check_timeout(timeout)
            self.check_idle()
            chosen, ranks_of_cell = among(ranks, self.size), self.connection
            if view is None:
                log_dir = ranks_of_cell.log_dir
                view = text_view(chosen, log_dir) if self.show_output else CapturedOutput()
            self._prepare(chosen, view)
            for line in self.news:
                view.notice(line)
            self.news.clear()
            self.goes_on = 0
            self.count += 1
            cell = RunCell(
                cell=self.count,
                source=text,
                number=number or self.count,
                ranks=chosen if len(chosen) < self.size else (),
                label=name,
                want_value=want_value,
                limit_nbytes=max(_LEAST_SCREEN_NBYTES, _SCREEN_NBYTES // len(chosen)),
            )
            ranks_of_cell.words.name_cell(text, cell.number)
            run = CellRun(self.count, chosen, ranks_of_cell, view, timeout, interrupt_kills)
            self.send(cell, run, *([call] if call else []))
            return run

    def _prepare(self, chosen: tuple[int, ...], view: View) -> None:
        # Ranks may die while they leave the cell before: then choose again.
        roster = self.connection.roster

        def tell(line: str) -> None:
            view.notice(line)
            view.refresh()

        while True:
            gone = set(chosen) & set(roster.dead)
            if gone and not self._heals_by_itself:
                told = self.connection.words.deaths_text()
                raise UsageError(
                    f"expected all ranks to be alive, found that {told}. "
                    f"Type: %distributed heal   or leave {label(gone)} out: -r"
                )
            self.show_late(view)
            self.connection.await_clients(chosen, tell)
            self._renew(tell)
            if not set(chosen) & set(roster.dead):
                return
            self.catch_up()

    def send(self, cell: Record, run: CellRun, *payloads: bytes) -> None:
        """Sends a cell, which runs from now on."""
        self.note_running(run)
        try:
            self.connection.send(run.ranks, cell, *payloads)
        except BaseException:
            self._abandon(run)
            raise

    def note_running(self, run: CellRun) -> None:
        self._running, self._caller = run, threading.get_ident()

    def hidden_view(self) -> HiddenView:
        """Returns a view that shows nothing; the next cell shows what ranks print meanwhile."""
        return HiddenView(self._late.append)

    def show_late(self, view: View) -> None:
        """Shows what ranks have written since their last cell."""
        if isinstance(view, HiddenView):
            return
        # First: what cannot be shown must not end each later cell too.
        shown, self._late = sorted(self._late, key=_rank_of), []
        for rank, batches in groupby(shown, key=_rank_of):
            notice: list[Any] = ["notice", "written after its cell had ended:"]
            late = [notice, *(entry for batch in batches for entry in batch.entries)]
            view.output(Output(rank, 0, tuple(late), 0, 0, 0))

    def wait(self, run: CellRun) -> CellRun:
        """Shows a cell's output until all its ranks have left it; raises the cell's failure."""
        with self._waiting(run):
            while not run.settled():
                run.step(run.poll_seconds)
        return self._conclude(run)

    async def wait_awaited(self, run: CellRun) -> CellRun:
        """Waits like `wait`, and lets the event loop run: the kernel answers widgets there."""
        with self._waiting(run), self.connection.inbox.waking() as next_event:
            while not run.settled():
                await next_event(run.poll_seconds)
                run.step(0)
        return self._conclude(run)

    @contextmanager
    def _waiting(self, run: CellRun) -> Iterator[None]:
        """Within, interrupts go to the cell; an exception abandons it."""
        try:
            with self.connection.inbox.hearing_interrupts():
                yield
        except BaseException:
            self._abandon(run)
            raise

    def _abandon(self, run: CellRun) -> None:
        """Interrupts a cell after an exception has ended the wait for it."""
        self._running, self._abandoned = None, run
        self.hooks.set_cell(None)
        if not self.connection.closed:
            run.interrupt()

    def _conclude(self, run: CellRun) -> CellRun:
        try:
            run.end()
        finally:
            self._end(run)
            if run.failed_first is not None:
                self.failed_first = run.failed_first
            # Before the failure is raised, because the next cell needs all ranks.
            try:
                self._heal_after(run)
                self._keep_after(run)
            finally:
                run.view.finish()
                if self.state == "running":
                    if self.connection.stays or self.connection.shared:
                        self._note_seen(run.cell, *range(self.size))
                    self.hooks.cell_finished()
        failed = self.hooks.take_failure()
        try:
            run.check()
        except CellFailed as error:
            if failed is not None:
                error.add_note(str(failed))
            raise
        if failed is not None:
            raise failed
        return run

    def _end(self, run: CellRun) -> None:
        self._running = None
        self._saved |= run.ending.keys()
        self._epoch.note(run.state.replies.values())

    def _keep_after(self, run: CellRun) -> None:
        keeping, view = self.keeping, run.view
        if keeping is None or isinstance(view, HiddenView) or self.state != "running":
            return
        if not run.ended_well or not keeping.due():
            return
        call = cloudpickle.dumps((_keep_here, (keeping.names,), {}))
        try:
            hidden = HiddenView(self._late.append, view.notice)
            self.wait(self.begin("", call=call, name="keep", view=hidden))
        except AllranksError as error:
            # Its line is ours, not one of the user's.
            reports = error.reports if isinstance(error, CellFailed) else ()
            said = next((report.message for report in reports if not report.waiting), error)
            if refused_by_all(reports, self.size):
                # They have compared the reasons, so no message is on its way. A new epoch would end
                # the communicators of the user's cells.
                self._epoch.dirty = False
            view.notice(f"{listed(keeping.names)} not kept: {said}")

    def interrupt(self) -> bool:
        """Interrupts what runs: see `Cluster.interrupt`."""
        awaits = self._connection is not None and self._connection.awaits_clients
        if self._crew is not None or awaits:
            self.connection.inbox.put(InterruptRequested())
        elif self._running is not None:
            self._running.press()
        return self.busy or awaits

    @property
    def have_left(self) -> dict[int, str]:
        """The ranks that have left the running cell, with the status of their replies."""
        replies = {} if self._running is None else self._running.state.replies
        return {rank: reply.status for rank, reply in replies.items()}

    def _take(self, record: CellRecord, payloads: list[bytes]) -> None:
        running, left = self._running, self._abandoned
        if self._crew is not None and self._crew.take(record, payloads):
            return
        if running is not None and record.cell == running.cell:
            if not isinstance(record, Result):
                running.take(record, payloads)
        elif isinstance(record, Output) and record.entries:
            self._late.append(record)
            if running is not None:
                # The rank had not begun this cell yet: output of the cell comes later.
                self.show_late(running.view)
        elif isinstance(record, Reply) and left is not None and record.cell == left.cell:
            left.state.apply(record)

    def _take_deaths(self, ends: Sequence[ProcessExit]) -> None:
        for run in (self._running, self._abandoned):
            if run is not None:
                run.died(ends)

    # Between cells.

    def await_abandoned(self) -> None:
        """Waits until all ranks have left an interrupted cell; raises UsageError if one stays."""
        left = self._abandoned
        if left is None:
            return
        deadline = time.monotonic() + _DETACHED_SECONDS
        self.connection.wait_until(left.settled, _REPLY_SECONDS)
        while not left.settled() and (busy := self._not_idle(left.pending)):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"expected idle ranks, found {label(busy)} still in a cell that "
                    "was interrupted. Wait for its end, or type: %distributed restart"
                )
            self.connection.wait_until(left.settled, _REPLY_SECONDS)
        # The reply of a rank was lost, and with it how the rank has left the cell.
        self._epoch.note(left.state.replies.values())
        self._epoch.dirty = self._epoch.dirty or bool(left.pending)
        self._abandoned = None

    def end_members(self, members: Mapping[int, int]) -> None:
        """Interrupts the members of an ensemble whose notebook has ended: cells, by rank."""
        for rank, cell in members.items():
            self.connection.send((rank,), Interrupt(cell))
            self._note_seen(cell, rank)
        deadline = time.monotonic() + _DETACHED_SECONDS
        while (busy := self._not_idle(members)) and time.monotonic() < deadline:
            self.connection.wait_until(lambda: False, _REPLY_SECONDS / 4)
        if busy:
            raise UsageError(
                f"expected idle ranks, found {label(busy)} still in a member of an ensemble that "
                "was interrupted. Try again: %distributed attach   or type: %distributed restart"
            )
        self._epoch.dirty = True
        for rank, cell in members.items():
            self._note_seen(cell, rank)
        self._ask_all(requests.MEMBERS, {"ranks_each": 0})

    def _note_seen(self, cell: int, *ranks: int) -> None:
        # A notebook that attaches later then does not show the cell again.
        self.connection.ask_soon(requests.SEEN, {"cell": cell}, lambda _: None, ranks)

    def _not_idle(self, ranks: Collection[int]) -> list[int]:
        told = self.connection.ask(requests.STATUS, {}, ranks=ranks, seconds=1.0, strict=False)
        idle = {rank for rank, (content, _) in told.items() if content["state"] == "idle"}
        return [rank for rank in ranks if rank not in idle]

    def _ask_all(self, name: str, arguments: dict[str, Any]) -> dict[int, dict[str, Any]]:
        answers = self.connection.ask(name, arguments, ranks=range(self.size))
        return {rank: content for rank, (content, _) in answers.items()}

    def _renew(self, tell: Callable[[str], None]) -> None:
        """Moves all ranks to a fresh communicator if they need one. Ranks may die meanwhile.

        Raises KeyboardInterrupt if the user has interrupted that.
        """
        self.await_abandoned()
        ranks, epoch = self.connection, self._epoch
        epoch.follow(ranks.epoch)
        epoch.dirty = epoch.dirty or ranks.ended_epoch >= epoch.number
        dead = ranks.roster.dead
        # A new communicator needs all ranks. The living ones can run cells without collectives.
        if epoch.dirty and not dead:
            epoch.number += 1
            renewal = Renewal(ranks, tell)
            try:
                renewal.make(epoch.number)
            except UsageError:
                if renewal.pressed:
                    raise KeyboardInterrupt from None
                if not dead:
                    raise
            if ranks.roster.ends:
                raise ClusterLost(ranks.loss_text())
            if not dead:  # else the new ranks begin an epoch with the others
                epoch.begin(epoch.number)
            if renewal.pressed:
                raise KeyboardInterrupt

    @contextmanager
    def crew(self, ranks_each: int) -> Iterator[MemberSlots]:
        """Within, members run side by side, each on ``ranks_each`` ranks in a row."""
        self.catch_up()
        self.hooks.ensemble_started()
        self.check_idle()
        self._renew(self.news.append)
        told = self._ask_all(requests.MEMBERS, {"ranks_each": ranks_each})
        # Members begin again on fresh ranks, from what the store has: no death is healed meanwhile.
        crew = self._crew = MemberSlots(self.connection, self.count, ranks_each)
        self._caller = threading.get_ident()
        for slot in crew.slots:
            slot.epoch.begin(max(told[rank]["epoch"] for rank in slot.ranks))
            slot.epoch.dirty = any(told[rank]["dirty"] for rank in slot.ranks)
        try:
            yield crew
        finally:
            self.count, self._crew = crew.cells, None
            if not self.connection.closed:
                every = range(self.size)
                end = {"ranks_each": 0}
                self.connection.ask_soon(requests.MEMBERS, end, lambda _: None, every)

    # Ranks that have died.

    def heal_when(self, healing: str) -> None:
        """Sets ``healing``: see `Cluster.heal_when`."""
        if healing not in HEALING:
            raise UsageError(
                f"expected {', '.join(HEALING)}, found {healing!r}. Type: %distributed heal on"
            )
        self.healing = healing

    def _spares_others(self) -> bool:
        # Members of an ensemble begin again on fresh ranks, from what the store has.
        return self.healing != "off" and self._crew is None

    def heal(self, tell: Callable[[str], None] | None = None) -> str:
        """Replaces ranks that have died: see `Cluster.heal`."""
        self.check_idle()
        if not self.dead:
            raise UsageError("expected ranks that have died, found all ranks alive")
        said, pressed = self._replace(tell or self.news.append)
        if pressed:
            # The ranks are complete again, and the user still expects an interrupt.
            self.news.append(said)
            raise KeyboardInterrupt
        return said

    def _heal_after(self, run: CellRun) -> None:
        if not self._heals_by_itself:
            return

        def tell(text: str) -> None:
            run.view.notice(text)
            run.view.refresh()

        try:
            dead = self.dead
            said, _ = self._replace(tell)  # an interrupt concerns the cell, which has ended
        except ClusterLost:
            # The cell's own failure would be hidden by the loss: show it as text.
            try:
                run.check()
            except CellFailed as failed:
                run.view.notice(plain(failed.text))
            raise
        for rank in set(dead).intersection(run.ranks):
            run.apply(Replaced(rank))
        run.view.notice(said)

    def _replace(self, tell: Callable[[str], None]) -> tuple[str, bool]:
        """Replaces dead ranks by new processes, in a fresh epoch; raises ClusterLost after it has
        killed all ranks. Returns a line about it, and whether an interrupt came meanwhile.
        """
        began = time.monotonic()
        self.await_abandoned()
        self._epoch.follow(self.connection.epoch)
        done = self._new_recovery()
        self._run(done, tell)
        self._epoch.begin(done.epoch)
        return text_of(done, time.monotonic() - began), done.presses > 0

    def restore(self, new: Collection[int], tell: Callable[[str], None]) -> Recovery:
        """New ranks take back what was kept in their places."""
        done = self._new_recovery(replaces=False)
        self._run(done, tell, lambda: done.ranks_are_new(new))
        return done

    def continue_recovery(self, record: Mapping[str, Any], tell: Callable[[str], None]) -> None:
        """Starts all ranks again, because another notebook has ended while it did that."""
        began = time.monotonic()
        for press in self.connection.step(0):  # hosts may have been lost: it begins with these
            self.connection.inbox.put(press)
        done = Recovery.continued(record, self.connection.places())
        self._run(done, tell, done.restarted)
        self._epoch.begin(done.epoch)
        tell(text_of(done, time.monotonic() - began))
        if done.presses:
            raise KeyboardInterrupt

    def _new_recovery(self, replaces: bool = True) -> Recovery:
        ranks = self.connection
        hosts = {rank: hello.host for rank, hello in sorted(ranks.roster.hellos.items())}
        return Recovery(hosts, self._epoch.number, self._saved, ranks.can_relocate, replaces)

    def _run(
        self,
        recovery: Recovery,
        tell: Callable[[str], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        RecoveryDriver(self.connection, recovery, tell, self.count).run(begin)
        self._saved, self.goes_on = recovery.own, recovery.goes_on
