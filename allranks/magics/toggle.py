"""``%distributed on``: every following cell goes to the ranks, until ``off``.

``%%local`` on top of a cell keeps that one in the notebook.
"""

from __future__ import annotations

from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

_MAGIC = "%%distributed\n"
_COMMAND = "%distributed"
_LOCAL = "%%local"
_EVERY_CELL = [
    *(_COMMAND, f"%{_COMMAND}", "%%ensemble", "%%px", "%%rank"),
    *("%load_ext allranks", "%reload_ext allranks", "%unload_ext allranks"),
    # Once for all ranks of this machine.
    *("%pip", "%conda", "%mamba", "%uv"),
]
"""What stays in the notebook where every other cell is for the ranks."""


class Toggle:
    """Prefixes the cells of a shell with ``%%distributed`` while it is on."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.is_on = False
        self._manager = shell.input_transformer_manager
        self._checks = False
        self._prefixed = False
        self._kept_here: str | None = None
        #: What a line begins with that is for the notebook.
        self.commands = [_COMMAND, "%%", "%load_ext", "%reload_ext"]

    def on(self) -> None:
        """Sends every following cell to the ranks."""
        if not self.is_on:
            self._shell.input_transformers_cleanup.append(self._send)
            vars(self._manager)["check_complete"] = self._check_complete
            self.is_on = True

    def every_cell(self) -> None:
        """Sends all cells to the ranks, those with IPython's own magics on top too."""
        self.commands[:] = _EVERY_CELL
        self.on()

    def off(self) -> None:
        """Leaves the following cells to the notebook."""
        if self.is_on:
            self._shell.input_transformers_cleanup.remove(self._send)
            del vars(self._manager)["check_complete"]
            self.is_on = False

    def _check_complete(self, cell: str) -> tuple[str, int | None]:
        """Answers a console: below a cell magic, IPython takes no cell for complete."""
        self._checks = True
        try:
            found: tuple[str, int | None] = TransformerManager.check_complete(self._manager, cell)
            return found
        finally:
            self._checks = False

    def _send(self, lines: list[str]) -> list[str]:
        """A cell that says itself where it runs stays as it is, as do our own commands."""
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
        # What a magic of a local cell runs, as %%capture does, is local too.
        if request and request["msg_id"] == self._kept_here:
            return lines
        self._prefixed = True
        return [_MAGIC, *lines]

    def _request(self) -> dict[str, Any]:
        """Returns the id of what a notebook asks for now, and whether a person does.

        A front end also runs code for itself, as for a list of variables: unseen.
        """
        kernel = getattr(self._shell, "kernel", None)
        parent = kernel.get_parent("shell") if kernel is not None else None
        if not parent:
            return {}
        content = parent.get("content", {})
        seen = not content.get("silent") and content.get("store_history", True)
        return {"msg_id": parent["header"]["msg_id"], "seen": seen}

    def took_cell(self) -> bool:
        """Whether the cell that runs now was prefixed here; true once."""
        prefixed, self._prefixed = self._prefixed, False
        return prefixed


def _without_first(lines: list[str]) -> list[str]:
    """A cell without the line that keeps it here; the others keep their numbers."""
    at = next(number for number, line in enumerate(lines) if line.strip())
    rest = lines[at + 1 :]
    # A magic must be the first line of its cell.
    return rest if rest and rest[0].lstrip().startswith("%%") else ["\n"] * (at + 1) + rest
