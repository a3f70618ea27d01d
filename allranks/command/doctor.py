"""``allranks doctor``: what this machine has for ranks, and what to type for what is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from allranks.cluster.doctor import examination
from allranks.cluster.doctor.findings import WRONG
from allranks.command.parsers import add_command


def add(parsers: Any) -> None:
    """Adds ``doctor``."""
    about = "checks MPI, launchers, GPUs, packages and limits, and says what to type"
    parser = add_command(parsers, "doctor", about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(act=act)


def act(said: argparse.Namespace) -> int:
    """Prints what was found; returns 1 where something is wrong."""
    found = examination.examine()
    if said.json:
        sys.stdout.write(json.dumps([one._asdict() for one in found], indent=2) + "\n")
    else:
        sys.stdout.write(examination.report(found) + "\n")
    return int(any(one.state == WRONG for one in found))
