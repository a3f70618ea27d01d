"""A cluster of ranks: start, run, push, pull, status, interrupt, restart, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, overload

import cloudpickle

from allranks.cluster import devices, launchers, variables
from allranks.cluster.cell_run import View
from allranks.cluster.cells import Cells
from allranks.cluster.failures import RankStatus
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.options import check_allowed, check_open_files, check_preload, choose_size
from allranks.cluster.sockets import InterruptRequested
from allranks.errors import CellFailed, UsageError
from allranks.records import requests
from allranks.records.config import EVERY_GPU
from allranks.records.wire import Hello
from allranks.widgets.displays import ProgressLine

if TYPE_CHECKING:
    import ipyparallel

T = TypeVar("T")


class Cluster:
    """Ranks of one MPI world, started together, that run cells and functions.

    A context manager: entering starts it, leaving stops it. Its ``state`` is one of ``new``,
    ``starting``, ``running``, ``lost`` and ``stopped``. Its length is the number of ranks, and
    ``cluster["x"]`` is the variable ``x`` of each rank, as a dict.

    Args:
        n: the number of ranks; by default one per visible GPU, else 2 to 4 by this machine's cores.
        gpus: the GPUs of each host to which ranks are pinned, for example ``"0,2"`` or ``"none"``;
            by default all that are visible there.
        launcher: where the ranks run, for example ``"ssh:h1:2,h2:2"``, or with options of the
            launcher ``"slurm --nodes 2 --ntasks-per-node 4"``; by default on this machine, or on
            the nodes of the job in which the notebook runs.
        preload: modules that are imported once, before the ranks are forked, for example
            ``("pandas",)``. The ranks share the memory of these modules.
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
        self.raises_own = raises_own
        self.launcher = launchers.named(launcher or launchers.default())
        hidden = (devices.HIDDEN,) if gpus == "none" else ()
        if isinstance(self.launcher, MultiHostLauncher):
            self.gpus: tuple[devices.Gpu, ...] = ()
            pins = hidden or devices.numbers(gpus) or (EVERY_GPU,)
            self.size = check_allowed(self.launcher.size(n))
            if exclusive:
                raise UsageError(
                    "--exclusive counts the GPUs of this machine, and the ranks run on others. "
                    "Leave it out, and request one GPU per rank: --gpus-per-node 4"
                )
        else:
            self.gpus = devices.choose(gpus)
            pins = hidden or tuple(g.uuid for g in self.gpus)
            self.size = choose_size(n, self.gpus)
            check_open_files(self.size)
            if exclusive:
                devices.check_exclusive(self.gpus, self.size)
        self.preload = check_preload(preload)
        self.cells = Cells(
            self.size,
            {
                "gpus": pins,
                "launcher": self.launcher,
                "preload": self.preload,
                "settings": dict(settings),
            },
        )
        if isinstance(self.launcher, MultiHostLauncher):
            self.cells.hooks.check_hosts(self.launcher.typed)
        self.show_output = show_output
        """For programs that show cells themselves."""
        self.roster = self.cells.roster
        """Which ranks run, which have died, and what they run."""

    def launch(self) -> Self:
        """Begins to start the ranks and returns at once. `start` then waits for them, and `stop`
        ends them; nothing else works yet.

        Raises:
            StartFailed: no process can be started for the ranks.
            MissingDependency: the launcher's program is not installed.
        """
        if self.state not in ("starting", "running"):
            self.cells.launch(isinstance(self.launcher, MultiHostLauncher))
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

        def progress(up: int, started: int, module: str) -> None:
            # All ranks come up together, after MPI has connected their processes.
            tail = f", {started} started" if started > up else ""
            tail += f", importing {module}" if module else ""
            head = f"starting ranks: {up} of {self.size} up"
            passing.show(head, up + max(up, started), 2 * self.size, tail)

        try:
            self.launch().cells.start(tell, progress)
        finally:
            passing.end()
        return self

    def stop(self) -> None:
        """Ends the ranks; deletes their variables, also the kept ones."""
        self.cells.turns.end_submitted(wait=False)
        self.cells.stop()

    def restart(self) -> Self:
        """Ends the ranks and starts as many new ones; their variables are deleted."""
        self.stop()
        return self.start()

    @property
    def state(self) -> str:
        """``new``, ``starting``, ``running``, ``lost`` or ``stopped``."""
        return self.roster.phase

    @property
    def lost_because(self) -> str:
        """The reason why the ranks are lost; empty if they are not."""
        return self.roster.lost_because

    @property
    def show_output(self) -> bool:
        """Whether calls without a view show what the ranks print."""
        return self.cells.show_output

    @show_output.setter
    def show_output(self, shows: bool) -> None:
        self.cells.show_output = shows

    @property
    def hellos(self) -> dict[int, Hello]:
        """The report of each rank on its process, host and device."""
        return dict(sorted(self.roster.hellos.items()))

    @property
    def log_dir(self) -> str:
        """The folder of the ranks' logs, ``rank-0.log`` and so on."""
        return self.cells.connection.log_dir

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # As an executor of Python does, a block that ends well waits for its submitted calls.
        self.cells.turns.end_submitted(wait=kind is None)
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
        return self._values(what, ranks=ranks, timeout=timeout, view=view)

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
            raise UsageError(
                f"{name} cannot be sent to the ranks: {error}. Pass it plain values, such as lists "
                "or arrays, and make other objects within it."
            ) from error
        return self._values("", call=call, name=name, ranks=ranks, timeout=timeout, view=view)

    def _values(self, source: str, view: View | None, **options: Any) -> list[Any]:
        with self.cells.turns.taken():
            run = self.cells.begin(source, view=view, want_value=True, **options)
            try:
                return self.cells.wait(run).values()
            except CellFailed as failed:
                own = run.exception(self.cells.failed_first)
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
        with self.cells.turns.taken():
            results: list[T] = self.cells.hooks.command("map", self, function, items, timeout)
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
        return self.cells.turns.submit(self.run, what, *args, **options)

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

    def interrupt(self) -> bool:
        """Interrupts what runs on the ranks; returns whether anything did.

        Before a cell, it interrupts the requests of clients that the cell waits for; without a
        cell, what ranks do for clients; tasks that have yet to begin go on.
        """
        roster, connection = self.roster, self.cells.connection if self.state != "new" else None
        if connection is None:
            return False
        if roster.reserved:
            connection.inbox.put(InterruptRequested())
        elif (waits := connection.awaits_clients) is not None:
            waits.put(InterruptRequested())
        elif roster.running is not None and connection.run is not None:
            connection.run.press()
        elif not roster.caller and roster.phase == "running":
            with self.cells.turns.taken_if_free() as free:
                if free:
                    return connection.interrupt_clients()
            connection.inbox.put(InterruptRequested())  # a call of another thread begins
            return True
        return roster.busy or connection.awaits_clients is not None

    def heal_when(self, healing: str) -> None:
        """Sets when ranks that die are replaced: ``on``, ``ask`` for it, or ``off``.

        Raises:
            UsageError: ``healing`` is none of these.
        """
        if healing not in ("on", "ask", "off"):
            raise UsageError(
                f"expected on, ask, off, found {healing!r}. Type: %distributed heal on"
            )
        self.roster.replacing = healing

    def heal(self, tell: Callable[[str], None] | None = None) -> str:
        """Replaces ranks that have died by new processes; returns a line about it.

        Args:
            tell: called with a line about each event; by default the next cell shows these lines.

        Raises:
            ClusterLost: the dead ranks could not be replaced, and all were killed.
            UsageError: the ranks run a cell, or none has died.
            KeyboardInterrupt: an interrupt during the replacement, which takes effect after it.
        """
        return self.cells.replace_dead(tell)

    def push(self, values: dict[str, Any], ranks: Iterable[int] | None = None) -> None:
        """Sets variables on ranks.

        Raises:
            UsageError: a value cannot be pickled, or a rank is busy.
        """
        if not isinstance(values, Mapping):
            raise UsageError(
                f"expected variables by name, found {type(values).__name__}. Type for example: "
                "ranks.push({'x': 3}), or: ranks['x'] = 3"
            )
        packed = variables.pack(values, "the ranks")
        self.cells.ask(requests.PUSH, {}, packed, ranks=ranks, after_clients=True)

    def pull(
        self, names: str | Sequence[str], ranks: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Returns ``{rank: value}``; with a list of names, ``{rank: {name: value}}``.

        Raises:
            UsageError: a rank has no such variable, cannot send it, or is busy.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        asked = {"names": wanted}
        answers = self.cells.ask(requests.PULL, asked, ranks=ranks, after_clients=True)
        return variables.unpack(answers, names)

    def __getitem__(self, name: str) -> dict[int, Any]:
        """Returns a variable of all ranks, as :meth:`pull`."""
        return self.pull(_variable(name))

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets a variable on all ranks, as :meth:`push`."""
        self.push({_variable(name): value})

    def status(self) -> list[RankStatus]:
        """Returns the state of every rank, and its current line."""
        return self.cells.statuses()

    def client(self) -> ipyparallel.Client:
        """Returns an ipyparallel client of this cluster, whose engine ids are the ranks.

        It closes with the cluster.
        """
        self.cells.catch_up()
        made: ipyparallel.Client = self.cells.hooks.command("client")
        return made

    def connection_information(self) -> dict[str, Any]:
        """Returns what ``ipyparallel.Client`` takes to connect to these ranks."""
        self.client()  # all engines are there then
        hooks = self.cells.hooks
        found: dict[str, Any] = hooks.command("connection_information")
        return found


def _variable(name: object) -> str:
    if isinstance(name, str) and name.isidentifier():
        return name
    raise UsageError(
        f"expected the name of a variable of the ranks, found {name!r:.60}. Type for example: "
        "ranks['x']   (of some ranks: ranks.pull('x', [0, 1]); to run code: ranks.run('x + 1'))"
    )


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
