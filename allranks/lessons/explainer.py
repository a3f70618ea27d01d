"""An allreduce that the ranks run, to be played round by round, inspected and run again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from allranks import launched
from allranks.cluster import cluster as notebook
from allranks.cluster.cluster import Cluster
from allranks.cluster.variables import OnRank
from allranks.errors import AllranksError, CellTimeout, ClusterLost, UsageError
from allranks.lessons.frames import (
    Frame,
    chunks,
    cost,
    frames,
    questions,
    shown,
    steps,
    text,
    title,
)
from allranks.lessons.records import Explained
from allranks.records.ranks import label
from allranks.widgets.dashboard.saved_panel import FRONT, image, table_html
from allranks.widgets.dashboard.svg import INK, svg_page
from allranks.widgets.displays import make_widget
from allranks.widgets.palette import RANKS
from allranks.widgets.scripts import joined

EXPLAIN_HERE, _EXPLAIN_SECONDS = OnRank("allranks.lessons.on_ranks", "explain_here"), 30.0
_WIDTH = 760
_ROW, _DIGIT, _ARCS, _HEAD = 15, 7.2, 26, 34
_GAP, _LEAST = 22, 116
_ADDED, _REPLACED = RANKS[1], RANKS[0]
#: Values in all frames together: a saved picture stays well below 200 kB.
_VALUES = 1400


def bundle(told: Explained, frames: list[Frame], place: str) -> dict[str, str]:
    # Without scripts or widgets. `place` is the class of the element that a live player replaces.
    words = f"{title(told)}, round by round: see the table"
    body = f"<p><b>{escape(title(told))}</b><br>{escape(cost(told))}</p>"
    body += f"<div>{image(film(frames), words)}</div>{legend()}"
    table = table_html(steps(frames))
    body += f"<details><summary>every message as a table</summary>{table}</details>"
    html = f'<div class="allranks-still {place}">{body}</div>'
    return {"text/html": html, "text/plain": text(told, frames)}


def film(frames: Sequence[Frame]) -> str:
    # Very many frames: some are omitted, but never the last.
    ranks, count = len(frames[0].values), len(frames[0].values[0])
    every = [shown(value) for frame in frames for row in frame.values for value in row]
    column = max(24.0, max(map(len, every)) * _DIGIT + 8)
    width = max(_LEAST, ranks * column + _GAP)
    height = _HEAD + _ARCS + _ROW * (count + 1) + 8
    across = max(1, int(_WIDTH // width))
    body = ""
    chosen = _chosen(len(frames), max(2, _VALUES // (ranks * count)))
    for place, number in enumerate(chosen):
        x, y = place % across * width, place // across * height
        drawn = _draw_frame(frames[number], number, column)
        body += f'<g transform="translate({x:.0f} {y:.0f})">{drawn}</g>'
    rows = -(-len(chosen) // across)
    style = (
        '<marker id="a" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5" markerHeight="5" '
        f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{INK}"/></marker>'
    )
    body = style + f'<g font-size="11" text-anchor="middle">{body}</g>'
    return svg_page(
        int(min(len(chosen), across) * width), int(rows * height), "", body, titled=False
    )


def legend() -> str:
    marks = ((_ADDED, "received value was added"), (_REPLACED, "received value replaced it"))
    parts = [f'<span style="color: {colour}">■</span> {said}' for colour, said in marks]
    return f"<p>{' &nbsp; '.join(parts)} &nbsp; <b>bold</b>: complete</p>"


def _chosen(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _draw_frame(frame: Frame, number: int, column: float) -> str:
    ranks = len(frame.values)
    title = "start" if not number else f"{number} {frame.phase}"
    body = f'<text x="4" y="13" text-anchor="start" font-weight="bold">{escape(title)}</text>'
    top = _HEAD + _ARCS
    for message in frame.messages:
        body += _arc(message.sender, message.receiver, column)
        x, y = message.receiver * column, top + _ROW * (message.start + 1) - 11
        high = _ROW * (message.stop - message.start) - 1
        colour = _ADDED if message.adds else _REPLACED
        body += (
            f'<rect x="{x + 2:.0f}" y="{y + 8:.0f}" width="{column - 4:.0f}" height="{high}" '
            f'rx="2" fill="{colour}" fill-opacity="0.3"/>'
        )
    for rank, row in enumerate(frame.values):
        x = (rank + 0.5) * column
        body += f'<text x="{x:.0f}" y="{top:.0f}">{rank}</text>'
        for place, value in enumerate(row):
            whole = ' font-weight="bold"' if frame.shares[rank][place] == ranks else ""
            y = top + _ROW * (place + 1) + 8
            body += f'<text x="{x:.0f}" y="{y}"{whole}>{escape(shown(value))}</text>'
    return body


def _arc(sender: int, receiver: int, column: float) -> str:
    # Higher for a longer way, so that crossing arrows remain distinct.
    start, end = (sender + 0.5) * column, (receiver + 0.5) * column
    shift = 3 if sender < receiver else -3
    foot = _HEAD + _ARCS - 12
    top = foot - min(_ARCS - 2, 10 + 4 * abs(receiver - sender)) * 1.5
    middle = (start + end) / 2
    return (
        f'<path d="M{start + shift:.0f} {foot}Q{middle:.0f} {top:.0f} {end - shift:.0f} {foot}" '
        f'fill="none" stroke="{INK}" marker-end="url(#a)"/>'
    )


ALGORITHMS = ("ring", "recursive doubling", "tree")
_IDLE_SECONDS = 0.2
MOST_RANKS = 16
MOST_VALUES = 32
#: Up to this many ranks have a digit each.
_DIGITS = 4

_EXPECTED = "expected one array of numbers a rank, all of one length"
_EXAMPLE = "Type for example: ring(values=[[1, 2], [10, 20]])"

Arrays = list[list[float]]


def _files() -> tuple[str, str]:
    own = Path(__file__).parent / "front"
    style = "\n".join((place / "front.css").read_text("utf-8") for place in (FRONT, own))
    return joined(own / "player.js"), style


class Explainer:
    """One allreduce, round by round: a player in a notebook, else text.

    The player can request another algorithm, other ranks or another size. Idle ranks then run it.
    ``ranks`` returns the ranks for that, or raises the message for the page.
    """

    def __init__(self, told: Explained, ranks: Callable[[], Cluster]) -> None:
        self.told = told
        self._ranks = ranks
        self._place = f"allranks-ring-{uuid.uuid4().hex}"
        self._widget: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._most = ranks().size
        self._problem = ""
        self._answers = 0
        #: Runs by algorithm, ranks and values, for display after the ranks have ended.
        self._kept = {(told.run.algorithm, told.run.size, *told.run.shape): told}
        self._asked: dict[str, Any] | None = None

    def __str__(self) -> str:
        return text(self.told, frames(self.told.run))

    def __repr__(self) -> str:
        return str(self)

    def _ipython_display_(self) -> None:
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        if getattr(get_ipython(), "kernel", None) is None:
            print(self)
            return
        show: Any = display
        show(self._bundle(), raw=True, display_id=self._place)
        if self._widget is None:
            self._loop = asyncio.get_running_loop()
            self._widget = make_widget("ExplainerWidget", *_files(), self.state, self._clicked)

    def _bundle(self) -> dict[str, str]:
        return bundle(self.told, frames(self.told.run), self._place)

    def state(self) -> dict[str, Any]:
        # JSON types only.
        told = frames(self.told.run)
        rounds = len(told) - 1
        return {
            "place": self._place,
            "title": title(self.told),
            "cost": cost(self.told),
            "problem": self._problem,
            "answers": self._answers,
            "algorithms": ALGORITHMS,
            "algorithm": self.told.run.algorithm,
            "mostRanks": min(self._most, MOST_RANKS),
            "chunks": chunks(self.told.run),
            "mostValues": MOST_VALUES,
            "questions": [[asdict(one) for one in asked] for asked in questions(told)],
            "frames": [
                {
                    "phase": frame.phase,
                    "values": [[shown(value) for value in row] for row in frame.values],
                    "shares": frame.shares,
                    "messages": [_message(asdict(message)) for message in frame.messages],
                    "words": frame.words(number, rounds),
                }
                for number, frame in enumerate(told)
            ],
        }

    def _clicked(self, click: dict[str, Any]) -> None:
        # Perhaps in another thread and during a cell, but only one thread may use the ranks.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ask, click)

    def _ask(self, click: dict[str, Any]) -> None:
        waiting, self._asked = self._asked is not None, click
        if not waiting:
            self._run_when_idle()

    def _run_when_idle(self) -> None:
        assert self._loop is not None
        try:
            if self._ranks().roster.busy:
                self._say("The ranks are running a cell: this will run when it has ended.")
                self._loop.call_later(_IDLE_SECONDS, self._run_when_idle)
                return
        except AllranksError:
            pass  # `run` raises it again below
        click, self._asked = self._asked or {}, None
        try:
            self.run(str(click["algorithm"]), int(click["ranks"]), int(click["size"]))
        except (AllranksError, KeyError, TypeError, ValueError) as error:
            self._say(str(error))

    def run(self, algorithm: str, ranks: int, size: int) -> None:
        # Without ranks it shows an earlier run of the same kind.
        from IPython.display import update_display

        asked, found = (algorithm, ranks, size), None
        try:
            found = self._ranks()
            self._kept[asked] = explain(found, algorithm, example_arrays(ranks, size))
            self._most = found.size
        except AllranksError as error:
            if asked not in self._kept:
                if found is not None and not isinstance(error, ClusterLost):
                    raise
                kept = (f"{name} of {size} over {ranks} ranks" for name, ranks, size in self._kept)
                raise UsageError(
                    f"{error} What they have run can still be played: {', '.join(kept)}."
                ) from None
        self.told = self._kept[asked]
        self._say("")
        update: Any = update_display
        update(self._bundle(), raw=True, display_id=self._place)

    def _say(self, problem: str) -> None:
        self._problem = problem
        self._answers += 1  # so that an answer equal to the last one also changes the state
        if self._widget is not None:
            self._widget.send_state("state")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    said = {name: [shown(one) for one in message[name]] for name in ("before", "received", "after")}
    return {**message, **said}


def wanted(cluster: Cluster | None, ranks: int | None) -> Cluster:
    # Starts the notebook's own ranks if they are not running, as a cell would.
    if cluster is not None:
        return cluster
    if launched.in_cells_of_ranks:
        raise UsageError(
            "ring() expected the notebook, found a cell of the ranks. Type it in a cell without "
            "%%distributed; where every cell runs on the ranks, begin its cell with: %%local"
        )
    if notebook.session is None:
        raise UsageError(
            "an explainer needs ranks to run on, and this notebook has none. Type: "
            "%load_ext allranks   (or pass cluster=allranks.Cluster(4).start())"
        )
    return notebook.session.of_size(None if notebook.session.running else ranks)


def present(cluster: Cluster | None) -> Cluster:
    # Starts nothing.
    found = cluster or (notebook.session.running if notebook.session else None)
    if found is None:
        raise UsageError("no ranks are running. Type: %distributed start")
    return found


def ring(
    cluster: Cluster | None = None,
    algorithm: str = "ring",
    ranks: int | None = None,
    size: int = 8,
    values: Any = None,
) -> Explainer:
    """Runs an allreduce on a cluster's ranks, and returns it for display round by round.

    Args:
        cluster: an ``allranks.Cluster``; by default the notebook's own, which is started now if
            it is not running.
        algorithm: ``ring``, ``recursive doubling`` or ``tree``.
        ranks: the number of ranks, from rank 0 on; by default all, and at most 16.
        size: the number of values on each rank, at most 32.
        values: in place of ``ranks`` and ``size`` the arrays to sum up, one per rank.

    Raises:
        UsageError: the algorithm is unknown, or there are too few ranks.
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(
            f"expected one of {', '.join(ALGORITHMS)}, found {algorithm!r}. Type for example: "
            'ring(algorithm="tree")'
        )
    own = None if values is None else checked_arrays(values)
    if own is None:
        example_arrays(ranks or 2, size)  # refuses before anything is started
    found = wanted(cluster, ranks if own is None else len(own))
    if own is None:
        own = example_arrays(ranks or min(max(2, found.size), MOST_RANKS), size)
    return Explainer(explain(found, algorithm, own), lambda: present(cluster))


