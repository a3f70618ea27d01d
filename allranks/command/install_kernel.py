"""``allranks install-kernel``: a kernel for Jupyter's launcher whose cells all run on ranks."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from allranks.cluster import devices, launchers
from allranks.cluster.options import ClusterOptions
from allranks.command.parsers import add_command
from allranks.errors import UsageError
from allranks.records.config import START_WITH

_ABOUT = 'adds "allranks" to the launcher: a kernel whose cells all run on the ranks'
_EXTENSION = "allranks.kernel"
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def add(parsers: Any) -> None:
    more = " The first cell starts the ranks with these options."
    parser = add_command(parsers, "install-kernel", _ABOUT, more, conflict_handler="resolve")
    _add_options(parser)
    # The launcher's own options may follow it: --on slurm --nodes 2
    parser.add_argument(
        "--on",
        dest="behind",
        nargs=argparse.REMAINDER,
        metavar="LAUNCHER",
        help="where the ranks run: local, ssh:h1:2,h2:2, slurm and its options, a named place",
    )
    parser.set_defaults(act=act)


def act(said: argparse.Namespace) -> int:
    """Writes the kernel's specification, and prints its place."""
    options = _options(said)
    if options.gpus != "none":
        # The kernel may run on another machine: only the form is checked.
        devices.numbers(options.gpus)
    launchers.named(options.launcher or launchers.default())
    place = _install(said, options)
    sys.stdout.write(
        f"Installed the kernel {said.name!r} in {place}\n"
        "JupyterLab and Notebook show it after a restart or a reload of the page; "
        "VS Code lists it under Jupyter kernels.\n"
    )
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    ClusterOptions.add_to(parser)
    parser.add_argument("--name", default="allranks", help="another name, for a second such kernel")
    parser.add_argument("--display-name", help="the name that the launcher shows")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--user", action="store_true", help="install for all environments of this user"
    )
    where.add_argument(
        "--prefix",
        default=sys.prefix,
        metavar="FOLDER",
        help="install below this folder, as /usr/local for all users; default: this environment",
    )


def _options(said: argparse.Namespace) -> ClusterOptions:
    said.launcher, *more = said.behind or [None]
    parser = argparse.ArgumentParser("allranks install-kernel", allow_abbrev=False)
    _add_options(parser)
    # Options of this command may also follow ``--on``.
    ClusterOptions.parse(parser, more, said)
    if not _NAME.fullmatch(said.name):
        raise UsageError(
            f"expected a name of letters, digits, '.', '_' and '-', found {said.name!r}. "
            "Type for example: --name allranks-slurm"
        )
    if said.n is not None and said.n < 1:
        raise UsageError(f"expected 1 rank or more, found {said.n}. Type for example: -n 4")
    return ClusterOptions.take_from(vars(said))


def _install(said: argparse.Namespace, options: ClusterOptions) -> str:
    from ipykernel.kernelspec import write_kernel_spec
    from jupyter_client.kernelspec import KernelSpecManager

    with tempfile.TemporaryDirectory() as folder:
        written = write_kernel_spec(
            Path(folder) / said.name,
            overrides={
                "display_name": said.display_name or said.name,
                # A front end's debugger would debug the notebook's process, where no cell runs.
                "metadata": {"debugger": False, "supported_encryption": ["curve"]},
                "env": {START_WITH: shlex.join(options.words())},
            },
            # If the extension fails, the kernel must not start: cells would run in the notebook.
            extra_arguments=[
                f"--ext={_EXTENSION}",
                "--IPKernelApp.reraise_ipython_extension_failures=True",
            ],
            python_arguments=["-Xfrozen_modules=off"],
        )
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
