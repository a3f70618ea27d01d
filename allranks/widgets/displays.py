"""Output in a notebook's cell: displays updated in place, and progress bars of one line."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from allranks.records.ranks import label, spans
from allranks.widgets.extensions import DISPLAY_OBSERVERS, leaving_out
from allranks.widgets.text import (
    NOTEBOOK,
    TERMINAL,
    Data,
    Line,
    Row,
    described,
    front_end,
    is_rich,
    render,
)

VIEW = "application/vnd.jupyter.widget-view+json"
#: The function that shows a line above a displayed widget, by the widget's id.
TITLES: dict[str, Callable[[str], object]] = {}

#: JupyterLab keeps the first figure of this type in a display, whatever it is updated to. Source:
#: plotly's renderer, `renderModel`.
_DRAWN_ONCE = "application/vnd.plotly.v1+json"


class ShownValue:
    """The value of a cell on the ranks, as the notebook's ``Out`` has it: what is shown of it."""

    def __init__(self, data: Data, metadata: Data) -> None:
        self.data, self.metadata = data, metadata

    def __repr__(self) -> str:
        return str(self.data["text/plain"])

    def _repr_mimebundle_(self, **_: Any) -> tuple[Data, Data]:
        return self.data, self.metadata


def make_widget(
    name: str, script: str, style: str, state: Callable[[], Data], heard: Callable[[Data], object]
) -> Any:
    """Returns the model of a widget. Pages ask for its state, and ``heard`` gets their messages.

    Both functions may be called from another thread. Pages keep one style for each ``name``.
    """
    # Imported here: anywidget loads ipywidgets, which takes longer than a short cell.
    import anywidget
    import traitlets

    synced = traitlets.Dict().tag(sync=True, to_json=lambda *_: state())
    own = {"__module__": __name__, "_esm": script, "_css": style, "state": synced}
    widget = type(name, (anywidget.AnyWidget,), own)()
    widget.on_msg(lambda _widget, content, _buffers: heard(content))
    return widget


class DisplaySlot:
    """An output of a notebook's cell; the notebook gets it with its first content.

    Then it joins ``slots``, the displays of this cell in the order in which they were made.
    """

    def __init__(self, slots: list[DisplaySlot]) -> None:
        self._slots = slots
        self._id = ""
        self._content: tuple[Data, Data] | None = None

    def __bool__(self) -> bool:
        return bool(self._id)

    @property
    def content(self) -> tuple[Data, Data]:
        return self._content or ({}, {})

    def show(self, data: Data, metadata: Data | None = None) -> int:
        # Returns the bytes sent.
        from IPython.display import display, update_display

        content = data, metadata or {}
        if content == self._content:
            return 0
        self._content = content
        act: Any = update_display
        if not self._id:
            self._id = f"allranks-{uuid.uuid4().hex}"
            self._slots.append(self)
            act = display
        elif _DRAWN_ONCE in data:
            update_display({}, raw=True, display_id=self._id)
        act(data, raw=True, display_id=self._id, metadata=content[1])
        for observer in [*DISPLAY_OBSERVERS]:
            with leaving_out(DISPLAY_OBSERVERS, observer, observer.shown):
                observer.shown(self._id, *content)
        return sum(len(str(part)) for part in data.values())

    def blank(self) -> int:
        # A front end cannot remove a display.
        return self.show({}) if self else 0

    def _move(self, name: str) -> None:
        content, self._content, self._id = self._content, None, name
        assert content is not None
        self.show(*content)


def put_above(new: DisplaySlot, data: Data, slots: list[DisplaySlot], first: int = 0) -> None:
    """Shows ``data`` for the first time, above all other displays but the ``first`` ones.

    ``slots`` are the displays in the order in which they were made. A page may draw after each
    message. So the contents move down one by one, beginning with the last: no content is missing
    meanwhile, and the new one never appears twice.
    """
    above, others = slots[:first], slots[first:]
    names = [*(shown._id for shown in others), ""]
    for at in reversed(range(len(others))):
        others[at]._move(names[at + 1])
    new._id = names[0]
    new.show(data)
    slots[:] = [*above, new, *others]