def explain(cluster: Cluster, algorithm: str, values: Sequence[Sequence[float]]) -> Any:
    """Runs an allreduce (sum) that reports its steps, and times it, on the first ranks.

    Args:
        cluster: runs it.
        algorithm: ``ring``, ``recursive doubling`` or ``tree``.
        values: an array for each rank, in their order, all of one length; at least two.

    Raises:
        UsageError: there are fewer ranks, or they run a cell.
        CellTimeout: the ranks did not end in time; they keep their variables, unless it says more.
        ClusterLost: the ranks are gone.
    """
    if cluster.roster.busy:
        raise UsageError("the ranks are running a cell. Try again when it has ended.")
    if not 2 <= len(values) <= cluster.size:
        raise UsageError(
            "an allreduce needs 2 ranks or more, and no more than are running: found "
            f"{len(values)}, and {cluster.size} {'is' if cluster.size == 1 else 'are'} running. "
            f"Type for example: %distributed restart -n {max(2, len(values))}"
        )
    try:
        first, *_ = cluster.run(
            EXPLAIN_HERE,
            algorithm,
            values,
            ranks=range(len(values)),
            timeout=_EXPLAIN_SECONDS,
            view=cluster.cells.hidden_view(),
        )
    except CellTimeout as late:
        raise CellTimeout(_too_late(late, algorithm, values)) from late
    return first


