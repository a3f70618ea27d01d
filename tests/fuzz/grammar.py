"""What a step is: a statement of the grammar, made with random choices, and what may come of it.

``statements/*.txt`` has the cells, in blocks that a blank line ends::

    name *weight @kind soak | how it may end; attribute of Case=expression; after_end; no mixes
        :word «one ¦ another»
        a line of the cell: $word, $rank, «one ¦ another ¦ %many»
        last: an expression below all the rest
        undo: what the notebook's user would type to have a usual rank again

``«…»`` is one of its parts, or one line of the block ``%many``, in which ``⏎`` is a new line. Of
``this => that`` it is that, and ``key`` is this. ``right name`` is a cell that checks its own
result, and stands before others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.sessions import Session

KINDS = ("notebook", "cluster", "healing")
_TEXTS = Path(__file__).with_name("statements")


class Fault(Exception):
    """Something is not as it is promised; two faults of one kind are taken for the same."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def check(holds: bool, kind: str, text: str) -> None:
    """Raises a `Fault` unless something holds."""
    if not holds:
        raise Fault(kind, text)


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
        values: what ``last`` is on each rank.
        lines: how many lines ``line STEP RANK I`` each rank writes.
        late: how many lines ``late STEP RANK I`` it writes, some of them after the cell's end.
        shows: a bundle's text that must be displayed, and the rank whose it is.
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
    shows: tuple[str, int] | None = None
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
    """The random choices of one step; ``rank`` is the one to misbehave."""

    rng: random.Random
    size: int
    step: int
    rank: int

    def words(self) -> dict[str, Any]:
        """Returns what a cell and its attributes may name."""
        rng, rank, everyone = self.rng, self.rank, range(self.size)
        one, two = sorted(rng.sample(everyone, 2))
        first, at = rng.uniform(0, 0.4), rng.uniform(0, 0.3)
        return {
            "rank": rank,
            "size": self.size,
            "step": self.step,
            "next": (rank + 1) % self.size,
            "everyone": everyone,
            "others": tuple(each for each in everyone if each != rank),
            "among": tuple(sorted(rng.sample(everyone, rng.randint(1, self.size)))),
            "one": one,
            "two": two,
            "key": "",
            "pick": rng.choice,
            "uniform": rng.uniform,
            "twice": (first, first + rng.choice((0.0, 0.001, 0.01, 0.1, 0.5))),
            "stopped": ((at, rank, 19), (at + rng.uniform(0.1, 0.8), rank, 18)),
            "may_interrupt": lambda name: (
                "CellInterrupted " * (name == "KeyboardInterrupt") + "CellFailed"
            ),
        }

    def fill(self, text: str, words: dict[str, Any]) -> str:
        """Returns a text of the grammar with its choices made; the innermost are made first."""
        while found := re.search("«(%?)([^«»]*)»", text):
            listed = CHOICES.get(found[2]) if found[1] else None
            parts = listed or [part.strip() for part in found[0][1:-1].split("¦")]
            key, arrow, part = self.rng.choice(parts).partition(" => ")
            if arrow:
                words["key"] = key
            line = text[: found.start()].rpartition("\n")[2]
            indent = line[: len(line) - len(line.lstrip())]
            chosen = (part if arrow else key).replace("⏎", f"\n{indent}")
            text = text[: found.start()] + chosen + text[found.end() :]
        return Template(text).safe_substitute(words)


Made = Case | Act
CHOICES: dict[str, list[str]] = {}
RIGHT: dict[str, str] = {}


@dataclass(frozen=True)
class Statement:
    """A statement of the grammar.

    Attributes:
        weight: how often it stands in a deck.
        only: the one kind of session that it can be played in.
        soak: it takes too long for every day.
    """

    name: str
    make: Callable[[Draw], Made]
    weight: int = 1
    only: str = ""
    soak: bool = False


STATEMENTS: dict[str, Statement] = {}


def act(
    weight: int = 1, only: str = "", soak: bool = False, lost: bool = False
) -> Callable[[Callable[[Draw, Any], None]], None]:
    """Adds something that is done to the session itself; see `Statement` and `Act`."""

    def add(do: Callable[[Draw, Any], None]) -> None:
        name = do.__name__
        make = lambda draw: Act(partial(do, draw), lost)  # noqa: E731
        STATEMENTS[name] = Statement(name, make, weight, only, soak)

    return add


def load() -> None:
    """Reads the grammar, once."""
    if STATEMENTS:
        return
    for path in sorted(_TEXTS.glob("*.txt")):
        for block in path.read_text().split("\n\n"):
            _add(*(line for line in block.splitlines() if not line.startswith("#")))
    import_module("tests.fuzz.acts")


def _add(head: str, *lines: str) -> None:
    body = [line[4:] for line in lines]
    if head.startswith("%"):
        CHOICES[head[1:]] = body
    elif head.startswith("right "):
        RIGHT[head[6:]] = "\n".join(body)
    else:
        marks, _, options = head.partition(" | ")
        name, *rest = marks.split()
        weight = next((int(mark[1:]) for mark in rest if mark[0] == "*"), 1)
        only = next((mark[1:] for mark in rest if mark[0] == "@"), "")
        assert name not in STATEMENTS, name
        make = partial(_case, options, "\n".join(body))
        STATEMENTS[name] = Statement(name, make, weight, only, "soak" in rest)


def _case(options: str, body: str, draw: Draw) -> Case:
    words = draw.words()
    for word, text in re.findall(r"^:(\w+) (.*)$", body, re.M):
        words[word] = draw.fill(text, words)
    last = "".join(re.findall(r"^last: (.*)$", body, re.M))
    cell = re.sub(r"^(:\w+|last:) .*\n?", "", body, flags=re.M)
    source, undo = [*re.split(r"^undo:\s", cell, maxsplit=1, flags=re.M), ""][:2]
    source, last, undo = (draw.fill(text, words) for text in (source, last, undo))
    given: dict[str, Any] = {}
    for option in options.split("; ") if options else ():
        name, equals, expression = option.partition("=")
        if equals:
            given[name] = eval(expression, words)
        elif name[0].isupper() or name.startswith("ok"):
            given["ends"] = name
        else:
            given[name.removeprefix("no ")] = not name.startswith("no ")
    given["ends"] = tuple(given.get("ends", "ok").split())
    says = given.get("says", ())
    says = (says,) if isinstance(says, str) else says
    given["says"] = tuple(draw.fill(text, words) for text in says)
    if "shows" in given:
        given["shows"] = (draw.fill(given["shows"][0], words), given["shows"][1])
    return Case(source.rstrip("\n"), last=last, undo=undo, **given)


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
