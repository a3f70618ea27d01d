"""The options of the magics, and what is said when one cannot be understood."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from allranks.cluster.options import ClusterOptions, check_out
from allranks.cluster.run import check_timeout
from allranks.errors import UsageError

COMMANDS = (
    "start", "stop", "restart", "status", "interrupt", "on", "off", "push", "pull", "log",
    "debug", "launchers",
)  # fmt: skip
_START_RANKS = ("start", "restart")
_NAME_VARIABLES = ("push", "pull")
_CHOOSE_RANKS = ("status", "push", "pull", "log", "debug")


@dataclass
class CellOptions:
    """What stands behind ``%%distributed``."""

    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    ranks: str | None = None
    out: str | None = None
    timeout: float | None = None
    local: bool = False
    fold: bool = True
    view: str = "auto"


@dataclass
class CommandOptions:
    """What stands behind ``%distributed COMMAND``."""

    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    ranks: str | None = None
    names: list[str] = field(default_factory=list)


class Parser(argparse.ArgumentParser):
    """Raises instead of ending the notebook's kernel."""

    def error(self, message: str) -> NoReturn:
        """Raises what the arguments are found to be."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise UsageError(f"{message}. Expected: {usage}")


def _parser(program: str, *, cluster: bool = True, ranks: bool = True) -> Parser:
    parser = Parser(prog=program, add_help=False, allow_abbrev=False)
    if cluster:
        ClusterOptions.add_to(parser)
    if ranks:
        parser.add_argument("-r", "--ranks", metavar="RANKS")
    return parser


def split(line: str) -> list[str]:
    """Splits a line; a list in brackets may have blanks in it, as in ``-r [0, 2-3]``."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"expected options, found {line!r}: {error}") from error
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("[") and not joined[-1].endswith("]"):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def parse_cell(line: str) -> CellOptions:
    """Returns the options of a cell.

    Raises:
        UsageError: an option is unknown, or its value is not what it must be.
    """
    parser = _parser("%%distributed")
    parser.add_argument("-o", "--out", metavar="NAME")
    parser.add_argument("--timeout", type=float, metavar="SECONDS")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--no-fold", dest="fold", action="store_false")
    parser.add_argument("--view", choices=("full", "auto", "plain"))
    options = ClusterOptions.parse(parser, split(line), CellOptions())
    options.cluster = ClusterOptions.take_from(vars(options))
    check_out(options.out, "values")
    check_timeout(options.timeout, "--timeout", " ")
    return options


def parse_command(line: str) -> tuple[str, CommandOptions]:
    """Returns the command and its options.

    Raises:
        UsageError: there is no such command, or its options cannot be understood.
    """
    words = split(line)
    if not words or words[0] not in COMMANDS:
        found = f"found {words[0]!r}" if words else "found nothing"
        raise UsageError(f"expected a command, {found}. Type: %distributed {' | '.join(COMMANDS)}")
    command = words[0]
    starts, named = command in _START_RANKS, command in _NAME_VARIABLES
    parser = _parser(f"%distributed {command}", cluster=starts, ranks=command in _CHOOSE_RANKS)
    if named:
        parser.add_argument("names", nargs="*", metavar="NAMES")
    rest = words[1:] if starts else _with_names_first(words[1:])
    options = ClusterOptions.parse(parser, rest, CommandOptions())
    if starts:
        options.cluster = ClusterOptions.take_from(vars(options))
    options.names = [name for part in options.names for name in part.split(",") if name]
    if named and not options.names:
        raise UsageError(
            "expected the names of variables, found none. "
            f"Type for example: %distributed {command} x, y"
        )
    return command, options


def _with_names_first(words: Sequence[str]) -> list[str]:
    """Moves options to the end: argparse takes names in one run only."""
    names: list[str] = []
    options: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--exclusive":
            options.append(word)
        elif word.startswith("-"):
            options += [word, *([value] if (value := next(rest, None)) is not None else [])]
        else:
            names.append(word)
    return names + options
