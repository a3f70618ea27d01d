"""The results of ``%%px``: that of ``-o``, and that of a cell that runs in the background."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import Any

from allranks.cluster.cell_run import CellRun, HiddenView, View
from allranks.cluster.cluster import Cluster
from allranks.errors import CellFailed, Report
from allranks.records.deferred import interruptible, interrupts_to
from allranks.records.ranks import label
from allranks.records.wire import Output
from allranks.widgets.dashboard.view import text_view


@contextmanager
def raising_composite_errors() -> Iterator[None]:
    """Within, the failure of a cell is also an error of ipyparallel, if that is imported: programs
    catch CompositeError, and read ``elist``.
    """
    try:
        yield
    except CellFailed as failed:
        if (errors := sys.modules.get("ipyparallel.error")) is not None:
            kind: Any = type(failed)
            failed.__class__ = _also(kind, errors.CompositeError)
            vars(failed).update(msg=str(failed), elist=[*map(_element, failed.reports)])
        raise


@lru_cache
def _also(kind: Any, composite: Any) -> Any:
    # Shown, and named, as the failure of any cell.
    own = {"__str__": kind.__str__, "__repr__": kind.__repr__, "__module__": kind.__module__}
    return type(kind.__name__, (kind, composite), own)


def _element(report: Report) -> tuple[str, str, str, dict[str, Any]]:
    about = {"engine_id": report.rank, "method": "execute"}
    return report.etype, report.message, "\n".join(report.traceback), about


_REFRESH_SECONDS = 0.1
_COUNTERPARTS = {"abort": "To end it, type: ranks.interrupt()"}
_HAS = "It has get(), get_dict(), wait(), ready(), successful(), stdout, stderr, elapsed, progress"


class PxResult(Future[list[Any]]):
    """A cell of the ranks, like ipyparallel's AsyncResult. As a future, it is what `Client.wait`
    takes.
    """

    #: Shows the output in waits, within `stream_output`.
    _stream: View | None = None
    #: None if the cell has ended before, or has not begun.
    _sent: CellRun | None = None

    def __init__(
        self, cluster: Cluster, ranks: Sequence[int], fold: bool, began: float | None = None
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # it cannot be cancelled, only interrupted
        self._cluster, self.ranks, self._fold = cluster, tuple(ranks), fold
        #: Programs for ipyparallel read this name.
        self._targets = list(ranks)
        self._output: list[Output] = []
        #: The same for waits that show it; None at the end of the cell, and at an interrupt.
        self._arrived: SimpleQueue[Output | None] = SimpleQueue()
        self._made, self._ended = time.monotonic() if began is None else began, 0.0

    def take(self, batch: Output) -> None:
        """Adds output of a rank."""
        self._output.append(batch)
        self._arrived.put(batch)

    def end(self, outcome: list[Any] | BaseException) -> None:
        """Ends with the values of the ranks, or an error."""
        self._ended = time.monotonic()
        if isinstance(outcome, BaseException):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)
        self._arrived.put(None)

    def ready(self) -> bool:
        """Returns whether the cell has ended on all ranks."""
        return self.done()

    def successful(self) -> bool:
        """Returns whether the cell has ended without an error."""
        return self.ready() and self.exception() is None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the cell, and returns whether it has ended.

        An interrupt of the notebook interrupts the cell.
        """
        timeout = None if timeout == -1 else timeout  # -1 is ipyparallel's default
        with self._interrupting():
            if self._stream is not None:
                if not self._show_arriving(self._stream, timeout):
                    return False
                self._arrived.put(None)  # for the next wait
            wait([self], timeout)
        return self.ready()

    @contextmanager
    def stream_output(self) -> Iterator[None]:
        """Within, a wait for the end shows the output so far, and what comes."""
        view = self._stream = self._text_view()
        try:
            yield
        finally:
            self._stream = None
            if self.ready():  # before a wait, which then shows nothing
                self._show_arriving(view, 0)
            view.finish()

    def _show_arriving(self, view: View, timeout: float | None = None) -> bool:
        """Shows the output as it comes; returns whether the cell, or `follow`, has ended."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            # First: what has come is in the queue by the end, whose None an earlier wait may have
            # taken.
            ended, left = self.done(), max(0.0, until - time.monotonic())
            try:
                batch = self._arrived.get(timeout=min(left, _REFRESH_SECONDS))
            except Empty:
                if ended:
                    view.finish()
                    return True
                if not left:
                    return False
            else:
                if batch is None:
                    view.finish()
                    return True
                view.output(batch)
            view.refresh()  # which holds lines back for a moment

    @contextmanager
    def _interrupting(self) -> Iterator[None]:
        try:
            with interruptible():
                yield
        except KeyboardInterrupt as pressed:
            # Here: scripts need no magics.
            from allranks.magics.session import show_as_line

            if not self.ready():
                self._cluster.interrupt()
                show_as_line(pressed, f"the cell on {label(self.ranks)} was interrupted")
            raise

    def get(self, timeout: float | None = None) -> list[Any]:
        """Waits for the end, and returns the values of the last expression, one for each rank.

        Raises:
            TimeoutError: the cell has not ended after ``timeout`` seconds.
            CellFailed: a rank has raised an exception.
        """
        if not self.ready():  # else this may be the thread of the cell
            self.wait(timeout)
        return super().result(0)

    def get_dict(self, timeout: float | None = None) -> dict[int, Any]:
        """Returns the same by ranks."""
        return dict(zip(self.ranks, self.get(timeout), strict=True))

    @property
    def r(self) -> list[Any]:
        """What `get` returns."""
        return self.get()

    @property
    def result_dict(self) -> dict[int, Any]:
        """What `get_dict` returns."""
        return self.get_dict()

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __getitem__(self, index: int | slice | str) -> Any:
        return getattr(self, index) if isinstance(index, str) else self.get(0)[index]

    @property
    def progress(self) -> int:
        """How many ranks have ended the cell."""
        if self.ready():
            return len(self)
        return 0 if self._sent is None else len(self) - len(self._sent.pending)

    @property
    def elapsed(self) -> float:
        """For how many seconds the cell runs, or ran, with the wait before its begin."""
        return (self._ended or time.monotonic()) - self._made

    @property
    def wall_time(self) -> float:
        """The same once the cell has ended; before, TimeoutError."""
        if not self.ready():
            raise TimeoutError("the cell has not ended")
        return self.elapsed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"the result of %%px has no {name!r}, which requests of ipyparallel have: it is a cell "
            f"of the ranks. {_COUNTERPARTS.get(name, _HAS)}"
        )

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end, and returns the error, None if there is none."""
        if not self.ready():
            self.wait(timeout)
        return super().exception(0)

    @property
    def stdout(self) -> list[str]:
        """What each rank has printed so far."""
        return self._text("out")

    @property
    def stderr(self) -> list[str]:
        """The same of the standard error."""
        return self._text("err")

    def _text(self, kind: str) -> list[str]:
        return [
            "".join(
                entry[1]
                for batch in list(self._output)
                for entry in batch.entries
                if batch.rank == rank and entry[0] == kind
            )
            for rank in self.ranks
        ]

    def display_outputs(self, groupby: str = "type") -> None:
        """Shows the output of the ranks so far."""
        view = self._text_view(groupby)
        for batch in list(self._output):
            view.output(batch)
        view.finish()

    def _text_view(self, groupby: str = "type") -> View:
        fold = self._fold and groupby != "engine"
        return text_view(self.ranks, self._cluster.log_dir, fold)

    def wait_interactive(
        self, interval: float = 0.1, timeout: float | None = None, **_ignored: Any
    ) -> None:
        """Waits for the end, with the arguments of ipyparallel's, which shows a bar meanwhile."""
        self.wait(timeout)

    result = get

    def __repr__(self) -> str:
        state = "running"
        if self.ready():
            state = "ended" if self.successful() else "failed"
        return f"<PxResult: {state} on {label(self.ranks)}>"