def reorder(order: Sequence[DisplaySlot], slots: list[DisplaySlot]) -> None:
    """Puts displays into another order: an output cannot move, but its contents can.

    ``slots`` are the same displays as they were made; afterwards they have the new order.
    """
    names = [shown._id for shown in slots]
    for shown, name in zip(order, names, strict=True):
        if shown._id != name:
            shown._move(name)
    slots[:] = order


#: An update that would unfold a display waits this long for the same update of other ranks.
_HOLD_SECONDS = 0.25
#: Rich's, around what it prints.
_OPENS, _CLOSES = '<pre style="white-space:pre;overflow-x:auto;', "</pre>\n"


@dataclass
class _Display:
    rank: int
    name: str
    data: Data
    metadata: Data


@dataclass
class _Position:
    """What ranks show as their first display, or second, and so on, and where it is shown."""

    shown: list[_TitledDisplay] = field(default_factory=list)
    #: When the first change was made that is not shown yet.
    changed_at: float | None = None


class _TitledDisplay:
    """Two outputs of the notebook: a line with the ranks of a display, and the display."""

    def __init__(self, slots: list[DisplaySlot]) -> None:
        self.title, self.body = DisplaySlot(slots), DisplaySlot(slots)
        self.ranks: tuple[int, ...] = ()

    def show(self, group: list[_Display], noun: str) -> int:
        self.ranks = tuple(display.rank for display in group)
        data = group[0].data
        whose = {"ranks": spans(self.ranks)} if noun == "rank" else {}
        metadata = {**group[0].metadata, "allranks": whose}
        if len(group) > 1 and VIEW in data:
            # Ranks have no widget in common but a bar, which has words of its own.
            return self.title.blank() + self.body.show(data, metadata)
        if is_rich(data):
            title, titles = f"{label(self.ranks, noun)}:", {"allranks": {**whose, "title": True}}
            if VIEW in data:
                TITLES[data[VIEW]["model_id"]] = lambda text: self.title.show(
                    {"text/plain": f"{title}\n· {text}"}, titles
                )
            return self.title.show({"text/plain": title}, titles) + self.body.show(data, metadata)
        lines = str(data.get("text/plain", "")).split("\n")
        rows = [Row(self.ranks, Line("out", line)) for line in lines]
        shown = {"text/plain": render(rows, noun)}
        return self.title.show(shown, described(rows, noun)) + self.body.blank()

    def blank(self) -> int:
        self.ranks = ()
        return self.title.blank() + self.body.blank()


class Gallery:
    """Displays of several ranks with no text between them; ``slots`` as for `DisplaySlot`."""

    def __init__(self, fold: bool, slots: list[DisplaySlot], noun: str = "rank") -> None:
        self.fold = fold
        self.noun = noun
        self._slots = slots
        self._of: dict[int, list[_Display]] = {}
        self._turns: list[_Position] = []
        #: Empty outputs for later displays, because a front end cannot remove an output.
        self._free: list[_TitledDisplay] = []

    @property
    def changed(self) -> bool:
        return any(turn.changed_at is not None for turn in self._turns)

    def has(self, rank: int) -> bool:
        return bool(self._of.get(rank))

    def add(self, rank: int, data: Data, metadata: Data, name: str) -> None:
        displays = self._of.setdefault(rank, [])
        new, last = _Display(rank, name, data, metadata), displays[-1] if displays else None
        if last is not None and _is_printed(last) and _is_printed(new):
            last.data = _one_below(last.data, data)
            self._change(len(displays) - 1)
            return
        displays.append(new)
        if len(displays) > len(self._turns):
            self._turns.append(_Position())
        self._change(len(displays) - 1)

    def update(self, rank: int, data: Data, metadata: Data, name: str) -> bool:
        """Changes a rank's displays of this name; returns whether there is one."""
        found = False
        for at, display in enumerate(self._of.get(rank, ())):
            if name and display.name == name:
                display.data, display.metadata, found = data, metadata, True
                self._change(at)
        return found

    def clear(self, rank: int) -> None:
        for at in range(len(self._of.pop(rank, ()))):
            self._change(at)

    def _change(self, at: int) -> None:
        turn = self._turns[at]
        if turn.changed_at is None:
            turn.changed_at = time.monotonic()

    def show(self, now: bool) -> int:
        """Shows what has changed; returns the bytes sent.

        Without ``now``, a display that may be the same for all ranks in a moment waits.
        """
        nbytes = 0
        for at, turn in enumerate(self._turns):
            if turn.changed_at is None:
                continue
            groups = self._groups(at)
            unfolds = turn.shown and len(groups) > len(turn.shown)
            if unfolds and not now and time.monotonic() - turn.changed_at < _HOLD_SECONDS:
                continue
            nbytes += self._show_turn(turn, groups)
        return nbytes

    def _groups(self, at: int) -> list[list[_Display]]:
        groups: list[list[_Display]] = []
        for rank in sorted(self._of):
            for display in self._of[rank][at : at + 1]:
                alike = (
                    group
                    for group in groups
                    if self.fold
                    and (group[0].data, group[0].metadata) == (display.data, display.metadata)
                )
                group = next(alike, None)
                if group is None:
                    groups.append([display])
                else:
                    display.data = group[0].data  # and so it is in memory once
                    group.append(display)
        return groups

    def _show_turn(self, turn: _Position, groups: list[list[_Display]]) -> int:
        turn.changed_at = None
        left, nbytes = list(turn.shown), 0
        turn.shown = []
        for group in groups:
            # The same ranks stay where they are, as far as they can.
            ranks = {display.rank for display in group}
            pair = max(left, key=lambda pair: len(ranks & set(pair.ranks)), default=None)
            if pair is None:
                pair = self._free.pop() if self._free else _TitledDisplay(self._slots)
            else:
                left.remove(pair)
            turn.shown.append(pair)
            nbytes += pair.show(group, self.noun)
        for pair in left:
            nbytes += pair.blank()
            self._free.append(pair)
        return nbytes

    def in_order(self) -> list[DisplaySlot]:
        """Returns the outputs as they are read best: by turn, then by rank; empty ones last."""
        pairs = [
            *(p for turn in self._turns for p in sorted(turn.shown, key=lambda pair: pair.ranks)),
            *self._free,
        ]
        return [shown for pair in pairs for shown in (pair.title, pair.body) if shown]


