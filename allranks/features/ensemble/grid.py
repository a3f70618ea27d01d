"""The line of ``%%ensemble``: its grid, its options, and errors about them.

In the grid ``lr=1e-1,1e-2 seed=0:8 width=log:16:256:5`` each value goes with each. One parameter
is a list of values, each written as in Python or as a bare word; ``a:b`` or ``a:b:step``, whole
numbers as in ``range``; or ``lin:low:high:count`` and ``log:low:high:count``, both ends included.
Without a count these two are ranges that only a random search can draw from.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import keyword
import math
import random
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.cluster.options import (
    GIVEN,
    ClusterOptions,
    check_out,
    check_timeout,
    names_first,
    unquoted,
)
from allranks.errors import UsageError

_PAIRS = {"(": ")", "[": "]", "{": "}"}


def split(text: str, at: Callable[[str], bool]) -> list[str]:
    # The pieces between the characters for which `at` is true. Quotes and brackets stay whole.
    pieces, piece, closing, quote = [], "", [], ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif not closing and at(character):
            pieces.append(piece)
            piece = ""
            continue
        piece += character
    if quote or closing:
        missing = quote or closing[-1]
        raise UsageError(f"expected a closing {missing}, found the end of {text!r}. Type it.")
    return [*pieces, piece]


def words(line: str) -> list[str]:
    return [word for word in split(line, str.isspace) if word]


_BARE = re.compile(r"[^\W\d][\w./-]*")
_WHOLE = re.compile(r"[+-]?\d+")
#: A number as numpy writes it, in a list of the notebook's: ``np.float64(0.1)``.
_NUMPYS = re.compile(r"\bnp\.\w+\(([^()]*)\)")
_NOT_FINITE = ("inf", "-inf", "nan")
_SCALES = ("lin", "log")
MOST = 100_000
#: The names that members find in their cells: no parameter can have one of these.
RESERVED = GIVEN | {"member", "result"}
_EXAMPLE = "Type for example: %%ensemble lr=1e-1,1e-2 seed=0:8"

Values = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A range of numbers from which a random search draws."""

    low: float
    high: float
    log: bool

    def draw(self, source: random.Random) -> float:
        # Uniform, or uniform in the logarithm.
        if self.log:
            return math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return source.uniform(self.low, self.high)


Choices = Sequence[Any] | Span


@dataclass(frozen=True)
class Grid:
    """The choices of each parameter; each dictionary in ``lists`` goes with every choice."""

    choices: Mapping[str, Choices]
    lists: Sequence[Sequence[Values]] = ()

    def members(self) -> list[Values]:
        # The last parameter changes fastest.
        rows = [*self.lists]
        for name, choice in self.choices.items():
            if isinstance(choice, Span):
                scale = "log" if choice.log else "lin"
                span = f"{name}={scale}:{choice.low:g}:{choice.high:g}"
                raise UsageError(
                    f"{span} expected a count, or a random search. "
                    f"Type {span}:5, or add --random 20"
                )
            rows.append([{name: value} for value in choice])
        _check_count(math.prod(map(len, rows)))
        return [_joined(parts) for parts in itertools.product(*rows)]

    def draw(self, count: int, seed: int) -> list[Values]:
        # Each member is drawn independently; the same seed gives the same members.
        _check_count(count)
        # A generator of its own: the state of the notebook's one neither counts nor changes.
        source = random.Random(seed)
        drawn = []
        for _ in range(count):
            parts = [source.choice(one) for one in self.lists]
            for name, choice in self.choices.items():
                value = choice.draw(source) if isinstance(choice, Span) else source.choice(choice)
                parts.append({name: value})
            drawn.append(_joined(parts))
        return drawn


def parse(words: Iterable[str], variables: Mapping[str, Any]) -> Grid:
    """Returns the grid of words: ``name=choices``, or the name of a list of dictionaries."""
    choices: dict[str, Choices] = {}
    lists: list[Sequence[Values]] = []
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            lists.append(_listed(word, variables))
            continue
        # As Python reads it in the cell: a keyboard's µ is the Greek letter there.
        name = unicodedata.normalize("NFKC", name)
        check_name(name)
        if name in choices:
            raise UsageError(f"expected {name}= once, found it twice. Leave out one of the two.")
        choices[name] = parse_choices(name, text)
    for one in lists:
        both = sorted(set(choices) & {name for values in one for name in values})
        if both:
            raise UsageError(
                f"expected each parameter in one place, found {both[0]} in the list and in "
                f"{both[0]}=…. Leave out one of the two."
            )
    return Grid(choices, lists)


def check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"expected the name of a parameter, found {name!r}. {_EXAMPLE}")
    if name in RESERVED:
        raise UsageError(
            f"expected a new name, found {name!r}, which every member has already. "
            f"Type for example: my_{name}=…"
        )


