"""The options of the magics, and the errors about them."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from allranks.cluster.options import (
    CELL_OPTIONS,
    LINE_COMMANDS,
    ClusterOptions,
    check_out,
    check_timeout,
    names_first,
)
from allranks.errors import UsageError
from allranks.records import ranks as rank_lists

COMMANDS = {
    "start": "starts the ranks; the first %%distributed cell also does",
    "stop": "ends the ranks",
    "restart": "ends the ranks and starts them again with the same options, without variables",
    "status": "shows every rank: host, pid, device, memory, state, line",
    "interrupt": "interrupts the running cell",
    "on": "sends every following cell to the ranks, until: off",
    "off": "runs the following cells in the notebook again",
    "push": "copies variables of the notebook to every rank",
    "pull": "returns {rank: value} of variables of the ranks",
    "log": "prints the end of the ranks' logs, and their paths",
    "debug": "opens a debugger where the last cell failed, on the rank that failed first",
    "launchers": "lists the launchers and named places for --on",
    "doctor": "checks MPI, GPUs, packages and limits; prints a command for each problem",
}
"""What each command of the core does; in the order in which they are listed."""
_START_RANKS = ("start", "restart")
_NAME_VARIABLES = ("push", "pull")
_CHOOSE_RANKS = ("status", "push", "pull", "log", "debug")


@dataclass
class CellOptions:
    """The options after ``%%distributed``."""

    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    ranks: str | None = None
    returns_value: bool = False
    """Whether the cell's value is the notebook's ``Out``."""
    chosen_by: str = "-r"
    """What stands before ``ranks``."""
    out: str | None = None
    timeout: float | None = None
    local: bool = False
    fold: bool = True
    view: str = "auto"
    interrupt_kills: bool = False
    features: dict[str, Any] = field(default_factory=dict)
    """The options of features that were given, by name."""

    def for_running(self) -> dict[str, Any]:
        """Returns the options of the feature that runs the cell; empty if ranks do."""
        return {name: v for name, v in self.features.items() if not CELL_OPTIONS[name].prepares}

    def for_preparing(self) -> dict[str, Any]:
        """Returns the options of features that prepare a cell of ranks."""
        return {name: v for name, v in self.features.items() if CELL_OPTIONS[name].prepares}


@dataclass
class CommandOptions:
    """The options after ``%distributed COMMAND``."""

    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    ranks: str | None = None
    names: list[str] = field(default_factory=list)
    features: dict[str, Any] = field(default_factory=dict)
    """The arguments of a feature's command, by name."""


def commands() -> dict[str, str]:
    """Returns what each command does, those of features at the end."""
    return COMMANDS | {name: one.about for name, one in LINE_COMMANDS.items()}


def by_command(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the options of features for a cell, for each command that takes them."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        found.setdefault(CELL_OPTIONS[name].command, {})[name] = value
    return found


class HelpShown(Exception):
    """Help was printed; there is nothing to run."""


class Parser(argparse.ArgumentParser):
    """Raises errors instead of ending the notebook's kernel.

    ``program`` is the beginning of the line, ``about`` its purpose. ``abbreviates`` is true for
    magics of other packages that accept abbreviations: of ours, a later option could make one
    ambiguous.
    """

    def __init__(self, program: str, about: str = "", *, abbreviates: bool = False) -> None:
        super().__init__(prog=program, description=about, allow_abbrev=abbreviates)

    @property
    def words(self) -> list[str]:
        """The options, as they are typed."""
        return list(self._option_string_actions)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        # argparse calls it after printing the help.
        raise HelpShown

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split()).replace("[-h] ", "")
        _, is_unknown, typed = message.partition("unrecognized arguments: ")
        word = typed.partition(" ")[0] if is_unknown else ""
        meant = [
            f" Did you mean {one}?" for one in difflib.get_close_matches(word, self.words, 1, 0.75)
        ]
        raise UsageError(f"{message}.{''.join(meant)} Expected: {usage}")


def _parser(program: str, about: str, *, cluster: bool = True, ranks: bool = True) -> Parser:
    parser = Parser(program, about)
    if cluster:
        ClusterOptions.add_to(parser)
    if ranks:
        said = "only these ranks: 0, 0,2, 1-3 or all"
        parser.add_argument("-r", "--ranks", metavar="RANKS", help=said)
    return parser


