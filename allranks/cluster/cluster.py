"""A cluster of ranks: start, run, push, pull, status, interrupt, restart, stop."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import cloudpickle

from allranks.cluster import devices, launchers, source
from allranks.cluster.connection import Answers, CellRecord, Connection
from allranks.cluster.crew import Crew
from allranks.cluster.explaining import Aside, explain_here
from allranks.cluster.inbox import Pressed
from allranks.cluster.preload import check_preload
from allranks.cluster.run import Run, View
from allranks.cluster.status import RankStatus, read_status
from allranks.errors import CellInterrupted, ClusterLost, UsageError
from allranks.records import requests
from allranks.records.explained import Explained
from allranks.records.ranks import label
from allranks.records.wire import Answer, Hello, Interrupt, Output, Result, RunCell
from allranks.widgets import text_view

if TYPE_CHECKING:
    import ipyparallel

_SCREEN_NBYTES = 128 * 1024
_LEAST_SCREEN_NBYTES = 4096
_POLL_SECONDS = 0.1
_CLIENT_SECONDS = 30.0
_EXPLAIN_SECONDS = 30.0
_rank_of = attrgetter("rank")


class Cluster:
    """Ranks of one MPI world, started together, that run cells and functions.

    A context manager: entering starts it, leaving stops it. Its ``state`` is one of ``new``,
    ``starting``, ``running``, ``lost`` and ``stopped``. It is used from one thread.

    Args:
        n: the number of ranks; by default one a visible GPU, else 2 to 4 by this machine's cores.
        gpus: which GPUs to pin ranks to, as ``"0,2"`` or ``"none"``; by default all visible.
        launcher: the name of what starts the ranks.
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
        launcher: str = "local",
        preload: str | Sequence[str] = (),
        exclusive: bool = False,
    ) -> None:
        self.gpus = devices.choose(gpus)
        self._pins = (devices.HIDDEN,) if gpus == "none" else tuple(g.uuid for g in self.gpus)
        self.size = default_size(self.gpus) if n is None else n
        most = most_ranks()
        if not 1 <= self.size <= most:
            raise UsageError(
                f"expected between 1 and {most} ranks on this machine, found {self.size}. "
                f"Type for example: %%distributed -n {min(4, most)}"
            )
        if exclusive:
            devices.check_exclusive(self.gpus, self.size)
        self.launcher = launchers.named(launcher)
        self.preload = check_preload(preload)
        self.state = "new"
        self.lost_because = ""
        self._connection: Connection | None = None
        self._client: ipyparallel.Client | None = None
        self._running: Run | None = None
        self._crew: Crew | None = None
        self._cells = 0
        self._epoch = 0
        self._dirty = False
        self._late: list[Output] = []

    @property
    def gpu_notices(self) -> list[str]:
        """What a user should know about the ranks' GPUs: who shares one, which are not found."""
        found = (devices.shared(self.gpus, self.size), devices.overlooked())
        return [line for line in found if line]

    # ── start and stop ───────────────────────────────────────────────────────────────────────

    def start(self) -> Cluster:
        """Starts the ranks and returns when all of them are up.

        Raises:
            StartFailed: they did not come up; nothing of them is left.
            MissingDependency: the launcher's program is not installed.
        """
        if self.state == "running":
            return self
        self.state = "starting"
        self._epoch, self._dirty, self._late = 0, False, []
        try:
            self._connection = Connection(
                self.size, self._pins, self.launcher, self.preload, self._of_cell
            )
            self._connection.start()
        except BaseException:
            self._connection = None
            self.state = "stopped"
            raise
        self.state = "running"
        return self

    def stop(self) -> None:
        """Ends the ranks; their variables are forgotten."""
        if self.state == "running":
            self._take_down("stopped")

    def restart(self) -> Cluster:
        """Ends the ranks and starts as many again; their variables are forgotten."""
        self.stop()
        return self.start()

    def _take_down(self, state: str) -> None:
        self.state = state
        if self._client is not None:
            self._client.close()
            self._client = None
        self._ranks.close()

    @property
    def _ranks(self) -> Connection:
        if self._connection is None:
            raise ClusterLost("the cluster has not been started. Type: %distributed start")
        return self._connection

    @property
    def hellos(self) -> dict[int, Hello]:
        """Who and where every rank is."""
        return dict(sorted(self._ranks.hellos.items()))

    @property
    def busy(self) -> bool:
        """Whether a cell, a function or an ensemble is under way."""
        return self._running is not None or self._crew is not None

    @property
    def log_dir(self) -> str:
        """The folder of the ranks' logs, ``rank-0.log`` and so on."""
        return self._ranks.log_dir

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

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
            UsageError: they run an ensemble.
        """
        if call is None:
            source.check(text)
        self._check_idle()
        chosen = tuple(range(self.size)) if ranks is None else tuple(sorted(set(ranks)))
        self.catch_up()
        view = view or text_view(chosen, self.log_dir)
        if not isinstance(view, Aside):
            self._show_late(view)
        self._renew()
        self._cells += 1
        cell = RunCell(
            cell=self._cells,
            source=text,
            number=number or self._cells,
            ranks=chosen if len(chosen) < self.size else (),
            label=name,
            want_value=want_value,
            limit_nbytes=max(_LEAST_SCREEN_NBYTES, _SCREEN_NBYTES // len(chosen)),
        )
        self._running = Run(cell.cell, chosen, self.size, view, timeout)
        self._ranks.send(chosen, cell, *([call] if call else []))
        return self._running

    def _show_late(self, view: View) -> None:
        for rank, batches in groupby(sorted(self._late, key=_rank_of), key=_rank_of):
            notice: list[Any] = ["notice", "written after its cell had ended:"]
            late = [notice, *(entry for batch in batches for entry in batch.entries)]
            view.output(Output(rank, 0, tuple(late), 0, 0, 0))
        self._late.clear()

    def explain(self, algorithm: str, values: Sequence[Sequence[float]]) -> Explained:
        """Runs an allreduce (sum) that tells its steps, and times it, on the first ranks.

        Args:
            algorithm: ``ring``, ``recursive doubling`` or ``tree``.
            values: one rank's array after the other, all of one length; two or more.

        Raises:
            UsageError: there are not so many ranks, or they run a cell.
            ClusterLost: the ranks are gone.
        """
        if self.busy:
            raise UsageError("the ranks run a cell. Ask again when it has ended.")
        if not 2 <= len(values) <= self.size:
            raise UsageError(
                f"an allreduce needs 2 ranks or more, and no more than run: found {len(values)}, "
                f"and {self.size} {'runs' if self.size == 1 else 'run'}. Type for example: "
                f"%distributed restart -n {max(2, len(values))}"
            )
        told, *_ = self.run(
            explain_here,
            algorithm,
            values,
            ranks=range(len(values)),
            timeout=_EXPLAIN_SECONDS,
            view=Aside(self._late.append),
        )
        return Explained.from_dict(told)

    def _check_idle(self) -> None:
        """Raises where the event loop of an awaited ensemble is used to run a cell beside it."""
        if self._crew is not None:
            raise UsageError(
                "expected idle ranks, found them running an ensemble. Wait for its end, or type: "
                "runs.stop()"
            )

    def _renew(self) -> None:
        """Moves the ranks to a fresh communicator where a cell has left the old one unusable."""
        if self._dirty:
            self._epoch += 1
            self.ask(requests.RENEW, {"epoch": self._epoch})
            self._dirty = False

    def wait(self, run: Run) -> Run:
        """Shows a cell's output until all its ranks have left it; returns it if all went well.

        Raises:
            CellFailed: at least one rank raised.
            ClusterLost: at least one rank died.
        """
        with self._ranks.inbox.hearing_interrupts():
            while not self.settled(run):
                self.step(run, _POLL_SECONDS)
        return self.conclude(run)

    async def wait_awaited(self, run: Run) -> Run:
        """Does what :meth:`wait` does, and lets the event loop run meanwhile.

        The notebook's kernel answers its widgets in that loop, so that their buttons work.
        """
        inbox = self._ranks.inbox
        with inbox.hearing_interrupts(), inbox.waking() as next_event:
            while not self.settled(run):
                try:
                    await next_event(_POLL_SECONDS)
                except asyncio.CancelledError:
                    # What an interrupt becomes where the kernel's own handler hears it.
                    _uncancel()
                    self.press(run)
                self.step(run, 0)
        return self.conclude(run)

    def step(self, run: Run, seconds: float) -> None:
        """Handles what comes within ``seconds``, and shows it."""
        for _ in self._ranks.step(seconds):
            self.press(run)
        if run.overdue():
            run.view.notice(
                f"the time of {run.timeout:g} s is over: interrupting {label(run.pending)}"
            )
            self._send_interrupt(run)
        run.view.refresh()

    def settled(self, run: Run) -> bool:
        """Whether every rank has left the cell, or can never leave it."""
        return not run.pending or self.state != "running" or self._ranks.over()

    def conclude(self, run: Run) -> Run:
        """Ends a settled cell: shows the rest, and raises what it ended with."""
        try:
            self._ranks.step(0)
            if self.state != "running":
                raise CellInterrupted(self.lost_because)
            if self._ranks.ends:
                raise ClusterLost(self._lose(run))
        finally:
            self._running = None
            self._dirty = self._dirty or run.dirty
            run.view.finish()
        run.check()
        return run

    def press(self, run: Run) -> None:
        """Interrupts a cell; the second time, ends the ranks that did not settle."""
        if self.state != "running":
            return
        run.presses += 1
        if run.presses == 1:
            self._send_interrupt(run)
            return
        self.give_up(stubborn(run.pending, self.size))

    def _send_interrupt(self, run: Run) -> None:
        self._ranks.send(run.pending, Interrupt(run.cell))

    def interrupt(self) -> bool:
        """Interrupts the cell, or the ensemble, that is running; returns whether one was."""
        if self._crew is not None:
            self._ranks.inbox.put(Pressed())
            return True
        if self._running is None:
            return False
        self.press(self._running)
        return True

    # ── variables and questions ──────────────────────────────────────────────────────────────

    def push(self, values: dict[str, Any], ranks: Iterable[int] | None = None) -> None:
        """Sets variables on ranks.

        Raises:
            UsageError: a value cannot be pickled, or a rank is busy.
        """
        try:
            payload = cloudpickle.dumps(values, protocol=5)
        except Exception as error:
            raise UsageError(f"{', '.join(values)} cannot be sent to the ranks: {error}") from error
        self.ask(requests.PUSH, {}, payload, ranks=ranks)

    def pull(
        self, names: str | Sequence[str], ranks: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Returns ``{rank: value}``; with a list of names, ``{rank: {name: value}}``.

        Raises:
            UsageError: a rank has no such variable, cannot send it, or is busy.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        answers = self.ask(requests.PULL, {"names": wanted}, ranks=ranks)
        pulled = {rank: pickle.loads(payloads[0]) for rank, (_, payloads) in answers.items()}
        if isinstance(names, str):
            return {rank: got[names] for rank, got in pulled.items()}
        return pulled

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
            UsageError: a rank refused, or did not answer.
            ClusterLost: the ranks are gone.
        """
        self.catch_up()
        chosen = range(self.size) if ranks is None else ranks
        return self._ranks.ask(name, arguments, *payloads, ranks=chosen)

    def client(self) -> ipyparallel.Client:
        """Returns an ipyparallel client of this cluster, whose engine ids are the ranks.

        It closes with the cluster.
        """
        import ipyparallel

        self.catch_up()
        if self._client is None:
            self._client = ipyparallel.Client(self._ranks.ipyparallel)
            self._client.wait_for_engines(self.size, timeout=_CLIENT_SECONDS, interactive=False)
        return self._client

    def is_up(self) -> bool:
        """Handles what has come while nobody waited; returns whether the ranks are up."""
        if self.state == "running":
            self._ranks.step(0)
            if self._ranks.ends and self._running is None and self._crew is None:
                self._lose(None)
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
            UsageError: they run another ensemble.
        """
        self.catch_up()
        self._check_idle()
        self._renew()
        answers = self.ask(requests.MEMBERS, {"ranks_each": ranks_each})
        self._crew = Crew(self._ranks, self._cells, ranks_each)
        for slot in self._crew.slots:
            slot.epoch = max(answers[rank][0]["epoch"] for rank in slot.ranks)
            slot.dirty = any(answers[rank][0]["dirty"] for rank in slot.ranks)
        try:
            yield self._crew
        finally:
            self._cells = self._crew.cells
            self._crew = None
            if self.state == "running":
                self._ranks.ask_soon(
                    requests.MEMBERS, {"ranks_each": 0}, lambda _: None, range(self.size)
                )

    def mourn(self) -> str:
        """Ranks died while a crew was at work: takes the rest down, returns what happened."""
        return self._lose(None)

    def give_up(self, why: str) -> None:
        """Ends the ranks, which did not settle; their variables are lost."""
        self.lost_because = why
        self._take_down("lost")

    def _of_cell(self, record: CellRecord, payloads: list[bytes]) -> None:
        if self._crew is not None and self._crew.take(record, payloads):
            return
        if self._running is not None and record.cell == self._running.cell:
            if not isinstance(record, Result):
                self._running.take(record, payloads)
        elif isinstance(record, Output) and record.entries:
            self._late.append(record)

    def _lose(self, run: Run | None) -> str:
        """Ranks died: shows their last output, takes the rest down, returns what happened."""
        self._take_down("lost")
        for rank in run.ranks if run else ():
            text = self._ranks.unseen(rank)
            if run and rank in run.pending:
                run.view.left(rank, "lost")
            if run and text:
                run.view.output(Output(rank, run.cell, (["out", text],), 0, 0, 0))
        self.lost_because = self._ranks.loss(shown=run is not None)
        return self.lost_because


def stubborn(pending: Iterable[int], size: int) -> str:
    """Returns what is said when ranks were ended because they did not react to an interrupt."""
    return (
        f"interrupted twice: {label(pending)} did not settle, so all {size} ranks were ended and "
        "their variables are lost. The next cell starts a fresh cluster."
    )


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


def default_size(gpus: Sequence[object]) -> int:
    """Returns one rank a GPU, or between 2 and 4 on a machine without."""
    return len(gpus) or max(2, min(4, os.cpu_count() or 1))


def most_ranks() -> int:
    """Returns how many ranks this machine is let start: 16 a core, and at least 64."""
    return max(64, 16 * (os.cpu_count() or 1))
