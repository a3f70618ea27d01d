"""A profile in words: how long, what differs between ranks, and the tree for a terminal."""

from __future__ import annotations

from allranks.records.profile import SAMPLES_A_SECOND
from allranks.records.ranks import label
from allranks.widgets.dashboard.numbers import seconds
from allranks.widgets.flame.tree import Folded, Node

DIFFERS = "≠"
_DIFFERENCES = 5
_LINES = 40
_LEAST = 0.02
#: A frame that only calls one other is left out of the text.
_PASSES_ON = 0.95


def text(folded: Folded) -> str:
    """Returns the whole profile as text."""
    head = f"{'time':>8}  {'share':>5}    one frame per line, called frames indented"
    return "\n".join([summary(folded), *differences(folded), head, *_tree(folded)])


def summary(folded: Folded) -> str:
    """Returns one line: which ranks, for how long."""
    each = ", a mean" if len(folded.ranks) > 1 else ""
    return (
        f"profile of {label(folded.ranks)}: {seconds(folded.seconds)}{each}, "
        f"{SAMPLES_A_SECOND} samples per second"
    )


def differences(folded: Folded) -> list[str]:
    """Returns a line for each place where ranks differ most."""
    return [f"{DIFFERS} {node.name}: {by_rank(folded, node)}" for node in _differing(folded)]


def _differing(folded: Folded) -> list[Node]:
    return folded.differing()[:_DIFFERENCES]


def by_rank(folded: Folded, node: Node) -> str:
    """Returns what ranks spend in a frame, as ``rank 3 1.2 s, ranks 0–2 0.1 s``.

    Ranks whose times differ little stand together.
    """
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


def _tree(folded: Folded) -> list[str]:
    lines: list[str] = []
    left_out = _walk(folded, folded.root, 0, lines)
    if left_out:
        lines.append(f"{'':17}… {left_out} more")
    return lines


def _walk(folded: Folded, node: Node, depth: int, lines: list[str]) -> int:
    left_out = 0
    for child in node.by_time:
        share = child.total / (folded.root.total or 1.0)
        if share < _LEAST:
            continue
        only = child.by_time[0] if child.children else None
        passes = only is not None and only.total >= _PASSES_ON * child.total
        inner = depth
        if not passes or child.name.startswith("In[") or " In[" in child.name:
            if len(lines) < _LINES:
                mark = DIFFERS if folded.differs(child) else " "
                time = seconds(folded.mean(child))
                lines.append(f"{time:>8}  {share:5.0%}  {mark} {'  ' * depth}{child.name}")
            else:
                left_out += 1
            inner = depth + 1
        left_out += _walk(folded, child, inner, lines)
    return left_out
