"""The flame graph of a profile: the stacks of all ranks as one tree, a picture and a text."""

from __future__ import annotations

import base64
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from allranks.errors import UsageError
from allranks.features.profile import SAMPLES_A_SECOND
from allranks.records.ranks import label
from allranks.widgets.dashboard.svg import PAPER, WRONG
from allranks.widgets.dashboard.tables import seconds
from allranks.widgets.text import TERMINAL, front_end

#: A frame is marked if the times of the ranks differ by this share of the whole time.
_DIFFERS = 0.1
#: And by this time: a rank may have a few samples more by chance.
_DIFFERS_SECONDS = 0.05
_EXPLAINED = 0.7
DIFFERS = "≠"
_DIFFERENCES = 5
_TEXT_LINES = 40
_LEAST = 0.02
#: A frame that only calls one other is left out of the text.
_PASSES_ON = 0.95
_WIDTH, _ROW = 900, 18
_LETTER = 6.2
_LEAST_WIDTH = 1.5
_MOST_ROWS = 60
_MOST_BOXES = 1500
#: Of the cell's own lines, of waiting and calls of allranks, and of libraries.
_CELL, _OURS, _OTHER = "#cfe4f7", "#f8dcae", "#e9e9e9"
_FONT = "#212121"


@dataclass(frozen=True)
class Profile:
    """The seconds of one rank in each stack of frames, the outermost first."""

    rank: int
    stacks: Mapping[tuple[str, ...], float]

    @property
    def seconds(self) -> float:
        return sum(self.stacks.values())

    @classmethod
    def from_content(cls, rank: int, content: Mapping[str, Any]) -> Profile:
        names, rows = content["frames"], content["stacks"]
        return cls(rank, {tuple(names[i] for i in stack): seconds for seconds, stack in rows})

    def collapsed(self) -> str:
        """Returns one line a stack, ``rank 0;outer;inner 1234``: frames and microseconds.

        This is the format of flamegraph.pl, speedscope and inferno.
        """
        lines = []
        for stack, spent in sorted(self.stacks.items()):
            names = [name.replace(";", ",").replace("\n", " ") for name in stack]
            lines.append(f"{';'.join([f'rank {self.rank}', *names])} {round(spent * 1e6)}\n")
        return "".join(lines)


@dataclass
class Node:
    """One frame, called from the one above it; ``seconds`` by rank include those of its calls."""

    name: str
    seconds: dict[int, float] = field(default_factory=dict)
    children: dict[str, Node] = field(default_factory=dict)

    def add(self, rank: int, seconds: float) -> None:
        self.seconds[rank] = self.seconds.get(rank, 0.0) + seconds

    @property
    def by_time(self) -> list[Node]:
        return sorted(self.children.values(), key=lambda node: (-node.total, node.name))

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Folded:
    """The time of several ranks, folded; ``root`` holds all of it."""

    ranks: tuple[int, ...]
    root: Node

    @property
    def seconds(self) -> float:
        # A mean over the ranks.
        return self.root.total / len(self.ranks)

    def mean(self, node: Node) -> float:
        return node.total / len(self.ranks)

    def each(self, node: Node) -> dict[int, float]:
        return {rank: node.seconds.get(rank, 0.0) for rank in self.ranks}

    def spread(self, node: Node) -> float:
        each = self.each(node).values()
        return max(each) - min(each)

    def differs(self, node: Node) -> bool:
        # Enough to be marked.
        return self.spread(node) >= max(_DIFFERS * self.seconds, _DIFFERS_SECONDS)

    def differing(self) -> list[Node]:
        """Returns the frames in which a difference arises, the greatest first."""

        def is_explained(node: Node) -> bool:
            # Its difference is that of one frame which it called.
            least = _EXPLAINED * self.spread(node)
            return any(self.spread(child) >= least for child in node.children.values())

        found = [n for n in _below(self.root) if self.differs(n) and not is_explained(n)]
        return sorted(found, key=lambda node: -self.spread(node))


