"""Ranks on hosts that LSF gives: ``--on lsf --nodes 2 --ntasks-per-node 4 -W 1:00``.

Written after the documentation of IBM Spectrum LSF (bsub, bjobs, bkill, blaunch), and tested only
with programs that imitate these commands: no LSF was available.

Source: IBM Spectrum LSF Command Reference, "bsub", "bjobs" and "blaunch".
"""

from __future__ import annotations

import re

from allranks.cluster.launchers.batch import BatchJob, HostfileLauncher, Look, ask

_WAITING = ("PEND", "PSUSP", "WAIT")
_RUNNING = ("RUN", "USUSP", "SSUSP")
#: The job's host does not answer LSF.
_UNKNOWN = "UNKWN"


class LsfLauncher(HostfileLauncher):
    """Starts ranks on LSF's hosts."""

    name = "lsf"
    system = "LSF"
    example = "--on lsf --nodes 2 --ntasks-per-node 4 -W 1:00"
    about = "and other options of bsub"
    submits = "bsub"
    #: As bsub answers: ``Job <7> is submitted to default queue <normal>.``
    number = re.compile(r"(?<=Job <)\d+")
    hostfile = "LSB_DJOB_HOSTFILE"
    runs = "blaunch"

    def resources(self, nodes: int, each: int, output: str) -> list[str]:
        words = ["-J", "allranks", "-rn", "-o", output, "-n", str(nodes * each)]
        return [*words, "-R", f"span[ptile={each}]"]

    def job(self, number: str, each: int, invitation: str, output: str) -> BatchJob:
        return LsfJob(number, each, invitation, output)


class LsfJob(BatchJob):
    """A job that bsub has submitted."""

    looked_up_by = ("bhist", "-l")

    def __init__(self, number: str, ranks: int, invitation: str, output: str) -> None:
        super().__init__("LSF", number, ranks, ["bkill", number], invitation)
        self._output = output

    def look(self) -> Look | None:
        state, queue, hosts, reason, ending = self._about()
        if state in ("", _UNKNOWN):
            return None
        if state in _RUNNING:
            return _hosts(hosts), ""
        if state in _WAITING:
            why = f": {reason}" if reason.strip("- ") else ""
            return (), f"LSF job {self.number} waits in queue {queue}{why}. Interrupt to cancel it."
        raise self.refused(f"has ended ({ending.strip('- ') or state})", self._output)

    def _about(self) -> list[str]:
        wanted = "stat queue exec_host pend_reason exit_reason delimiter='|'"
        said = ask("bjobs", "-a", "-noheader", "-o", wanted, self.number)
        return [*said.split("|"), "", "", "", "", ""][:5]

    def why_ended(self) -> str:
        """Returns LSF's reason for the job's end, as ``TERM_RUNLIMIT: job killed after …``."""
        state, *_, ending = self._about()
        if state in ("", _UNKNOWN, *_RUNNING):
            return ""
        why = ending.strip("- ")
        return f"LSF job {self.number} has ended" + (f": {why}" if why else "")


def _hosts(text: str) -> list[str]:
    """Returns the hosts of ``4*node1:4*node2``."""
    names = (part.rpartition("*")[2].partition(".")[0] for part in text.split(":"))
    return list(dict.fromkeys(filter(None, names)))
