"""Runs in the notebook's kernel: what starts processes as ranks, one environment a file.

On this machine that is mpiexec. Elsewhere a launcher owes one thing: it runs one command once on
every host, and says which hosts these are.
"""

from __future__ import annotations

import os
import shlex

from allranks.cluster.launchers.launcher import Launcher
from allranks.cluster.launchers.sites import BUILT_IN, sites, unreadable
from allranks.errors import UsageError

#: Those that take options of their own, which are the batch system's.
_BATCH = ("slurm", "pbs", "lsf")


def default() -> str:
    """Returns what starts ranks where nothing is said: this machine, or this job's nodes."""
    from allranks.cluster.launchers import slurm

    return "slurm" if slurm.in_allocation(os.environ) else "local"


def takes_options(name: str | None) -> bool:
    """Whether a launcher, or a named place, has a batch system's options.

    A name that nobody knows may have any: it is refused by :func:`named`, which tells why.
    """
    first = _first(name or "local")
    if _built_in(first):
        return first in _BATCH
    site = sites().get(first)
    return site is None or _first(site.on) in _BATCH


def named(name: str) -> Launcher:
    """Returns the launcher of that name, or of the place of that name; options may follow it.

    Raises:
        UsageError: there is none.
        MissingDependency: what it needs is not here.
    """
    from allranks.cluster.launchers.local import LocalLauncher
    from allranks.cluster.launchers.spread import Spread

    first, *options = _words(name)
    # What is built in needs no file, and no file that cannot be read keeps it from starting.
    site = None if _built_in(first) else sites().get(first)
    if site is not None:
        first, *before = _words(site.on)
        options = before + options
    made: Launcher | None = None
    kind, colon, where = first.partition(":")
    if first == "local" and not options:
        made = LocalLauncher()
    elif kind == "ssh" and colon and not options:
        from allranks.cluster.launchers.ssh import SshLauncher

        made = SshLauncher(where)
    elif first == "slurm":
        from allranks.cluster.launchers.slurm import SlurmLauncher

        made = SlurmLauncher(options)
    elif first == "pbs":
        from allranks.cluster.launchers.pbs import PbsLauncher

        made = PbsLauncher(options)
    elif first == "lsf":
        from allranks.cluster.launchers.lsf import LsfLauncher

        made = LsfLauncher(options)
    if made is None:
        raise UsageError(
            f"expected a launcher, found {name!r}. Available: --on local, --on ssh:HOST:RANKS,…, "
            "--on slurm, pbs or lsf. To see what can be used here: %distributed launchers"
            + "".join(f"\n{path} was not read: permission denied" for path in unreadable())
        )
    if site is not None and isinstance(made, Spread):
        made.site_environment = site.environment
    return made


def _first(text: str) -> str:
    return next(iter(text.split()), "")


def _built_in(word: str) -> bool:
    return word.partition(":")[0] in BUILT_IN


def _words(name: str) -> list[str]:
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise UsageError(f"expected a launcher, found {name!r}: {error}") from error
    return words or [""]
