"""What programs call on a cluster: functions on ranks, with a result now or later."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import cloudpickle

from allranks.cluster.cells import CellRun, HiddenView, View
from allranks.cluster.features import NotebookHooks
from allranks.cluster.healing import HealedCells
from allranks.errors import CellFailed, UsageError
from allranks.records.wire import Output

T = TypeVar("T")
_POLL_SECONDS = 0.01


class CapturedOutput(HiddenView):
    """A view that shows nothing, and has what each rank printed: ``captured[0]`` is rank 0's text.

    Displays are in it as text. For the whole output, including long output, see the logs.
    """

    def __init__(self) -> None:
        self._parts = defaultdict[int, list[str]](list)
        self.notices: list[str] = []
        """Lines about the call as a whole."""
        super().__init__(self._take, self.notices.append)

    def _take(self, batch: Output) -> None:
        for kind, *rest in batch.entries:
            if kind in ("out", "err"):
                self._parts[batch.rank].append(rest[0])
            elif kind in ("display", "result"):
                self._parts[batch.rank].append(f"{rest[0].get('text/plain', '')}\n")

    def __getitem__(self, rank: int) -> str:
        return "".join(self._parts.get(rank, ()))


class Calls(HealedCells):
    """Functions on ranks. Calls of several threads wait for each other, in any order.

    `submit` calls from one thread of its own, so submitted calls run in their order.
    """

    # Of `Cluster`.
    size: int
    failed_first: int | None
    hooks: NotebookHooks
    begin: Callable[..., CellRun]
    wait: Callable[[CellRun], CellRun]

    def __init__(self, *, raises_own: bool) -> None:
        super().__init__()
        self.raises_own = raises_own
        self._turn = threading.RLock()
        #: Not the turn, which a running call has: `submit` returns at once.
        self._submitting = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        if self.busy and self._caller == threading.get_ident():
            # It would wait for itself: another thread's call may have the turn, and wait for the
            # cell of this one.
            self._catch_up()
            self._check_idle()
        with self._turn:
            while self.busy and self._caller in _other_threads():
                time.sleep(_POLL_SECONDS)
            yield

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
        with self._in_turn():
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
        with self._in_turn():
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
        with self._in_turn():
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
        with self._submitting:
            # One thread: cells cannot run side by side, and this keeps the calls in their order.
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "allranks-calls")
            return self._executor.submit(self.run, what, *args, **options)  # type: ignore[arg-type]

    async def run_async(self, what: Callable[..., T] | str, *args: Any, **options: Any) -> list[T]:
        """Like :meth:`run`, while the event loop goes on."""
        return await asyncio.wrap_future(self.submit(what, *args, **options))

    async def map_async(
        self, function: Callable[..., T], *items: Iterable[Any], timeout: float | None = None
    ) -> list[T]:
        """Like :meth:`map`, while the event loop goes on."""
        return await asyncio.to_thread(self.map, function, *items, timeout=timeout)

    def _end_submitted(self, *, wait: bool) -> None:
        with self._submitting:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=wait, cancel_futures=not wait)

    def __len__(self) -> int:
        return self.size


def _other_threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
