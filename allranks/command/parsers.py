"""What the parsers of several commands have in common."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(
    parsers: Any, name: str, about: str, more: str = "", **options: Any
) -> argparse.ArgumentParser:
    """Adds a command, which is described as it is listed.

    Args:
        parsers: of all commands.
        name: the command's.
        about: what it does, in a line.
        more: what its own help says beside.
        options: the parser's own.
    """
    description = f"{about[0].upper()}{about[1:]}.{more}"
    parser: argparse.ArgumentParser = parsers.add_parser(
        name, help=about, description=description, **options
    )
    return parser


def add_size(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds ``-np``, as mpiexec has it; ``default`` says in words what it is by default."""
    help_ = f"number of ranks; default: {default}"
    parser.add_argument("-np", "-n", dest="size", type=int, metavar="N", help=help_)
