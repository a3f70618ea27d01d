"""The notebook's cluster: started when it is first needed, and again after it was lost."""

from __future__ import annotations

import time
from dataclasses import replace

from allranks.cluster import devices
from allranks.cluster.options import TYPED, ClusterOptions
from allranks.ensemble.mapping import Cluster
from allranks.errors import UsageError
from allranks.records.ranks import label

_NAMES = "rank, size, local_rank, local_size, comm, MPI, device, allreduce, broadcast, barrier …"
_NOTHING = ClusterOptions()
_DEFAULT = ClusterOptions(preload="")


class Session:
    """Holds the one cluster of a notebook."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._asked = _DEFAULT

    @property
    def running(self) -> Cluster | None:
        """The cluster, if its ranks are up."""
        cluster = self._cluster
        return cluster if cluster is not None and cluster.state == "running" else None

    def cluster(self, options: ClusterOptions = _NOTHING) -> Cluster:
        """Returns the running cluster, started now if need be.

        Args:
            options: what the line asks for.

        Raises:
            UsageError: another number of ranks, other GPUs, another launcher or other modules
                are running.
        """
        running = self.running
        if running is not None and running.is_up():
            self._check(running, options)
            return running
        if running is not None:
            print(running.lost_because.splitlines()[0])
        lost = self._cluster is not None and self._cluster.state == "lost"
        wanted = options.over(self._asked)
        cluster = wanted.make(Cluster)
        # What was asked for holds until it is stopped: after a start that failed, or a loss, too.
        self._asked = replace(wanted, n=cluster.size)
        started = time.monotonic()
        cluster.start(_Waiting().show)
        self._cluster = cluster
        print(start_text(cluster, time.monotonic() - started, again=lost))
        for line in cluster.gpu_notices:
            print(line)
        return cluster

    def of_size(self, n: int | None) -> Cluster:
        """Returns the running cluster, started now with so many ranks if need be."""
        return self.cluster(ClusterOptions(n))

    def _check(self, running: Cluster, options: ClusterOptions) -> None:
        for name, option in TYPED.items():
            asked, have = getattr(options, name), self._asked.effective(name)
            if asked is not None and asked != have:
                # What cannot be started at all is not offered as a restart.
                replace(options, exclusive=False).make()
                what = f"{have} ranks are" if option == "-n" else f"{option} {have or 'none'} is"
                raise UsageError(
                    f"{option} {asked} was asked for, but {what} running. Leave out {option}, or "
                    f"type: %distributed restart {option} {asked}   (this forgets all variables "
                    "of the ranks)"
                )
        if options.exclusive:
            devices.check_exclusive(running.gpus, running.size)

    def restart(self, options: ClusterOptions = _NOTHING) -> None:
        """Ends the ranks and starts others, of the same kind where nothing else is asked."""
        wanted = options.over(self._asked)
        wanted.make()  # Refuses what cannot be started before anything is lost.
        self.stop()
        self.cluster(wanted)

    def stop(self) -> bool:
        """Ends the ranks; returns whether there were any."""
        running, self._cluster = self.running, None
        self._asked = _DEFAULT
        if running is not None:
            running.stop()
        return running is not None


class _Waiting:
    """Prints what is waited for, whenever that is something else."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, waits: str) -> None:
        if waits != self._shown:
            self._shown = waits
            print(waits, flush=True)


def start_text(cluster: Cluster, seconds: float, again: bool = False) -> str:
    """Returns the lines that say what was started, and which names every rank has."""
    hellos = list(cluster.hellos.values())
    hosts = ", ".join(sorted({hello.host for hello in hellos}))
    gpus = {(hello.host, hello.device) for hello in hellos if hello.device != "cpu"}
    where = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}" if gpus else "CPU"
    what = "started again" if again else "started"
    return (
        f"allranks {what} {label(range(cluster.size))} on {hosts} ({where}, {hellos[0].mpi}) in "
        f"{seconds:.1f} s.\nEach has: {_NAMES}"
    )
