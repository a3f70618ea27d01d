"""``%distributed on``: every following cell goes to the ranks, until ``off``."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

_MAGIC = "%%distributed\n"
_COMMAND = "%distributed"


class Toggle:
    """Prefixes the cells of a shell with ``%%distributed`` while it is on."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.is_on = False
        self._prefixed = False
        #: What a line begins with that is for the notebook.
        self.commands = [_COMMAND, "%%", "%load_ext", "%reload_ext"]

    def on(self) -> None:
        """Sends every following cell to the ranks."""
        if not self.is_on:
            self._shell.input_transformers_cleanup.append(self._send)
            self.is_on = True

    def off(self) -> None:
        """Leaves the following cells to the notebook."""
        if self.is_on:
            self._shell.input_transformers_cleanup.remove(self._send)
            self.is_on = False

    def _send(self, lines: list[str]) -> list[str]:
        """A cell that says itself where it runs stays as it is, as do our own commands."""
        first = next((line.strip() for line in lines if line.strip()), "")
        if not first or first.startswith(tuple(self.commands)):
            return lines
        self._prefixed = True
        return [_MAGIC, *lines]

    def took_cell(self) -> bool:
        """Whether the cell that runs now was prefixed here; true once."""
        prefixed, self._prefixed = self._prefixed, False
        return prefixed
