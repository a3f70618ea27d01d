"""Output that a page misses because it is closed while a cell runs.

A front end records only what it receives while a page is open: displays that change meanwhile are
lost to the notebook. So the kernel keeps the displays of long cells. A page that is opened later
asks for them, and from then on gets every change. They are deleted once the cell has ended and a
page has confirmed that it has all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.widgets.text import of_this_process

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult

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
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: The number at its prompt; None while it runs.
    count: int | None = None
    #: Whether a page that was opened after its begin has asked for it.
    asked: bool = False

    def told(self) -> dict[str, Any]:
        return {"cell": self.cell, "outputs": [*self.outputs.values()], "count": self.count}


class OutputReplay:
    """The cells of a notebook whose outputs may not be complete in any page."""

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}
        self._widget: Any = None
        self._shell: Any = None
        #: A page may be heard in another thread.
        self._lock = threading.RLock()

    def take(self, name: str, data: dict[str, Any], metadata: dict[str, Any]) -> None:
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

    def tick(self) -> None:
        """Makes the widget through which pages ask, once a cell runs for long."""
        cell = None if self._widget is not None else self._running()
        if cell is not None and time.monotonic() - cell.began > _LONG_SECONDS:
            self._widget = _make_widget(self._heard)

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
            self._widget.send({"ended": cell.told() if cell.asked else {"cell": cell.cell}})

    def _heard(self, said: dict[str, Any]) -> None:
        with self._lock:
            # A page was opened again.
            if said.get("kind") == "opened":
                for cell in self._cells.values():
                    cell.asked = True
                self._widget.send({"all": [cell.told() for cell in self._cells.values()]})
            # The page has all outputs of a cell that has ended.
            elif said.get("kind") == "has":
                name = str(said.get("cell"))
                if name in self._cells and self._cells[name].count is not None:
                    del self._cells[name]


def _make_widget(heard: Callable[[dict[str, Any]], None]) -> Any:
    """Returns a model without a view, through which pages ask; ``heard`` gets their messages.

    They may come in another thread.
    """
    # Imported here: anywidget loads ipywidgets, which takes longer than a short cell.
    import anywidget
    import traitlets

    states = count()

    class ReplayWidget(anywidget.AnyWidget):
        _esm = (Path(__file__).parent / "front" / "output_replay.js").read_text("utf-8")
        # The first page sees the model being made; a later one asks for its state.
        page = traitlets.Dict().tag(sync=True, to_json=lambda *_: {"later": next(states) > 0})

    widget = ReplayWidget()
    widget.on_msg(lambda _widget, content, _buffers: heard(content))
    return widget


#: Of this kernel.
replay = OutputReplay()
