"""``horovodrun -np 4 python train.py …``: Horovod's command.

On this machine the script runs on ranks as a cell of a notebook does: with labelled output, the
first failure on top, ``--timeout``, ``--log-dir`` and ``--report``. With other hosts, another
Python, or ``--mpi``, the command becomes ``mpiexec -n 4 python -m allranks.horovod train.py …``.
Runs in a shell; standard library only, until a script is run.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, NamedTuple

from allranks import horovod
from allranks.cluster.launchers.mpiexec import mpi_environment, mpiexec
from allranks.errors import AllranksError, UsageError

_USAGE = "horovodrun -np 4 [-H localhost:4] python train.py"
_THIS_HOST = ("localhost", "127.0.0.1")
_FLAGS = {
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
    "--gloo": "leave it out: MPI is always used",
    "--mpi-args": "set OMPI_MCA_… in the environment",
    "--check-build": "call hvd.mpi_built() and hvd.nccl_built() in Python",
    "--timeline-filename": "call hvd.start_timeline(file) in the script",
    "--min-np": "give the number of ranks, which is fixed: -np 4",
    "--max-np": "give the number of ranks, which is fixed: -np 4",
    "--host-discovery-script": "name the hosts, which are fixed: -H host1:2,host2:2",
}


class HorovodrunOptions(NamedTuple):
    """The options of a command line; "" for an option left out."""

    size: int
    hosts: str  # for instance localhost:4
    hostfile: str
    command: list[str]  # a Python, its flags, a script, the script's arguments
    timeout: str = ""  # seconds
    log_dir: str = ""
    report: str = ""
    mpi: bool = False  # whether mpiexec is used although it is not needed


def parse(arguments: list[str]) -> HorovodrunOptions:
    values = dict.fromkeys(_FLAGS.values(), "")
    rest, mpi = list(arguments), False
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest.pop(0).partition("=")
        if flag == _MPI:
            mpi = True
            continue
        if flag not in _FLAGS:
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
        values[_FLAGS[flag]] = value
    size = values["size"]
    if not size.isdecimal() or int(size) == 0:
        found = f"found -np {size}" if size else "found none"
        raise UsageError(f"expected a number of ranks, {found}. Type for example: {_USAGE}")
    del values["size"]
    return HorovodrunOptions(size=int(size), command=rest, mpi=mpi, **values)


def python_command(command: list[str]) -> list[str]:
    program = command[0] if command else ""
    flags = 1
    while flags < len(command) and command[flags].startswith("-"):
        flags += 1
    is_python = os.path.basename(program).startswith("python")
    if not is_python or flags == len(command) or {"-m", "-c"} & set(command[:flags]):
        found = f"found {' '.join(command)}" if command else "found none"
        if "-m" in command[:flags]:
            found += ". For a module type: allranks run -np 4 -m package.train"
        raise UsageError(f"expected a Python and a script, {found}. Type for example: {_USAGE}")
    # This Python has allranks. A Python that is given with its path is used as given.
    python = program if os.path.dirname(program) else sys.executable
    return [python, *command[1:flags], "-m", "allranks.horovod", *command[flags:]]


def local_script(options: HorovodrunOptions) -> list[str]:
    """Returns the script and its arguments if its ranks can be started here, else an empty list."""
    python, *flags = python_command(options.command)
    flags, arguments = flags[: flags.index("-m")], flags[flags.index("-m") + 2 :]
    here = all(host.partition(":")[0] in _THIS_HOST for host in options.hosts.split(",") if host)
    this = os.path.realpath(python) == os.path.realpath(sys.executable) and set(flags) <= {"-u"}
    if here and this and not (options.mpi or options.hostfile):
        return arguments
    asked = {"--timeout": options.timeout, "--log-dir": options.log_dir, "--report": options.report}
    for flag, value in asked.items():
        if value:
            raise UsageError(
                f"{flag} is for ranks on this machine, of this Python: found {flag} {value} with "
                f"another. Leave out -H, --hostfile, --mpi and the Python's own flags, or {flag}. "
                f"Type for example: {_USAGE}"
            )
    return []


def main() -> None:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-v", "--version"):
        sys.stdout.write(f"{horovod.__version__}\n")
        return
    try:
        options = parse(arguments)
        script = local_script(options)
        if script:
            raise SystemExit(_run(options, script))
        command = [mpiexec(), "-n", str(options.size)]
        if options.hosts:
            command += ["-H", options.hosts]
        if options.hostfile:
            command += ["--hostfile", options.hostfile]
        command += python_command(options.command)
        os.environ.update(mpi_environment(alone=not (options.hosts or options.hostfile)))
    except AllranksError as error:
        raise SystemExit(f"horovodrun: {error}") from None
    # In this process, so that mpiexec gets the shell's signals and the shell its exit code.
    os.execv(command[0], command)


def _run(options: HorovodrunOptions, script: list[str]) -> int:
    try:
        timeout = float(options.timeout) if options.timeout else None
    except ValueError:
        found = f"expected --timeout in seconds, found {options.timeout!r}. Type for example: "
        raise UsageError(f"{found}--timeout 60") from None
    importlib.import_module("allranks.notebook").load_features()
    scripts: Any = importlib.import_module("allranks.command.script")
    job = scripts.ScriptRun(options.size, script, timeout, options.log_dir, options.report)
    code: int = scripts.run_script(job)
    return code


if __name__ == "__main__":
    main()
