"""A cluster of ranks: start, run, push, pull, status, interrupt, restart, stop."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle

from allranks.cluster import devices, launchers, variables
from allranks.cluster.cells import CellRun, Cells, HiddenView, View
from allranks.cluster.connection import Connection
from allranks.cluster.failures import RankStatus, plain, read_status
from allranks.cluster.features import NotebookHooks
from allranks.cluster.folders import KeptFolders
from allranks.cluster.healing import AfterCells, keep_here, listed, restored
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.members import MemberSlots
from allranks.cluster.options import check_preload, check_source, check_timeout, choose_size
from allranks.cluster.sessions import AttachedHostAgent
from allranks.cluster.sharing import DetachedCell
from allranks.cluster.sockets import Answers
from allranks.cluster.variables import explain_here
from allranks.errors import AllranksError, CellFailed, ClusterLost, UsageError
from allranks.records import requests
from allranks.records.config import EVERY_GPU
from allranks.records.ranks import among, label
from allranks.records.requests import end_of
from allranks.records.wire import Answer, Hello, RunCell
from allranks.widgets.dashboard.view import text_view
from allranks.widgets.displays import ProgressLine

if TYPE_CHECKING:
    import ipyparallel

HEALING = ("on", "ask", "off")
_SCREEN_NBYTES = 128 * 1024
_LEAST_SCREEN_NBYTES = 4096
_RESTORE_SECONDS = 120.0
"""A model's library may have to be imported first."""
_EXPLAIN_SECONDS = 30.0