def parse_choices(name: str, text: str) -> Choices:
    scale, colon, rest = text.partition(":")
    if colon and scale in _SCALES:
        return _scaled(name, text, scale, rest.split(":"))
    ends = text.split(":")
    if len(ends) > 1 and all(_WHOLE.fullmatch(end) for end in ends) and len(ends) <= 3:
        whole = [int(end) for end in ends]
        found: Sequence[Any] = () if whole[2:] == [0] else range(*whole)
    elif len(ends) > 1 and all(_is_number(end) for end in ends):
        raise UsageError(
            f"{name}={text} expected whole numbers as in 0:8, found others. "
            f"Type for example: {name}=lin:{ends[0]}:{ends[1]}:5"
        )
    else:
        pieces = split(text, ",".__contains__)
        found = [_value(name, piece.strip()) for piece in pieces]
        # A list is a list of values; a tuple is one value.
        if len(pieces) == 1 and isinstance(found[0], list):
            found = found[0]
    if not found:
        raise UsageError(f"{name}={text} expected at least one value, found none. {_EXAMPLE}")
    try:
        count = len(found)
    except OverflowError:  # len() of a range cannot exceed sys.maxsize
        count = sys.maxsize
    _check_count(count)
    return found


def _scaled(name: str, text: str, scale: str, parts: list[str]) -> Choices:
    example = f"Type for example: {name}={scale}:{'1e-4:1e-1' if scale == 'log' else '0:1'}:5"
    if not 2 <= len(parts) <= 3 or not all(_is_number(part) for part in parts):
        raise UsageError(f"{name}={text} expected {scale}:low:high:count. {example}")
    low, high = float(parts[0]), float(parts[1])
    if low >= high or (scale == "log" and low <= 0):
        above = " above 0" if scale == "log" else ""
        raise UsageError(f"{name}={text} expected a low number{above} and a higher one. {example}")
    if not math.isfinite(high / low if scale == "log" else high - low):
        raise UsageError(f"{name}={text} expected two numbers that are not so far apart. {example}")
    if len(parts) == 2:
        return Span(low, high, scale == "log")
    if not _WHOLE.fullmatch(parts[2]) or int(parts[2]) < 2:
        raise UsageError(f"{name}={text} expected a count of 2 or more at the end. {example}")
    count = int(parts[2])
    _check_count(count)
    return [_between(low, high, n / (count - 1), scale == "log") for n in range(count)]


def _between(low: float, high: float, share: float, log: bool) -> float:
    if share in (0, 1):
        return high if share else low
    if log:
        # Twelve digits, so that a tenth is shown and kept as 0.1.
        return float(f"{low * (high / low) ** share:.12g}")
    return float(f"{low + (high - low) * share:.12g}")


def _value(name: str, piece: str) -> Any:
    if piece in _NOT_FINITE:
        return float(piece)
    try:
        return ast.literal_eval(_NUMPYS.sub(r"\1", piece))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if _BARE.fullmatch(piece):
        return piece
    found = repr(unquoted(piece)) if piece else "nothing"
    example = f"Type for example: {name}=1e-1,1e-2 or {name}=adam,sgd or {name}='two words'"
    if piece.startswith("["):
        example = f"Of an array, type for example: {name}={{array.tolist()}}"
    elif piece.startswith("{"):
        example = f"The notebook can fill in its own variables only: {name}={{rates}}"
    raise UsageError(
        f"{name}= expected values as Python writes them, or bare words, found {found}. {example}"
    )


def _listed(word: str, variables: Mapping[str, Any]) -> Sequence[Values]:
    if word not in variables:
        raise UsageError(
            f"expected name=values, an option, or a variable of the notebook that holds a list of "
            f"dictionaries, found {word!r}. {_EXAMPLE}"
        )
    found = variables[word]
    return check_list(found, word)


def check_list(found: Any, word: str) -> Sequence[Values]:
    if not isinstance(found, list | tuple) or not all(isinstance(row, dict) for row in found):
        raise UsageError(
            f"expected {word} to be a list of dictionaries, found {type(found).__name__}. "
            f"Type for example: {word} = [dict(lr=0.1), dict(lr=0.01)]"
        )
    for row in found:
        for name in row:
            check_name(name)
    return found


def _joined(parts: Iterable[Values]) -> Values:
    return {name: value for part in parts for name, value in part.items()}


