"""``allranks.run``: a function on ranks, with the arguments of ``horovod.run``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from allranks.cluster import cluster as notebook
from allranks.cluster.cluster import Cluster
from allranks.errors import UsageError

_HERE = ("localhost", "127.0.0.1")
#: Arguments of Horovod without an effect here.
_IGNORED = (
    "start_timeout",
    "disable_cache",
    "verbose",
    "use_gloo",
    "use_mpi",
    "network_interface",
    "network_interfaces",
)
_FIXED = "the number of ranks is fixed: leave it out"
_THIS_MACHINE = "the ranks run on this machine: leave it out"
_REFUSED = {
    **dict.fromkeys(("min_num_proc", "max_num_proc", "min_np", "max_np"), _FIXED),
    **dict.fromkeys(("slots", "reset_limit"), _FIXED),
    "cooldown_range": "hosts are never excluded: leave it out",
    "host_discovery_script": "the hosts are fixed: leave it out",
    **dict.fromkeys(("hostfile", "ssh_port", "ssh_identity_file"), _THIS_MACHINE),
    "mpi_args": "set OMPI_MCA_… or MPICH's variables in the environment",
    "output_filename": "every rank has a log; see allranks.Cluster.log_dir",
    "executable": "the ranks run this Python: start the notebook with the other one",
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    timeout: float | None = None,
    **options: Any,
) -> list[Any]:
    """Calls a function on every rank and returns its results, in order of rank.

    If the notebook has this number of ranks and they are idle, they call it. Otherwise ranks are
    started for the call, and end after it.

    Args:
        func: what every rank calls, with ``args`` and ``kwargs``; it may be defined in a cell.
        num_proc: the number of ranks; 1 by default, as in Horovod.
        np: Horovod's older name of ``num_proc``.
        hosts: ``localhost`` or ``localhost:4``.
        timeout: seconds after which the ranks are interrupted.
        options: other options of Horovod. ``start_timeout``, ``disable_cache``, ``verbose``,
            ``use_gloo``, ``use_mpi`` and ``network_interface(s)`` change nothing; others are
            refused.

    Raises:
        CellFailed: the function raised on at least one rank; with that rank's traceback.
        ClusterLost: a rank died.
        UsageError: an argument is not supported.

    Source: ``horovod.run`` of Horovod 0.28.
    """
    _check_options(options)
    size = _chosen_size(num_proc, np, hosts)
    call = (func, tuple(args), dict(kwargs or {}))
    shared = notebook.session.running if notebook.session is not None else None
    fits = shared is not None and shared.size == size
    if shared is not None and fits and shared.cells.is_up() and not shared.roster.busy:
        return shared.call(*call, timeout=timeout)
    started = Cluster(size)
    started.roster.replacing = "off"  # no cell follows on these ranks
    with started as fresh:
        return fresh.call(*call, timeout=timeout)


def _check_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name in _REFUSED and value is not None:
            raise UsageError(f"run() expected no {name}, found {value!r}: {_REFUSED[name]}.")
        if name not in _REFUSED and name not in _IGNORED:
            raise UsageError(
                f"run() has no argument {name!r}. Arguments of the function go in args and kwargs: "
                "run(train, args=(0.01,), np=4)"
            )


def _chosen_size(num_proc: int | None, np: int | None, hosts: str | None) -> int:
    if num_proc is not None and np is not None and num_proc != np:
        raise UsageError(
            f"expected one number of ranks, found num_proc={num_proc} and np={np}. Type: np={np}"
        )
    size = next((given for given in (num_proc, np) if given is not None), None)
    slots = 0
    for part in (hosts or "").split(",") if hosts else ():
        host, _, count = part.strip().partition(":")
        if host not in _HERE or (count and not count.isdecimal()):
            raise UsageError(
                f"run() starts ranks on this machine, found hosts={hosts!r}. "
                "Type: hosts='localhost:4', or leave it out"
            )
        slots += int(count or 1)
    if hosts and size is not None and size > slots:
        raise UsageError(
            f"expected hosts with room for {size} ranks, found hosts={hosts!r}. Leave it out."
        )
    return 1 if size is None else size
