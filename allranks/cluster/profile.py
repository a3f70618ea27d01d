"""IPython's profile: the folder that ipyparallel looks into, and what it says there of Slurm."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from allranks.errors import UsageError

_FILE = "ipcluster_config.py"


def folder() -> Path | None:
    """Returns the folder of IPython's profile: this notebook's, else the default one.

    None where there can be none: IPython would make a temporary folder, and another for each who
    asks.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and shell.profile_dir is not None:
        return Path(shell.profile_dir.location)
    place = Path(os.path.expanduser(os.environ.get("IPYTHONDIR", "~/.ipython")))
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        return None
    from IPython.paths import get_ipython_dir

    return Path(get_ipython_dir(), "profile_default")


@dataclass(frozen=True)
class SlurmSettings:
    """How jobs are submitted and cancelled here, and with which options; by default as everywhere.

    The job's number is what ``group`` of ``job_id`` finds in what the submit command says.
    """

    submit: tuple[str, ...] = ("sbatch",)
    delete: tuple[str, ...] = ("scancel",)
    options: tuple[str, ...] = ()
    job_id: re.Pattern[str] = re.compile(r"\d+")
    group: int = 0


def slurm() -> SlurmSettings:
    """Returns what ``c.SlurmLauncher`` and its like say in the profile's ``ipcluster_config.py``.

    Its templates are not taken: they would start engines that are no ranks of one world.

    Raises:
        UsageError: that file cannot be read.
    """
    place = folder()
    if place is None or not (place / _FILE).exists():
        return SlurmSettings()
    path = place / _FILE
    from ipyparallel.cluster.launcher import SlurmEngineSetLauncher
    from traitlets.config.loader import PyFileConfigLoader

    try:
        config = PyFileConfigLoader(path.name, path=str(path.parent)).load_config()
        said = SlurmEngineSetLauncher(config=config, profile_dir=str(path.parent))
        named = {"partition": said.queue, "account": said.account}
        named |= {"qos": said.qos, "time": said.timelimit}
        more = said.formatter.format(said.options, **{**said.context, **said.namespace})
        options = [f"--{name}={value}" for name, value in named.items() if value]
        return SlurmSettings(
            submit=tuple(said.submit_command),
            delete=tuple(said.delete_command),
            options=(*options, *shlex.split(more)),
            job_id=said.job_id_regexp,
            group=said.job_id_regexp_group,
        )
    except Exception as error:  # a person's own Python
        raise UsageError(
            f"expected ipyparallel's settings of Slurm in {path}, found {error!r}. Correct it"
        ) from error