def fold(profiles: Sequence[Profile]) -> Folded:
    root = Node("all")
    for profile in profiles:
        for stack, spent in profile.stacks.items():
            node = root
            node.add(profile.rank, spent)
            for name in stack:
                node = node.children.setdefault(name, Node(name))
                node.add(profile.rank, spent)
    return Folded(tuple(sorted({profile.rank for profile in profiles})), root)


def _below(node: Node) -> Iterator[Node]:
    for child in node.children.values():
        yield child
        yield from _below(child)


def text(folded: Folded) -> str:
    head = f"{'time':>8}  {'share':>5}    one frame per line, called frames indented"
    lines: list[str] = []
    left_out = _walk(folded, folded.root, 0, lines)
    if left_out:
        lines.append(f"{'':17}… {left_out} more")
    return "\n".join([summary(folded), *differences(folded), head, *lines])


def summary(folded: Folded) -> str:
    each = ", a mean" if len(folded.ranks) > 1 else ""
    return (
        f"profile of {label(folded.ranks)}: {seconds(folded.seconds)}{each}, "
        f"{SAMPLES_A_SECOND} samples per second"
    )


def differences(folded: Folded) -> list[str]:
    found = folded.differing()[:_DIFFERENCES]
    return [f"{DIFFERS} {node.name}: {by_rank(folded, node)}" for node in found]


def by_rank(folded: Folded, node: Node) -> str:
    """Returns the times of ranks in a frame, as ``rank 3 1.2 s, ranks 0–2 0.1 s``."""
    # Ranks with similar times stand together.
    near = max(0.02 * folded.seconds, 0.25 * folded.spread(node))
    groups: list[list[tuple[int, float]]] = []
    for rank, value in sorted(folded.each(node).items(), key=lambda pair: -pair[1]):
        if groups and groups[-1][0][1] - value <= near:
            groups[-1].append((rank, value))
        else:
            groups.append([(rank, value)])
    said = []
    for group in groups:
        mean = sum(value for _, value in group) / len(group)
        said.append(f"{label(sorted(rank for rank, _ in group))} {seconds(mean)}")
    return ", ".join(said)


def _walk(folded: Folded, node: Node, depth: int, lines: list[str]) -> int:
    """Adds the lines of the frames below a node; returns how many it has left out."""
    left_out = 0
    for child in node.by_time:
        share = child.total / (folded.root.total or 1.0)
        if share < _LEAST:
            continue
        only = child.by_time[0] if child.children else None
        passes = only is not None and only.total >= _PASSES_ON * child.total
        inner = depth
        if not passes or child.name.startswith("In[") or " In[" in child.name:
            if len(lines) < _TEXT_LINES:
                mark = DIFFERS if folded.differs(child) else " "
                time = seconds(folded.mean(child))
                lines.append(f"{time:>8}  {share:5.0%}  {mark} {'  ' * depth}{child.name}")
            else:
                left_out += 1
            inner = depth + 1
        left_out += _walk(folded, child, inner, lines)
    return left_out


@dataclass(frozen=True)
class _Box:
    node: Node
    row: int
    x: float
    width: float


def page(folded: Folded) -> str:
    boxes = list(_boxes(folded))
    name = f"allranks-{uuid.uuid4().hex}"
    data = base64.b64encode(svg(folded, boxes).encode()).decode()
    areas = "".join(
        f'<area shape="rect" coords="{b.x:.0f},{b.row * _ROW},{b.x + b.width:.0f},'
        f'{(b.row + 1) * _ROW}" title="{escape(_title(folded, b.node))}" alt="">'
        for b in boxes
    )
    said = "".join(f"<br>{escape(line)}" for line in differences(folded))
    return (
        f'<div class="allranks-still"><p><b>{escape(summary(folded))}</b>{said}</p>'
        f'<img alt="flame graph, as text below" src="data:image/svg+xml;base64,{data}" '
        f'usemap="#{name}" width="{_WIDTH}" height="{_height(boxes)}" style="max-width: none">'
        f'<map name="{name}">{areas}</map>'
        f"<details><summary>as text</summary><pre>{escape(text(folded))}</pre></details></div>"
    )


