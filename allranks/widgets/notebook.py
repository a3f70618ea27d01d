"""The text view of a notebook: displays that are updated in place while the cell runs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from allranks.records.ranks import label
from allranks.records.wire import Output
from allranks.widgets.block import Block
from allranks.widgets.text import hidden_note, only_text

_REFRESH_SECONDS = 0.1
#: Displays are held for so long, so that those of one call stand in order of rank.
_HOLD_SECONDS = 0.4
#: A long text is sent less often: it is sent whole each time.
_NBYTES_A_SECOND = 200_000


class _Shown:
    """One display in the cell's output, made when there is something in it."""

    def __init__(self) -> None:
        self._id = f"allranks-{uuid.uuid4().hex}"
        self._last: dict[str, Any] | None = None

    def show(self, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> int:
        """Shows the data in place; returns the bytes sent, 0 where nothing has changed."""
        from IPython.display import display, update_display

        if data == self._last:
            return 0
        act: Any = display if self._last is None else update_display
        act(data, raw=True, display_id=self._id, metadata=metadata or {})
        self._last = data
        return sum(len(str(part)) for part in data.values())


class NotebookView:
    """Shows labelled text and pictures of ranks in a notebook's cell.

    Args:
        ranks: the ranks whose output is to come.
        log_dir: where their logs are.
        fold: whether identical output of several ranks is shown once.
    """

    def __init__(self, ranks: Sequence[int], log_dir: str = "", fold: bool = True) -> None:
        self.ranks = tuple(ranks)
        self.log_dir = log_dir
        self.fold = fold
        self._hidden: dict[int, tuple[int, int]] = {}
        self._held: list[tuple[int, str, list[Any]]] = []
        self._held_since = 0.0
        self._pictures: list[dict[str, Any]] = []
        self._named: dict[tuple[int, str], dict[str, Any]] = {}
        self._next_refresh = 0.0
        self._new_block()

    def _new_block(self) -> None:
        self._block = Block(self.ranks, self.fold)
        self._shown = _Shown()
        self._changed = False

    def output(self, batch: Output) -> None:
        """Takes in what a rank wrote."""
        self._changed = True
        if batch.hidden_lines:
            self._hidden[batch.rank] = (batch.hidden_lines, batch.hidden_nbytes)
        for kind, *rest in batch.entries:
            if kind in ("out", "err"):
                self._block.feed(batch.rank, kind, rest[0])
            elif kind == "notice":
                self._block.feed(batch.rank, "note", rest[0] + "\n")
            elif kind == "hidden":
                self._hidden.pop(batch.rank, None)
                note = hidden_note(rest[0], rest[1], self._log(batch.rank))
                self._block.feed(batch.rank, "note", note + "\n")
            elif kind == "clear":
                self._block.clear(batch.rank)
            elif only_text(rest[0]):
                text = str(rest[0].get("text/plain", ""))
                self._block.feed(batch.rank, "value" if kind == "result" else "out", text + "\n")
            else:
                if not self._held:
                    self._held_since = time.monotonic()
                self._held.append((batch.rank, kind, rest))

    def _show_held(self) -> None:
        """Shows the displays that came at about the same time, in order of rank."""
        held, self._held = sorted(self._held, key=lambda one: one[0]), []
        for rank, kind, rest in held:
            self._picture(rank, kind, rest)

    def _picture(self, rank: int, kind: str, rest: list[Any]) -> None:
        """Shows a rich display below its label; the same one of several ranks is shown once."""
        data, metadata = rest[0], rest[1]
        name = str(rest[2] or "") if len(rest) > 2 else ""
        if kind == "update" and (rank, name) in self._named:
            self._named[rank, name]["shown"].show(data, metadata)
            return
        for picture in self._pictures if self.fold else ():
            if picture["data"] == data and rank not in picture["ranks"]:
                picture["ranks"].append(rank)
                picture["label"].show({"text/plain": f"{label(picture['ranks'])}:"})
                break
        else:
            self._flush()
            self._new_block()
            picture = {"data": data, "ranks": [rank], "label": _Shown(), "shown": _Shown()}
            picture["label"].show({"text/plain": f"{label([rank])}:"})
            picture["shown"].show(data, metadata)
            self._pictures.append(picture)
        if name:
            self._named[rank, name] = picture

    def notice(self, text: str) -> None:
        """Shows a line about the cell as a whole."""
        for rank in self.ranks:
            self._block.feed(rank, "note", text + "\n")
        self._changed = True

    def refresh(self) -> None:
        """Shows what is new, at most ten times a second."""
        now = time.monotonic()
        if self._held and now - self._held_since >= _HOLD_SECONDS:
            self._show_held()
        if self._changed and now >= self._next_refresh:
            nbytes = self._flush()
            self._next_refresh = now + max(_REFRESH_SECONDS, nbytes / _NBYTES_A_SECOND)

    def finish(self) -> None:
        """Shows everything."""
        self._show_held()
        self._flush()

    def _flush(self) -> int:
        extra = [
            (rank, hidden_note(*counts, self._log(rank))) for rank, counts in self._hidden.items()
        ]
        text = self._block.render(extra)
        self._changed = False
        return self._shown.show({"text/plain": text}) if text else 0

    def _log(self, rank: int) -> str:
        return f"{self.log_dir}/rank-{rank}.log" if self.log_dir else ""
