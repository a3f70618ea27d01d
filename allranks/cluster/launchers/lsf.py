"""Ranks on hosts that LSF gives: ``--on lsf --nodes 2 --ntasks-per-node 4 -W 1:00``.

By the documented commands of IBM Spectrum LSF (bsub, bjobs, bkill, blaunch), and run against
stand-ins of them only: no LSF was to be had.

Source: IBM Spectrum LSF Command Reference, "bsub", "bjobs" and "blaunch".
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

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
from allranks.errors import StartFailed
from allranks.records.config import Invitation

_PACKAGE = "see your cluster's documentation"
_HOST = "ALLRANKS_HOST"
_WAITING = ("PEND", "PSUSP", "WAIT")
_RUNNING = ("RUN", "USUSP", "SSUSP")
_EXAMPLE = "--on lsf --nodes 2 --ntasks-per-node 4 -W 1:00"
#: As bsub answers: ``Job <7> is submitted to default queue <normal>.``
_SUBMITTED = re.compile(r"Job <(\d+)>")


class LsfLauncher(Spread):
    """Starts ranks on LSF's hosts.

    Args:
        options: how many hosts and ranks on each, and bsub's own.
    """

    name = "lsf"

    def __init__(self, options: Sequence[str] = ()) -> None:
        program("bsub", _PACKAGE)
        self._asked: BatchOptions = parse_batch(options, _EXAMPLE)

    def size(self, n: int | None) -> int:
        """Returns how many ranks there are to be."""
        return self._asked.size(n)

    def address(self) -> str:
        """Returns this machine's address."""
        return own_address()

    def describe(self) -> str:
        """Returns the job's hosts, in a few words."""
        return f"{self._asked.nodes} hosts of LSF"

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> Job:
        """Submits a job that runs the relay on every host."""
        path = invite(invitation, log_dir)
        output = os.path.join(log_dir, "lsf.log")
        nodes, each = self._asked.nodes, self._asked.each
        words = ["bsub", "-J", "allranks", "-rn", "-o", output, "-n", str(nodes * each)]
        words += ["-R", f"span[ptile={each}]", *self._asked.more]
        said = submit("LSF", words, _script(path), path)
        found = _SUBMITTED.search(said)
        if found is None:
            os.unlink(path)
            raise StartFailed(f"expected the number of a job of bsub, found: {said.strip()}")
        return LsfJob(found[1], each, path, output)


def _script(path: str) -> str:
    """Returns a body that runs the relay on every host of the job, each under its name.

    ``blaunch`` does so by LSF's own daemons, which end what they have started with the job.
    """
    command = shlex.join(relay_command(path, _HOST))
    return (
        "#!/bin/sh\n"
        'for host in $(sort -u "$LSB_DJOB_HOSTFILE"); do\n'
        f'  blaunch "$host" env {_HOST}="${{host%%.*}}" {command} &\n'
        "done\n"
        "wait\n"
    )


class LsfJob(BatchJob):
    """A job that bsub has submitted."""

    def __init__(self, number: str, ranks: int, invitation: str, output: str) -> None:
        super().__init__("LSF", number, ranks, ["bkill", number], invitation)
        self._output = output

    def look(self) -> tuple[Sequence[str], str]:
        """Returns the names of its hosts, once it runs, and what it waits for until then."""
        state, queue, hosts, reason, ending = self._about()
        if not state:
            return (), self._waits
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
        """Returns what LSF says of the job's end, as ``TERM_RUNLIMIT: job killed after …``."""
        state, *_, ending = self._about()
        if state in ("", *_RUNNING):
            return ""
        why = ending.strip("- ")
        return f"LSF job {self.number} has ended" + (f": {why}" if why else "")


def _hosts(text: str) -> list[str]:
    """Returns the hosts of ``4*node1:4*node2``."""
    names = (part.rpartition("*")[2].partition(".")[0] for part in text.split(":"))
    return list(dict.fromkeys(filter(None, names)))