def svg(folded: Folded, boxes: list[_Box] | None = None, titled: bool = False) -> str:
    """Returns the picture alone; ``titled``, each frame has a tooltip."""
    boxes = list(_boxes(folded)) if boxes is None else boxes
    body = "".join(_drawn(folded, box, titled) for box in boxes)
    height = _height(boxes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11" fill="{_FONT}">'
        f'<rect width="{_WIDTH}" height="{height}" fill="{PAPER}"/>{body}</svg>'
    )


def _height(boxes: list[_Box]) -> int:
    return _ROW * (1 + max((box.row for box in boxes), default=0))


def _boxes(folded: Folded) -> Iterator[_Box]:
    # Only frames that are wide enough to be seen, row by row.
    scale = _WIDTH / (folded.root.total or 1.0)
    row = [_Box(folded.root, 0, 0.0, float(_WIDTH))]
    count = 0
    while row and row[0].row < _MOST_ROWS:
        following: list[_Box] = []
        for box in row:
            if count == _MOST_BOXES:
                return
            count += 1
            yield box
            x = box.x
            for child in box.node.by_time:
                width = child.total * scale
                if width >= _LEAST_WIDTH:
                    following.append(_Box(child, box.row + 1, x, width))
                x += width
        row = following


def _drawn(folded: Folded, box: _Box, titled: bool) -> str:
    node, y = box.node, box.row * _ROW
    differs = box.row > 0 and folded.differs(node)
    name = node.name if box.row else summary(folded)
    words = _fitted(f"{DIFFERS} {name}" if differs else name, box.width)
    line = f'stroke="{WRONG}" stroke-width="2"' if differs else f'stroke="{PAPER}"'
    inset = 1 if differs else 0
    width = max(0.5, box.width - 2 * inset)
    colour = _OURS if "(allranks)" in node.name else _CELL if "In[" in node.name else _OTHER
    rect = (
        f'<rect x="{box.x + inset:.1f}" y="{y + inset}" width="{width:.1f}"'
        f' height="{_ROW - 1 - 2 * inset}" fill="{colour}" {line}/>'
    )
    label = f'<text x="{box.x + 4:.1f}" y="{y + 12.5}">{escape(words)}</text>' if words else ""
    title = f"<title>{escape(_title(folded, node))}</title>" if titled else ""
    return f"<g>{title}{rect}{label}</g>" if titled else rect + label


def _fitted(words: str, width: float) -> str:
    most = int((width - 8) / _LETTER)
    if len(words) <= most:
        return words
    return words[: most - 1] + "…" if most > 3 else ""


def _title(folded: Folded, node: Node) -> str:
    share = node.total / (folded.root.total or 1.0)
    said = f"{node.name}\n{seconds(folded.mean(node))}, {share:.1%}"
    return f"{said}\n{by_rank(folded, node)}" if folded.differs(node) else said


def check_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"expected a file in an existing folder, found {name!r}. Type for example: "
            "--save profile.txt, or --save profile.svg for the picture"
        )
    return path


def bundle(profiles: Sequence[Profile]) -> dict[str, str]:
    folded = fold(profiles)
    return {"text/html": page(folded), "text/plain": text(folded)}


def show(profiles: Sequence[Profile], file: Path | None = None) -> None:
    """Shows the flame graph of all ranks, and writes it to ``file``: as SVG, else as stacks."""
    folded = fold(profiles)
    if front_end() == TERMINAL:
        sys.stdout.write(text(folded) + "\n")
    else:
        from IPython.display import display

        display(bundle(profiles), raw=True)
    if file is None:
        return
    stacks = "".join(profile.collapsed() for profile in profiles)
    said = f"The profile is in {file}."
    try:
        file.write_text(svg(folded, titled=True) if file.suffix == ".svg" else stacks, "utf-8")
    except OSError as error:
        said = f"The profile could not be written to {file}: {error.strerror}."
    sys.stdout.write(said + "\n")
