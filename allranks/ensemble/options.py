"""The line of ``%%ensemble``: the grid, the options, and errors about them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.cluster.options import ClusterOptions, check_out, check_timeout
from allranks.ensemble import grid
from allranks.ensemble.early import KINDS, read_metric
from allranks.ensemble.grid import unquoted, words
from allranks.errors import UsageError


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

    def members(self, variables: Mapping[str, Any]) -> list[grid.Values]:
        if not self.words:
            raise UsageError(
                "expected at least one parameter, found none. "
                "Type for example: %%ensemble lr=1e-1,1e-2 seed=0:8"
            )
        made = grid.parse(self.words, variables)
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
    add("--store", metavar="FOLDER", help="keep results here; members that have ended do not rerun")
    add("--trust-store", action="store_true", help="read results that other users have stored")
    add("--retry-failed", action="store_true", help="run only members that have not finished")
    add("--random", type=int, metavar="COUNT", help="draw this many members at random")
    add("--seed", type=int, help="seed of --random")
    add("--timeout", type=float, metavar="SECONDS", help="interrupt a member that takes longer")
    add("--metric", metavar="NAME[:min|max]", help="the logged value that ranks members")
    add("--stop", choices=KINDS, help="stop poor members early, by --metric")
    add("--grace", type=int, metavar="STEPS", help="stop no member before this step")
    add(
        "--no-fold", dest="fold", action="store_false",
        help="do not fold equal output of members",
    )  # fmt: skip
    add("--view", choices=("full", "auto", "plain"), help="the live table and panel, or text")


def parse(line: str, parser: argparse.ArgumentParser) -> Options:
    given, options = _sorted(words(line))
    # In this order: an option at the end would take a word of the grid as its value.
    made = parser.parse_args([*given, *options], namespace=Options())
    made.cluster = ClusterOptions.take_from(vars(made))
    _check(made)
    return made


def _sorted(found: Sequence[str]) -> tuple[list[str], list[str]]:
    # argparse would take words of the grid for values of options.
    flags = {"--trust-store", "--retry-failed", "--no-fold", "--exclusive"}
    given: list[str] = []
    options: list[str] = []
    rest = iter(found)
    for word in rest:
        if not word.startswith("-"):
            given.append(word)
            continue
        options.append(word)
        if word not in flags and "=" not in word and (value := next(rest, None)) is not None:
            options.append(unquoted(value))
    return given, options


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
            f"--stop {options.stop} needs --metric, the logged value that ranks members. "
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