class Cluster:
    """Ranks of one MPI world, started together, that run cells and functions.

    A context manager: entering starts it, leaving stops it. Its ``state`` is one of ``new``,
    ``starting``, ``running``, ``lost`` and ``stopped``. It is used from one thread.

    Args:
        n: the number of ranks; by default one per visible GPU, else 2 to 4 by this machine's cores.
        gpus: which GPUs of each host to pin ranks to, as ``"0,2"`` or ``"none"``; by default all
            visible there.
        launcher: what starts the ranks, as ``"ssh:h1:2,h2:2"``, with its options where it has
            any, as ``"slurm --nodes 2 --ntasks-per-node 4"``; by default this machine, or the job
            of several nodes that the notebook runs in.
        preload: modules to import before the ranks are forked, as ``("tensorflow",)``: every rank
            has them at once, and the memory they take is shared.
        exclusive: whether each rank needs a GPU of its own; by default they may share.

    Raises:
        UsageError: this number of ranks, or these GPUs, are not possible here.
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
    ) -> None:
        self.launcher = launchers.named(launcher or launchers.default())
        hidden = (devices.HIDDEN,) if gpus == "none" else ()
        if isinstance(self.launcher, MultiHostLauncher):
            self.gpus: tuple[devices.Gpu, ...] = ()
            self._pins = hidden or devices.numbers(gpus) or (EVERY_GPU,)
            self.size = self.launcher.size(n)
            if exclusive:
                raise UsageError(
                    "--exclusive counts the GPUs of this machine, and the ranks run on others. "
                    "Leave it out, and request one GPU per rank: --gpus-per-node 4"
                )
        else:
            self.gpus = devices.choose(gpus)
            self._pins = hidden or tuple(g.uuid for g in self.gpus)
            self.size = choose_size(n, self.gpus)
            if exclusive:
                devices.check_exclusive(self.gpus, self.size)
        self.preload = check_preload(preload)
        self.failed_first: int | None = None
        """The rank that was the first to fail in the last cell that failed."""
        self.healing = "on"
        self.news: list[str] = []
        """Lines about events between cells, which the next cell shows."""
        self.keeping: AfterCells | None = None
        """What the ranks keep when a cell has ended."""
        self.goes_on = 0
        """The commit that a training which a death has ended can go on from; else 0."""
        self.stays = 0.0
        """How many seconds the ranks stay for another notebook when this one goes."""
        self._shared = False
        self._kept: KeptFolders | None = None
        self._connection: Connection | None = None
        self._cells = Cells()
        self.hooks = NotebookHooks()
        """Those of the features; a notebook's clusters share one object."""

    @property
    def gpu_notices(self) -> list[str]:
        """Lines for the user: shared GPUs, and GPUs that were not found."""
        if isinstance(self.launcher, MultiHostLauncher):
            return []  # they are seen by the ranks alone
        found = (devices.shared(self.gpus, self.size), devices.overlooked())
        return [line for line in found if line]

    def start(self, tell: Callable[[str], None] = lambda waits: None) -> Cluster:
        """Starts the ranks and returns when all of them are up.

        Args:
            tell: called repeatedly with the reason of the wait, as the place in a queue.

        Raises:
            StartFailed: they did not come up; nothing of them is left.
            MissingDependency: the launcher's program is not installed.
        """
        if self.state == "running":
            return self
        passing = ProgressLine()
        self.failed_first = None
        fresh = self._kept is None
        if self._kept is None and not isinstance(self.launcher, MultiHostLauncher):
            self._kept = KeptFolders()
        connection = self._connect(self._kept.paths if self._kept is not None else ())
        self._cells.begin(connection)

        def progress(up: int, started: int, module: str) -> None:
            # All ranks come up together, after MPI has connected their processes.
            tail = f", {started} started" if started > up else ""
            tail += f", importing {module}" if module else ""
            head = f"starting ranks: {up} of {self.size} up"
            passing.show(head, up + max(up, started), 2 * self.size, tail)

        try:
            connection.start(tell, progress)
        except BaseException:
            if fresh:
                self._forget()
            raise
        finally:
            passing.end()
        if self._kept is not None:
            self._kept.hold()
        # Folders of a lost cluster: the new ranks begin with what its ranks had kept.
        if not fresh and (kept := self._restore(range(self.size))):
            self.news.append(f"{label(range(self.size))} {_have(self.size)} {kept}")
        return self

    def _connect(
        self, kept_dirs: tuple[str, ...] = (), taken: AttachedHostAgent | None = None
    ) -> Connection:
        made = self._connection = Connection(
            self.size,
            self._pins,
            self.launcher,
            self.preload,
            self._cells.take,
            self.hooks,
            kept_dirs,
            taken,
        )
        made.healing = self.healing
        return made

    def stop(self) -> None:
        """Ends the ranks; deletes their variables, also the kept ones."""
        if self.state == "running":
            self._ranks.close()
        self._forget()

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def restart(self) -> Cluster:
        """Ends the ranks and starts as many new ones; their variables are deleted."""
        self.stop()
        return self.start()

    def stay(self, seconds: float, memo: dict[str, Any]) -> None:
        """Sets how long the ranks keep running when this notebook ends; 0 for not at all.

        ``memo`` is for the next notebook. Raises UsageError if the ranks are on several hosts.
        """
        self._catch_up()
        self._ranks.stay(seconds, memo)
        self.stays = seconds
        if self._kept is not None:
            self._kept.stay(seconds > 0)

    def let_go(self) -> None:
        """Detaches from the ranks, to which another notebook can attach."""
        self._cells.check_idle()
        self._ranks.let_go()
        if self._kept is not None:
            self._kept.let_go()

    def lend(self, memo: dict[str, Any]) -> None:
        """Leaves the ranks to another notebook; they stay as long as this one runs."""
        self._catch_up()
        self._cells.check_idle()
        if self._cells.occupied:
            raise UsageError("expected idle ranks, found one in a cell that was interrupted")
        self._ranks.lend(self.stays, memo)
        if self._kept is not None:
            self._kept.let_go()

    def lends(self, lend: Callable[[socket.socket], object]) -> None:
        """Sets the function that a thread calls with a notebook that asks for the ranks."""
        self._ranks.sharing.lend = lend

    @property
    def count(self) -> int:
        """How many cells the ranks have been sent."""
        return self._cells.count

    def attach(self, taken: AttachedHostAgent) -> DetachedCell:
        """Takes over another notebook's ranks; returns their last cell. If they do not answer, they
        stay detached.
        """
        connection = self._connect(taken=taken)
        left = DetachedCell.of(connection.attach())
        self.stays = taken.stays
        self._shared = taken.shared
        self._kept = KeptFolders(taken.config.kept_dirs)
        self._kept.hold()
        self._kept.stay(True)
        try:
            self._cells.take_over(connection, left)
            if not left.unseen:
                connection.resume()
                connection.ask(requests.SEND, {}, ranks=connection.roster.alive, strict=False)
        except BaseException:
            self.let_go()
            raise
        return left

    def follow(self, left: DetachedCell, view: View) -> CellRun:
        """Returns the ranks' unfinished cell, in flight and shown from its beginning."""
        run = CellRun(left.cell, left.ranks, self._ranks, view, None)
        self._ranks.sharing.follow(left)
        self._cells.running = run
        self._ranks.resume()
        return run

    def show_late(self, view: View) -> None:
        """Shows what the ranks have written between cells."""
        self._cells.show_late(view)

    @property
    def _ranks(self) -> Connection:
        if self._connection is None:
            raise ClusterLost(
                "the cluster has not been started. Call its method start() first, or write: "
                "with Cluster(n=2) as cluster:"
            )
        return self._connection

    @property
    def state(self) -> str:
        """How the ranks are: see above."""
        return self._connection.state if self._connection is not None else "new"

    @property
    def lost_because(self) -> str:
        """Why the ranks are lost, where they are."""
        return self._connection.lost_because if self._connection is not None else ""

    @property
    def can_heal(self) -> bool:
        """Whether ranks that die can be replaced, where and as these run."""
        return self._ranks.can_heal

    @property
    def hellos(self) -> dict[int, Hello]:
        """The report of each rank on its process, host and device."""
        return dict(sorted(self._ranks.roster.hellos.items()))

    @property
    def busy(self) -> bool:
        """Whether a cell, a function or an ensemble is under way."""
        return self._cells.busy

    @property
    def log_dir(self) -> str:
        """The folder of the ranks' logs, ``rank-0.log`` and so on."""
        return self._ranks.log_dir

    @property
    def session_dir(self) -> str:
        """The folder of the ranks' sockets, by which other notebooks find them."""
        return self._ranks.session_dir

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<allranks.Cluster of {self.size} ranks, {self.state}>"

    def run(
        self,
        what: str | Callable[..., Any],
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
            view: what shows their output; by default labelled text.

        Raises:
            SyntaxError: the source cannot be compiled; nothing was run.
            UsageError: there are no such ranks; nothing was run.
            CellFailed: at least one rank raised, or died while others are left.
            ClusterLost: at least one rank died, and none is left.
        """
        if not isinstance(what, str):
            return self.call(what, args, kwargs, ranks=ranks, timeout=timeout, view=view)
        run = self.submit(what, ranks=ranks, timeout=timeout, view=view, want_value=True)
        return self.wait(run).values()

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        view: View | None = None,
    ) -> list[Any]:
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
        run = self.submit(
            "",
            call=call,
            name=name,
            ranks=ranks,
            timeout=timeout,
            view=view,
            want_value=True,
        )
        return self.wait(run).values()

    def map(self, function: Any, *items: Iterable[Any], timeout: float | None = None) -> list[Any]:
        """Calls a function once for each item, on the next free rank; returns the results.

        Every rank is a world of its own meanwhile. What is printed is shown with the item's
        number, and a bar shows the progress. An item whose rank dies runs again, once.

        Args:
            function: it may be defined in a cell.
            items: as of Python's ``map``: with several lists, one of each is passed.
            timeout: seconds after which an item is interrupted, and has failed.

        Returns:
            One value per item, in their order.

        Raises:
            MapFailed: items failed; all others have run, and are in its ``results``.
            MapInterrupted: the notebook was interrupted; what has finished is in ``results``.
            ClusterLost: ranks died again and again, and no item is to blame.
            UsageError: there is nothing to call, or the ranks are busy.
        """
        results: list[Any] = self.hooks.command("map", self, function, items, timeout)
        return results

    def submit(
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
    ) -> CellRun:
        """Sends a cell to all of its ranks or to none, and returns it in flight.

        ``call`` is a pickled ``(function, args, kwargs)`` instead of source; ``number`` is the
        notebook's number of the cell, for tracebacks. Raises before anything is sent.
        """
        if call is None:
            check_source(text)
        self._catch_up()
        self._cells.check_idle()
        chosen = among(ranks, self.size)
        check_timeout(timeout)
        view = view or text_view(chosen, self.log_dir)
        return self.send_checked(
            text,
            chosen,
            view,
            call=call,
            name=name,
            number=number,
            timeout=timeout,
            want_value=want_value,
        )

    def send_checked(
        self,
        text: str,
        chosen: tuple[int, ...],
        view: View,
        *,
        call: bytes | None = None,
        name: str = "cell",
        number: int | None = None,
        timeout: float | None = None,
        want_value: bool = False,
    ) -> CellRun:
        """Sends a cell whose source and options the caller has checked, when the ranks are up."""
        ranks, count = self._ranks, self._ready(chosen, view)
        for line in self.news:
            view.notice(line)
        self.news.clear()
        cell = RunCell(
            cell=count,
            source=text,
            number=number or count,
            ranks=chosen if len(chosen) < self.size else (),
            label=name,
            want_value=want_value,
            # The ranks share what is shown of a cell; the rest is in their logs.
            limit_nbytes=max(_LEAST_SCREEN_NBYTES, _SCREEN_NBYTES // len(chosen)),
        )
        self.goes_on = 0
        run = CellRun(count, chosen, ranks, view, timeout)
        self._cells.send(cell, run, *([call] if call else []))
        return run

    def _ready(self, chosen: Iterable[int], view: View) -> int:
        # Ranks may die while they leave the cell before: then choose again.
        dead = self._ranks.roster.dead
        while True:
            gone = set(chosen) & set(dead)
            if gone and not self._heals_by_itself:
                found = self._ranks.roster.deaths_text()
                raise UsageError(
                    f"expected all ranks to be alive, found that {found}. "
                    f"Type: %distributed heal   or leave {label(gone)} out: -r"
                )
            count = self._cells.prepare(view)
            if not set(chosen) & set(dead):
                return count
            self._catch_up()

    def explain(self, algorithm: str, values: Sequence[Sequence[float]]) -> Any:
        """Runs an allreduce (sum) that reports its steps, and times it, on the first ranks.

        Args:
            algorithm: ``ring``, ``recursive doubling`` or ``tree``.
            values: one rank's array after the other, all of one length; two or more.

        Raises:
            UsageError: there are fewer ranks, or they run a cell.
            ClusterLost: the ranks are gone.
        """
        if self.busy:
            raise UsageError("the ranks are running a cell. Try again when it has ended.")
        if not 2 <= len(values) <= self.size:
            raise UsageError(
                "an allreduce needs 2 ranks or more, and no more than are running: found "
                f"{len(values)}, and {self.size} {'is' if self.size == 1 else 'are'} running. "
                f"Type for example: %distributed restart -n {max(2, len(values))}"
            )
        first, *_ = self.run(
            explain_here,
            algorithm,
            values,
            ranks=range(len(values)),
            timeout=_EXPLAIN_SECONDS,
            view=HiddenView(self._cells.late.append),
        )
        return first

    def wait(self, run: CellRun) -> CellRun:
        """Shows a cell's output until all its ranks have left it; raises the cell's failure."""
        self._cells.wait(run)
        return self._conclude(run)

    async def wait_awaited(self, run: CellRun) -> CellRun:
        """Waits like `wait`, and lets the event loop run: the kernel answers widgets there."""
        await self._cells.wait_awaited(run)
        return self._conclude(run)

    def _conclude(self, run: CellRun) -> CellRun:
        try:
            run.end()
        finally:
            self._cells.end(run)
            # Before the failure is raised, because the next cell needs all ranks.
            try:
                self._heal_after(run)
                self._keep_after(run)
            finally:
                run.view.finish()
                # A notebook that attaches later then does not show the cell again.
                if self.stays or self._shared:
                    self.ask_soon(requests.SEEN, {"cell": run.cell}, lambda _: None)
                if self.state == "running":
                    self.hooks.cell_finished()
        failed = self.hooks.take_failure()
        if run.failed_first is not None:
            self.failed_first = run.failed_first
        try:
            run.check()
        except CellFailed as error:
            if failed is not None:
                error.add_note(str(failed))
            raise
        if failed is not None:
            raise failed
        return run

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
            run.view.left(rank, "replaced")
        run.view.notice(said)

    def heal_when(self, healing: str) -> None:
        """Sets when ranks that die are replaced: ``on``, ``ask`` for it, or ``off``.

        Raises:
            UsageError: there is no such choice.
        """
        if healing not in HEALING:
            raise UsageError(
                f"expected {', '.join(HEALING)}, found {healing!r}. Type: %distributed heal on"
            )
        self.healing = healing
        if self._connection is not None:
            self._connection.healing = healing

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks that have died, and can be replaced."""
        return tuple(sorted(self._ranks.roster.dead))

    @property
    def _heals_by_itself(self) -> bool:
        waiting = self.state == "running" and self.healing == "on" and not self._ranks.roster.ends
        return waiting and bool(self._ranks.roster.dead)

    def heal(self, tell: Callable[[str], None] | None = None) -> str:
        """Replaces ranks that have died by new processes; returns a line about it.

        Args:
            tell: called with what happens meanwhile; by default that is shown with the next cell.

        Raises:
            ClusterLost: they could not be replaced, and all were killed.
            UsageError: the ranks run a cell, or none has died.
            KeyboardInterrupt: an interrupt came while they were; it has waited for the end.
        """
        self._cells.check_idle()
        if not self.dead:
            raise UsageError("expected ranks that have died, found all ranks alive")
        said, pressed = self._replace(tell or self.news.append)
        if pressed:
            # The ranks are complete again, and the user still expects an interrupt.
            self.news.append(said)
            raise KeyboardInterrupt
        return said

    def _replace(self, tell: Callable[[str], None]) -> tuple[str, bool]:
        began = time.monotonic()
        healed = self._cells.heal(tell)
        dead = sorted(healed.ends)
        left = [rank for rank in range(self.size) if rank not in healed.ends]
        had = self._restore(set(dead) - set(self.dead))
        are = "was replaced" if len(dead) == 1 else "were replaced"
        new = f"{are}, with {had}" if had else f"{are} and {_have(len(dead))} no variables"
        kept = f"{label(left)} kept {'its' if len(left) == 1 else 'theirs'} " if left else ""
        return f"{label(dead)} {new}; {kept}({time.monotonic() - began:.1f} s)", healed.presses > 0

    def _keep_after(self, run: CellRun) -> None:
        keeping, view = self.keeping, run.view
        if keeping is None or isinstance(view, HiddenView) or self.state != "running":
            return
        if not run.ended_well or not keeping.due():
            return
        try:
            self.call(
                keep_here, keeping.names, view=HiddenView(self._cells.late.append, view.notice)
            )
        except AllranksError as error:
            # Its line is ours, not one of the user's.
            reports = error.reports if isinstance(error, CellFailed) else ()
            said = next((report.message for report in reports if not report.waiting), error)
            view.notice(f"{listed(keeping.names)} not kept: {said}")

    def take_over(self, lost: Cluster) -> None:
        """Gives these ranks, once started, what those of a lost cluster kept."""
        self._kept = lost._kept

    def _restore(self, new: Iterable[int]) -> str:
        """New ranks take back what was kept in their places; returns what that is."""
        old = set(self._ranks.roster.alive) - set(new)
        try:
            settled = self._ranks.ask(requests.SETTLE, {}, ranks=old, seconds=_RESTORE_SECONDS)
            self.goes_on = min((content["goes_on"] for content, _ in settled.values()), default=0)
            return restored(
                self._ranks.ask(requests.RESTORE, {}, ranks=new, seconds=_RESTORE_SECONDS)
            )
        except UsageError as error:
            self.news.append(str(error))
            return ""

    def log_end(self, rank: int, nbytes: int) -> str:
        """Returns the last bytes of a rank's log, which may lie on another host, as text."""
        path = self.hellos[rank].log
        try:
            return end_of(path, nbytes)
        except FileNotFoundError:  # on another host
            asked = {"path": path, "nbytes": nbytes}
            content, _ = self.ask(requests.LOG, asked, ranks=(rank,))[rank]
            return str(content["text"])

    def interrupt(self) -> bool:
        """Interrupts the cell, or the ensemble, that is running; returns whether one was."""
        return self._cells.interrupt()

    def push(self, values: dict[str, Any], ranks: Iterable[int] | None = None) -> None:
        """Sets variables on ranks.

        Raises:
            UsageError: a value cannot be pickled, or a rank is busy.
        """
        self.ask(requests.PUSH, {}, variables.pack(values, "the ranks"), ranks=ranks)

    def pull(
        self, names: str | Sequence[str], ranks: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Returns ``{rank: value}``; with a list of names, ``{rank: {name: value}}``.

        Raises:
            UsageError: a rank has no such variable, cannot send it, or is busy.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        answers = self.ask(requests.PULL, {"names": wanted}, ranks=ranks)
        return variables.unpack(answers, names)

    def status(self) -> list[RankStatus]:
        """Returns what every rank is doing now."""
        self._look()
        self._check_up()
        answers = self._ranks.ask(
            requests.STATUS, {}, ranks=range(self.size), seconds=1.0, strict=False
        )
        empty: dict[str, Any] = {}
        return [read_status(h, answers.get(r, (empty, []))[0]) for r, h in self.hellos.items()]

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
        return self._ranks.connection_information

    def is_up(self, tell: Callable[[str], None] | None = None) -> bool:
        """Handles events since the last cell; returns whether the ranks are up. With automatic
        healing it replaces dead ranks.
        """
        self._look()
        if self._heals_by_itself and not self.busy and not self._cells.occupied:
            tell = tell or self.news.append
            tell(self._ranks.roster.deaths_text())
            with suppress(ClusterLost):  # then the state is lost, with the reason
                tell(self.heal(tell))
        return self.state == "running"

    def _look(self) -> None:
        if self.state == "running":
            self._ranks.step(0)
            if self._ranks.roster.ends and not self.busy:
                self._ranks.lose()

    def _catch_up(self) -> None:
        """Handles events since the last cell; raises ClusterLost if the ranks are not up."""
        self.is_up()
        self._check_up()

    def _check_up(self) -> None:
        self._ranks  # noqa: B018  raises where nothing was ever started
        if self.state != "running":
            raise ClusterLost(
                self.lost_because
                or "the ranks are stopped. Type: %distributed start   or, of a Cluster: .start()"
            )

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

    @contextmanager
    def crew(self, ranks_each: int) -> Iterator[MemberSlots]:
        """Within, members run side by side, each on ``ranks_each`` ranks in a row."""
        self._catch_up()
        self.hooks.ensemble_started()
        with self._cells.crew(ranks_each) as crew:
            yield crew


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


class NotebookSession(Protocol):
    """The interface of a notebook's session: the magics are above this package."""

    @property
    def running(self) -> Cluster | None: ...

    def of_size(self, n: int | None) -> Cluster:
        """Returns the notebook's cluster, started now with this number of ranks if necessary."""


session: NotebookSession | None = None
"""The session of this notebook, which the extension sets while it is loaded."""
