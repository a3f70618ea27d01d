"""What batch systems share: a job that is submitted, waits, runs the relay on every host, and ends.

The invitation, with its key, is in a file that only this user may read, in the folder of the
cluster's logs, which the hosts must share. It is removed as soon as all hosts have connected.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, NoReturn

from allranks import python_path
from allranks.cluster.cleanup import CleanupProcess
from allranks.cluster.launchers.job import Host, Job, last_lines, other_version
from allranks.cluster.launchers.launcher import check_size
from allranks.errors import MissingDependency, StartFailed, UsageError
from allranks.records.config import Invitation

#: A restart of the batch system's controller takes less.
_UNKNOWN_SECONDS = 60.0
_ASK_SECONDS = 20.0
_CLOSE_SECONDS = 10.0
#: The batch systems report no change of a job to the program of its user: they are asked.
_POLL_SECONDS = 1.0
#: Runs when the kernel ends the job, and when the kernel has died.
_CANCEL = 'rm -f "$1"; shift; "$@" > /dev/null 2>&1'


def program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingDependency(
            f"expected {name}, found no such program on this machine. Start the notebook on the "
            f"cluster's login node, or install it: {package}"
        )
    return found


def ask(*words: str) -> str:
    """Returns the output of a batch system's program; "" if it fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def submit(
    system: str, words: Sequence[str], script: str, invitation: str, number: re.Pattern[str]
) -> re.Match[str]:
    """Submits a script; returns the job's number, as ``number`` finds it in the answer.

    Without a number it removes the invitation: a job that was submitted nevertheless ends as soon
    as it begins.
    """
    try:
        said = _answer(system, words, script)
        found = number.search(said)
        if found is None:
            raise StartFailed(
                f"expected {words[0]} to print the job's number, found {said.strip()!r}. The "
                f"pattern for it is {number.pattern!r}"
            )
    except BaseException:
        os.unlink(invitation)
        raise
    return found


def _answer(system: str, words: Sequence[str], script: str) -> str:
    typed = f"The command was: {shlex.join(words)}"
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Which most systems give the job.
        env=python_path.without_current_folder(os.environ),
        # An interrupt of the kernel goes to its whole process group: a job could be submitted
        # without its number being read.
        start_new_session=True,
    ) as asked:
        try:
            said, problem = asked.communicate(script, _ASK_SECONDS)
        except subprocess.TimeoutExpired as error:
            os.killpg(asked.pid, signal.SIGKILL)
            raise StartFailed(
                f"expected {system} to accept a job within {_ASK_SECONDS:g} s, found no answer. "
                f"Try again later; a job that it accepts now ends as soon as it starts. {typed}"
            ) from error
    if asked.returncode:
        raise StartFailed(
            f"expected {system} to accept a job, found {problem.strip() or said.strip()}\n{typed}"
        )
    return said


def invite(invitation: Invitation, log_dir: str) -> str:
    """Returns the path of a new file with the invitation, mode 0600."""
    path = os.path.join(log_dir, "invitation")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as kept:
        kept.write(invitation.to_json())
    return path


class BatchOptions(argparse.Namespace):
    """The number of hosts and ranks of a job, and options of the batch system."""

    nodes: int = 1
    ntasks_per_node: int | None = None
    ntasks: int | None = None
    more: Sequence[str] = ()

    @property
    def each(self) -> int:
        if self.ntasks_per_node is not None:
            return self.ntasks_per_node
        return (self.ntasks or self.nodes) // self.nodes

    def size(self, n: int | None) -> int:
        """Returns the number of ranks; raises UsageError if ``n`` is another number, or no multiple
        of the number of hosts.
        """
        if self.ntasks is None:
            self.ntasks = n
        if self.ntasks is not None and self.ntasks % self.nodes:
            raise UsageError(
                f"expected the same number of ranks on each of {self.nodes} hosts, found "
                f"{self.ntasks} in all. Type for example: --nodes 2 --ntasks-per-node 4"
            )
        return check_size(self.ntasks, self.nodes * self.each)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"expected the options of a job, found: {message}. {self.epilog}")


