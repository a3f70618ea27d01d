"""Ranks on hosts that Slurm gives: ``--on slurm --nodes 2 --ntasks-per-node 4 --time 1:00:00``.

The options are sbatch's own. A notebook that runs in a job of several nodes itself has its ranks
there: ``--on slurm`` without options.

As a notebook in a job of two nodes has it: SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2
SLURM_JOB_NODELIST=h[1-2] SLURM_TASKS_PER_NODE=4(x2)
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from allranks.cluster.launchers.batch import (
    BatchJob,
    ask,
    invite,
    program,
    relay_command,
    submit,
)
from allranks.cluster.launchers.launcher import Host, Job, Tell
from allranks.cluster.launchers.spread import Spread, address_towards, check_size
from allranks.errors import StartFailed, UsageError
from allranks.records.config import Invitation

_PACKAGE = "apt-get install slurm-client"
_NODE_NAME = "SLURMD_NODENAME"
_ENDING_SECONDS = 5.0
_POLL_SECONDS = 0.2
_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SUSPENDED")
_ENDINGS = {
    "TIMEOUT": "ran into its time limit",
    "CANCELLED": "was cancelled",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted by another job",
    "DEADLINE": "ran into its deadline",
    "BOOT_FAIL": "lost a node, which did not boot",
    "FAILED": "failed",
    "COMPLETED": "ended",
}


class SlurmLauncher(Spread):
    """Starts ranks on Slurm's nodes.

    Args:
        options: sbatch's; none for the allocation that the notebook runs in.

    Raises:
        UsageError: they do not tell how many nodes and ranks there are to be.
        MissingDependency: Slurm is not here.
    """

    name = "slurm"

    def __init__(self, options: Sequence[str] = ()) -> None:
        program("sbatch", _PACKAGE)
        self._inside = not options and in_allocation(os.environ)
        self._asked, self._more = _parse(options)

    def size(self, n: int | None) -> int:
        """Returns how many ranks there are to be: nodes, times ranks a node."""
        if self._inside:
            return check_size(n, sum(_tasks_per_node(os.environ)))
        nodes, each, tasks = self._asked.nodes, self._asked.each, self._asked.tasks or n
        if each is None:
            if (tasks or nodes) % nodes:
                raise UsageError(
                    f"expected as many ranks on each of {nodes} nodes, found {tasks} in all. "
                    "Type for example: --nodes 2 --ntasks-per-node 4"
                )
            self._asked.each = each = (tasks or nodes) // nodes
        return check_size(tasks, nodes * each)

    def address(self) -> str:
        """Returns this machine's address on the way to the first node."""
        where = ["-p", self._asked.partition] if self._asked.partition else []
        nodes = ask("sinfo", "-h", "-N", "-o", "%N", *where).split()
        if not nodes:
            raise StartFailed(
                f"expected nodes of Slurm, found that sinfo {shlex.join(where)} tells none. "
                "Check the partition's name: sinfo"
            )
        return address_towards(nodes[0])

    def describe(self) -> str:
        """Returns the job's nodes, in a few words."""
        return "this Slurm job" if self._inside else f"{self._asked.nodes} nodes of Slurm"

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> Job:
        """Submits a job that runs the relay on every node, or runs it in this allocation."""
        path = invite(invitation, log_dir)
        if self._inside:
            return SrunJob(path, tell)
        output = os.path.join(log_dir, "slurm.log")
        nodes, each = self._asked.nodes, self._asked.each
        assert each is not None
        words = ["sbatch", "--parsable", "--job-name=allranks", *self._more]
        words += [f"--nodes={nodes}", f"--ntasks-per-node={each}", f"--output={output}"]
        # Its ranks are gone with a node, and what they had: to run it again would be of no use.
        words += ["--no-requeue"]
        if self._asked.partition:
            words.append(f"--partition={self._asked.partition}")
        said = submit("Slurm", words, f"#!/bin/sh\nexec {shlex.join(_srun(nodes, path))}\n", path)
        return SlurmJob(said.strip().partition(";")[0], each, path, output)


