"""What the extension changes in IPython's shell.

When it is unloaded, an ``ExitStack`` undoes the changes.

- `EveryCell`: ``%distributed on`` sends every following cell to the ranks, until ``off``.
- `load_once`: ``%load_ext allranks`` prints nothing where allranks is loaded.
- `AwaitedMagics`: widgets react while a cell runs, because IPython awaits our cell magics.
- `complete_lines`: Tab and ``--help`` on the magics' lines.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from traceback import walk_stack
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

from allranks.magics.options import Parser, cell_parser, command_parser, commands

_CELL_MAGIC = "%%distributed\n"
_COMMAND = "%distributed"
_LOCAL = "%%local"
EVERY_CELL = [
    *(_COMMAND, f"%{_COMMAND}", "%%px", "%%rank"),
    *("%load_ext allranks", "%reload_ext allranks", "%unload_ext allranks"),
    # Once for all ranks of this machine.
    *("%pip", "%conda", "%mamba", "%uv"),
]
"""What stays in the notebook where every other cell is for the ranks."""


class EveryCell:
    """Prefixes the cells of a shell with ``%%distributed`` while it is on."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.is_on = False
        #: Whether the kernel is one of ranks.
        self.is_kernel = False
        # Patched on the instance, in `vars`: other shells of this process keep the class's method.
        self._manager = shell.input_transformer_manager
        self._checks = False
        self._prefixed = False
        self._kept_here: str | None = None
        #: Beginnings of lines that run in the notebook.
        self.commands = [_COMMAND, "%%", "%load_ext", "%reload_ext"]

    @property
    def local_beginnings(self) -> list[str]:
        """How cells begin that run in the notebook while every other cell runs on the ranks."""
        return [*self.commands, _LOCAL]

    def on(self) -> None:
        if not self.is_on:
            self._shell.input_transformers_cleanup.append(self._send)
            vars(self._manager)["check_complete"] = self._check_complete
            self.is_on = True

    def text(self) -> str:
        """Returns a sentence about the cells that run on the ranks, where `on` has chosen them."""
        chosen = self.is_on and not self.is_kernel
        return " Every cell runs on them, until: %distributed off" if chosen else ""

    def every_cell(self) -> None:
        # Also those that begin with IPython's own magics.
        self.commands[:] = [*EVERY_CELL, *(f"%%{name}" for name in CELL_MAGICS)]
        self.is_kernel = True
        self.on()

    def off(self) -> None:
        if self.is_on:
            self._shell.input_transformers_cleanup.remove(self._send)
            del vars(self._manager)["check_complete"]
            self.is_on = False

    def _check_complete(self, cell: str) -> tuple[str, int | None]:
        # For consoles: below a cell magic, IPython takes no cell for complete.
        self._checks = True
        try:
            found: tuple[str, int | None] = TransformerManager.check_complete(self._manager, cell)
            return found
        finally:
            self._checks = False

    def _send(self, lines: list[str]) -> list[str]:
        """Prefixes a cell, except with our own commands or a magic that chooses where it runs."""
        first = next((line.strip() for line in lines if line.strip()), "")
        request = self._request()
        if first.split()[:1] == [_LOCAL]:
            self._kept_here = request.get("msg_id")
            return _without_first(lines)
        if (
            self._checks
            or not first
            or first.startswith(tuple(self.commands))
            or not request.get("seen", True)
        ):
            return lines
        # A cell that a magic of a local cell runs, as %%capture does, is local too.
        if request and request["msg_id"] == self._kept_here:
            return lines
        self._prefixed = True
        return [_CELL_MAGIC, *lines]

    def _request(self) -> dict[str, Any]:
        """Returns the id of the front end's request, and whether a person sent it.

        A front end also runs code of its own, unseen, as for a list of variables.
        """
        kernel = getattr(self._shell, "kernel", None)
        parent = kernel.get_parent("shell") if kernel is not None else None
        if not parent:
            return {}
        content = parent.get("content", {})
        seen = not content.get("silent") and content.get("store_history", True)
        return {"msg_id": parent["header"]["msg_id"], "seen": seen}

    def took_cell(self) -> bool:
        # Whether the running cell was prefixed here; true once.
        prefixed, self._prefixed = self._prefixed, False
        return prefixed


def _without_first(lines: list[str]) -> list[str]:
    # The other lines keep their numbers.
    at = next(number for number, line in enumerate(lines) if line.strip())
    rest = lines[at + 1 :]
    # A magic must be the first line of its cell.
    return rest if rest and rest[0].lstrip().startswith("%%") else ["\n"] * (at + 1) + rest


_CALL = "get_ipython().run_cell_magic('"
#: Below one of these a cell is run by another magic, as ``%%time``, which awaits nothing, or by the
#: code of a cell, whose event loop already runs. ipykernel runs an awaited cell in another way.
_MAGICS = (InteractiveShell.run_cell_magic.__code__, InteractiveShell.run_line_magic.__code__)
_WITHOUT_AWAIT = (*_MAGICS, InteractiveShell.run_cell.__code__)


def _append(undo: ExitStack, items: list[Any], item: Any) -> None:
    items.append(item)
    undo.callback(items.remove, item)


