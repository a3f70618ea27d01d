"""Ranks as people type and read them: ``0,2-3``, ``ranks 0, 2–3``, and what each of them does."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

from allranks.errors import UsageError


def parse(text: str, size: int, option: str = "-r") -> tuple[int, ...]:
    """Returns the ranks that a text names, sorted, each once.

    Args:
        text: as ``2``, ``0,2-3``, ``[0, 2-3]`` or ``all``.
        size: how many ranks there are.
        option: what stands before the text, for the example in an error.

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
            raise UsageError(
                f"expected ranks as in 0,2-3, found {text!r}. Type for example: {option} 0"
            )
        lowest, highest = int(first), int(last or first)
        if not lowest <= highest < size:
            raise _not_there(repr(text), size, f"{option} {size - 1}")
        named.update(range(lowest, highest + 1))
    return tuple(sorted(named))


def among(ranks: Iterable[int] | None, size: int) -> tuple[int, ...]:
    """Returns ranks that are given by number, sorted, each once; None stands for all.

    Raises UsageError if these are no ranks, or one of them is not there.
    """
    if ranks is None:
        return tuple(range(size))
    try:
        chosen = tuple(sorted({index(rank) for rank in ranks}))
    except TypeError:
        raise UsageError(
            f"expected a list of ranks, found {ranks!r}. Type for example: ranks=[0]"
        ) from None
    if not chosen or chosen[0] < 0 or chosen[-1] >= size:
        raise _not_there(str(list(chosen)), size, "ranks=[0]")
    return chosen


def _not_there(found: str, size: int, example: str) -> UsageError:
    run = "rank is running" if size == 1 else "ranks are running"
    return UsageError(
        f"expected ranks between 0 and {size - 1}, found {found}: {size} {run}. "
        f"Type for example: {example}"
    )


def compact(ranks: Iterable[int], dash: str = "–") -> str:
    """Returns ``0, 2–3`` for (0, 2, 3)."""
    runs = spans(sorted(ranks))
    return ", ".join(str(a) if a == b else f"{a}{dash}{b}" for a, b in runs)


def spans(ranks: Sequence[int]) -> list[list[int]]:
    """Returns the first and the last rank of each run of neighbours."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def label(ranks: Iterable[int], noun: str = "rank") -> str:
    """Returns ``rank 2`` or ``ranks 0, 2–3``; or as many of another ``noun``."""
    listed = list(ranks)
    return f"{noun}{'s' if len(listed) != 1 else ''} {compact(listed)}"


class ActivityState(NamedTuple):
    """A state of a rank, and what readers ask of it: it crosses the wire with these properties.

    A feature defines its own where the rank enters it. A reader needs no list of the states.
    """

    word: str
    #: The character before the word in a tile.
    mark: str = ""
    #: A class of the front ends: ``well`` if nothing is left to do, ``bad`` if help is needed.
    look: str = ""
    #: Whether the rank runs anything: a cell, a request of a client, its own work between cells.
    is_busy: bool = False
    #: Whether it waits, for other ranks or for a person.
    waits: bool = False
    #: Whether it waits for a person.
    asks: bool = False
    #: Whether it is worth saying which ranks are in it.
    is_named: bool = False


class Activity(NamedTuple):
    """What a rank does; ``str()`` returns it as people read it.

    ``text`` is more than the word of the state, or empty. ``waits_for`` is the `label` of the ranks
    that it waits for in a call; then ``text`` is the call.
    """

    state: ActivityState
    text: str = ""
    waits_for: str = ""

    @classmethod
    def read(cls, sent: Sequence[Any]) -> Activity:
        """Returns what arrived as lists; raises TypeError or ValueError if it has another form."""
        state, text, waits_for = sent
        found = cls(ActivityState(*state), text, waits_for)
        if not all(isinstance(one, str) for one in (*found.state[:3], text, waits_for)):
            raise TypeError(f"what a rank does has another form: {sent!r:.60}")
        return found

    def __str__(self) -> str:
        if self.waits_for:
            return f"{self.state.word} in {self.text} for {self.waits_for}"
        return self.text or self.state.word

    @property
    def brief(self) -> str:
        """The same for a narrow place, which may cut off the end: the ranks come first."""
        if self.waits_for:
            return f"waits for {self.waits_for} in {self.text}"
        return str(self)


def counted(doing: Mapping[int, Activity], count_all: bool = True) -> list[str]:
    """Returns how many ranks do what, or which: ``3 running``, ``1 waits for rank 2``, ``rank 4
    failed``. Those that go on come first, then the largest groups. Without ``count_all``, ranks
    that all do the same are not counted.
    """
    groups: dict[tuple[ActivityState, str], list[int]] = {}
    for rank, one in doing.items():
        groups.setdefault((one.state, one.waits_for), []).append(rank)
    if len(groups) == 1 and not count_all:
        ((state, whom),) = groups
        return [f"{state.word} for {whom}" if whom else state.word]
    order = sorted(groups, key=lambda key: (key[0] not in _GO_ON, -len(groups[key])))
    return [_group_text(*key, groups[key]) for key in order]


def _group_text(state: ActivityState, whom: str, ranks: list[int]) -> str:
    if whom:
        return f"{len(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {whom}"
    return f"{label(ranks) if state.is_named else len(ranks)} {state.word}"


WAITS = ActivityState("waiting", "◷", is_busy=True, waits=True)
BETWEEN = ActivityState("between two cells", is_busy=True)
RUNNING = Activity(ActivityState("running", "▶", is_busy=True))
IDLE = Activity(ActivityState("idle", "·", "well"))
_GO_ON = RUNNING.state, IDLE.state
#: What a rank does between two cells, once it has ended its own work.
MEETS = Activity(WAITS, "waiting for the other ranks")
#: What the notebook knows of ranks that do not answer. One that computes in C does not either.
SILENT = Activity(ActivityState("silent", "", "bad", is_busy=True, is_named=True))
STOPPED, DEAD = (
    Activity(ActivityState(word, "", "bad", is_named=True)) for word in ("stopped", "dead")
)
#: What a rank does that has left a cell, by the status of `allranks.cluster.state.Left`.
ENDINGS = {
    "ok": Activity(ActivityState("finished", "✓", "well")),
    "error": Activity(ActivityState("failed", "✗", "bad", is_named=True)),
    "waiting": Activity(ActivityState("waited", "◷"), "waited for a rank that failed"),
    "interrupted": Activity(ActivityState("interrupted", "■", is_named=True)),
    "lost": Activity(ActivityState("lost", "✝", "bad", is_named=True)),
    "replaced": Activity(ActivityState("replaced", "↻", is_named=True)),
}


@lru_cache(maxsize=8)
def copy_holders(hosts: tuple[Hashable, ...]) -> tuple[int, ...]:
    """Returns, for each rank, the rank of another host that stores a copy of what it keeps.

    ``hosts`` has the host of each rank. The copies of a host are spread over all others, so that
    each of them can continue some of its ranks. If there is only one host, each rank holds its own.
    """
    there: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        there.setdefault(host, []).append(rank)
    names, found = list(there), list(range(len(hosts)))
    for at, host in enumerate(names):
        others = names[at + 1 :] + names[:at]
        for place, rank in enumerate(there[host]):
            if others:
                holders = there[others[place % len(others)]]
                found[rank] = holders[place // len(others) % len(holders)]
    return tuple(found)
