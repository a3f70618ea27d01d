"""What PBS and LSF share: a job that finds its hosts in a file, and runs the relay on each of them.

Their own daemons run it there (``pbs_tmrsh``, ``blaunch``), and end it with the job.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import ClassVar

from allranks.cluster.launchers.batch import (
    BatchJob,
    BatchOptions,
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


class HostfileLauncher(Spread):
    """Starts ranks on the hosts of a job.

    Args:
        options: how many hosts and ranks on each, and the batch system's own.
    """

    name: str
    system: ClassVar[str]
    """What the batch system is called."""
    example: ClassVar[str]
    """What an error suggests."""
    submits: ClassVar[str]
    """The program that takes a job."""
    number: ClassVar[re.Pattern[str]]
    """What finds the job's number in that program's answer."""
    hostfile: ClassVar[str]
    """The variable that has the path of the file, which names each host once a rank."""
    runs: ClassVar[str]
    """The program that runs a command on one host of the job."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        program(self.submits, _PACKAGE)
        self._asked: BatchOptions = parse_batch(options, self.example)

    def size(self, n: int | None) -> int:
        """Returns how many ranks there are to be."""
        return self._asked.size(n)

    def address(self) -> str:
        """Returns this machine's address."""
        return own_address()

    def describe(self) -> str:
        """Returns the job's hosts, in a few words."""
        return f"{self._asked.nodes} hosts of {self.system}"

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> Job:
        """Submits a job that runs the relay on every host."""
        path = invite(invitation, log_dir)
        output = os.path.join(log_dir, f"{self.name}.log")
        nodes, each = self._asked.nodes, self._asked.each
        words = [self.submits, *self.options(nodes, each, output), *self._asked.more]
        found = submit(self.system, words, self._script(path), path, self.number)
        return self.job(found[0], each, path, output)

    def options(self, nodes: int, each: int, output: str) -> list[str]:
        """Returns what asks for so many hosts and ranks on each, and for its output in a file."""
        raise NotImplementedError

    def job(self, number: str, each: int, invitation: str, output: str) -> BatchJob:
        """Returns the job of this number."""
        raise NotImplementedError

    def _script(self, path: str) -> str:
        """Returns a body that runs the relay on every host of the job, each under its name."""
        command = shlex.join(relay_command(path, _HOST))
        return (
            "#!/bin/sh\n"
            f'for host in $(sort -u "${self.hostfile}"); do\n'
            f'  {self.runs} "$host" env {_HOST}="${{host%%.*}}" {command} &\n'
            "done\n"
            "wait\n"
        )
