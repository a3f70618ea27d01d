"""Ranks on hosts that PBS or LSF gives: ``--on pbs`` or ``--on lsf``, and ``--nodes 2 …``.

Written after the documentation of PBS Professional and OpenPBS (qsub, qstat, qdel, pbs_tmrsh) and
of IBM Spectrum LSF (bsub, bjobs, bkill, blaunch), and tested only with programs that imitate these
commands: neither was available.

Source: Altair PBS Professional User's Guide, "Submitting a PBS Job" and "PBS Commands"; IBM
Spectrum LSF Command Reference, "bsub", "bjobs" and "blaunch".
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from allranks.cluster.launchers.addresses import own_address
from allranks.cluster.launchers.batch import (
    BatchJob,
    BatchOptions,
    JobState,
    ask,
    invite,
    parse_batch,
    program,
    submit,
)
from allranks.cluster.launchers.job import RELAY, Tell
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.records.config import Invitation

_PACKAGE = "see your cluster's documentation"
_HOST = "ALLRANKS_HOST"


class HostfileLauncher(MultiHostLauncher):
    """The common part of PBS and LSF: a job finds its hosts in a file, and runs the relay on each.

    The batch system's own daemons run it there (``pbs_tmrsh``, ``blaunch``), and end it with the
    job.
    """

    takes_options = True
    job: ClassVar[type[BatchJob]]
    #: The program that takes a job.
    submits: ClassVar[str]
    #: What finds the job's number in that program's answer.
    number: ClassVar[re.Pattern[str]]
    #: The variable that has the path of the file.
    hostfile: ClassVar[str]
    #: The program that runs a command on one host of the job.
    runs: ClassVar[str]

    def __init__(self, where: str = "", options: Sequence[str] = ()) -> None:
        super().__init__(where, options)
        program(self.submits, _PACKAGE)
        self._asked: BatchOptions = parse_batch(options, self.example)

    @classmethod
    def check(cls) -> None:
        program(cls.submits, _PACKAGE)
        super().check()

    def size(self, n: int | None) -> int:
        return self._asked.size(n)

    def address(self) -> str:
        return own_address()

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> BatchJob:
        """Submits a job that runs the relay on every host."""
        path = invite(invitation, log_dir)
        output = os.path.join(log_dir, f"{self.name}.log")
        nodes, each = self._asked.nodes, self._asked.each
        words = [self.submits, *self.resources(nodes, each, output), *self._asked.more]
        # The file names each host once for every rank.
        command = shlex.join([*RELAY, "--join", path, _HOST])
        script = (
            "#!/bin/sh\n"
            f'for host in $(sort -u "${self.hostfile}"); do\n'
            f'  {self.runs} "$host" env {_HOST}="${{host%%.*}}" {command} &\n'
            "done\n"
            "wait\n"
        )
        found = submit(self.job.system, words, script, path, self.number)
        return self.job(found[0], each, path, output)

    def resources(self, nodes: int, each: int, output: str) -> list[str]:
        """Returns the options for hosts, ranks on each, and the output file."""
        raise NotImplementedError


#: States of waiting jobs, in qstat's job_state.
_PBS_WAITING = {"Q": "queued", "H": "held", "W": "waiting for its time", "T": "being moved"}
_PBS_RUNNING = ("R", "E", "S", "U")


class PbsJob(BatchJob):
    """A job that qsub has submitted."""

    system = "PBS"
    cancels = ("qdel",)
    looked_up_by = ("qstat", "-x", "-f")

    def look(self) -> JobState | None:
        about = self._about()
        if not about:
            return None
        state = str(about.get("job_state", ""))
        if state in _PBS_RUNNING:
            return _pbs_hosts(str(about.get("exec_host", ""))), ""
        if state in _PBS_WAITING:
            why = str(about.get("comment", _PBS_WAITING[state]))
            start = about.get("estimated", {}).get("start_time", "")
            when = f", expected to start {start}" if start else ""
            queue = about.get("queue", "?")
            return (), (
                f"PBS job {self.number} waits in queue {queue}: {why}{when}. "
                "Interrupt to cancel it."
            )
        raise self.refused(f"has ended with exit status {about.get('Exit_status')}")

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
        if about.get("job_state") in (None, *_PBS_RUNNING):
            return ""
        comment = str(about.get("comment", "")).strip()
        return f"PBS job {self.number} has ended" + (f": {comment}" if comment else "")


class PbsLauncher(HostfileLauncher):
    """Starts ranks on PBS's hosts."""

    name = "pbs"
    example = "--on pbs --nodes 2 --ntasks-per-node 4 -l walltime=1:00:00"
    about = "and other options of qsub"
    job = PbsJob
    submits = "qsub"
    #: As qsub answers: ``7.server``
    number = re.compile(r"\S+")
    hostfile = "PBS_NODEFILE"
    runs = "pbs_tmrsh"

    def resources(self, nodes: int, each: int, output: str) -> list[str]:
        words = ["-N", "allranks", "-r", "n", "-j", "oe", "-o", output]
        words += ["-l", f"select={nodes}:ncpus={each}:mpiprocs={each}", "-l", "place=scatter"]
        return words


