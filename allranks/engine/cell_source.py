"""How IPython treats the source of a cell: what it looks for, and the name of its file.

IPython splits each cell into tokens, and compiles it twice, before it runs it: it looks for magics
and ``await``. For a cell of 60 lines that takes longer than all other steps together, and every
rank does it. Most cells have no character that such a search could find.

The code of a cell has a file name that libraries recognise; people see ``In[3]``.
"""

from __future__ import annotations

import copy
import linecache
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from IPython.core import ultratb
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

from allranks.collectives.calls import sites
from allranks.records.code_names import code_name, is_cell, with_numbers

#: ``%magic``, ``!command``, ``,f a``, ``;f a``, ``/f a``, ``x = %magic``, ``x = !command``, ``x?``.
_MAY_BE_SPECIAL = re.compile(r"^\s*[%!,;/]|=\s*[%!]|\?", re.MULTILINE)
#: The searches that these characters are for. A cell may add others.
_SEARCHES = {"MagicAssign", "SystemAssign", "EscapedCommand", "HelpEnd"}


def search_only_where_needed(shell: InteractiveShell) -> None:
    """Has IPython search a cell for magics and ``await`` only where there may be some."""
    manager: TransformerManager = shell.input_transformer_manager
    transform: Callable[[list[str]], list[str]] = manager.do_token_transforms
    is_async: Callable[..., bool] = shell.should_run_async

    def do_token_transforms(lines: list[str]) -> list[str]:
        names = {getattr(search, "__name__", "") for search in manager.token_transformers}
        return lines if names <= _SEARCHES and not _has_special(lines) else transform(lines)

    def should_run_async(
        source: str, *, transformed_cell: str | None = None, **options: Any
    ) -> bool:
        # Python's keywords cannot be written in another way.
        text = source if transformed_cell is None else transformed_cell
        may_wait = "await" in text or "async" in text
        return may_wait and is_async(source, transformed_cell=transformed_cell, **options)

    setattr(manager, "do_token_transforms", do_token_transforms)  # noqa: B010  a method, to mypy
    setattr(shell, "should_run_async", should_run_async)  # noqa: B010


def _has_special(lines: list[str]) -> bool:
    return any(map(_MAY_BE_SPECIAL.search, lines))


class CellNames:
    """Names cells: ``In[7]``, and ``In[7]#2`` if that number is used again for another text.

    A text that runs again, as another cell, has the number of the latest one.
    """

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}
        #: The last cell, and the file name of its code.
        self._last: tuple[tuple[str, str, int], str] = ("", "", 0), ""

    def name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """Returns the file name of a cell's code."""
        cell = raw_code, transformed_code, number
        asked, file = self._last
        # IPython asks again as it runs the cell.
        if cell == asked and sites.CELLS.get(file) in linecache.cache:
            return file
        file, again = code_name(raw_code), 1
        while True:
            shown = f"In[{number}]" + (f"#{again}" if again > 1 else "")
            # The same text keeps its name.
            if self._sources.setdefault(shown, transformed_code) == transformed_code:
                break
            again += 1
        if sites.CELLS.get(file) != shown:
            sites.CELLS[file] = shown
            sites.SITES.clear()  # with the number that this text has had before
        # Other ranks, and lines of a message, find the source under this name.
        lines = [f"{line}\n" for line in transformed_code.splitlines()]
        linecache.cache[shown] = len(transformed_code), None, lines, shown
        self._last = cell, file
        return file


def show_numbers() -> None:
    """Has Python's own tracebacks and warnings show ``In[3]`` in place of file names of cells."""
    plain_frame, plain_warning = _Stack.format_frame_summary, warnings.formatwarning

    def format_frame_summary(self: Any, frame_summary: Any, **options: Any) -> str:
        if frame_summary.filename in sites.CELLS:
            frame_summary = copy.copy(frame_summary)
            frame_summary.filename = sites.CELLS[frame_summary.filename]
        return plain_frame(self, frame_summary, **options)

    def formatwarning(message: Any, category: Any, filename: str, *rest: Any, **more: Any) -> str:
        return plain_warning(message, category, sites.shown_name(filename), *rest, **more)

    # IPython cannot open the file of a cell, and would not mark the place of an error in its line.
    shown_by_ipython: Any = ultratb
    plain_length = shown_by_ipython.get_line_number_of_frame
    shown_by_ipython.get_line_number_of_frame = lambda frame: (
        0 if is_cell(frame.f_code.co_filename) else plain_length(frame)
    )
    _Stack.format_frame_summary = format_frame_summary  # type: ignore[method-assign]
    warnings.formatwarning = formatwarning
    threading.excepthook = _show_error_of_thread


_Stack = traceback.StackSummary


def _show_error_of_thread(error: threading.ExceptHookArgs, /) -> None:
    # Python's own is written in C.
    if error.exc_type is SystemExit:
        return
    name = error.thread.name if error.thread is not None else threading.get_ident()
    lines = traceback.format_exception(error.exc_type, error.exc_value, error.exc_traceback)
    text = with_numbers("".join(lines), sites.CELLS)
    print(f"Exception in thread {name}:\n{text}", end="", file=sys.stderr, flush=True)
