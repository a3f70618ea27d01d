"""The options of the magics, and what is said when one cannot be understood."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from allranks.cluster.options import ClusterOptions, check_out
from allranks.cluster.run import check_timeout
from allranks.errors import UsageError

COMMANDS = {
    "start": "starts the ranks; a %%distributed cell does so by itself",
    "stop": "ends the ranks",
    "restart": "ends the ranks and starts them again with the same options, without variables",
    "status": "shows every rank: host, pid, device, memory, state, line",
    "interrupt": "interrupts the running cell",
    "on": "sends every following cell to the ranks, until: off",
    "off": "runs the following cells in the notebook again",
    "push": "copies variables of the notebook to every rank",
    "pull": "returns {rank: value} of variables of the ranks",
    "log": "prints the end of the ranks' logs, and where they are",
    "debug": "opens a debugger where the last cell has failed, on the rank that failed first",
    "launchers": "lists what ranks can be started on, for --on",
}
"""What each command does; in the order in which they are listed."""
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


class HelpShown(Exception):
    """Help was asked for, and has been printed; there is nothing else to do."""


class Parser(argparse.ArgumentParser):
    """Raises instead of ending the notebook's kernel.

    Args:
        program: what stands at the beginning of the line.
        about: what that does.
    """

    def __init__(self, program: str, about: str = "") -> None:
        self.words: list[str] = []
        """The options, as they are typed."""
        super().__init__(prog=program, description=about, allow_abbrev=False)

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        """Adds an option, as argparse does."""
        action = super().add_argument(*names, **how)
        self.words += action.option_strings
        return action

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Called when argparse has printed the help."""
        raise HelpShown

    def error(self, message: str) -> NoReturn:
        """Raises what the arguments are found to be."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split()).replace("[-h] ", "")
        raise UsageError(f"{message}. Expected: {usage}")


def _parser(program: str, about: str, *, cluster: bool = True, ranks: bool = True) -> Parser:
    parser = Parser(program, about)
    if cluster:
        ClusterOptions.add_to(parser)
    if ranks:
        parser.add_argument(
            "-r", "--ranks", metavar="RANKS", help="only these ranks: 0, 0,2, 1-3 or all"
        )
    return parser


def cell_parser() -> Parser:
    """Returns what parses the line of a cell."""
    parser = _parser("%%distributed", "Runs the cell on every rank.")
    parser.add_argument(
        "-o", "--out", metavar="NAME", help="keep each rank's value of the last expression there"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="interrupt a cell that takes longer"
    )
    parser.add_argument(
        "--local", action="store_true", help="run the cell in the notebook too, after the ranks"
    )
    parser.add_argument(
        "--no-fold", dest="fold", action="store_false", help="show equal output of ranks each time"
    )
    parser.add_argument(
        "--view",
        choices=("full", "auto", "plain"),
        help="the live panel: all of it, what there is to show, or text only",
    )
    return parser


def command_parser(command: str) -> Parser:
    """Returns what parses the words after a command of ``%distributed``."""
    program, about = f"%distributed {command}", COMMANDS[command]
    about = f"{about[0].upper()}{about[1:]}."
    chooses = command in _CHOOSE_RANKS
    parser = _parser(program, about, cluster=command in _START_RANKS, ranks=chooses)
    if command in _NAME_VARIABLES:
        parser.add_argument("names", nargs="*", metavar="NAMES", help="the variables' names")
    return parser


def commands_text() -> str:
    """Returns the list of the commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {command:{width}}  {about}" for command, about in COMMANDS.items()]
    return "\n".join(
        [
            "%distributed COMMAND, one of:",
            *lines,
            "Options of a command: %distributed start --help. Of a cell: %%distributed --help.",
        ]
    )


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
        HelpShown: help was asked for.
    """
    parser = cell_parser()
    options = ClusterOptions.parse(parser, split(line), CellOptions())
    options.cluster = ClusterOptions.take_from(vars(options))
    check_out(options.out, "values")
    check_timeout(options.timeout, "--timeout", " ")
    return options


def parse_command(line: str) -> tuple[str, CommandOptions]:
    """Returns the command and its options.

    Raises:
        UsageError: there is no such command, or its options cannot be understood.
        HelpShown: help was asked for, or nothing.
    """
    words = split(line)
    if not words or words[0] in ("help", "-h", "--help"):
        print(commands_text())
        raise HelpShown
    if words[0] not in COMMANDS:
        raise UsageError(
            f"expected a command, found {words[0]!r}. Type: %distributed {' | '.join(COMMANDS)}"
        )
    command = words[0]
    starts, named = command in _START_RANKS, command in _NAME_VARIABLES
    parser = command_parser(command)
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