def _pbs_hosts(text: str) -> list[str]:
    """Returns the hosts of ``node1/0*4+node2/0*4``."""
    return list(dict.fromkeys(re.split(r"[./]", part)[0] for part in text.split("+") if part))


_LSF_WAITING = ("PEND", "PSUSP", "WAIT")
_LSF_RUNNING = ("RUN", "USUSP", "SSUSP")
#: The job's host does not answer LSF.
_LSF_UNKNOWN = "UNKWN"


class LsfJob(BatchJob):
    """A job that bsub has submitted."""

    system = "LSF"
    cancels = ("bkill",)
    looked_up_by = ("bhist", "-l")

    def look(self) -> JobState | None:
        state, queue, hosts, reason, ending = self._about()
        if state in ("", _LSF_UNKNOWN):
            return None
        if state in _LSF_RUNNING:
            return _lsf_hosts(hosts), ""
        if state in _LSF_WAITING:
            why = f": {reason}" if reason.strip("- ") else ""
            return (), f"LSF job {self.number} waits in queue {queue}{why}. Interrupt to cancel it."
        raise self.refused(f"has ended ({ending.strip('- ') or state})")

    def _about(self) -> list[str]:
        wanted = "stat queue exec_host pend_reason exit_reason delimiter='|'"
        said = ask("bjobs", "-a", "-noheader", "-o", wanted, self.number)
        return [*said.split("|"), "", "", "", "", ""][:5]

    def why_ended(self) -> str:
        """Returns LSF's reason for the job's end, as ``TERM_RUNLIMIT: job killed after …``."""
        state, *_, ending = self._about()
        if state in ("", _LSF_UNKNOWN, *_LSF_RUNNING):
            return ""
        why = ending.strip("- ")
        return f"LSF job {self.number} has ended" + (f": {why}" if why else "")


class LsfLauncher(HostfileLauncher):
    """Starts ranks on LSF's hosts."""

    name = "lsf"
    example = "--on lsf --nodes 2 --ntasks-per-node 4 -W 1:00"
    about = "and other options of bsub"
    job = LsfJob
    submits = "bsub"
    #: As bsub answers: ``Job <7> is submitted to default queue <normal>.``
    number = re.compile(r"(?<=Job <)\d+")
    hostfile = "LSB_DJOB_HOSTFILE"
    runs = "blaunch"

    def resources(self, nodes: int, each: int, output: str) -> list[str]:
        words = ["-J", "allranks", "-rn", "-o", output, "-n", str(nodes * each)]
        return [*words, "-R", f"span[ptile={each}]"]


def _lsf_hosts(text: str) -> list[str]:
    """Returns the hosts of ``4*node1:4*node2``."""
    names = (part.rpartition("*")[2].partition(".")[0] for part in text.split(":"))
    return list(dict.fromkeys(filter(None, names)))
