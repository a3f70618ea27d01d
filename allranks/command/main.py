"""The command ``allranks``: ``run``, ``export``, ``doctor`` and ``install-kernel``."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import allranks
from allranks.cluster import doctor, script
from allranks.command import export, install_kernel
from allranks.command.parsers import add_command, add_size
from allranks.errors import AllranksError, UsageError
from allranks.notebook import load_features

_RUN_EXAMPLE = "allranks run -np 4 train.py --epochs 3"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; prints our own errors in one line, without a traceback."""
    parser = argparse.ArgumentParser("allranks", description="Notebook cells on MPI ranks.")
    parser.add_argument("--version", action="version", version=allranks.__version__)
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_run, export.add, _add_doctor, install_kernel.add):
        add(parsers)
    typed, more = parser.parse_known_args(arguments, argparse.Namespace(takes_more=False))
    if more and not typed.takes_more:
        parser.error(f"unrecognized arguments: {shlex.join(more)}")
    typed.more = more
    try:
        code: int = typed.act(typed)
        sys.stdout.flush()
    except AllranksError as error:
        raise SystemExit(f"allranks: {error}") from None
    except OSError as error:
        _no_output(error)
    sys.exit(code)


def _no_output(error: OSError) -> NoReturn:
    if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
        raise error
    # Python flushes the rest when it exits, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        raise SystemExit(1)
    raise SystemExit(f"allranks: the output cannot be written: {error.strerror}")


def _add_run(parsers: Any) -> None:
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
    parser.epilog = f"For example: {_RUN_EXAMPLE}. Ranks on other hosts: allranks export, mpiexec."
    parser.set_defaults(act=_run)


def _run(typed: argparse.Namespace) -> int:
    words = [typed.script, *typed.arguments]
    # As it is typed after mpiexec: python train.py.
    if os.path.basename(words[0]).startswith("python") and not os.path.isfile(words[0]):
        words = words[2:] if words[1:2] == ["-u"] else words[1:]
    if not words or words[0].startswith("-"):
        raise UsageError(f"expected a script, found {words}. Type for example: {_RUN_EXAMPLE}")
    load_features()
    return script.run_script(
        script.ScriptRun(typed.size, words, typed.timeout, typed.log_dir, typed.report)
    )


def _add_doctor(parsers: Any) -> None:
    about = "checks MPI, launchers, GPUs, packages and limits, and says what to type"
    parser = add_command(parsers, "doctor", about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(act=_doctor)


def _doctor(typed: argparse.Namespace) -> int:
    found = doctor.examine()
    if typed.json:
        sys.stdout.write(json.dumps([one._asdict() for one in found], indent=2) + "\n")
    else:
        sys.stdout.write(doctor.report(found) + "\n")
    return int(any(one.state == doctor.WRONG for one in found))


if __name__ == "__main__":
    main()
