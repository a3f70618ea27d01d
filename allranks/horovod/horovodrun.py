"""``horovodrun -np 4 python train.py …``: Horovod's command.

On this machine the script runs on ranks as a notebook's cell does: labelled output, the culprit
first, ``--timeout``, ``--log-dir``, ``--report``. With other hosts, another Python, or ``--mpi``,
the command becomes ``mpiexec -n 4 python -m allranks.horovod train.py …``. Runs in a shell;
standard library only, until a script is run.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, NamedTuple

from allranks import horovod
from allranks.cluster.launchers.local import LocalLauncher
from allranks.errors import AllranksError, UsageError

_USAGE = "horovodrun -np 4 [-H localhost:4] python train.py"
_HERE = ("localhost", "127.0.0.1")
_TAKEN = {
    "-np": "size",
    "--num-proc": "size",
    "-H": "hosts",
    "--hosts": "hosts",
    "-hostfile": "hostfile",
    "--hostfile": "hostfile",
    "--timeout": "timeout",
    "--log-dir": "log_dir",
    "--output-filename": "log_dir",
    "--report": "report",
}
_MPI = "--mpi"
_INSTEAD = {
    "--gloo": "leave it out: there is MPI",
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
        timeout: seconds after which the ranks are interrupted; empty for never.
        log_dir: a folder for the ranks' logs; empty for none.
        report: a file for the picture of what was measured; empty for none.
        mpi: whether the command is to become mpiexec.
    """

    size: int
    hosts: str
    hostfile: str
    command: list[str]
    timeout: str = ""
    log_dir: str = ""
    report: str = ""
    mpi: bool = False


def parse(arguments: list[str]) -> Wanted:
    """Returns what Horovod's command line asks for.

    Raises:
        UsageError: a flag is not known, or has no value; there is no number of ranks.
    """
    said = dict.fromkeys(_TAKEN.values(), "")
    rest, mpi = list(arguments), False
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest.pop(0).partition("=")
        if flag == _MPI:
            mpi = True
            continue
        if flag not in _TAKEN:
            instead = _INSTEAD.get(flag, "leave it out")
            raise UsageError(
                "expected -np, -H, --hostfile, --timeout, --log-dir, --report, --mpi or "
                f"--version, found {flag}. Instead, {instead}. Type for example: {_USAGE}"
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
    del said["size"]
    return Wanted(size=int(size), command=rest, mpi=mpi, **said)


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


def script_of(wanted: Wanted) -> list[str]:
    """Returns a script and its arguments, where its ranks can be started here; else nothing.

    Raises:
        UsageError: the command is not a Python and a script; or it cannot be run here, and what is
            asked for is for scripts that are.
    """
    python, *flags = python_command(wanted.command)
    flags, arguments = flags[: flags.index("-m")], flags[flags.index("-m") + 2 :]
    here = all(host.partition(":")[0] in _HERE for host in wanted.hosts.split(",") if host)
    this = os.path.realpath(python) == os.path.realpath(sys.executable) and set(flags) <= {"-u"}
    if here and this and not (wanted.mpi or wanted.hostfile):
        return arguments
    asked = {"--timeout": wanted.timeout, "--log-dir": wanted.log_dir, "--report": wanted.report}
    for flag, value in asked.items():
        if value:
            raise UsageError(
                f"{flag} is for ranks on this machine, of this Python: found {flag} {value} with "
                f"another. Leave out -H, --hostfile, --mpi and the Python's own flags, or {flag}. "
                f"Type for example: {_USAGE}"
            )
    return []


def main() -> None:
    """Runs the script, or becomes mpiexec; what was typed wrong is said in one line."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-v", "--version"):
        sys.stdout.write(f"{horovod.__version__}\n")
        return
    try:
        wanted = parse(arguments)
        script = script_of(wanted)
        if script:
            raise SystemExit(_run(wanted, script))
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


def _run(wanted: Wanted, script: list[str]) -> int:
    try:
        timeout = float(wanted.timeout) if wanted.timeout else None
    except ValueError:
        found = f"expected --timeout in seconds, found {wanted.timeout!r}. Type for example: "
        raise UsageError(f"{found}--timeout 60") from None
    scripts: Any = importlib.import_module("allranks.cluster.script")
    job = scripts.Job(wanted.size, script, timeout, wanted.log_dir, wanted.report)
    code: int = scripts.run(job)
    return code


if __name__ == "__main__":
    main()
