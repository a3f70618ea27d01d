"""Where IPython's rich output goes on a rank: into the transcript, in order with the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.jsonutil import json_default

from allranks.engine.transcript import Entry

Place = Callable[[Entry], None]

# Made here, because a cell may replace what json holds.
_write = json.JSONEncoder(default=json_default).encode
_read = json.JSONDecoder().decode


class RankDisplayHook(DisplayHook):
    """Shows the value of a cell's last expression; ``Out`` and ``_`` work as everywhere."""

    def __init__(self, shell: InteractiveShell, place: Place) -> None:
        super().__init__(shell=shell, parent=shell)  # type: ignore[no-untyped-call]
        self.place = place

    def set_parent(self, parent: dict[str, Any]) -> None:
        """ipykernel says which of its messages is being answered; no cell comes that way."""

    def write_output_prompt(self) -> None:
        """The view labels the value with its rank; there is no ``Out[n]:`` to write."""

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        """Places the value's mime bundle in the transcript."""
        self.place(["result", *_as_json(format_dict, md_dict or {})])

    def finish_displayhook(self) -> None:
        """There is nothing to end."""
        self._is_active = False


class RankDisplayPublisher(DisplayPublisher):
    """Publishes ``display(…)``, its updates, and ``clear_output``."""

    def __init__(self, shell: InteractiveShell, place: Place) -> None:
        super().__init__(shell=shell, parent=shell)  # type: ignore[no-untyped-call]
        self.place = place

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
        self.place([kind, *_as_json(data, metadata or {}, name)])

    def clear_output(self, wait: bool = False) -> None:
        """Clears what this rank has shown in this cell."""
        self.place(["clear", wait])


def _as_json(*parts: Any) -> list[Any]:
    """What JSON has of these: bytes of images in base64, numpy's numbers as Python's.

    Raises:
        TypeError: a part holds what JSON has nothing for.
    """
    cleaned: list[Any] = _read(_write(parts))
    return cleaned
