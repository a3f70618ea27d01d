"""Ranks on hosts that PBS gives: ``--on pbs --nodes 2 --ntasks-per-node 4 -l walltime=1:00:00``.

Written after the documentation of PBS Professional and OpenPBS (qsub, qstat, qdel, pbs_tmrsh), and
tested only with programs that imitate these commands: no PBS was available.

Source: Altair PBS Professional User's Guide, "Submitting a PBS Job" and "PBS Commands".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from allranks.cluster.launchers.batch import BatchJob, HostfileLauncher, Look, ask

#: States of waiting jobs, in qstat's job_state.
_WAITING = {"Q": "queued", "H": "held", "W": "waiting for its time", "T": "being moved"}
_RUNNING = ("R", "E", "S", "U")


class PbsLauncher(HostfileLauncher):
    """Starts ranks on PBS's hosts."""

    name = "pbs"
    system = "PBS"
    example = "--on pbs --nodes 2 --ntasks-per-node 4 -l walltime=1:00:00"
    about = "and other options of qsub"
    submits = "qsub"
    #: As qsub answers: ``7.server``
    number = re.compile(r"\S+")
    hostfile = "PBS_NODEFILE"
    runs = "pbs_tmrsh"

    def resources(self, nodes: int, each: int, output: str) -> list[str]:
        words = ["-N", "allranks", "-r", "n", "-j", "oe", "-o", output]
        words += ["-l", f"select={nodes}:ncpus={each}:mpiprocs={each}", "-l", "place=scatter"]
        return words

    def job(self, number: str, each: int, invitation: str, output: str) -> BatchJob:
        return PbsJob(number, each, invitation, output)


class PbsJob(BatchJob):
    """A job that qsub has submitted."""

    looked_up_by = ("qstat", "-x", "-f")

    def __init__(self, number: str, ranks: int, invitation: str, output: str) -> None:
        super().__init__("PBS", number, ranks, ["qdel", number], invitation)
        self._output = output

    def look(self) -> Look | None:
        about = self._about()
        if not about:
            return None
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
        # -x includes jobs that have ended.
        said = ask("qstat", "-x", "-f", "-F", "json", self.number)
        try:
            jobs = json.loads(said)["Jobs"]
            found: Mapping[str, Any] = next(iter(jobs.values()))
        except (ValueError, KeyError, StopIteration):
            return {}
        return found

    def why_ended(self) -> str:
        """Returns PBS's reason for the job's end, as ``job killed: walltime 65 exceeded limit``."""
        about = self._about()
        if about.get("job_state") in (None, *_RUNNING):
            return ""
        comment = str(about.get("comment", "")).strip()
        return f"PBS job {self.number} has ended" + (f": {comment}" if comment else "")


def _hosts(text: str) -> list[str]:
    """Returns the hosts of ``node1/0*4+node2/0*4``."""
    return list(dict.fromkeys(re.split(r"[./]", part)[0] for part in text.split("+") if part))