def parse_batch(options: Sequence[str], example: str) -> BatchOptions:
    """Parses options as typed. ``example`` is for errors about the number of hosts or ranks."""
    parser = _Parser(add_help=False, allow_abbrev=False, epilog=f"Type for example: {example}")
    parser.add_argument("-N", "--nodes", type=int)
    parser.add_argument("--ntasks-per-node", type=int)
    parser.add_argument("--ntasks", type=int)
    parsed, more = parser.parse_known_args(list(options), namespace=BatchOptions())
    parsed.more = more
    if parsed.nodes < 1 or parsed.each < 1:
        parser.error("no host, or no rank")
    return parsed


#: The names of a job's hosts, once it runs, and what it waits for until then.
JobState = tuple[Sequence[str], str]


class BatchJob(Job):
    """A job in a batch system's queue, and then on its hosts, with ``ranks`` on each.

    ``invitation`` is the path of the invitation, ``output`` that of the job's output.
    """

    system: ClassVar[str]
    #: The command that cancels a job, up to its number.
    cancels: Sequence[str]
    #: The command that reports on a job that has ended, up to its number.
    looked_up_by: ClassVar[Sequence[str]]
    _known_at: float | None = None

    def __init__(self, number: str, ranks: int, invitation: str, output: str) -> None:
        self.number = number
        self._output = output
        self._ranks = ranks
        self._invitation = invitation
        self._next_poll = 0.0
        self._waits = self.submitted
        self._keeper = CleanupProcess(_CANCEL, invitation, *self.cancels, number)

    def hosts(self) -> Sequence[Host]:
        """Returns its hosts; none in the queue. Raises StartFailed if it has ended."""
        if time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + _POLL_SECONDS
            found = self.look()
            self._check_known(known=found is not None)
            if found is not None:
                names, self._waits = found
                self._hosts = [Host(name, self._ranks) for name in names]
            # The job runs on where other hosts have this version.
            if self._hosts and other_version(self._written(), ""):
                raise self.refused("cannot start the ranks of a host")
        return self._hosts

    def _check_known(self, known: bool) -> None:
        now = time.monotonic()
        self._known_at = now if known or self._known_at is None else self._known_at
        if now - self._known_at > _UNKNOWN_SECONDS:
            raise StartFailed(
                f"expected {self.system} to report the state of job {self.number}, found no report "
                f"for {_UNKNOWN_SECONDS:g} s: the job was cancelled, or has expired. To "
                f"look it up: {shlex.join([*self.looked_up_by, self.number])}"
            )

    @property
    def submitted(self) -> str:
        """The line until the batch system reports a state."""
        return f"{self.system} job {self.number} was submitted. Interrupt to cancel it."

    def look(self) -> JobState | None:
        """Returns the names of its hosts once it runs; until then the reason of its wait.

        None if the batch system is too busy to answer, or does not list the job. It is asked again
        until all hosts have connected. Raises StartFailed if the job has ended.
        """
        raise NotImplementedError

    def waits(self) -> str:
        return self._waits

    def refused(self, what: str) -> StartFailed:
        """Returns the error for a job that has ended, with the last lines of its output."""
        text = self._written()
        lines = f"\n{last_lines(text)}{other_version(text, 'A host has')}".rstrip()
        return StartFailed(
            f"expected {self.system} job {self.number} to run, found that it {what}.{lines}"
        )

    def _written(self) -> str:
        """Returns the job's output as far as it is there: some systems copy it at the end."""
        with suppress(OSError), open(self._output, errors="replace") as log:
            return log.read()
        return ""

    def close(self) -> None:
        """Cancels the job unless it has ended by itself."""
        self.all_came()
        # Where the batch system does not answer, it is asked as long as this takes.
        self._keeper.close(_CLOSE_SECONDS)
