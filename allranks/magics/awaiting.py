"""Has IPython await our cell magics, so that a notebook's widgets react while a cell runs.

IPython does not await what a magic returns. So the line that a cell magic becomes is given an
``await``, and the magic returns a coroutine where it sees that it was.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Coroutine
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

_CALL = "get_ipython().run_cell_magic('{}'"
#: Below one of these a cell is run by another magic, as ``%%time``, which awaits nothing.
_MAGICS = (InteractiveShell.run_cell_magic.__code__, InteractiveShell.run_line_magic.__code__)


class Awaiting:
    """Puts an ``await`` before our cell magics in the cells of a notebook.

    Args:
        shell: the notebook's shell; a terminal's is left as it is.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._calls = [_CALL.format(name) for name in ("distributed", "ensemble")]
        self._added = getattr(shell, "kernel", None) is not None
        if self._added:
            shell.input_transformers_post.append(self._transform)
            shell.events.register("pre_run_cell", self._begin)

    def add(self, name: str) -> None:
        """Has one more cell magic awaited."""
        self._calls.append(_CALL.format(name))

    def drop(self, name: str) -> None:
        """Leaves a cell magic that was added to others."""
        self._calls.remove(_CALL.format(name))

    def remove(self) -> None:
        """Leaves the shell as it was."""
        if self._added:
            self._shell.input_transformers_post.remove(self._transform)
            self._shell.events.unregister("pre_run_cell", self._begin)

    def _begin(self, _: object) -> None:
        # A value that could not be shown fails its cell. Where the next one is awaited, ipykernel
        # would report that as failed as well.
        vars(self._shell)["_last_traceback_during_displayhook"] = False

    def _transform(self, lines: list[str]) -> list[str]:
        if not lines or not lines[0].startswith(tuple(self._calls)) or not self._shell.autoawait:
            return lines
        # Another package may have put its own in its place, as view.activate() does with %%px.
        magic = self._shell.find_cell_magic(lines[0].split("'", 2)[1])
        ours = getattr(magic, "__module__", "").startswith("allranks.")
        if not ours or _called_by_a_magic(sys._getframe()):
            return lines
        return ["await " + lines[0], *lines[1:]]


def is_awaited() -> bool:
    """Whether the cell magic that calls this stands behind an ``await`` in the notebook's cell."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _MAGICS[0]:
        frame = frame.f_back
    caller = frame.f_back if frame is not None else None
    if caller is None or caller.f_code.co_name != "<module>":
        return False
    return bool(caller.f_code.co_flags & inspect.CO_COROUTINE)


def nothing_to_run() -> Coroutine[Any, Any, None] | None:
    """What the cell magic that calls this returns where it has nothing to run."""

    async def nothing() -> None:
        pass

    return nothing() if is_awaited() else None


def _called_by_a_magic(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _MAGICS:
            return True
        frame = frame.f_back
    return False
