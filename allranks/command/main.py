"""The command ``allranks``: ``run``, ``export``, ``labs``, ``doctor`` and others."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import allranks
from allranks.cluster import devices, doctor, launchers
from allranks.cluster.features import NotebookHooks
from allranks.cluster.options import ClusterOptions
from allranks.command import agents, export, gpu_report, labs, script
from allranks.errors import AllranksError, UsageError
from allranks.notebook import load_features
from allranks.records.config import START_WITH

_EXTENSION = "allranks.kernel"
_TAKE_OPTIONS_OF_A_START = ("install-kernel", "mcp")
_KERNEL_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RUN_EXAMPLE = "allranks run -np 4 train.py --epochs 3"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; prints our own errors in one line, without a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in _TAKE_OPTIONS_OF_A_START:
        load_features()  # which have some of these options
    parser = argparse.ArgumentParser("allranks", description="Notebook cells on MPI ranks.")
    parser.add_argument("--version", action="version", version=allranks.__version__)
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (about, add_options) in _COMMANDS.items():
        added = parsers.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            # install-kernel replaces one of the options that it shares with %distributed.
            conflict_handler="resolve" if name == "install-kernel" else "error",
        )
        add_options(added)
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


def _add_run(parser: argparse.ArgumentParser) -> None:
    put = parser.add_argument
    export.add_size(parser, "one per GPU, or per core")
    put("--timeout", type=float, metavar="SECONDS", help="interrupt a script that takes longer")
    put("--log-dir", default="", metavar="FOLDER", help="write each rank's output to a file in it")
    put(
        "--report",
        default="",
        metavar="FILE.html",
        help="write curves, timings and output to a page",
    )
    put("script", nargs="?", metavar="train.py", help="the script")
    put("arguments", nargs=argparse.REMAINDER, metavar="…", help="its arguments")
    put(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module with its arguments in place of a script, as python -m does",
    )
    parser.epilog = f"For example: {_RUN_EXAMPLE}. Ranks on other hosts: allranks export, mpiexec."
    parser.set_defaults(act=_run)


def _run(typed: argparse.Namespace) -> int:
    words = [word for word in (typed.script, *typed.arguments) if word is not None]
    if typed.module is not None:
        words = ["-m", *typed.module, *words]  # the latter after -mpackage.train, in one word
    # As it is typed after mpiexec: python train.py, or python -m train.
    elif words and os.path.basename(words[0]).startswith("python") and not os.path.isfile(words[0]):
        words = words[2:] if words[1:2] == ["-u"] else words[1:]
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or words[0].startswith("-"):
        found = f"found {shlex.join(words)}" if words else "found none"
        raise UsageError(
            f"expected a script, or -m and a module, {found}. Type for example: {_RUN_EXAMPLE}, "
            "or: allranks run -np 4 -m package.train --epochs 3"
        )
    load_features()
    return script.run_script(
        script.ScriptRun(typed.size, words, typed.timeout, typed.log_dir, typed.report, is_module)
    )


def _add_launcher(parser: argparse.ArgumentParser, about: str) -> None:
    # The launcher's own options may follow it: --on slurm --nodes 2
    parser.add_argument(
        "--on", dest="behind", nargs=argparse.REMAINDER, metavar="LAUNCHER", help=about
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gpu", action="store_true", help="run the suites for GPUs instead")
    parser.add_argument(
        "--report", metavar="FILE", default="report.json", help="where --gpu writes its results"
    )
    _add_launcher(
        parser, "check these hosts and their network instead: ssh:h1:2,h2:2, slurm and its options"
    )
    parser.set_defaults(act=_doctor)


def _doctor(typed: argparse.Namespace) -> int:
    if typed.gpu:
        return gpu_report.run(typed.report)
    if typed.behind is None:
        found = doctor.examine()
    else:
        tell = partial(print, file=sys.stderr, flush=True)
        load_features()
        hooks, on = NotebookHooks(), shlex.join(typed.behind)
        hooks.check_hosts(on)
        # Not by `command`, which would blame the feature for what a launcher raises.
        found = hooks.commands["examine_hosts"]("examine_hosts", on, tell)
    if typed.json:
        sys.stdout.write(json.dumps([one._asdict() for one in found], indent=2) + "\n")
    else:
        sys.stdout.write(doctor.report(found) + "\n")
    return int(any(one.state == doctor.WRONG for one in found))


def _add_install_kernel(parser: argparse.ArgumentParser) -> None:
    assert parser.description is not None
    parser.description += " The first cell starts the ranks with these options."
    _add_kernel_options(parser)
    _add_launcher(
        parser, "where the ranks run: local, ssh:h1:2,h2:2, slurm and its options, a named place"
    )
    parser.set_defaults(act=_install_kernel)


def _install_kernel(said: argparse.Namespace) -> int:
    """Writes the kernel's specification, and prints its place."""
    options = _cluster_options(said)
    if options.gpus != "none":
        # The kernel may run on another machine: only the form is checked.
        devices.numbers(options.gpus)
    launchers.named(options.launcher or launchers.default())
    place = _write_kernel(said, options)
    sys.stdout.write(
        f"Installed the kernel {said.name!r} in {place}\n"
        "JupyterLab and Notebook show it after a restart or a reload of the page; "
        "VS Code lists it under Jupyter kernels.\n"
    )
    return 0


