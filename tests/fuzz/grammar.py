"""What a step is: a statement of the grammar, made with random choices, and what may come of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.sessions import Session

KINDS = ("notebook", "cluster", "healing")


class Fault(Exception):
    """Something is not as it is promised.

    Args:
        kind: in a word or two, what: two faults of one kind are taken for the same.
        text: what was expected, and what was found.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True)
class Case:
    """One cell, and what may come of it.

    Attributes:
        source: the cell, in which ``rank``, ``size``, ``np``, ``os`` and ``time`` are there.
        ends: how it may end: ``ok``, or the name of the error.
        says: what a reader must find in what is shown.
        failed: the exception of each rank that must be reported as failed; None: it may be any.
        lost: whether the ranks' variables are lost; None: it may be either, as long as it is said.
            Where ranks are replaced those of the dead are, and no others.
        ranks: the ranks that run it; None: all.
        timeout: ``--timeout``.
        presses: when the notebook is interrupted, in seconds after the cell was begun there.
        signals: ``(seconds, rank, signal)``, sent from outside.
        last: an expression below all the rest.
        values: what ``last`` is on each rank.
        undo: what the notebook's user would type to have a usual rank again.
        lines: how many lines ``line STEP RANK I`` each rank writes.
        late: how many lines ``late STEP RANK I`` it writes, some of them after the cell's end.
        shows: a bundle's text that must be displayed, and the ranks whose it is.
        begins: whether the cell begins and ends with lines of the suite's own.
        mixes: whether right statements may stand before it.
        speaks: whether what ranks print at the cell's end can be seen.
        forgets: whether the cell itself forgets all variables.
        after_end: whether ranks may fail although they have reached the last line.
    """

    source: str
    ends: tuple[str, ...] = ("ok",)
    says: tuple[str, ...] = ()
    failed: Mapping[int, str] | None = None
    lost: bool | None = False
    ranks: tuple[int, ...] | None = None
    timeout: float | None = None
    presses: tuple[float, ...] = ()
    signals: tuple[tuple[float, int, int], ...] = ()
    last: str = ""
    values: tuple[object, ...] | None = None
    undo: str = ""
    lines: int = 0
    late: int = 0
    shows: tuple[tuple[str, tuple[int, ...]], ...] = ()
    begins: bool = True
    mixes: bool = True
    speaks: bool = True
    forgets: bool = False
    after_end: bool = False


@dataclass(frozen=True)
class Act:
    """Something that is done to the session itself; it raises `Fault` where that goes wrong.

    ``lost`` says whether the ranks' variables are lost by it.
    """

    do: Callable[[Session], None]
    lost: bool = False


@dataclass(frozen=True)
class Draw:
    """The random choices of one step."""

    rng: random.Random
    size: int
    step: int
    rank: int
    """One of the ranks, the one to misbehave."""

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but that one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def among(self, least: int = 1) -> tuple[int, ...]:
        """Some of the ranks."""
        many = self.rng.randint(min(least, self.size), self.size)
        return tuple(sorted(self.rng.sample(range(self.size), many)))


Made = Case | Act


@dataclass(frozen=True)
class Statement:
    """A statement of the grammar."""

    name: str
    make: Callable[[Draw], Made]
    weight: int
    only: str
    soak: bool


STATEMENTS: dict[str, Statement] = {}
RIGHT: dict[str, Callable[[Draw], str]] = {}


def statement(
    weight: int = 1, only: str = "", soak: bool = False
) -> Callable[[Callable[[Draw], Made]], Callable[[Draw], Made]]:
    """Adds a statement to the grammar, under its function's name.

    Args:
        weight: how often it stands in a deck.
        only: the one kind of session that it can be played in.
        soak: it takes too long for every day.
    """

    def add(make: Callable[[Draw], Made]) -> Callable[[Draw], Made]:
        name = make.__name__
        assert name not in STATEMENTS, name
        STATEMENTS[name] = Statement(name, make, weight, only, soak)
        return make

    return add


def act(
    weight: int = 1, only: str = "", soak: bool = False, lost: bool = False
) -> Callable[[Callable[[Draw, Session], None]], None]:
    """Adds something that is done to the session itself; see `statement` and `Act`."""

    def add(do: Callable[[Draw, Session], None]) -> None:
        def make(draw: Draw) -> Act:
            return Act(lambda session: do(draw, session), lost)

        STATEMENTS[do.__name__] = Statement(do.__name__, make, weight, only, soak)

    return add


def statements(**made: Callable[[Draw], Made]) -> None:
    """Adds statements that stand once in a deck."""
    STATEMENTS.update({name: Statement(name, make, 1, "", False) for name, make in made.items()})


def right(make: Callable[[Draw], str]) -> Callable[[Draw], str]:
    """Adds source that checks its own result; it stands before other statements, or alone."""
    RIGHT[make.__name__] = make
    return make


def rights(**made: Callable[[Draw], str]) -> None:
    """Adds several sources that check their own results."""
    RIGHT.update(made)


@dataclass(frozen=True)
class Seed:
    """Names a session: ``notebook-4-17`` is the 17th on 4 ranks of a notebook.

    A step depends on the seed and on its own number only, whatever was played before it.
    """

    kind: str
    size: int
    number: int
    soak: bool = field(default=False)

    @classmethod
    def parse(cls, text: str) -> Seed:
        """Returns the seed of a text."""
        kind, size, number, *more = text.split("-")
        if kind not in KINDS:
            raise ValueError(f"expected a seed as notebook-4-17 or cluster-2-3, found {text!r}")
        return cls(kind, int(size), int(number), more == ["soak"])

    def __str__(self) -> str:
        return f"{self.kind}-{self.size}-{self.number}{'-soak' * self.soak}"

    def statements(self) -> Iterator[Statement]:
        """Yields the statements of all steps: one shuffled deck after the other."""
        names = [
            name
            for name, each in sorted(STATEMENTS.items())
            if each.only in ("", self.kind) and (self.soak or not each.soak)
            for _ in range(each.weight)
        ]
        for deck in count():
            # The number of ranks is left out: the days' sessions share one deck.
            random.Random(f"{self.kind} {self.number} deck {deck}").shuffle(names)
            yield from [STATEMENTS[name] for name in names]

    def draw(self, step: int, size: int) -> Draw:
        """Returns the choices of a step, on so many ranks."""
        rng = random.Random(f"{self} step {step}")
        return Draw(rng, size, step, rng.randrange(size))
