"""Ranks on hosts that PBS gives: ``--on pbs --nodes 2 --ntasks-per-node 4 -l walltime=1:00:00``.

By the documented commands of PBS Professional and OpenPBS (qsub, qstat, qdel, pbs_tmrsh), and run
against stand-ins of them only: no PBS was to be had.

Source: Altair PBS Professional User's Guide, "Submitting a PBS Job" and "PBS Commands".
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from allranks.cluster.launchers.batch import (
    BatchJob,
    BatchOptions,
    ask,
    invite,
    parse_batch,
    program,
    relay_command,
    submit,
)
from allranks.cluster.launchers.launcher import Job, Tell
from allranks.cluster.launchers.spread import Spread, own_address
from allranks.records.config import Invitation

_PACKAGE = "see your cluster's documentation"
_HOST = "ALLRANKS_HOST"
#: What qstat says in job_state of those that wait.
_WAITING = {"Q": "queued", "H": "held", "W": "waiting for its time", "T": "being moved"}
_RUNNING = ("R", "E")
_EXAMPLE = "--on pbs --nodes 2 --ntasks-per-node 4 -l walltime=1:00:00"


class PbsLauncher(Spread):
    """Starts ranks on PBS's hosts.

    Args:
        options: how many hosts and ranks on each, and qsub's own.
    """

    name = "pbs"

    def __init__(self, options: Sequence[str] = ()) -> None:
        program("qsub", _PACKAGE)
        self._asked: BatchOptions = parse_batch(options, _EXAMPLE)

    def size(self, n: int | None) -> int:
        """Returns how many ranks there are to be."""
        return self._asked.size(n)

    def address(self) -> str:
        """Returns this machine's address."""
        return own_address()

    def describe(self) -> str:
        """Returns the job's hosts, in a few words."""
        return f"{self._asked.nodes} hosts of PBS"

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> Job:
        """Submits a job that runs the relay on every host."""
        path = invite(invitation, log_dir)
        output = os.path.join(log_dir, "pbs.log")
        nodes, each = self._asked.nodes, self._asked.each
        words = ["qsub", "-N", "allranks", "-r", "n", "-j", "oe", "-o", output]
        words += ["-l", f"select={nodes}:ncpus={each}:mpiprocs={each}", "-l", "place=scatter"]
        number = submit("PBS", [*words, *self._asked.more], _script(path), path).strip()
        return PbsJob(number, each, path, output)


def _script(path: str) -> str:
    """Returns a body that runs the relay on every host of ``$PBS_NODEFILE``, each under its name.

    ``pbs_tmrsh`` does so by PBS's own daemons, which end what they have started with the job.
    """
    command = shlex.join(relay_command(path, _HOST))
    return (
        "#!/bin/sh\n"
        'for host in $(sort -u "$PBS_NODEFILE"); do\n'
        f'  pbs_tmrsh "$host" env {_HOST}="${{host%%.*}}" {command} &\n'
        "done\n"
        "wait\n"
    )


class PbsJob(BatchJob):
    """A job that qsub has submitted."""

    def __init__(self, number: str, ranks: int, invitation: str, output: str) -> None:
        super().__init__("PBS", number, ranks, ["qdel", number], invitation)
        self._output = output

    def look(self) -> tuple[Sequence[str], str]:
        """Returns the names of its hosts, once it runs, and what it waits for until then."""
        about = self._about()
        if not about:
            return (), self._waits
        state = str(about.get("job_state", ""))
        if state in _RUNNING:
            return _hosts(str(about.get("exec_host", ""))), ""
        if state in _WAITING:
            why = str(about.get("comment", _WAITING[state]))
            start = about.get("estimated", {}).get("start_time", "")
            when = f", expected to start {start}" if start else ""
            queue = about.get("queue", "?")
            return (), (
                f"PBS job {self.number} waits in queue {queue}: {why}{when}. "
                "Interrupt to cancel it."
            )
        raise self.refused(f"has ended with exit status {about.get('Exit_status')}", self._output)

    def _about(self) -> Mapping[str, Any]:
        # -x: of a job that has ended, too.
        said = ask("qstat", "-x", "-f", "-F", "json", self.number)
        try:
            jobs = json.loads(said)["Jobs"]
            found: Mapping[str, Any] = next(iter(jobs.values()))
        except (ValueError, KeyError, StopIteration):
            return {}
        return found

    def why_ended(self) -> str:
        """Returns what PBS says of the job's end, as ``job killed: walltime 65 exceeded limit``."""
        about = self._about()
        if about.get("job_state") in (None, *_RUNNING):
            return ""
        comment = str(about.get("comment", "")).strip()
        return f"PBS job {self.number} has ended" + (f": {comment}" if comment else "")


def _hosts(text: str) -> list[str]:
    """Returns the hosts of ``node1/0*4+node2/0*4``."""
    return list(dict.fromkeys(re.split(r"[./]", part)[0] for part in text.split("+") if part))
