"""Keeps the displays of long cells for pages that are opened later.

A front end records only what it receives while a page is open: displays that change meanwhile are
lost to the notebook. So the kernel keeps the displays of long cells. A page that is opened later
asks for them, and from then on gets every change. They are deleted once the cell has ended and a
page has confirmed that it has all of them.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.cluster.features import NotebookFeature, ProcessChange
from allranks.widgets.displays import ShownValue, make_widget
from allranks.widgets.extensions import DisplayObserver
from allranks.widgets.text import Data, of_this_process

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

_SCRIPT = Path(__file__).parent / "output_replay.js"
#: A page is hardly closed and opened during a shorter cell.
_LONG_SECONDS = 1.0
_CELLS = 30


@dataclass
class _Cell:
    """One cell of the notebook: its displays, in the order in which they stand there."""

    cell: str
    #: The request that has begun it.
    run: str
    began: float
    outputs: dict[str, Data] = field(default_factory=dict)
    #: The number at its prompt; None while it runs.
    count: int | None = None
    #: Whether a page that was opened after its begin has asked for it.
    asked: bool = False

    def as_message(self) -> Data:
        return {"cell": self.cell, "outputs": [*self.outputs.values()], "count": self.count}


class OutputReplay(DisplayObserver):
    """The cells of a notebook whose outputs may not be complete in any page."""

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}
        self._widget: Any = None
        self._shell: Any = None
        #: A page may be heard in another thread.
        self._lock = threading.RLock()

    def shown(self, name: str, data: Data, metadata: Data) -> None:
        with self._lock:
            cell = next((one for one in self._cells.values() if name in one.outputs), None)
            cell = cell or self._running()
            if cell is None:
                return
            new = {"output_type": "display_data", "data": data, "metadata": metadata}
            cell.outputs[name] = new
            if cell.asked:
                at = [*cell.outputs].index(name)
                self._widget.send({"cell": cell.cell, "at": at, "output": new})

    def refresh(self) -> None:
        """Makes the widget through which pages ask, once a cell runs for long."""
        cell = None if self._widget is not None else self._running()
        if cell is not None and time.monotonic() - cell.began > _LONG_SECONDS:
            script, states = _SCRIPT.read_text("utf-8"), count()
            self._widget = make_widget(
                "ReplayWidget",
                script,
                "",
                # The first page sees the model being made; a later one asks for its state.
                lambda: {"later": next(states) > 0},
                self._heard,
            )

    def close(self) -> None:
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._ended)
        if self._widget is not None:
            self._widget.close()
        self._shell = self._widget = None
        self._cells.clear()

    def _running(self) -> _Cell | None:
        """Returns the cell that runs, if a page shows it that can be opened anew."""
        kernel = of_this_process()
        request = kernel.get_parent("shell") if kernel is not None else {}
        name = request.get("metadata", {}).get("cellId")
        content = request.get("content", {})
        if not name or "code" not in content or content.get("allow_stdin") is False:
            return None
        run = request["header"]["msg_id"]
        cell = self._cells.get(name)
        if cell is None or cell.run != run:
            self._cells.pop(name, None)
            cell = self._cells[name] = _Cell(name, run, time.monotonic())
            for old in [*self._cells][:-_CELLS]:
                del self._cells[old]
            if self._shell is None:
                self._shell = kernel.shell
                self._shell.events.register("post_run_cell", self._ended)
        return cell

    def _ended(self, result: ExecutionResult | None) -> None:
        if result is None or result.info is None or not result.info.store_history:
            return  # the notebook's part of a cell, which goes on
        cell = next((one for one in self._cells.values() if one.count is None), None)
        if cell is None:
            return
        cell.count = result.execution_count
        error = result.error_before_exec or result.error_in_exec
        value: object = result.result
        if isinstance(value, ShownValue):
            cell.outputs["value"] = {
                "output_type": "execute_result",
                "data": value.data,
                "metadata": value.metadata,
                "execution_count": result.execution_count,
            }
        if error is not None:
            cell.outputs["error"] = {
                "output_type": "error",
                "ename": type(error).__name__,
                "evalue": str(error),
                "traceback": getattr(self._shell, "_last_traceback", None) or [],
            }
        short = time.monotonic() - cell.began < _LONG_SECONDS and not cell.asked
        if self._widget is None or short:
            self._cells.pop(cell.cell)
        else:
            self._widget.send({"ended": cell.as_message() if cell.asked else {"cell": cell.cell}})

    def _heard(self, message: Data) -> None:
        with self._lock:
            # A page was opened again.
            if message.get("kind") == "opened":
                for cell in self._cells.values():
                    cell.asked = True
                self._widget.send({"all": [cell.as_message() for cell in self._cells.values()]})
            # The page has all outputs of a cell that has ended.
            elif message.get("kind") == "has":
                name = str(message.get("cell"))
                if name in self._cells and self._cells[name].count is not None:
                    del self._cells[name]


_REPLAY = OutputReplay()


class KeepsDisplays(NotebookFeature):
    """Keeps what the pages of this kernel may have missed."""

    display_observers = (_REPLAY,)
    _kept = ProcessChange(lambda undo: undo.callback(_REPLAY.close))

    @classmethod
    def loaded(cls, shell: InteractiveShell, undo: ExitStack) -> None:
        undo.enter_context(cls._kept)


FEATURE = KeepsDisplays