def _is_printed(display: _Display) -> bool:
    # rich makes one display for each call: the summary of a Keras model comes as five of them.
    html = display.data.get("text/html")
    printed = isinstance(html, str) and html.startswith(_OPENS) and html.endswith(_CLOSES)
    return printed and not display.name and not display.metadata


def _one_below(above: Data, below: Data) -> Data:
    html = above["text/html"].removesuffix(_CLOSES) + below["text/html"].partition(">")[2]
    return {"text/plain": f"{above['text/plain']}{below['text/plain']}", "text/html": html}


_BAR_WIDTH = 30
_SHOW_AFTER_SECONDS = 1.0


def bar_line(head: str, done: int, total: int, tail: str) -> str:
    full = _BAR_WIDTH * done // max(1, total)
    return f"{head} {'█' * full}{'░' * (_BAR_WIDTH - full)}{tail}"


def bar_data(head: str, done: int, total: int, tail: str) -> Data:
    meter = f'<meter value="{done}" max="{max(1, total)}"></meter>'
    html = f"<p>{escape(head)} {meter}{escape(tail)}</p>"
    return {"text/plain": bar_line(head, done, total, tail), "text/html": html}


def rewrite_line(text: str, end: str = "") -> None:
    try:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{text}\x1b[K{end}")
            sys.stderr.flush()
    except (AttributeError, ValueError):
        pass  # there is no such stream, or it is closed


#: A display cannot be taken away, and nbconvert warns of one that has no data.
NOTHING = {"text/html": "", "text/plain": ""}


class ProgressLine:
    """A bar that disappears at the end; ``since`` is the begin, by ``time.monotonic()``."""

    def __init__(self, since: float | None = None) -> None:
        self._where = front_end()
        self._shown = DisplaySlot([])
        self._show_at = (time.monotonic() if since is None else since) + _SHOW_AFTER_SECONDS
        self._drawn = False

    def show(self, head: str, done: int, total: int, tail: str) -> None:
        # Nothing in the first second.
        if time.monotonic() < self._show_at:
            return
        self._drawn = True
        if self._where == NOTEBOOK:
            self._shown.show(bar_data(head, done, total, tail))
        elif self._where == TERMINAL:
            rewrite_line(bar_line(head, done, total, tail))

    def end(self) -> None:
        if not self._drawn:
            return
        if self._where == NOTEBOOK:
            self._shown.show(NOTHING)
        elif self._where == TERMINAL:
            rewrite_line("")