def replace(undo: ExitStack, target: object, name: str, value: object) -> None:
    # On the instance: until then its class has what is replaced.
    setattr(target, name, value)
    undo.callback(delattr, target, name)


_LOAD = re.compile(r"^(\s*)(?=get_ipython\(\)\.run_line_magic\('load_ext', 'allranks'\)\s*$)")
_UNLESS_LOADED = r"\1if 'allranks' not in get_ipython().extension_manager.loaded: "


def load_once(shell: InteractiveShell, undo: ExitStack) -> None:
    """Skips ``%load_ext allranks`` where allranks is loaded.

    IPython prints how to reload it there, above what the rest of the cell says of the ranks.
    """
    _append(undo, shell.input_transformers_post, _load_unless_loaded)


def _load_unless_loaded(lines: list[str]) -> list[str]:
    # Decided when the line runs: a line above it may unload the extension.
    return [_LOAD.sub(_UNLESS_LOADED, line) for line in lines]


class AwaitedMagics:
    """Puts an ``await`` before our cell magics in the cells of a notebook, not of a terminal."""

    def __init__(self, shell: InteractiveShell, undo: ExitStack) -> None:
        self._shell = shell
        _append(undo, shell.input_transformers_post, self._transform)
        shell.events.register("pre_run_cell", self._begin)
        undo.callback(shell.events.unregister, "pre_run_cell", self._begin)

    def _begin(self, _: object) -> None:
        # A value that could not be shown fails its cell. Where the next one is awaited, ipykernel
        # would report that as failed as well.
        vars(self._shell)["_last_traceback_during_displayhook"] = False

    def _transform(self, lines: list[str]) -> list[str]:
        if not lines or not lines[0].startswith(_CALL) or not self._shell.autoawait:
            return lines
        # Another package may have replaced the magic, as view.activate() does with %%px.
        magic = self._shell.find_cell_magic(lines[0].split("'", 2)[1])
        ours = getattr(magic, "__module__", "").startswith("allranks.")
        within = any(frame.f_code in _WITHOUT_AWAIT for frame, _ in walk_stack(sys._getframe()))
        if not ours or within:
            return lines
        return ["await " + lines[0], *lines[1:]]


def is_awaited() -> bool:
    """Whether the calling cell magic stands behind an ``await`` in the notebook's cell."""
    above = (frame for frame, _ in walk_stack(sys._getframe(1)))
    magic = next((frame for frame in above if frame.f_code is _MAGICS[0]), None)
    caller = magic.f_back if magic is not None else None
    if caller is None or caller.f_code.co_name != "<module>":
        return False
    return bool(caller.f_code.co_flags & inspect.CO_COROUTINE)


def nothing_to_run() -> Coroutine[Any, Any, None] | None:
    """Returns the result of the calling cell magic if it has nothing to run."""

    async def nothing() -> None:
        pass

    return nothing() if is_awaited() else None


#: The cell magics for the ranks, with the parsers of their options; features add theirs.
CELL_MAGICS: dict[str, Callable[[], Parser]] = {"distributed": cell_parser}
_MAGIC = re.compile(r"\s*(%{1,2})(\w+)(.*)", re.DOTALL)
_ASKS = re.compile(r"%%(\w+)\s+(.*\s)?(-h|--help)\s*$")


def words_for(line: str) -> Sequence[str]:
    """Returns the candidates for the last word of a line: commands, or options not used yet."""
    found = _MAGIC.match(line)
    if found is None or not found[3][:1].isspace():
        return ()
    *before, last = re.split(r"\s+", found[3].lstrip())
    if found[1] == "%%":
        known = CELL_MAGICS[found[2]]().words if found[2] in CELL_MAGICS else []
    elif f"%{found[2]}" != _COMMAND:
        return ()
    elif not before:
        return [*commands(), "--help"]
    else:
        known = command_parser(before[0]).words if before[0] in commands() else []
    # While a name or a value is typed, options would be wrong.
    return [word for word in known if word not in before] if last.startswith("-") else ()


def _with_a_cell(lines: list[str]) -> list[str]:
    # IPython refuses a cell magic without a cell; help needs none.
    text = [line for line in lines if line.strip()]
    if len(text) == 1 and (found := _ASKS.match(text[0])) and found[1] in CELL_MAGICS:
        return [f"{text[0].rstrip()}\n", "#\n"]
    return lines


def complete_lines(shell: InteractiveShell, undo: ExitStack) -> None:
    """Completes the lines of the magics; help needs no cell below them."""
    _append(undo, shell.Completer.custom_matchers, _match_line)
    _append(undo, shell.input_transformers_cleanup, _with_a_cell)


@context_matcher(priority=1001, identifier="allranks_line")  # type: ignore[untyped-decorator]
def _match_line(context: CompletionContext) -> dict[str, Any]:
    line = context.line_with_cursor[: context.cursor_position]
    found = [word for word in words_for(line) if word.startswith(context.token)]
    completions = [SimpleCompletion(text=word, type="magic") for word in found]
    return {"completions": completions, "suppress": bool(found), "ordered": True}