class SlurmJob(BatchJob):
    """A job that sbatch has submitted.

    Args:
        number: its number.
        ranks: how many ranks each node has.
        invitation: the path of the invitation.
        output: the path of what it writes.
    """

    def __init__(self, number: str, ranks: int, invitation: str, output: str) -> None:
        super().__init__("Slurm", number, ranks, ["scancel", number], invitation)
        self._output = output

    def look(self) -> tuple[Sequence[str], str]:
        """Returns the names of its nodes, once it runs, and its place in the queue until then."""
        said = ask("squeue", "-h", "-t", "all", "-j", self.number, "-o", "%T|%r|%S|%P|%N")
        if not said:
            return (), self._waits  # the controller is busy, or does not know it yet
        state, reason, start, partition, nodes = said.splitlines()[0].split("|")
        if state == "RUNNING":
            return ask("scontrol", "show", "hostnames", nodes).split(), ""
        if reason == "None":
            return (), self.submitted
        if state in _PENDING:
            return (), self._place(reason, start, partition)
        raise self.refused(_ENDINGS.get(state, f"is {state}"), self._output)

    def _place(self, reason: str, start: str, partition: str) -> str:
        queue = ask("squeue", "-h", "-t", "PENDING", "-p", partition, "--sort=-p,i", "-o", "%i")
        waiting = queue.split()
        place = waiting.index(self.number) + 1 if self.number in waiting else len(waiting) + 1
        when = "" if start in ("", "N/A") else f", expected to start {start.replace('T', ' ')}"
        return (
            f"Slurm job {self.number} waits in partition {partition}: place {place} of "
            f"{max(place, len(waiting))} ({reason}){when}. Interrupt to cancel it."
        )

    def why_ended(self) -> str:
        """Returns what ended it, as ``Slurm job 7 ran into its time limit (0:01:00)``."""
        return _why_ended(self.number)


class SrunJob:
    """The relay on every node of the allocation that the notebook runs in.

    Args:
        invitation: the path of the invitation.
        tell: called with every host when it has ended.
    """

    def __init__(self, invitation: str, tell: Tell) -> None:
        self._invitation = invitation
        self._names = ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        words = _srun(len(self._names), invitation)
        self._running = subprocess.Popen(
            [words[0], "--overlap", *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._tell = tell
        threading.Thread(target=self._watch, name="allranks-srun", daemon=True).start()

    def hosts(self) -> Sequence[Host]:
        """Returns the nodes, and how many ranks each has."""
        pairs = zip(self._names, _tasks_per_node(os.environ), strict=True)
        return [Host(name, ranks) for name, ranks in pairs]

    def waits(self) -> str:
        """Returns nothing."""
        return ""

    def why_ended(self) -> str:
        """Returns what ended the allocation, if it has ended."""
        return _why_ended(os.environ["SLURM_JOB_ID"])

    def all_came(self) -> None:
        """The invitation is needed no longer."""
        if os.path.exists(self._invitation):
            os.unlink(self._invitation)

    def _watch(self) -> None:
        assert self._running.stderr is not None
        said = self._running.stderr.read().decode("utf-8", "replace")
        code = self._running.wait()
        for name in self._names:
            self._tell(name, f"was left by srun, which ended with exit code {code}: {said.strip()}")

    def close(self) -> None:
        """Ends the relays where they have not ended by themselves."""
        self.all_came()
        try:
            self._running.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._running.terminate()
            self._running.wait()


def in_allocation(environment: Mapping[str, str]) -> bool:
    """Whether the notebook runs in a job of several nodes."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", "")
    return "SLURM_JOB_ID" in environment and nodes.isdecimal() and int(nodes) > 1


def _srun(nodes: int, invitation: str) -> list[str]:
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--mpi=none",
        # One task a node, whose ranks are to have all that the job has there.
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        *relay_command(invitation, _NODE_NAME),
    ]


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """Returns how many ranks each node has, of ``4(x2),1``."""
    counts: list[int] = []
    for part in environment.get("SLURM_TASKS_PER_NODE", "1").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found:
            counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _why_ended(number: str) -> str:
    deadline = time.monotonic() + _ENDING_SECONDS
    while True:
        said = ask("scontrol", "-o", "show", "job", number)
        found = dict(re.findall(r"(\w+)=(\S+)", said))
        state, reason = found.get("JobState", ""), found.get("Reason", "")
        if state == "COMPLETING" and reason == "TimeLimit":
            state = "TIMEOUT"
        if state != "COMPLETING" or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    if state in ("", "RUNNING", "COMPLETED", "COMPLETING"):
        return ""
    limit = f" of {found.get('TimeLimit')}" if state == "TIMEOUT" else ""
    return f"Slurm job {number} {_ENDINGS.get(state, f'is {state}')}{limit}"


class _Options(argparse.Namespace):
    nodes: int = 1
    each: int | None = None
    tasks: int | None = None
    partition: str = ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"expected options of sbatch, found: {message}. "
            "Type for example: --on slurm --nodes 2 --ntasks-per-node 4 --time 1:00:00"
        )


def _parse(options: Sequence[str]) -> tuple[_Options, list[str]]:
    """Returns the options that are needed here, and the others, which are sbatch's alone."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-N", "--nodes", type=int)
    parser.add_argument("--ntasks-per-node", type=int, dest="each")
    parser.add_argument("--ntasks", type=int, dest="tasks")
    parser.add_argument("-p", "--partition")
    parsed, more = parser.parse_known_args(list(options), namespace=_Options())
    if parsed.nodes < 1 or (parsed.each is not None and parsed.each < 1):
        parser.error("no node, or no rank")
    return parsed, more