class BackgroundCell(PxResult):
    """A cell that the ranks run while the notebook continues, from its begin on.

    The next cell for the ranks waits for its end.
    """

    #: The last one.
    _last: BackgroundCell | None = None

    def __init__(
        self, cluster: Cluster, text: str, number: int, ranks: Sequence[int], fold: bool
    ) -> None:
        super().__init__(cluster, ranks, fold)
        self.name = f"In[{number}] (%%px --noblock)"
        BackgroundCell._last = self
        #: Lines before the begin of the cell, for instance what it waits for; None at its begin.
        self._before: SimpleQueue[str | None] = SimpleQueue()
        self._has_begun = False
        # A daemon, because the end of the kernel must not wait for the cell.
        threading.Thread(target=self._run, args=(text, number), daemon=True).start()
        # The following cells come after this one.
        try:
            with interruptible():
                while (line := self._before.get()) is not None:
                    sys.stderr.write(f"{line}\n")
        except KeyboardInterrupt:
            cluster.interrupt()
            raise

    def _run(self, text: str, number: int) -> None:
        outcome: list[Any] | BaseException
        try:
            run = self._sent = self._cluster.cells.begin(
                text,
                name=f"cell In[{number}]",
                number=number,
                ranks=self.ranks,
                view=HiddenView(self.take, self._note),
                want_value=True,
            )
            self._begin()
            with raising_composite_errors():
                outcome = self._cluster.cells.wait(run).values()
        except BaseException as error:
            outcome = error
        self.end(outcome)
        self._begin()

    def _begin(self) -> None:
        self._has_begun = True
        self._before.put(None)

    def _note(self, text: str) -> None:
        """Shows a line about the cell as a whole: as each rank's, or before its begin at once."""
        if not self._has_begun:
            self._before.put(text)
            return
        for rank in self.ranks:
            self.take(Output(rank, 0, (["notice", text],), 0, 0, 0))

    def follow(self) -> None:
        """Shows the output as it comes, until the end of the cell, or an interrupt, which leaves
        the ranks in it.
        """
        view = self._text_view()
        # In a cell with an await, ipykernel's own only cancels what awaits.
        try:
            with interrupts_to(lambda *_: self._arrived.put(None)):
                self._show_arriving(view)
        finally:
            view.finish()

    def wait_for_end(self, quiet_seconds: float, tell: Callable[[], object]) -> None:
        """Waits for the end; calls ``tell`` if it has not come by then. An interrupt of the
        notebook interrupts the cell, also one that comes when ``tell`` has shown that it would.
        """
        with self._interrupting():
            wait([self], quiet_seconds)
            if not self.ready():
                tell()
                wait([self])

    def interrupt(self) -> None:
        """Interrupts the cell on all its ranks. It may be called again, as for one rank after the
        other: the stop button then kills the ranks that are still in the cell.
        """
        if self._sent is None or not self._sent.presses:
            self._cluster.interrupt()
        elif not self._cluster.cells.connection.closed:
            self._sent.interrupt()


def in_background(cluster: Cluster) -> list[BackgroundCell]:
    """Returns the cell of ``%%px --noblock`` that these ranks run, if there is one."""
    last = BackgroundCell._last
    return [] if last is None or last.ready() or last._cluster is not cluster else [last]


def running_cell(cluster: Cluster) -> tuple[str, Sequence[int]]:
    """Returns the cell or call of this notebook that ranks run, in words, and these ranks.

    Not members: between two of them a rank answers requests, and the notebook does not know when.
    """
    name = next((one.name for one in in_background(cluster)), "another call of this notebook")
    cell = cluster.roster.running  # once: another thread may end it
    return name, () if cell is None else cell.pending
