"""Arguments and descriptions that several commands share."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(
    parsers: Any, name: str, about: str, more: str = "", **options: Any
) -> argparse.ArgumentParser:
    """Adds a command; its list entry and its own help have ``about``, only the latter ``more``."""
    description = f"{about[0].upper()}{about[1:]}.{more}"
    parser: argparse.ArgumentParser = parsers.add_parser(
        name, help=about, description=description, **options
    )
    return parser


def add_size(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds ``-np``, the option of mpiexec; ``default`` is for its help."""
    help_ = f"number of ranks; default: {default}"
    parser.add_argument("-np", "-n", dest="size", type=_count, metavar="N", help=help_)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < len(text.lstrip("0")) < 10:
        raise argparse.ArgumentTypeError(f"expected a number of ranks from 1, found {text!r}")
    return int(text)
