"""A cluster of ranks: start, run, push, pull, status, interrupt, restart, stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import cloudpickle

from allranks.cluster import devices, launchers, sizes, source, variables
from allranks.cluster.cells import Cells
from allranks.cluster.connection import Answers, Connection
from allranks.cluster.crew import Crew
from allranks.cluster.explaining import explain
from allranks.cluster.launchers.launcher import OnSeveralHosts
from allranks.cluster.preload import check_preload
from allranks.cluster.run import Run, View, check_timeout
from allranks.cluster.status import RankStatus, read_status
from allranks.errors import ClusterLost, UsageError
from allranks.records import requests
from allranks.records.config import EVERY_GPU
from allranks.records.explained import Explained
from allranks.records.log import end_of
from allranks.records.ranks import among
from allranks.records.wire import Answer, Hello, RunCell
from allranks.widgets import text_view
from allranks.widgets.bar import Passing
from allranks.widgets.front_end import NOTEBOOK, front_end

if TYPE_CHECKING:
    import ipyparallel

_SCREEN_NBYTES = 128 * 1024
_LEAST_SCREEN_NBYTES = 4096

#: Attributes by which cells, ensembles and scripts are run and watched.
_OF_THE_PACKAGE = {
    "ask", "ask_soon", "catch_up", "crew", "failed_first", "gpu_notices", "hellos", "is_up",
    "log_end", "submit", "wait", "wait_awaited",
}  # fmt: skip


class Cluster:
    """Ranks of one MPI world, started together, that run cells and functions.

    A context manager: entering starts it, leaving stops it. Its ``state`` is one of ``new``,
    ``starting``, ``running``, ``lost`` and ``stopped``. It is used from one thread.

    Args:
        n: the number of ranks; by default one a visible GPU, else 2 to 4 by this machine's cores.
        gpus: which GPUs of each host to pin ranks to, as ``"0,2"`` or ``"none"``; by default all
            visible there.
        launcher: what starts the ranks, as ``"ssh:h1:2,h2:2"``, with its options where it has
            any, as ``"slurm --nodes 2 --ntasks-per-node 4"``; by default this machine, or the job
            of several nodes that the notebook runs in.
        preload: modules to import before the ranks are made, as ``("tensorflow",)``: every rank
            has them at once, and the memory they take is shared.
        exclusive: whether each rank needs a GPU of its own; by default they may share.

    Raises:
        UsageError: there cannot be so many ranks here, or such GPUs.
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
        if isinstance(self.launcher, OnSeveralHosts):
            self.gpus: tuple[devices.Gpu, ...] = ()
            self._pins = hidden or devices.numbers(gpus) or (EVERY_GPU,)
            self.size = self.launcher.size(n)
            if exclusive:
                raise UsageError(
                    "--exclusive looks at this machine's GPUs, and the ranks are to run elsewhere. "
                    "Leave it out, and ask for as many GPUs as ranks: --gpus-per-node 4"
                )
        else:
            self.gpus = devices.choose(gpus)
            self._pins = hidden or tuple(g.uuid for g in self.gpus)
            self.size = sizes.chosen(n, self.gpus)
            if exclusive:
                devices.check_exclusive(self.gpus, self.size)
        self.preload = check_preload(preload)
        self.failed_first: int | None = None
        """The rank that was the first to fail in the last cell that failed."""
        self._connection: Connection | None = None
        self._cells = Cells()

    @property
    def gpu_notices(self) -> list[str]:
        """What a user should know about the ranks' GPUs: who shares one, which are not found."""
        if isinstance(self.launcher, OnSeveralHosts):
            return []  # they are seen by the ranks alone
        found = (devices.shared(self.gpus, self.size), devices.overlooked())
        return [line for line in found if line]

    # ── start and stop ───────────────────────────────────────────────────────────────────────

    def start(self, tell: Callable[[str], None] = lambda waits: None) -> Cluster:
        """Starts the ranks and returns when all of them are up.

        Args:
            tell: called, again and again, with what is waited for, where hosts are not to be had
                at once: the place in a queue.

        Raises:
            StartFailed: they did not come up; nothing of them is left.
            MissingDependency: the launcher's program is not installed.
        """
        if self.state == "running":
            return self
        passing = Passing()
        self.failed_first = None
        self._connection = Connection(
            self.size, self._pins, self.launcher, self.preload, self._cells.take
        )
        self._cells.begin(self._connection)

        def progress(up: int, module: str) -> None:
            tail = f", importing {module}" if module else ""
            passing.show(f"starting ranks: {up} of {self.size} up", up, self.size, tail)

        try:
            self._connection.start(tell, progress)
        finally:
            passing.end()
        return self

    def stop(self) -> None:
        """Ends the ranks; their variables are forgotten."""
        if self.state == "running":
            self._ranks.close()

    def restart(self) -> Cluster:
        """Ends the ranks and starts as many again; their variables are forgotten."""
        self.stop()
        return self.start()

    @property
    def _ranks(self) -> Connection:
        if self._connection is None:
            raise ClusterLost("the cluster has not been started. Type: %distributed start")
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
    def hellos(self) -> dict[int, Hello]:
        """Who and where every rank is."""
        return dict(sorted(self._ranks.hellos.items()))

    @property
    def busy(self) -> bool:
        """Whether a cell, a function or an ensemble is under way."""
        return self._cells.busy

    @property
    def log_dir(self) -> str:
        """The folder of the ranks' logs, ``rank-0.log`` and so on."""
        return self._ranks.log_dir

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __dir__(self) -> list[str]:
        """Leaves out what is for the package's own magics, so that Tab shows what is for users."""
        return sorted(set(super().__dir__()) - _OF_THE_PACKAGE)

    def __repr__(self) -> str:
        return f"<allranks.Cluster of {self.size} ranks, {self.state}>"

    # ── run ──────────────────────────────────────────────────────────────────────────────────

    def run(
        self,
        what: str | Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        view: View | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs source or a function on ranks; returns one value a rank, in order of rank.

        Args:
            what: a cell's source, or a function that every rank calls with ``args``, ``kwargs``.
            ranks: which ranks; by default all.
            timeout: seconds after which the ranks are interrupted.
            view: what shows their output; by default labelled text.

        Raises:
            SyntaxError: the source cannot be compiled; nothing was run.
            UsageError: there are no such ranks; nothing was run.
            CellFailed: at least one rank raised.
            ClusterLost: at least one rank died.
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
        """Calls a function on ranks, as :meth:`run`, whatever its arguments are called."""
        run = self.submit(
            "",
            call=cloudpickle.dumps((function, args, kwargs or {}), protocol=5),
            name=getattr(function, "__name__", "function"),
            ranks=ranks,
            timeout=timeout,
            view=view,
            want_value=True,
        )
        return self.wait(run).values()

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
    ) -> Run:
        """Sends a cell to its ranks, all of them or none, and returns it in flight.

        Args:
            text: the cell's source.
            call: instead of source, a pickled ``(function, args, kwargs)``.
            name: what the cell is called in reports.
            number: the notebook's number of the cell, for tracebacks.
            ranks, timeout, view: as in :meth:`run`.
            want_value: whether the last expression's value is sent back.

        Raises:
            SyntaxError: the source cannot be compiled; nothing was sent.
            ClusterLost: the ranks are gone; nothing was sent.
            UsageError: they are busy, there are no such ranks, or no such time.
        """
        if call is None:
            source.check(text)
        self.catch_up()
        self._cells.check_idle()
        chosen = among(ranks, self.size)
        check_timeout(timeout)
        view = view or text_view(chosen, self.log_dir)
        self._ranks.mirrors.drawn = front_end() == NOTEBOOK
        count = self._cells.prepare(view)
        cell = RunCell(
            cell=count,
            source=text,
            number=number or count,
            ranks=chosen if len(chosen) < self.size else (),
            label=name,
            want_value=want_value,
            limit_nbytes=max(_LEAST_SCREEN_NBYTES, _SCREEN_NBYTES // len(chosen)),
        )
        run = Run(count, chosen, self._ranks, view, timeout)
        with self._cells.attended(run):
            self._cells.send(cell, run, *([call] if call else []))
        return run

    def explain(self, algorithm: str, values: Sequence[Sequence[float]]) -> Explained:
        """Runs an allreduce (sum) that tells its steps, and times it, on the first ranks.

        Args:
            algorithm: ``ring``, ``recursive doubling`` or ``tree``.
            values: one rank's array after the other, all of one length; two or more.

        Raises:
            UsageError: there are not so many ranks, or they run a cell.
            ClusterLost: the ranks are gone.
        """
        return explain(self, algorithm, values, self._cells.late.append)

    def wait(self, run: Run) -> Run:
        """Shows a cell's output until all its ranks have left it; returns it if all went well.

        Raises:
            CellFailed: at least one rank raised.
            ClusterLost: at least one rank died.
        """
        with self._cells.attended(run), self._ranks.inbox.hearing_interrupts():
            while not run.settled():
                run.step(run.poll_seconds)
        return self._conclude(run)

    async def wait_awaited(self, run: Run) -> Run:
        """Does what :meth:`wait` does, and lets the event loop run meanwhile.

        The notebook's kernel answers its widgets in that loop, so that their buttons work.
        """
        inbox = self._ranks.inbox
        attended = self._cells.attended(run)
        with attended, inbox.hearing_interrupts(), inbox.waking() as next_event:
            while not run.settled():
                await next_event(run.poll_seconds)
                run.step(0)
        return self._conclude(run)

    def _conclude(self, run: Run) -> Run:
        """Ends a settled cell: shows the rest, and raises what it ended with."""
        try:
            run.end()
        finally:
            self._cells.end(run)
            run.view.finish()
        if run.failed_first is not None:
            self.failed_first = run.failed_first
        run.check()
        return run

    def log_end(self, rank: int, nbytes: int) -> str:
        """Returns the last bytes of a rank's log, which may lie on another host, as text.

        Raises:
            UsageError: the rank there does not answer.
            ClusterLost: the ranks are gone, and with them the way to that host.
        """
        path = self.hellos[rank].log
        try:
            return end_of(path, nbytes)
        except FileNotFoundError:
            asked = {"path": path, "nbytes": nbytes}
            content, _ = self.ask(requests.LOG, asked, ranks=(rank,))[rank]
            return str(content["text"])

    def interrupt(self) -> bool:
        """Interrupts the cell, or the ensemble, that is running; returns whether one was."""
        return self._cells.interrupt()

    # ── variables and questions ──────────────────────────────────────────────────────────────

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
        self.catch_up()
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
        """Returns the ranks' answers to a request (see ``allranks.records.requests``).

        Raises:
            UsageError: a rank refused, did not answer, or is not there.
            ClusterLost: the ranks are gone.
        """
        self.catch_up()
        return self._ranks.ask(name, arguments, *payloads, ranks=among(ranks, self.size))

    def client(self) -> ipyparallel.Client:
        """Returns an ipyparallel client of this cluster, whose engine ids are the ranks.

        It closes with the cluster.
        """
        self.catch_up()
        return self._ranks.client()

    def is_up(self) -> bool:
        """Handles what has come while nobody waited; returns whether the ranks are up."""
        if self.state == "running":
            self._ranks.step(0)
            if self._ranks.ends and not self.busy:
                self._ranks.lose()
        return self.state == "running"

    def catch_up(self) -> None:
        """Handles what has come while nobody waited.

        Raises:
            ClusterLost: the ranks are not up; if they died, how.
        """
        self._ranks  # noqa: B018  raises where nothing was ever started
        if not self.is_up():
            raise ClusterLost(
                self.lost_because or "the ranks are stopped. Type: %distributed start"
            )

    def ask_soon(
        self,
        name: str,
        arguments: dict[str, Any],
        deliver: Callable[[Answer], None],
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Makes a request of ranks while a cell runs; its answers are delivered as they come."""
        if self.state == "running":
            chosen = range(self.size) if ranks is None else ranks
            self._ranks.ask_soon(name, arguments, deliver, chosen)

    # ── many small cells side by side ────────────────────────────────────────────────────────

    @contextmanager
    def crew(self, ranks_each: int) -> Iterator[Crew]:
        """Within, members of an ensemble run side by side, each on ``ranks_each`` ranks in a row.

        Raises:
            ClusterLost: the ranks are gone; nothing was sent.
            UsageError: they are busy.
        """
        self.catch_up()
        self._ranks.mirrors.drawn = front_end() == NOTEBOOK
        with self._cells.crew(ranks_each) as crew:
            yield crew
