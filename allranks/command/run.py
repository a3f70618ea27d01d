"""``allranks run -np 4 train.py``: a script on ranks of this machine, shown as a cell is shown."""

from __future__ import annotations

import argparse
import os
from typing import Any

from allranks.cluster import script
from allranks.command.parsers import add_command, add_size
from allranks.errors import UsageError

_EXAMPLE = "allranks run -np 4 train.py --epochs 3"


def add(parsers: Any) -> None:
    """Adds ``run``."""
    about = "runs a script on ranks of this machine: MPI, Horovod, torch or JAX"
    parser = add_command(parsers, "run", about)
    put = parser.add_argument
    add_size(parser, default="one per GPU, or per core")
    put("--timeout", type=float, metavar="SECONDS", help="interrupt a script that takes longer")
    put("--log-dir", default="", metavar="FOLDER", help="write each rank's output to a file here")
    put(
        "--report",
        default="",
        metavar="FILE.html",
        help="write curves, timings and output to a page",
    )
    put("script", metavar="train.py", help="the script")
    put("arguments", nargs=argparse.REMAINDER, metavar="…", help="its arguments")
    parser.epilog = f"For example: {_EXAMPLE}. Ranks on other hosts: allranks export, mpiexec."
    parser.set_defaults(act=act)


def act(said: argparse.Namespace) -> int:
    """Runs the script; returns its exit code."""
    words = [said.script, *said.arguments]
    # As one types it behind mpiexec.
    if os.path.basename(words[0]).startswith("python") and not os.path.isfile(words[0]):
        words = words[2:] if words[1:2] == ["-u"] else words[1:]
    if not words or words[0].startswith("-"):
        raise UsageError(f"expected a script, found {words}. Type for example: {_EXAMPLE}")
    return script.run(script.Job(said.size, words, said.timeout, said.log_dir, said.report))
