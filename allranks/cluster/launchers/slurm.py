"""Ranks on hosts that Slurm gives: ``--on slurm --nodes 2 --ntasks-per-node 4 --time 1:00:00``.

The options are sbatch's own, behind those that the user's profile of ipyparallel has for Slurm. A
notebook that runs in a job of several nodes itself has its ranks there: ``--on slurm`` without
options.

As a notebook in a job of two nodes has it: SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2
SLURM_JOB_NODELIST=h[1-2] SLURM_TASKS_PER_NODE=4(x2)
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allranks import python_path
from allranks.cluster.ipython_profile import profile_folder
from allranks.cluster.launchers.addresses import address_towards
from allranks.cluster.launchers.batch import (
    BatchJob,
    JobState,
    ask,
    invite,
    parse_batch,
    program,
    submit,
)
from allranks.cluster.launchers.job import RELAY, Host, Job, Tell, watch_command
from allranks.cluster.launchers.launcher import MultiHostLauncher, check_size
from allranks.errors import StartFailed, UsageError
from allranks.records.config import Invitation

_FILE = "ipcluster_config.py"
_EXAMPLE = "--on slurm --nodes 2 --ntasks-per-node 4 --time 1:00:00"
_PACKAGE = "apt-get install slurm-client"
_NODE_NAME = "SLURMD_NODENAME"
#: Two nodes, because one of them may be this machine.
_ASKED_NODES = 2
_ENDING_SECONDS = 5.0
#: As that of `BatchJob`, for a job whose last process has ended.
_POLL_SECONDS = 0.2
_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SUSPENDED")
#: Reasons of a wait that only other options, or an administrator, can end.
_NEVER = re.compile(
    r"Partition(TimeLimit|Config)|BadConstraints|DependencyNeverSatisfied|Invalid\w+"
    r"|\w+NotAllowed|(QOS|Assoc)Max\w*Per(Job|Node)\w*|QOSMin\w+|MaxMemPerLimit|ReservationDeleted"
    r"|(Association|QOS)TimeLimit"
)
#: Limits on what one user may have at the same time: they end with the user's other jobs.
_OF_USER = re.compile(r"(QOS|Assoc)Max\w*Per(User|Account)\w*|(QOS|Association|AssocMax)Jobs?Limit")
_ENDINGS = {
    "TIMEOUT": "reached its time limit",
    "CANCELLED": "was cancelled",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted by another job",
    "DEADLINE": "reached its deadline",
    "BOOT_FAIL": "lost a node that did not boot",
    "FAILED": "failed",
    "COMPLETED": "ended",
    "COMPLETING": "is ending",
}


@dataclass(frozen=True)
class SlurmSettings:
    """How jobs are submitted and cancelled here, and with which options.

    ``group`` of ``job_id`` is the job's number in the output of the submit command.
    """

    submit: tuple[str, ...] = ("sbatch",)
    delete: tuple[str, ...] = ("scancel",)
    options: tuple[str, ...] = ()
    job_id: re.Pattern[str] = re.compile(r"\d+")
    group: int = 0


def slurm_settings() -> SlurmSettings:
    """Returns the options of ``c.SlurmLauncher`` and its like in the profile's
    ``ipcluster_config.py``.

    Templates are ignored: they would start engines that are not ranks of one world.
    """
    place = profile_folder()
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
    except Exception as error:  # a user's code may raise anything
        raise UsageError(
            f"expected ipyparallel's settings of Slurm in {path}, found {error!r}. Correct it"
        ) from error


class SlurmLauncher(MultiHostLauncher):
    """Starts ranks on Slurm's nodes.

    ``options`` are sbatch's; without any it uses the allocation that the notebook runs in.
    """

    name = "slurm"
    example = _EXAMPLE
    about = "and other options of sbatch"
    takes_options = True

    def __init__(self, where: str = "", options: Sequence[str] = ()) -> None:
        super().__init__(where, options)
        self._settings = slurm_settings()
        program(self._settings.submit[0], _PACKAGE)
        self._inside = not options and in_allocation(os.environ)
        self._asked = parse_batch([*self._settings.options, *options], _EXAMPLE)
        if array := [word for word in self._asked.more if re.match(r"--array\b|-a", word)]:
            raise UsageError(
                f"expected one job for all ranks, found {array[0]}, which makes one of each task. "
                f"Leave it out, and type for example: {_EXAMPLE}"
            )

    @classmethod
    def check(cls) -> None:
        program(slurm_settings().submit[0], _PACKAGE)
        super().check()

    @classmethod
    def is_default(cls, environment: Mapping[str, str]) -> bool:
        return in_allocation(environment)

    def size(self, n: int | None) -> int:
        if self._inside:
            return check_size(n, sum(_tasks_per_node(os.environ)))
        return self._asked.size(n)

    def address(self) -> str:
        where = _partition(self._asked.more)
        nodes = list(dict.fromkeys(ask("sinfo", "-h", "-N", "-o", "%N", *where).split()))
        if not nodes:
            raise StartFailed(
                f"expected nodes of Slurm, found none by sinfo {shlex.join(where)}. "
                "Check the partition's name: sinfo"
            )
        return address_towards(*nodes[:_ASKED_NODES])

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> Job:
        """Submits a job that runs the relay on every node, or runs it in this allocation."""
        if self._inside:
            hosts = _own_hosts(os.environ)
            return SrunJob(hosts, invite(invitation, log_dir), tell)
        path = invite(invitation, log_dir)
        output = os.path.join(log_dir, "slurm.log")
        nodes, each = self._asked.nodes, self._asked.each
        words = [*self._settings.submit, "--job-name=allranks", *self._asked.more]
        words += [f"--nodes={nodes}", f"--ntasks-per-node={each}", f"--output={output}"]
        # A lost node ends its ranks and their data: to run the job again would not help.
        words += ["--no-requeue"]
        script = f"#!/bin/sh\nexec {shlex.join(_srun(nodes, path))}\n"
        number = submit("Slurm", words, script, path, self._settings.job_id)
        cancel = self._settings.delete
        return SlurmJob(number[self._settings.group], each, path, output, cancel)


class SlurmJob(BatchJob):
    """A job that sbatch has submitted."""

    system = "Slurm"
    looked_up_by = ("sacct", "-j")

    def __init__(
        self, number: str, ranks: int, invitation: str, output: str, cancels: Sequence[str]
    ) -> None:
        self.cancels = cancels
        super().__init__(number, ranks, invitation, output)

    def look(self) -> JobState | None:
        said = ask("squeue", "-h", "-t", "all", "-j", self.number, "-o", "%T|%r|%S|%P|%N")
        if not said:
            return None
        state, reason, start, partition, nodes = said.splitlines()[0].split("|")
        if state == "RUNNING":
            return ask("scontrol", "show", "hostnames", nodes).split(), ""
        if state in _PENDING:
            self._check(reason, partition)
            looked_at = reason != "None"
            return (), self._place(reason, start, partition) if looked_at else self.submitted
        raise self.refused(_ENDINGS.get(state, f"is {state}"))

    def _check(self, reason: str, partition: str) -> None:
        """Raises StartFailed for a reason that does not end by itself."""
        alone = _OF_USER.fullmatch(reason) and not ask(
            "squeue", "-h", "-t", "RUNNING", "-u", str(os.geteuid()), "-o", "%i"
        )
        if alone or _NEVER.fullmatch(reason):
            limits = f"scontrol show partition {partition}; sacctmgr show qos; sacctmgr show assoc"
            raise self.refused(
                f"cannot with these options ({reason}), however long it waits. "
                f"Change them, for example --time or --nodes. To see the limits: {limits}"
            )

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
        return _why_ended(self.number)


class SrunJob(Job):
    """The relay on every node of the notebook's allocation; ``tell`` gets each host when srun has
    ended.
    """

    def __init__(self, hosts: Sequence[Host], invitation: str, tell: Tell) -> None:
        self._hosts = hosts
        self._invitation = invitation
        words = _srun(len(hosts), invitation)
        self._running = subprocess.Popen(
            [words[0], "--overlap", *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=python_path.without_current_folder(os.environ),
            start_new_session=True,
        )
        watch_command("srun", self._running, hosts, tell)

    def why_ended(self) -> str:
        return _why_ended(os.environ["SLURM_JOB_ID"])

    def close(self) -> None:
        """Ends the relays that have not ended by themselves."""
        self.all_came()
        for end in (self._running.terminate, self._running.kill):
            try:
                self._running.wait(_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                end()
        self._running.wait()


def in_allocation(environment: Mapping[str, str]) -> bool:
    nodes = environment.get("SLURM_JOB_NUM_NODES", "")
    return "SLURM_JOB_ID" in environment and nodes.isdecimal() and int(nodes) > 1


def _srun(nodes: int, invitation: str) -> list[str]:
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--mpi=none",
        # There is one task on each node, and its ranks may use all cores of the job there.
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        *RELAY,
        "--join",
        invitation,
        _NODE_NAME,
    ]


def _own_hosts(environment: Mapping[str, str]) -> list[Host]:
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    names = ask("scontrol", "show", "hostnames", nodes).split()
    ranks = _tasks_per_node(environment)
    if not names or len(names) != len(ranks):
        raise StartFailed(
            f"expected the nodes of this Slurm job, {nodes!r}, and the ranks of each, found nodes "
            f"{names} and ranks {ranks}. Type: scontrol show hostnames; echo $SLURM_TASKS_PER_NODE"
        )
    return [Host(name, count) for name, count in zip(names, ranks, strict=True)]


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """Returns the number of ranks of each node, from ``4(x2),1``."""
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
        time.sleep(_POLL_SECONDS)  # Slurm can only be asked: it sends no event for a state of a job
    if state in ("", "RUNNING", "COMPLETED", "COMPLETING"):
        return ""
    limit = f" of {found.get('TimeLimit')}" if state == "TIMEOUT" else ""
    return f"Slurm job {number} {_ENDINGS.get(state, f'is {state}')}{limit}"


def _partition(options: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-p", "--partition")
    found = parser.parse_known_args(list(options))[0].partition
    return [f"--partition={found}"] if found else []
