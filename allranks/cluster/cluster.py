"""A cluster of ranks: start, run, push, pull, status, interrupt, restart, stop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, overload

import cloudpickle

from allranks import own_files
from allranks.cluster import devices, launchers, variables
from allranks.cluster.calls import CapturedOutput, Turns
from allranks.cluster.cells import CellRun, HiddenView, View
from allranks.cluster.connection import Connection
from allranks.cluster.failures import RankStatus, read_statuses, refused_by_all
from allranks.cluster.features import NotebookHooks
from allranks.cluster.healing import AfterCells, HealedCells, keep_here
from allranks.cluster.kept_folders import KeptFolders
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.log_folder import refused_log_folder
from allranks.cluster.options import (
    check_allowed,
    check_open_files,
    check_preload,
    check_source,
    check_timeout,
    choose_size,
)
from allranks.cluster.recovered import listed, text_of_kept, text_of_new
from allranks.cluster.sessions import AttachedHostAgent
from allranks.cluster.sharing import DetachedCell
from allranks.cluster.sockets import Answers
from allranks.errors import AllranksError, CellFailed, UsageError
from allranks.records import requests
from allranks.records.config import EVERY_GPU
from allranks.records.ranks import among, label
from allranks.records.wire import Answer, Hello, RunCell
from allranks.widgets.dashboard.view import text_view
from allranks.widgets.displays import ProgressLine

if TYPE_CHECKING:
    import ipyparallel

T = TypeVar("T")
_SCREEN_NBYTES = 128 * 1024
_LEAST_SCREEN_NBYTES = 4096


class Cluster(HealedCells):
    """Ranks of one MPI world, started together, that run cells and functions.

    A context manager: entering starts it, leaving stops it. Its ``state`` is one of ``new``,
    ``starting``, ``running``, ``lost`` and ``stopped``. Its length is the number of ranks.

    Args:
        n: the number of ranks; by default one per visible GPU, else 2 to 4 by this machine's cores.
        gpus: the GPUs of each host to which ranks are pinned, for example ``"0,2"`` or ``"none"``;
            by default all that are visible there.
        launcher: where the ranks run, for example ``"ssh:h1:2,h2:2"``, or with options of the
            launcher ``"slurm --nodes 2 --ntasks-per-node 4"``; by default on this machine, or on
            the nodes of the job in which the notebook runs.
        preload: modules that are imported once, before the ranks are forked, for example
            ``("tensorflow",)``. The ranks share the memory of these modules.
        exclusive: whether each rank needs a GPU of its own; by default they may share.
        raises_own: whether calls raise the exception of the rank that failed first, if it can be
            pickled; by default they raise a CellFailed with this exception as its ``__cause__``.
        show_output: whether calls show what the ranks print, if they have no view of their own.
        settings: environment variables of the ranks.

    Raises:
        UsageError: this machine cannot have this number of ranks, or has no such GPUs.
        MissingDependency: a module to preload is not installed.
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        gpus: str | None = None,
        launcher: str | None = None,
        preload: str | Sequence[str] = (),
        exclusive: bool = False,
        raises_own: bool = False,
        show_output: bool = True,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.raises_own, self.show_output = raises_own, show_output
        self._turns = Turns(lambda: self._caller if self.busy else 0, self._refuse_call)
        self.launcher = launchers.named(launcher or launchers.default())
        hidden = (devices.HIDDEN,) if gpus == "none" else ()
        if isinstance(self.launcher, MultiHostLauncher):
            self.gpus: tuple[devices.Gpu, ...] = ()
            self._pins = hidden or devices.numbers(gpus) or (EVERY_GPU,)
            self.size = check_allowed(self.launcher.size(n))
            if exclusive:
                raise UsageError(
                    "--exclusive counts the GPUs of this machine, and the ranks run on others. "
                    "Leave it out, and request one GPU per rank: --gpus-per-node 4"
                )
        else:
            self.gpus = devices.choose(gpus)
            self._pins = hidden or tuple(g.uuid for g in self.gpus)
            self.size = choose_size(n, self.gpus)
            check_open_files(self.size)
            if exclusive:
                devices.check_exclusive(self.gpus, self.size)
        self.preload = check_preload(preload)
        self._settings = dict(settings)
        self.failed_first: int | None = None
        """The rank that was the first to fail in the last cell that failed."""
        self.keeping: AfterCells | None = None
        """What the ranks keep when a cell has ended."""
        self.stays = 0.0
        """How many seconds the ranks stay for another notebook when this one goes."""
        self.expects_clients = True
        """Whether ipyparallel's controller starts with the ranks, or only when it is needed."""
        self._shared = False
        self._kept: KeptFolders | None = None
        #: Whether these ranks begin without anything kept.
        self._fresh = True
        self.hooks = NotebookHooks()
        """Those of the features; a notebook's clusters share one object."""

    @property
    def gpu_notices(self) -> list[str]:
        """Lines for the user: shared GPUs, and GPUs that were not found."""
        if isinstance(self.launcher, MultiHostLauncher):
            return []  # they are seen by the ranks alone
        found = (devices.shared(self.gpus, self.size), devices.overlooked())
        return [line for line in found if line]

    def launch(self) -> Self:
        """Begins to start the ranks and returns at once. `start` then waits for them, and `stop`
        ends them; nothing else works yet.

        Raises:
            StartFailed: no process can be started for the ranks.
            MissingDependency: the launcher's program is not installed.
        """
        if self.state in ("starting", "running"):
            return self
        self.failed_first = None
        several = isinstance(self.launcher, MultiHostLauncher)
        # The relays of several hosts have removed their folders.
        if self._kept is not None and (several or not self._kept.have_files):
            self._forget()
        self._fresh = self._kept is None
        if self._fresh:
            self._kept = KeptFolders(on_several_hosts=several)
        connection = self._connect()
        self._begin()
        try:
            connection.launch()
        except BaseException:
            self._forget_fresh()
            raise
        return self

    def start(self, tell: Callable[[str], None] = lambda waits: None) -> Self:
        """Starts the ranks and returns when all of them are up.

        Args:
            tell: called repeatedly with the reason of the wait, such as the place in a queue.

        Raises:
            StartFailed: the ranks did not start; no process of them is left.
            MissingDependency: the launcher's program is not installed.
        """
        if self.state == "running":
            return self
        passing = ProgressLine()
        connection = self.launch()._ranks

        def progress(up: int, started: int, module: str) -> None:
            # All ranks come up together, after MPI has connected their processes.
            tail = f", {started} started" if started > up else ""
            tail += f", importing {module}" if module else ""
            head = f"starting ranks: {up} of {self.size} up"
            passing.show(head, up + max(up, started), 2 * self.size, tail)

        try:
            connection.start(tell, progress)
        except BaseException:
            self._forget_fresh()
            raise
        finally:
            passing.end()
        if self._kept is not None:
            self._kept.hold()
        self.news += filter(None, [refused_log_folder(), *connection.notices])
        # Folders of a lost cluster: the new ranks begin with what its ranks had kept.
        if not self._fresh:
            self.news += filter(None, [text_of_kept(self._restore(range(self.size), tell))])
        return self

    def _connect(self, taken: AttachedHostAgent | None = None) -> Connection:
        self._connection = Connection(
            self.size,
            self._pins,
            self.launcher,
            self.preload,
            self._take,
            self._take_deaths,
            self._spares_others,
            self.hooks,
            self._kept.paths if self._kept is not None else (),
            taken,
            self._settings,
        )
        self._connection.expects_clients &= self.expects_clients
        return self._connection

    def stop(self) -> None:
        """Ends the ranks; deletes their variables, also the kept ones."""
        self._turns.end_submitted(wait=False)
        if self.state in ("starting", "running"):
            self._ranks.close()
        self._forget()

    def _forget_fresh(self) -> None:
        if self._fresh:
            self._forget()

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def restart(self) -> Self:
        """Ends the ranks and starts as many new ones; their variables are deleted."""
        self.stop()
        return self.start()

    def stay(self, seconds: float, memo: dict[str, Any]) -> None:
        """Sets how long the ranks keep running when this notebook ends; 0 for not at all.

        ``memo`` is for the next notebook. Raises UsageError if the launcher's job would end with
        this one.
        """
        self._catch_up()
        self._ranks.stay(seconds, memo)
        self.stays = seconds
        if self._kept is not None:
            self._kept.stay(seconds > 0)

    def let_go(self) -> None:
        """Detaches from the ranks, to which another notebook can attach."""
        self._check_idle()
        self._ranks.let_go()
        if self._kept is not None:
            self._kept.let_go()

    def lend(self, memo: dict[str, Any]) -> None:
        """Leaves the ranks to another notebook; they stay as long as this one runs."""
        self._catch_up()
        self._check_idle()
        if self._occupied:
            raise UsageError("expected idle ranks, found one in a cell that was interrupted")
        self._ranks.lend(self.stays, memo)
        if self._kept is not None:
            self._kept.let_go()

    def lends(self, lend: Callable[[socket.socket], object]) -> None:
        """Sets the function that a thread calls with a notebook that asks for the ranks."""
        self._ranks.sharing.lend = lend

    def attach(
        self, taken: AttachedHostAgent, tell: Callable[[str], None] | None = None
    ) -> DetachedCell:
        """Takes over another notebook's ranks; returns their last cell. If they do not answer, they
        stay detached. ``tell`` gets a line about what takes long; else the next cell shows it.
        """
        connection = self._connect(taken)
        told = connection.attach()
        left = DetachedCell.of(told)
        self.stays = taken.stays
        self._shared = taken.shared
        self._kept = KeptFolders(taken.config.kept_dirs)
        self._kept.hold()
        self._kept.stay(True)
        try:
            record = connection.record if connection.record.get("cells", -1) >= left.cell else {}
            self.count = record.get("cells", left.cell)
            self._begin(left.epoch)
            self._saved = set(record.get("own", ()))
            if not told:
                self._continue(record, tell or self.news.append)
                return left
            if left.members:
                self._end_members(left.members)
            if not left.unseen:
                connection.resume()
                connection.ask(requests.SEND, {}, ranks=connection.roster.alive, strict=False)
            # Another notebook has replaced them, and has ended before it said what they have.
            new = {rank for rank, about in told.items() if about["new"]}
            # What a rank has saved itself, and has back, is newer than what was kept.
            back = set(record.get("own", ())) - new
            gone = {end["rank"] for end in record.get("gone", ())} - back
            if new := new | told.keys() & gone:
                done = self._restore(new, tell or self.news.append)
                self.news.append(text_of_new(done, new))
            self.news += connection.notices
        except BaseException:
            if not connection.closed:
                self.let_go()
            raise
        return left

    def follow(self, left: DetachedCell, view: View) -> CellRun:
        """Returns the ranks' unfinished cell, in flight and shown from its beginning.

        If some ranks have not received it, the others may wait for them, and are interrupted.
        """
        run = CellRun(left.cell, left.ranks, self._ranks, view, None)
        if self._ranks.roster.lost_hosts:
            view.notice(self._ranks.words.deaths_text())
        self._ranks.sharing.follow(left)
        self._running, self._caller = run, threading.get_ident()
        self._ranks.resume()
        if left.missed and left.running:
            view.notice(
                f"interrupted: its notebook ended before {label(left.missed)} received this cell"
            )
            run.interrupt()
        return run

    @property
    def lost_because(self) -> str:
        """The reason why the ranks are lost; empty if they are not."""
        return self._connection.lost_because if self._connection is not None else ""

    @property
    def hellos(self) -> dict[int, Hello]:
        """The report of each rank on its process, host and device."""
        return dict(sorted(self._ranks.roster.hellos.items()))

    @property
    def log_dir(self) -> str:
        """The folder of the ranks' logs, ``rank-0.log`` and so on."""
        return self._ranks.log_dir

    @property
    def session_dir(self) -> str:
        """The folder of the ranks' sockets, by which other notebooks find them."""
        return self._ranks.session_dir

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # As an executor of Python does, a block that ends well waits for its submitted calls.
        self._turns.end_submitted(wait=kind is None)
        self.stop()

    def __repr__(self) -> str:
        return f"<allranks.Cluster of {self.size} ranks, {self.state}>"

    @overload
    def run(
        self,
        what: str,
        *,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        view: View | None = None,
    ) -> list[Any]: ...

    @overload
    def run(
        self,
        what: Callable[..., T],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        view: View | None = None,
        **kwargs: Any,
    ) -> list[T]: ...

    def run(
        self,
        what: Any,
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        view: View | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs source or a function on ranks; returns one value per rank, in order of rank.

        Args:
            what: a cell's source, or a function that every rank calls with ``args``, ``kwargs``.
            ranks: which ranks; by default all.
            timeout: seconds after which the ranks are interrupted.
            view: shows their output, for instance an `allranks.CapturedOutput`; by default labelled
                text is shown.

        Raises:
            SyntaxError: the source cannot be compiled; nothing was run.
            UsageError: there are no such ranks; nothing was run.
            CellFailed: at least one rank raised, or died while others are left. Its ``__cause__``
                is the exception of the rank that failed first, if it can be pickled.
            ClusterLost: at least one rank died, and none is left.
        """
        if not isinstance(what, str):
            return self.call(what, args, kwargs, ranks=ranks, timeout=timeout, view=view)
        with self._turns.taken():
            run = self.begin(what, ranks=ranks, timeout=timeout, view=view, want_value=True)
            return self._values(run)

    def call(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        view: View | None = None,
    ) -> list[T]:
        """Calls a function on ranks, as :meth:`run`; its arguments may have any names."""
        if not callable(function):
            raise UsageError(
                f"expected a cell's source or a function, found {type(function).__name__}. "
                "Type for example: ranks.run('rank')"
            )
        name = getattr(function, "__name__", "function")
        try:
            call = cloudpickle.dumps((function, args, kwargs or {}), protocol=5)
        except Exception as error:  # an object's __reduce__ may raise anything
            raise UsageError(f"{name} cannot be sent to the ranks: {error}") from error
        with self._turns.taken():
            run = self.begin(
                "", call=call, name=name, ranks=ranks, timeout=timeout, view=view, want_value=True
            )
            return self._values(run)

    def _values(self, run: CellRun) -> list[Any]:
        try:
            return self.wait(run).values()
        except CellFailed as failed:
            own = run.exception(self.failed_first)
            if own is None:
                raise
            # The note has the report, which names the other ranks.
            if self.raises_own:
                own.add_note(str(failed))
                raise own from None
            raise failed from own

    def map(
        self, function: Callable[..., T], *items: Iterable[Any], timeout: float | None = None
    ) -> list[T]:
        """Calls a function once for each item, on the next free rank; returns the results.

        Each item runs in a world of one rank. Output is shown with the number of its item, and a
        bar shows the progress. An item whose rank dies runs again, once.

        Args:
            function: it may be defined in a cell.
            items: one list or several; with several lists, the function gets an entry of each.
            timeout: seconds after which an item is interrupted, and has failed.

        Returns:
            One value per item, in their order.

        Raises:
            MapFailed: items failed; all others have run, and are in its ``results``.
            MapInterrupted: the notebook was interrupted; what has finished is in ``results``.
            ClusterLost: ranks died repeatedly, and not because of one item.
            UsageError: ``function`` cannot be called, or the ranks are busy.
        """
        with self._turns.taken():
            results: list[T] = self.hooks.command("map", self, function, items, timeout)
        return results

    def starmap(
        self,
        function: Callable[..., T],
        items: Iterable[Iterable[Any]],
        timeout: float | None = None,
    ) -> list[T]:
        """Like :meth:`map`; each item is the tuple of the arguments of a call."""

        def call(arguments: tuple[Any, ...]) -> T:
            return function(*arguments)

        call.__name__ = getattr(function, "__name__", "function")
        return self.map(call, [tuple(item) for item in items], timeout=timeout)

    def submit(self, what: Callable[..., T] | str, *args: Any, **options: Any) -> Future[list[T]]:
        """Calls :meth:`run` with these arguments in another thread.

        Returns:
            The future of the values. ``cancel()`` drops a call that has not begun;
            ``cluster.interrupt()`` ends the one that runs. After the cluster has stopped, the
            remaining calls are cancelled.
        """
        return self._turns.submit(self.run, what, *args, **options)

    async def run_async(self, what: Callable[..., T] | str, *args: Any, **options: Any) -> list[T]:
        """Like :meth:`run`, while the event loop goes on."""
        return await asyncio.wrap_future(self.submit(what, *args, **options))

    async def map_async(
        self, function: Callable[..., T], *items: Iterable[Any], timeout: float | None = None
    ) -> list[T]:
        """Like :meth:`map`, while the event loop goes on."""
        return await asyncio.to_thread(self.map, function, *items, timeout=timeout)

    def __len__(self) -> int:
        return self.size

    def _refuse_call(self) -> None:
        """Raises an error if the thread of the running call makes another one."""
        self._catch_up()
        self._check_idle()

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
        with self._turns.taken():
            if not checked:
                if call is None:
                    check_source(text)
                self._catch_up()
                check_timeout(timeout)
            self._check_idle()
            chosen = among(ranks, self.size)
            if view is None:
                view = text_view(chosen, self.log_dir) if self.show_output else CapturedOutput()
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
                # The ranks share what is shown of a cell; the rest is in their logs.
                limit_nbytes=max(_LEAST_SCREEN_NBYTES, _SCREEN_NBYTES // len(chosen)),
            )
            self._ranks.words.name_cell(text, cell.number)
            run = CellRun(self.count, chosen, self._ranks, view, timeout, interrupt_kills)
            self._send(cell, run, *([call] if call else []))
            return run

    def _prepare(self, chosen: tuple[int, ...], view: View) -> None:
        # Ranks may die while they leave the cell before: then choose again.
        roster = self._ranks.roster

        def tell(line: str) -> None:
            view.notice(line)
            view.refresh()

        while True:
            gone = set(chosen) & set(roster.dead)
            if gone and not self._heals_by_itself:
                told = self._ranks.words.deaths_text()
                raise UsageError(
                    f"expected all ranks to be alive, found that {told}. "
                    f"Type: %distributed heal   or leave {label(gone)} out: -r"
                )
            self.show_late(view)
            self._ranks.await_clients(chosen, tell)
            self._renew(tell)
            if not set(chosen) & set(roster.dead):
                return
            self._catch_up()

    def hidden_view(self) -> HiddenView:
        """Returns a view that shows nothing; the next cell shows what ranks print meanwhile."""
        return HiddenView(self._late.append)

    def wait(self, run: CellRun) -> CellRun:
        """Shows a cell's output until all its ranks have left it; raises the cell's failure."""
        with self._waiting(run):
            while not run.settled():
                run.step(run.poll_seconds)
        return self._conclude(run)

    async def wait_awaited(self, run: CellRun) -> CellRun:
        """Waits like `wait`, and lets the event loop run: the kernel answers widgets there."""
        with self._waiting(run), self._ranks.inbox.waking() as next_event:
            while not run.settled():
                await next_event(run.poll_seconds)
                run.step(0)
        return self._conclude(run)

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
                    if self.stays or self._shared:
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

    def _keep_after(self, run: CellRun) -> None:
        keeping, view = self.keeping, run.view
        if keeping is None or isinstance(view, HiddenView) or self.state != "running":
            return
        if not run.ended_well or not keeping.due():
            return
        try:
            hidden = HiddenView(self._late.append, view.notice)
            self.call(keep_here, keeping.names, view=hidden)
        except AllranksError as error:
            # Its line is ours, not one of the user's.
            reports = error.reports if isinstance(error, CellFailed) else ()
            said = next((report.message for report in reports if not report.waiting), error)
            if refused_by_all(reports, self.size):
                # They have compared the reasons, so no message is on its way. A new epoch would end
                # the communicators of the user's cells.
                self._epoch.dirty = False
            view.notice(f"{listed(keeping.names)} not kept: {said}")

    def take_over(self, lost: Cluster) -> None:
        """Gives these ranks, once started, what those of a lost cluster kept."""
        self._kept = lost._kept

    def log_end(self, rank: int, nbytes: int) -> str:
        """Returns the last bytes of a rank's log, which may lie on another host, as text."""
        path = self.hellos[rank].log
        try:
            return own_files.end_of(path, nbytes)
        except FileNotFoundError:  # on another host
            asked = {"path": path, "nbytes": nbytes}
            content, _ = self.ask(requests.LOG, asked, ranks=(rank,))[rank]
            return str(content["text"])

    def push(self, values: dict[str, Any], ranks: Iterable[int] | None = None) -> None:
        """Sets variables on ranks.

        Raises:
            UsageError: a value cannot be pickled, or a rank is busy.
        """
        packed = variables.pack(values, "the ranks")
        self.ask(requests.PUSH, {}, packed, ranks=self._after_clients(ranks))

    def pull(
        self, names: str | Sequence[str], ranks: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Returns ``{rank: value}``; with a list of names, ``{rank: {name: value}}``.

        Raises:
            UsageError: a rank has no such variable, cannot send it, or is busy.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        answers = self.ask(requests.PULL, {"names": wanted}, ranks=self._after_clients(ranks))
        return variables.unpack(answers, names)

    def _after_clients(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        self._catch_up()
        chosen = among(ranks, self.size)
        self._ranks.await_clients(chosen, lambda line: None)
        return chosen

    def status(self) -> list[RankStatus]:
        """Returns the state of every rank, and its current line."""
        self._look()
        self._check_up()
        answers = self._ranks.ask(
            requests.STATUS, {}, ranks=range(self.size), seconds=1.0, strict=False
        )
        found = {rank: content for rank, (content, _) in answers.items()}
        return read_statuses(self.hellos, found, self._ranks.roster.dead)

    def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        *payloads: bytes,
        ranks: Iterable[int] | None = None,
    ) -> Answers:
        """Returns the ranks' answers to a request of ``allranks.records.requests``."""
        self._catch_up()
        return self._ranks.ask(name, arguments, *payloads, ranks=among(ranks, self.size))

    def client(self) -> ipyparallel.Client:
        """Returns an ipyparallel client of this cluster, whose engine ids are the ranks.

        It closes with the cluster.
        """
        self._catch_up()
        return self._ranks.client()

    def connection_information(self) -> dict[str, Any]:
        """Returns what ``ipyparallel.Client`` takes to connect to these ranks."""
        self.client()  # all engines are there then
        found: dict[str, Any] = self._ranks.ipyparallel
        return found

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
            self._ranks.ask_soon(name, arguments, deliver, chosen)


class NotebookSession(Protocol):
    """The interface of a notebook's session: the magics are above this package."""

    @property
    def hooks(self) -> NotebookHooks: ...

    @property
    def running(self) -> Cluster | None: ...

    def of_size(self, n: int | None) -> Cluster:
        """Returns the notebook's cluster, started now with this number of ranks if necessary."""


session: NotebookSession | None = None
"""The session of this notebook, which the extension sets while it is loaded."""


def running() -> Cluster | None:
    """Returns the notebook's cluster if its ranks are up."""
    return None if session is None else session.running
