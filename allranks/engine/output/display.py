"""Where IPython's rich output goes on a rank: into the transcript, in order with the text."""

from __future__ import annotations

from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from allranks.engine.output.bundle import checked
from allranks.engine.output.transcript import Transcript

_WHOLE_VALUE = "%%distributed -o NAME returns the whole value, print() writes it to the log"
_WHOLE_TEXT = "print() writes the whole text to the log"


class RankDisplayHook(DisplayHook):
    """Shows the value of a cell's last expression; ``Out`` and ``_`` work as everywhere."""

    def __init__(self, shell: InteractiveShell, transcript: Transcript) -> None:
        super().__init__(shell=shell, parent=shell)  # type: ignore[no-untyped-call]
        self.transcript = transcript

    def set_parent(self, parent: dict[str, Any]) -> None:
        """ipykernel says which of its messages is being answered; no cell comes that way."""

    def write_output_prompt(self) -> None:
        """The view labels the value with its rank; there is no ``Out[n]:`` to write."""

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        """Places the value's mime bundle in the transcript."""
        _place(self.transcript, "result", format_dict, md_dict)

    def finish_displayhook(self) -> None:
        """There is nothing to end."""
        self._is_active = False


class RankDisplayPublisher(DisplayPublisher):
    """Publishes ``display(…)``, its updates, and ``clear_output``."""

    def __init__(self, shell: InteractiveShell, transcript: Transcript) -> None:
        super().__init__(shell=shell, parent=shell)  # type: ignore[no-untyped-call]
        self.transcript = transcript

    def set_parent(self, parent: dict[str, Any]) -> None:
        """ipykernel says which of its messages is being answered; no cell comes that way."""

    def publish(  # type: ignore[override]
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        """Places a mime bundle in the transcript, or the update of an earlier one."""
        name = (transient or {}).get("display_id")
        kind = "update" if update else "display"
        _place(self.transcript, kind, data, metadata, None if name is None else str(name))

    def clear_output(self, wait: bool = False) -> None:
        """Clears what this rank has shown in this cell."""
        self.transcript.place(["clear", bool(wait)])


def _place(transcript: Transcript, kind: str, data: Any, metadata: Any, *name: str | None) -> None:
    """Places what of a display can be shown, and then what cannot."""
    get_it = _WHOLE_VALUE if kind == "result" else _WHOLE_TEXT
    bundle = checked(data, metadata, transcript.limit_nbytes, get_it)
    if bundle.data or kind == "update":
        transcript.place([kind, bundle.data, bundle.metadata, *name], bundle.nbytes)
    for note in bundle.notes:
        transcript.note(note)