@cache
def cell_parser() -> Parser:
    parser = _parser("%%distributed", "Runs the cell on every rank.")
    add = parser.add_argument
    add("-o", "--out", metavar="NAME", help="variable for the ranks' values of the last expression")
    add("--timeout", type=float, metavar="SECONDS", help="interrupt a cell that takes longer")
    add("--local", action="store_true", help="run the cell in the notebook too, after the ranks")
    said = "do not fold equal output of ranks"
    add("--no-fold", dest="fold", action="store_false", help=said)
    said = "the live panel: always, when it has something to show, or text only"
    add("--view", choices=("full", "auto", "plain"), help=said)
    for option in CELL_OPTIONS.values():
        add(f"--{option.name}", dest=option.field, **option.arguments)
    return parser


def command_parser(command: str) -> Parser:
    program, about = f"%distributed {command}", commands()[command]
    about = f"{about[0].upper()}{about[1:]}."
    added = LINE_COMMANDS.get(command)
    chooses = command in _CHOOSE_RANKS if added is None else added.chooses_ranks
    parser = _parser(program, about, cluster=command in _START_RANKS, ranks=chooses)
    add = parser.add_argument
    if command in _NAME_VARIABLES:
        add("names", nargs="*", metavar="NAMES", help="the variables' names")
    if added is not None and added.words:
        add("names", nargs="*", metavar=added.words, help=added.words_about)
    if added is not None:
        for name, arguments in added.arguments.items():
            add(name, **arguments)
    return parser


def commands_text() -> str:
    width = max(map(len, commands()))
    lines = [f"  {command:{width}}  {about}" for command, about in commands().items()]
    return "\n".join(
        [
            "%distributed COMMAND, one of:",
            *lines,
            "Options of a command: %distributed start --help. Of a cell: %%distributed --help.",
        ]
    )


def split(line: str) -> list[str]:
    """Splits a line; a list in brackets may contain blanks, as in ``-r [0, 2-3]``."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(
            f"expected options, found {line!r}: {error}. Close each quotation mark."
        ) from error
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("[") and not joined[-1].endswith("]"):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def parse_cell(line: str) -> CellOptions:
    if not line or line.isspace():
        return CellOptions()  # as of most cells
    parser = cell_parser()
    options = ClusterOptions.parse(parser, split(line), CellOptions())
    options.cluster = ClusterOptions.take_from(vars(options))
    options.features = {
        name: value
        for name, known in CELL_OPTIONS.items()
        if (value := vars(options).pop(known.field, None)) not in (None, False)
    }
    check_out(options.out, "values")
    check_timeout(options.timeout, "--timeout", " ")
    for prepares in options.for_preparing():
        for runs in options.for_running():
            raise UsageError(
                f"--{prepares} needs a cell that ranks run, found --{runs}. Leave out --{prepares}"
            )
    return options


def chosen_ranks(options: CellOptions, size: int) -> tuple[int, ...]:
    """Returns the ranks that a cell runs on, of ``size``."""
    text = (options.ranks or "all").strip()
    try:
        return rank_lists.parse(text, size, options.chosen_by)
    except UsageError as error:
        if options.chosen_by == "-r" and text.isdecimal():
            raise UsageError(f"{error}, or for {text} ranks: -n {text}") from None
        raise


def parse_command(line: str) -> tuple[str, CommandOptions]:
    words = split(line)
    if not words or words[0] in ("help", "-h", "--help"):
        print(commands_text())
        raise HelpShown
    if words[0] not in commands():
        closest = difflib.get_close_matches(words[0], commands(), 1)
        typed = [*closest, *words[1:]] if closest else []
        if words[0].partition("=")[0] in command_parser("start").words:
            typed = ["start", *words]
        raise UsageError(
            f"expected a command, found {words[0]!r}. Type: %distributed "
            + (" ".join(typed) if typed else " | ".join(commands()))
        )
    command = words[0]
    starts, named = command in _START_RANKS, command in _NAME_VARIABLES
    parser = command_parser(command)
    rest = words[1:] if starts else names_first(parser, words[1:])
    options = ClusterOptions.parse(parser, rest, CommandOptions())
    if starts:
        options.cluster = ClusterOptions.take_from(vars(options))
    if command in LINE_COMMANDS:
        arguments = LINE_COMMANDS[command].arguments
        names = (name.lstrip("-").replace("-", "_") for name in arguments)
        options.features = {name: vars(options).pop(name) for name in names}
        if LINE_COMMANDS[command].chooses_ranks:
            options.features["ranks"] = options.ranks
    options.names = [name for part in options.names for name in part.split(",") if name]
    if named and not options.names:
        raise UsageError(
            "expected the names of variables, found none. "
            f"Type for example: %distributed {command} x, y"
        )
    return command, options
