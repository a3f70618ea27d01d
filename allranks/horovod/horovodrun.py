"""``horovodrun -np 4 python train.py …``: Horovod's command, by this machine's ``mpiexec``.

It becomes ``mpiexec -n 4 python -m allranks.horovod train.py …``. Runs in a shell; standard library
only.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from allranks import horovod
from allranks.cluster.launchers.local import LocalLauncher
from allranks.errors import AllranksError, UsageError

_USAGE = "horovodrun -np 4 [-H localhost:4] python train.py"
_TAKEN = {
    "-np": "size",
    "--num-proc": "size",
    "-H": "hosts",
    "--hosts": "hosts",
    "-hostfile": "hostfile",
    "--hostfile": "hostfile",
}
_INSTEAD = {
    "--mpi": "leave it away: there is nothing but MPI",
    "--gloo": "leave it away: there is MPI",
    "--mpi-args": "set OMPI_MCA_… in the environment",
    "--check-build": "call hvd.mpi_built() and hvd.nccl_built() in Python",
    "--timeline-filename": "call hvd.start_timeline(file) in the script",
    "--min-np": "give the number of ranks, which stays: -np 4",
    "--max-np": "give the number of ranks, which stays: -np 4",
    "--host-discovery-script": "name the hosts, which stay: -H host1:2,host2:2",
}


class Wanted(NamedTuple):
    """What a command line asks for.

    Attributes:
        size: how many ranks.
        hosts: as ``localhost:4``; empty for this machine.
        hostfile: the path of a file of hosts; empty where there is none.
        command: a Python, its own flags, a script and the script's arguments.
    """

    size: int
    hosts: str
    hostfile: str
    command: list[str]


def parse(arguments: list[str]) -> Wanted:
    """Returns what Horovod's command line asks for.

    Raises:
        UsageError: a flag is not known, or has no value; there is no number of ranks.
    """
    said = {"size": "", "hosts": "", "hostfile": ""}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in _TAKEN:
            instead = _INSTEAD.get(flag, "leave it away")
            raise UsageError(
                f"expected -np, -H, --hostfile or --version, found {flag}. Instead, {instead}. "
                f"Type for example: {_USAGE}"
            )
        if not equals:
            value = rest.pop(0) if rest else ""
        if not value:
            raise UsageError(
                f"expected a value after {flag}, found none. Type for example: {_USAGE}"
            )
        said[_TAKEN[flag]] = value
    size = said["size"]
    if not size.isdecimal() or int(size) == 0:
        found = f"found -np {size}" if size else "found none"
        raise UsageError(f"expected a number of ranks, {found}. Type for example: {_USAGE}")
    return Wanted(int(size), said["hosts"], said["hostfile"], rest)


def python_command(command: list[str]) -> list[str]:
    """Returns what each rank runs: the script of a command, with ``horovod`` found in it.

    Raises:
        UsageError: the command is not a Python and a script.
    """
    program = command[0] if command else ""
    flags = 1
    while flags < len(command) and command[flags].startswith("-"):
        flags += 1
    is_python = os.path.basename(program).startswith("python")
    if not is_python or flags == len(command) or {"-m", "-c"} & set(command[:flags]):
        found = f"found {' '.join(command)}" if command else "found none"
        raise UsageError(f"expected a Python and a script, {found}. Type for example: {_USAGE}")
    # The Python that has allranks, unless one is named by its path.
    python = program if os.path.dirname(program) else sys.executable
    return [python, *command[1:flags], "-m", "allranks.horovod", *command[flags:]]


def main() -> None:
    """Becomes mpiexec; what was typed wrong is said in one line."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-v", "--version"):
        sys.stdout.write(f"{horovod.__version__}\n")
        return
    try:
        wanted = parse(arguments)
        launcher = LocalLauncher()
        command = launcher.command(wanted.size)
        if wanted.hosts:
            command += ["-H", wanted.hosts]
        if wanted.hostfile:
            command += ["--hostfile", wanted.hostfile]
        command += python_command(wanted.command)
        os.environ.update(launcher.environment(alone=not (wanted.hosts or wanted.hostfile)))
    except AllranksError as error:
        raise SystemExit(f"horovodrun: {error}") from None
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
