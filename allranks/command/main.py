"""The command ``allranks``: what each of its words does is in a file of its own."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

import allranks
from allranks.command import doctor, export, install_kernel, run
from allranks.errors import AllranksError

#: Each adds a parser, which names the function that is called with what was typed.
COMMANDS = {
    "run": run,
    "export": export,
    "doctor": doctor,
    "install-kernel": install_kernel,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Does what was typed; what cannot be done is said in one line."""
    parser = argparse.ArgumentParser("allranks", description="Notebook cells on MPI ranks.")
    parser.add_argument("--version", action="version", version=allranks.__version__)
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS.values():
        module.add(parsers)
    said, more = parser.parse_known_args(arguments, argparse.Namespace(takes_more=False))
    if more and not said.takes_more:
        parser.error(f"unrecognized arguments: {shlex.join(more)}")
    said.more = more
    try:
        code: int = said.act(said)
    except AllranksError as error:
        raise SystemExit(f"allranks: {error}") from None
    sys.exit(code)


if __name__ == "__main__":
    main()
