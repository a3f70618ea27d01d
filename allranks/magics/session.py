"""The notebook's cluster: started when it is first needed, and again after it was lost."""

from __future__ import annotations

import time

from allranks.cluster import devices
from allranks.cluster.cluster import Cluster
from allranks.cluster.horovod_run import share
from allranks.errors import UsageError
from allranks.records.ranks import label

_LEFT_AWAY = {"--gpus": "all", "--preload": "none"}
_NAMES = "rank, size, local_rank, local_size, comm, device, allreduce, broadcast, barrier …"
_DEFAULT: tuple[int | None, str | None, str, str] = (None, None, "local", "")


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

    def cluster(
        self,
        n: int | None = None,
        gpus: str | None = None,
        launcher: str | None = None,
        preload: str | None = None,
        *,
        exclusive: bool = False,
    ) -> Cluster:
        """Returns the running cluster, started now if need be.

        Args:
            n, gpus, launcher, preload: what the line asks for; None where it does not say.
            exclusive: whether each rank must have a GPU of its own.

        Raises:
            UsageError: another number of ranks, other GPUs, another launcher or other modules
                are running.
        """
        running = self.running
        if running is not None and running.is_up():
            self._check(running, n, gpus, launcher, preload)
            if exclusive:
                devices.check_exclusive(running.gpus, running.size)
            return running
        if running is not None:
            print(running.lost_because.splitlines()[0])
        lost = self._cluster is not None and self._cluster.state == "lost"
        before = self._asked
        modules = before[3] if preload is None else preload
        cluster = Cluster(
            before[0] if n is None else n,
            gpus=gpus or before[1],
            launcher=launcher or before[2],
            preload=modules,
            exclusive=exclusive,
        )
        # What was asked for holds until it is stopped: after a start that failed, or a loss, too.
        self._asked = (cluster.size, gpus or before[1], launcher or before[2], modules)
        started = time.monotonic()
        self._cluster = cluster.start()
        share(cluster)
        print(start_text(cluster, time.monotonic() - started, again=lost))
        for line in cluster.gpu_notices:
            print(line)
        return cluster

    def _check(
        self,
        running: Cluster,
        n: int | None,
        gpus: str | None,
        launcher: str | None,
        preload: str | None,
    ) -> None:
        now = (running.size, *self._asked[1:])
        for option, asked, have in zip(
            ("-n", "--gpus", "--on", "--preload"), (n, gpus, launcher, preload), now, strict=True
        ):
            if asked is not None and asked != have:
                # What cannot be started at all is not offered as a restart.
                Cluster(n, gpus=gpus, launcher=launcher or "local", preload=preload or ())
                found = have or _LEFT_AWAY[option]
                what = f"{have} ranks are" if option == "-n" else f"{option} {found} is"
                raise UsageError(
                    f"{option} {asked} was asked for, but {what} running. Leave {option} away, or "
                    f"type: %distributed restart {option} {asked}   (this forgets all variables "
                    "of the ranks)"
                )

    def restart(
        self,
        n: int | None = None,
        gpus: str | None = None,
        launcher: str | None = None,
        preload: str | None = None,
        *,
        exclusive: bool = False,
    ) -> None:
        """Ends the ranks and starts others, of the same kind where nothing else is asked."""
        asked = self._asked
        size = asked[0] if n is None else n
        modules = asked[3] if preload is None else preload
        # Refuses what cannot be started before anything is lost.
        Cluster(
            size,
            gpus=gpus or asked[1],
            launcher=launcher or asked[2],
            preload=modules,
            exclusive=exclusive,
        )
        self.stop()
        self.cluster(size, gpus or asked[1], launcher or asked[2], modules, exclusive=exclusive)

    def stop(self) -> bool:
        """Ends the ranks; returns whether there were any."""
        running, self._cluster = self.running, None
        self._asked = _DEFAULT
        if running is not None:
            running.stop()
        return running is not None


def start_text(cluster: Cluster, seconds: float, again: bool = False) -> str:
    """Returns the lines that say what was started, and which names every rank has."""
    hellos = list(cluster.hellos.values())
    hosts = ", ".join(sorted({hello.host for hello in hellos}))
    gpus = sorted({hello.device for hello in hellos} - {"cpu"})
    where = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}" if gpus else "CPU"
    what = "started again" if again else "started"
    return (
        f"allranks {what} {label(range(cluster.size))} on {hosts} ({where}, {hellos[0].mpi}) in "
        f"{seconds:.1f} s.\nEach has: {_NAMES}"
    )
