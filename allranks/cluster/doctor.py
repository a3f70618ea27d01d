"""``allranks doctor`` and ``%distributed doctor``: checks of what ranks need of this machine.

A check stands beside the code that it is about, and is listed in `CHECKS`: of MPI, of the
launchers, of installed packages and GPUs. Those of the machine itself are here. Checks import no
package that ranks use, they read its metadata. A launcher of another distribution is checked by its
own `Launcher.check`.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator

import psutil

from allranks.cluster import packages
from allranks.cluster.findings import ABSENT, OK, WRONG, Finding
from allranks.cluster.launchers import mpiexec, registry
from allranks.cluster.sizes import chosen

_SHARED = "/dev/shm"
#: Docker's default of 64 MB is too little for NCCL's buffers and torch's loaders of data.
_SHARED_NBYTES = 128 * 2**20
#: The notebook's kernel and ipyparallel's controller open 100 descriptors, and 8 for each rank.
_FILES = 256
#: TensorFlow starts dozens of threads a rank, and each counts.
_PROCESSES = 1024
_FABRIC = "/dev/infiniband"
_PINNED_NBYTES = 2**30


def examine() -> list[Finding]:
    """Returns the results of all checks. It takes a second or two: it starts two MPI processes."""
    return [one for check in CHECKS for one in check()]


def check_machine() -> Iterator[Finding]:
    """Checks cores, shared memory, connections and limits."""
    yield _cores()
    yield _shared_memory()
    yield _ports()
    yield from _limits()


def _cores() -> Finding:
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    sizes = f"{_size(memory.available)} of {_size(memory.total)} memory free"
    cores = f"{mine} core{'s' if mine > 1 else ''}"
    return Finding("cores", OK, f"{cores}, {sizes}; a cell starts {chosen(None, ())} without -n")


def _shared_memory() -> Finding:
    if not os.path.isdir(_SHARED):
        return Finding("shared memory", ABSENT, f"no {_SHARED} here")
    stat = os.statvfs(_SHARED)
    free, size = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    found = f"{_size(free)} of {_size(size)} free in {_SHARED}"
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
    limit = _size(most) if in_bytes else str(most)
    found = "no limit" if most == resource.RLIM_INFINITY else f"at most {limit}"
    if most == resource.RLIM_INFINITY or most >= least:
        return Finding(about, OK, found)
    needed = _size(least) if in_bytes else str(least)
    return Finding(about, WRONG, f"{found}, expected {needed} or more", remedy)


def _size(nbytes: int) -> str:
    return f"{nbytes / 10**9:.1f} GB" if nbytes >= 10**9 else f"{nbytes / 10**6:.3g} MB"


CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    packages.check_python,
    packages.check_libraries,
    packages.check_gpus,
    mpiexec.check_mpi,
    registry.check_launchers,
    check_machine,
)
"""In the order in which their results are shown."""
