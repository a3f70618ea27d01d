"""Lists of ranks as people type and read them: ``0,2-3`` and ``ranks 0, 2–3``."""

from __future__ import annotations

from collections.abc import Iterable

from allranks.errors import UsageError


def parse(text: str, size: int) -> tuple[int, ...]:
    """Returns the ranks that a text names, sorted, each once.

    Args:
        text: as ``2``, ``0,2-3``, ``[0, 2-3]`` or ``all``.
        size: how many ranks there are.

    Raises:
        UsageError: the text is no list of ranks, or names one that is not there.
    """
    named: set[int] = set()
    body = text.strip().removeprefix("[").removesuffix("]")
    if body.strip() == "all":
        return tuple(range(size))
    for part in body.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"expected ranks as in 0,2-3, found {text!r}. Type for example: -r 0")
        lowest, highest = int(first), int(last or first)
        if not lowest <= highest < size:
            raise UsageError(
                f"expected ranks between 0 and {size - 1}, found {text!r}: {size} "
                f"{'rank runs' if size == 1 else 'ranks run'}. Type for example: -r {size - 1}"
            )
        named.update(range(lowest, highest + 1))
    return tuple(sorted(named))


def compact(ranks: Iterable[int], dash: str = "–") -> str:
    """Returns ``0, 2–3`` for (0, 2, 3)."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}{dash}{b}" for a, b in spans)


def label(ranks: Iterable[int], noun: str = "rank") -> str:
    """Returns ``rank 2`` or ``ranks 0, 2–3``; or as many of another ``noun``."""
    listed = list(ranks)
    return f"{noun}{'s' if len(listed) != 1 else ''} {compact(listed)}"