def _check_count(count: int) -> None:
    if not 1 <= count <= MOST:
        raise UsageError(f"expected 1 to {MOST:,} members, found {count:,}. {_EXAMPLE}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


_LOWER = ("loss", "err", "mse", "mae", "rmse", "perplexity", "residual", "cost", "l2")


def lower_is_better(metric: str) -> bool:
    # A guess: most other metrics are better if they are high.
    return any(part in metric.lower() for part in _LOWER)


def read_metric(text: str) -> tuple[str, bool]:
    # loss, loss:min, f1:max
    name, colon, mode = text.partition(":")
    if not name or (colon and mode not in ("min", "max")):
        raise UsageError(
            f"expected --metric NAME, NAME:min or NAME:max, found {text!r}. "
            f"Type for example: --metric {name or 'loss'}:min"
        )
    return name, mode == "min" if colon else lower_is_better(name)


#: The ways to stop members early.
STOP_KINDS = ("halving", "median")


@dataclass
class Options:
    """The line of ``%%ensemble``; ``words`` are those that are not options."""

    words: list[str] = field(default_factory=list)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    out: str = ""
    ranks_each: int = 1
    store: str | None = None
    trust_store: bool = False
    retry_failed: bool = False
    random: int | None = None
    seed: int = 0
    timeout: float | None = None
    metric: str | None = None
    stop: str | None = None
    grace: int | None = None
    fold: bool = True
    view: str = "auto"

    @property
    def name(self) -> str:
        return self.out or "runs"

    def wanted(self) -> tuple[str, bool] | None:
        return None if self.metric is None else read_metric(self.metric)

    def members(self, variables: Mapping[str, Any]) -> list[Values]:
        if not self.words:
            raise UsageError(
                "expected at least one parameter, found none. "
                "Type for example: %%ensemble lr=1e-1,1e-2 seed=0:8"
            )
        made = parse(self.words, variables)
        return made.members() if self.random is None else made.draw(self.random, self.seed)


def add_to(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", nargs="*", metavar="NAME=VALUES", help="a grid: lr=1e-1,1e-2 seed=0:8")
    ClusterOptions.add_to(parser)
    add("-o", "--out", metavar="NAME", help="the variable for the table; default: runs")
    add(
        "--ranks-per-member", dest="ranks_each", type=int, metavar="K",
        help="number of ranks per member",
    )  # fmt: skip
    add("--store", metavar="FOLDER", help="keep results here; finished members do not run again")
    add("--trust-store", action="store_true", help="read results that other users have stored")
    add("--retry-failed", action="store_true", help="run only members that have not finished")
    add("--random", type=int, metavar="COUNT", help="draw this many members at random")
    add("--seed", type=int, help="seed of --random")
    add("--timeout", type=float, metavar="SECONDS", help="interrupt a member that takes longer")
    add("--metric", metavar="NAME[:min|max]", help="the logged value that orders members")
    add("--stop", choices=STOP_KINDS, help="stop poor members early, by --metric")
    add("--grace", type=int, metavar="STEPS", help="stop no member before this step")
    add(
        "--no-fold", dest="fold", action="store_false",
        help="do not fold equal output of members",
    )  # fmt: skip
    add("--view", choices=("full", "auto", "plain"), help="the live table and panel, or text")


def parse_line(line: str, parser: argparse.ArgumentParser) -> Options:
    made = parser.parse_args(names_first(parser, words(line)), namespace=Options())
    made.cluster = ClusterOptions.take_from(vars(made))
    _check(made)
    return made


def _check(options: Options) -> None:
    check_out(options.out or None, "runs")
    if options.ranks_each < 1:
        raise UsageError(
            f"expected --ranks-per-member of 1 or more, found {options.ranks_each}. "
            "Type for example: --ranks-per-member 2"
        )
    check_timeout(options.timeout, "--timeout", " ")
    if options.store == "":
        raise UsageError(
            "expected a folder after --store, found ''. Type for example: --store results"
        )
    if options.grace is not None and options.grace < 1:
        raise UsageError(
            f"expected --grace of 1 step or more, found {options.grace}. "
            "Type for example: --grace 10"
        )
    wanted = options.wanted()
    if options.stop is not None and wanted is None:
        raise UsageError(
            f"--stop {options.stop} needs --metric, the logged value that orders members. "
            f"Type for example: --stop {options.stop} --metric loss"
        )
    if options.grace is not None and options.stop is None:
        raise UsageError("--grace needs --stop. Type for example: --stop halving")


def check_size(options: Options, size: int) -> None:
    each = options.ranks_each
    if size % each:
        fits = [str(k) for k in range(1, size + 1) if not size % k]
        raise UsageError(
            f"--ranks-per-member {each} expected a divisor of the {size} ranks, so that none is "
            f"left over. Type --ranks-per-member {' or '.join(fits)}, or start other ranks: "
            f"%distributed restart -n {max(each, size // each * each)}"
        )