def _add_kernel_options(parser: argparse.ArgumentParser) -> None:
    ClusterOptions.add_to(parser)
    parser.add_argument("--name", default="allranks", help="needed for a second such kernel")
    parser.add_argument("--display-name", help="the name that the launcher shows")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--user", action="store_true", help="install for all environments of this user"
    )
    where.add_argument(
        "--prefix",
        default=sys.prefix,
        metavar="FOLDER",
        help="install below this folder (for all users: /usr/local); default: this environment",
    )


def _cluster_options(said: argparse.Namespace) -> ClusterOptions:
    said.launcher, *more = said.behind or [None]
    parser = argparse.ArgumentParser("allranks install-kernel", allow_abbrev=False)
    _add_kernel_options(parser)
    # Options of this command may also follow ``--on``.
    ClusterOptions.parse(parser, more, said)
    if not _KERNEL_NAME.fullmatch(said.name):
        raise UsageError(
            f"expected a name of letters, digits, '.', '_' and '-', found {said.name!r}. "
            "Type for example: --name allranks-slurm"
        )
    if said.n is not None and said.n < 1:
        raise UsageError(f"expected 1 rank or more, found {said.n}. Type for example: -n 4")
    return ClusterOptions.take_from(vars(said))


def _write_kernel(said: argparse.Namespace, options: ClusterOptions) -> str:
    from ipykernel.kernelspec import write_kernel_spec
    from jupyter_client.kernelspec import KernelSpecManager

    with tempfile.TemporaryDirectory() as folder:
        written = write_kernel_spec(
            Path(folder) / said.name,
            overrides={
                "display_name": said.display_name or said.name,
                "metadata": {"debugger": True, "supported_encryption": ["curve"]},
                "env": {START_WITH: shlex.join(options.words())},
            },
            # If the extension fails, the kernel must not start: cells would run in the notebook.
            extra_arguments=[
                f"--ext={_EXTENSION}",
                "--IPKernelApp.reraise_ipython_extension_failures=True",
            ],
            python_arguments=["-Xfrozen_modules=off"],
        )
        for logo in (Path(__file__).parent / "kernel_logo").iterdir():
            shutil.copy(logo, written)
        try:
            return str(
                KernelSpecManager().install_kernel_spec(
                    written,
                    kernel_name=said.name,
                    user=said.user,
                    prefix=None if said.user else said.prefix,
                )
            )
        except OSError as error:
            raise UsageError(
                f"expected to write below {said.prefix}, found: {error}. "
                "Type: allranks install-kernel --user"
            ) from None


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "run": ("runs a script on ranks of this machine: MPI, Horovod, torch or JAX", _add_run),
    "export": (
        "writes a script of a notebook's distributed cells, for mpiexec or a batch system",
        export.add_options,
    ),
    "labs": ("copies the labs into a folder, without output", labs.add_options),
    "doctor": (
        "checks MPI, launchers, GPUs, packages and limits; prints a command for each problem",
        _add_doctor,
    ),
    "install-kernel": (
        'adds "allranks" to the launcher: a kernel whose cells all run on the ranks',
        _add_install_kernel,
    ),
    "mcp": (
        "serves tools with which an agent runs cells on ranks, over standard input and output",
        agents.add_options,
    ),
}
"""What each command does, in a few words, and what adds its options to a parser."""


if __name__ == "__main__":
    main()