def _too_late(late: CellTimeout, algorithm: str, values: Sequence[Sequence[float]]) -> str:
    ended = [one for one in late.reports if not one.waiting and one.etype != CellTimeout.__name__]
    # Ranks that did not react were killed.
    killed = f" {late}." if ended or not late.reports else ""
    return (
        f"ring() expected {label(range(len(values)))} to run an allreduce ({algorithm}, "
        f"{len(values[0])} values a rank) several times within {_EXPLAIN_SECONDS:g} s, found that "
        f"they had not ended.{killed} The machine may be busy: type the same again. Or see what "
        "the ranks do: %distributed status, and start new ones: %distributed restart"
    )


def example_arrays(ranks: int, size: int) -> Arrays:
    # For up to four ranks each has its own digit, so a sum shows the ranks in it.
    if not 2 <= ranks <= MOST_RANKS:
        raise UsageError(
            f"expected between 2 and {MOST_RANKS} ranks to be drawn, found {ranks}. "
            "Type for example: ring(ranks=4)"
        )
    if not 1 <= size <= MOST_VALUES:
        raise UsageError(
            f"expected between 1 and {MOST_VALUES} values a rank to be drawn, found {size}. "
            "Type for example: ring(size=8)"
        )
    weight = [10**rank if ranks <= _DIGITS else rank + 1 for rank in range(ranks)]
    return [[(place % 9 + 1) * one for place in range(size)] for one in weight]


def checked_arrays(values: Any) -> Arrays:
    # One array per rank: lists, or an array of shape (ranks, size).
    rows = values.tolist() if hasattr(values, "tolist") else values
    try:
        arrays = [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
    except TypeError:
        raise UsageError(f"{_EXPECTED}, found {values!r}. {_EXAMPLE}") from None
    every = [one for array in arrays for one in array]
    if not all(isinstance(one, int | float) for one in every):
        wrong = next(one for one in every if not isinstance(one, int | float))
        raise UsageError(f"{_EXPECTED}, found {wrong!r} among them. {_EXAMPLE}")
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) > 1:
        raise UsageError(f"{_EXPECTED}, found arrays of {lengths} values. {_EXAMPLE}")
    example_arrays(len(arrays), lengths[0] if lengths else 0)
    return arrays
