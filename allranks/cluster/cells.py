"""The cells of one cluster, one after the other, and what happens to its ranks between them."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from allranks import own_files
from allranks.cluster.calls import Turns
from allranks.cluster.cell_run import CapturedOutput, CellRun, HiddenView, View, show_late
from allranks.cluster.connection import Connection
from allranks.cluster.failures import NEXT_CELL, RankStatus, read_statuses
from allranks.cluster.features import NotebookHooks
from allranks.cluster.kept_folders import KeptFolders
from allranks.cluster.log_folder import refused_log_folder
from allranks.cluster.options import check_source, check_timeout
from allranks.cluster.renewal import renew
from allranks.cluster.sockets import Answers
from allranks.cluster.state import ClusterState
from allranks.errors import CellFailed, ClusterLost, UsageError
from allranks.records import requests
from allranks.records.ranks import among, label
from allranks.records.wire import Answer, Record, RunCell
from allranks.widgets.dashboard.view import text_view

AnyConnection = TypeVar("AnyConnection", bound=Connection)

#: The sources of at most so many cells are kept whole.
_SOURCES = 100
#: The ranks share what is shown of a cell; the rest is in their logs.
_SCREEN_NBYTES, _LEAST_SCREEN_NBYTES = 128 * 1024, 4096


_START = "%distributed start   or, of a Cluster: .start()"
_FORKED = (
    "the ranks are those of the process that has forked this one: only that one can use them. For "
    "ranks of this process, type: .start()"
)
#: Those that this process has made: a process that it forks must not end the ranks.
_made = weakref.WeakSet["Cells"]()


def _tell_now(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _in_forked_process() -> None:
    for cells in _made:
        cells.leave_to_parent()


os.register_at_fork(after_in_child=_in_forked_process)


class Cells:
    """Numbers the cells, sends them, and passes on the records of the one that runs.

    After a cell that left its communicator unusable, the ranks move to a fresh one before the next
    cell. Output that comes after the end of its cell is shown with the next one. Ranks that die are
    replaced, and then have again what they had kept. ``options`` are those of `Connection`.
    """

    def __init__(self, size: int, options: Mapping[str, Any]) -> None:
        self.size = size
        self.roster = ClusterState(size)
        """The state of the ranks."""
        self.hooks = NotebookHooks()
        """Those of the features; a notebook's clusters share one object."""
        self.turns = Turns(self.roster, self._refuse_call)
        self.failed_first: int | None = None
        """The rank that was the first to fail in the last cell that failed."""
        self.kept: KeptFolders | None = None
        """Where the ranks keep variables."""
        self.show_output = True
        """Whether cells without a view show what the ranks print."""
        self.expects_clients = True
        """Whether the controller of clients starts with the ranks, or only when it is needed."""
        #: Whether these ranks begin without anything kept.
        self._fresh = True
        self.news: list[str] = []
        """Lines about events between cells, which the next cell shows."""
        self._options = options
        self._connection: Connection | None = None
        _made.add(self)

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

    def connect(self, kind: Callable[..., AnyConnection]) -> AnyConnection:
        """Makes a connection of this kind, and has it from now on."""
        kept_dirs = self.kept.paths if self.kept is not None else ()
        self._connection = made = kind(
            self.roster,
            hooks=self.hooks,
            kept_dirs=kept_dirs,
            turns=self.turns,
            **self._options,
        )
        self.turns.wake()
        return made

    def launch(self, several_hosts: bool) -> None:
        """Begins to start the ranks: see `Connection.launch`."""
        self.failed_first = None
        # The relays of several hosts have removed their folders.
        if self.kept is not None and (several_hosts or not self.kept.have_files):
            self.forget_kept()
        self._fresh = self.kept is None
        if self._fresh:
            self.kept = KeptFolders(on_several_hosts=several_hosts)
        connection = self.connect(Connection)
        connection.expects_clients &= self.expects_clients
        try:
            connection.launch()
        except BaseException:
            self._forget_fresh()
            raise

    def start(self, tell: Callable[[str], None], progress: Callable[[int, int, str], None]) -> None:
        """Waits for the ranks after `launch`: see `Connection.start`."""
        connection = self.connection
        try:
            connection.start(tell, progress)
        except BaseException:
            self._forget_fresh()
            raise
        assert self.kept is not None
        self.kept.hold()
        self.news += filter(None, [refused_log_folder(), *connection.notices])
        # Folders of a lost cluster: the new ranks begin with what its ranks had kept.
        if not self._fresh:
            said = self.hooks.command("restore_ranks", connection, tell)
            self.news += filter(None, [said])

    def stop(self) -> None:
        """Ends the ranks, and deletes what they have kept. No later cell could show what they have
        written since their last one: it is shown now.
        """
        ends = self.roster.phase in ("starting", "running")
        if ends:
            self.connection.close()
        self.forget_kept()
        if ends and self.connection.late and self.show_output:
            view = text_view(range(self.size), self.connection.log_dir)
            self.show_late(view)
            view.finish()

    def leave_to_parent(self) -> None:
        """This process is forked: its parent has the ranks, and ends them."""
        self.turns.renew()
        self.roster.concludes = 0
        if self._connection is not None:
            self._connection.leave_to_parent()
        if self.kept is not None:
            self.kept.let_go()
            self.kept = None
        if self.roster.phase in ("starting", "running"):
            self.roster.set_phase("stopped", _FORKED)

    def _forget_fresh(self) -> None:
        if self._fresh:
            self.forget_kept()

    def forget_kept(self) -> None:
        if self.kept is not None:
            self.kept.close()
            self.kept = None

    def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        *payloads: bytes,
        ranks: Iterable[int] | None = None,
        after_clients: bool = False,
    ) -> Answers:
        """Returns the ranks' answers to a request of ``allranks.records.requests``; if wanted, once
        they have answered the requests of clients.
        """
        self.catch_up()
        chosen = among(ranks, self.size)
        if after_clients:
            self.connection.await_clients(chosen, _tell_now)
        return self.connection.ask(name, arguments, *payloads, ranks=chosen)

    def statuses(self) -> list[RankStatus]:
        """Returns the state of every rank, and its current line."""
        self._look()
        self._check_up()
        every, ranks = range(self.size), self.connection
        answers = ranks.ask(requests.STATUS, {}, ranks=every, seconds=1.0, strict=False)
        found = {rank: content for rank, (content, _) in answers.items()}
        return read_statuses(dict(sorted(self.roster.hellos.items())), found, self.roster.dead)

    def log_end(self, rank: int, nbytes: int) -> str:
        """Returns the last bytes of a rank's log, which may lie on another host, as text."""
        path = self.roster.hellos[rank].log
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
        if self.roster.phase == "running":
            chosen = range(self.size) if ranks is None else ranks
            self.connection.ask_soon(name, arguments, deliver, chosen)

    # Before a cell.

    def _refuse_call(self) -> None:
        """Raises an error if the thread of the running call makes another one."""
        self.catch_up()
        self.check_idle()

    def check_idle(self) -> None:
        """Raises UsageError while another cell runs: an awaited cell lets its event loop run."""
        roster = self.roster
        if roster.running is not None:
            if not self.connection.is_left(roster.running):
                raise UsageError(
                    "expected idle ranks, found them running a cell. Wait for its end, or "
                    "interrupt it: ranks.interrupt()   (in a program: cluster.interrupt())"
                )
            # An interrupt came before the wait for the cell began, so nothing has ended it.
            self.connection.end_cell()
            self.turns.wake()
        if roster.reserved:
            raise UsageError(f"expected idle ranks, found them {roster.reserved}")
        if not self._concludes_alone:
            raise UsageError(
                "expected idle ranks, found them at the end of a cell of another thread. Wait a "
                "moment, and try again"
            )

    @property
    def _is_free(self) -> bool:
        """Whether no cell runs, and no other thread deals with the end of one."""
        return not self.roster.busy and self._concludes_alone

    @property
    def _concludes_alone(self) -> bool:
        return self.roster.concludes in (0, threading.get_ident())

    @property
    def occupied(self) -> bool:
        """Whether ranks may be in a cell, also in one that was interrupted."""
        cell = self.roster.cell
        return cell is not None and not self.connection.is_left(cell)

    def is_up(self, tell: Callable[[str], None] | None = None) -> bool:
        """Handles events since the last cell, and replaces dead ranks unless the user has to ask
        for it; returns whether the ranks are up.
        """
        self._look()
        if self._may_replace() and not self.occupied:
            with self.turns.taken_if_free() as free:
                # Else a call of another thread begins, and replaces them: two would do it at once.
                if free and self._may_replace():
                    tell = tell or self.news.append
                    tell(self.connection.words.deaths_text())
                    with suppress(ClusterLost):  # then the state is lost, with the reason
                        tell(self.replace_dead(tell))
        return self.roster.phase == "running"

    def _may_replace(self) -> bool:
        return self.roster.replaces_now and self._is_free

    def _look(self) -> None:
        """Handles events since the last cell."""
        if self.roster.phase == "running":
            self.connection.step(0)
            if self.roster.ends and self._is_free:
                self.connection.lose()

    def catch_up(self) -> None:
        """Handles events since the last cell; raises ClusterLost if the ranks are not up."""
        self.is_up()
        self._check_up()

    def _check_up(self) -> None:
        """Raises ClusterLost if the ranks are not up."""
        if self.connection.roster.phase != "running":
            why = self.roster.lost_because
            raise ClusterLost(
                why.replace(NEXT_CELL, f"To start them again, type: {_START}  ")
                or f"the ranks are {self.roster.phase}. Type: {_START}"
            )

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
            chosen, connection = among(ranks, self.size), self.connection
            if view is None:
                shown = self.show_output
                view = text_view(chosen, connection.log_dir) if shown else CapturedOutput()
            self._prepare(chosen, view)
            for line in self.news:
                view.notice(line)
            self.news.clear()
            self.roster.goes_on = 0
            cell = RunCell(
                cell=self.roster.cells + 1,
                source=text,
                number=number or self.roster.cells + 1,
                ranks=chosen if len(chosen) < self.size else (),
                label=name,
                want_value=want_value,
                limit_nbytes=max(_LEAST_SCREEN_NBYTES, _SCREEN_NBYTES // len(chosen)),
            )
            connection.words.numbers[text] = cell.number
            if len(connection.words.numbers) > _SOURCES:
                connection.words.name_cells()
            try:
                run = CellRun(cell.cell, chosen, connection, view, timeout, interrupt_kills)
                if self.roster.dead:
                    connection.note_deaths(chosen)
            except BaseException:
                connection.end_cell()  # it was not sent
                raise
            self.roster.sent = cell, time.monotonic()
            self.send(cell, run, *([call] if call else []))
            return run

    def _prepare(self, chosen: tuple[int, ...], view: View) -> None:
        # Ranks may die while they leave the cell before: then choose again.
        roster, connection = self.roster, self.connection

        def tell(line: str) -> None:
            self.show_late(view)
            view.notice(line)
            view.refresh()

        while True:
            gone = set(chosen) & set(roster.dead)
            if gone and not roster.replaces_now:
                told = connection.words.deaths_text()
                raise UsageError(
                    f"expected all ranks to be alive, found that {told}. "
                    f"Type: {self.hooks.replaces_ranks}   or leave {label(gone)} out: -r"
                )
            connection.await_clients(chosen, tell)
            if roster.unsettled:
                renew(connection, tell)
            # Also a rank that is not chosen: the cell shows no death from before it.
            if not (roster.replaces_now or set(chosen) & set(roster.dead)):
                break
            self.catch_up()
        # Not earlier: the next cell shows it if this one does not begin.
        self.show_late(view)

    def send(self, cell: Record, run: CellRun, *payloads: bytes) -> None:
        """Sends a cell, which runs from now on."""
        try:
            self.connection.send(run.ranks, cell, *payloads)
        except BaseException:
            self._abandon(run)
            raise

    def hidden_view(self) -> HiddenView:
        """Returns a view that shows nothing; the next cell shows what ranks print meanwhile."""
        return HiddenView(self.connection.late.append)

    def show_late(self, view: View) -> None:
        """Shows what ranks have written since their last cell."""
        show_late(self.connection.late, view)

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
        # Another thread may have begun it.
        self.roster.thread = threading.get_ident()
        try:
            with self.connection.inbox.hearing_interrupts():
                yield
        except BaseException:
            self._abandon(run)
            raise

    def _abandon(self, run: CellRun) -> None:
        """Interrupts a cell after an exception has ended the wait for it."""
        self.roster.abandoned = True
        self.turns.wake()
        self.hooks.set_cell(None)
        if not self.connection.closed:
            run.interrupt()

    def _conclude(self, run: CellRun) -> CellRun:
        # Also the cell that keeps variables after this one.
        outer = self.roster.concludes
        try:
            self.roster.concludes = threading.get_ident()
            return self._ended(run)
        finally:
            self.roster.concludes = outer
            self.turns.wake()

    def _ended(self, run: CellRun) -> CellRun:
        try:
            run.end()
        finally:
            self.connection.end_cell()
            if run.failed_first is not None:
                self.failed_first = run.failed_first
            # Before the failure is raised, because the next cell needs all ranks.
            try:
                self.hooks.cell_left(run, self)
            finally:
                run.view.finish()
                if self.roster.phase == "running":
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

    # Ranks that have died.

    def replace_dead(self, tell: Callable[[str], None] | None = None) -> str:
        """Replaces ranks that have died; returns a line about it. Raises a KeyboardInterrupt
        that comes meanwhile when they are replaced.
        """
        self._check_up()
        self.check_idle()
        if not self.roster.dead:
            raise UsageError(
                "expected ranks that have died, found all ranks alive: there is none to replace. "
                "To start all anew, type: %distributed restart"
            )
        said: str
        tell = tell or self.news.append
        with self.turns.taken_if_free() as free:
            if not free:
                raise UsageError(
                    "expected idle ranks, found a call of another thread that begins. Wait a "
                    "moment, and try again"
                )
            # The replacement gives up on a rank that is long in another request.
            self.connection.await_clients(self.roster.alive, _tell_now)
            said, pressed = self.hooks.command("replace_ranks", self.connection, tell)
        if pressed:
            # The ranks are complete again, and the user still expects an interrupt.
            self.news.append(said)
            raise KeyboardInterrupt
        return said
