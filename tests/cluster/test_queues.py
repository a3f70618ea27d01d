"""Jobs of batch systems, on stand-ins of their commands: what these say, or do not say."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from allranks import Cluster, __version__
from allranks.cluster.connection import Connection
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers import batch, pbs_lsf, slurm
from allranks.cluster.launchers.batch import BatchJob
from allranks.cluster.launchers.job import Host
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.state import ClusterState
from allranks.errors import StartFailed, UsageError
from allranks.features.hosts.notebook import NotebookHosts
from allranks.records import limits
from allranks.records.config import Invitation
from tests.kernel import wait_until

INVITATION = Invitation("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "key")
TOLD = {
    "squeue": "CANCELLED|None|N/A|main|\n",
    "qstat": '{"Jobs": {"7": {"job_state": "F", "Exit_status": 271}}}\n',
    "bjobs": "EXIT|normal|-|-|TERM_OWNER: job killed by owner\n",
}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def put(commands: Path, name: str, script: str) -> None:
    (commands / name).write_text(f"#!/bin/sh\n{script}\n")
    (commands / name).chmod(0o755)


@pytest.fixture(params=[slurm.SlurmJob, pbs_lsf.PbsJob, pbs_lsf.LsfJob])
def job(request, commands: Path, tmp_path: Path):
    for name in (*TOLD, "scancel", "qdel", "bkill"):
        put(commands, name, "exit 1")
    invitation = batch.invite(INVITATION, str(tmp_path))
    more = [("scancel",)] if request.param is slurm.SlurmJob else []
    made: BatchJob = request.param("7", 2, invitation, str(tmp_path / "output"), *more)
    yield made
    made.close()


def test_a_job_that_is_cancelled_while_it_waits_is_waited_for_no_longer(job, commands):
    for name, said in TOLD.items():
        put(commands, name, f"cat <<'.'\n{said}.")
    with pytest.raises(StartFailed, match=f"expected {job.system} job 7 to run, found that it "):
        job.hosts()


@pytest.mark.parametrize("ended", [True, False])
def test_a_job_whose_hosts_have_another_allranks_is_given_up_and_says_what_to_install(
    job, commands, tmp_path, ended
):
    put(commands, "squeue", "echo 'RUNNING|None|N/A|main|h1'")
    put(commands, "scontrol", "echo h1")
    put(commands, "qstat", """echo '{"Jobs": {"7": {"job_state": "R", "exec_host": "h1/0*2"}}}'""")
    put(commands, "bjobs", "echo 'RUN|normal|2*h1|-|-'")
    assert [host.name for host in job.hosts()] == ["h1"]
    (tmp_path / "output").write_text("/bin/python: No module named allranks.relay\n")
    for name, said in TOLD.items() if ended else ():
        put(commands, name, f"cat <<'.'\n{said}.")
    job._next_poll = 0.0
    with pytest.raises(StartFailed) as failed:
        job.hosts()
    assert str(failed.value).endswith(
        "No module named allranks.relay\n"
        f"A host has another allranks; the notebook has {__version__}. Install this there"
    )


def test_a_job_that_the_queue_has_forgotten_is_given_up_and_named(job, monkeypatch):
    monkeypatch.setattr(batch, "_POLL_SECONDS", 0.0)
    assert job.hosts() == ()  # it may not be known yet
    monkeypatch.setattr(batch, "_UNKNOWN_SECONDS", -1.0)
    with pytest.raises(StartFailed) as failed:
        job.hosts()
    look = {"Slurm": "sacct -j 7", "PBS": "qstat -x -f 7", "LSF": "bhist -l 7"}[job.system]
    assert str(failed.value).startswith(f"expected {job.system} to report the state of job 7")
    assert str(failed.value).endswith(f"To look it up: {look}")


def test_a_queue_that_is_silent_now_and_then_is_asked_again(job, commands, monkeypatch):
    monkeypatch.setattr(batch, "_POLL_SECONDS", 0.0)
    assert job.hosts() == ()
    job._known_at -= batch._UNKNOWN_SECONDS / 2
    put(commands, "squeue", "echo 'PENDING|Priority|N/A|main|'")
    put(commands, "qstat", """echo '{"Jobs": {"7": {"job_state": "Q"}}}'""")
    put(commands, "bjobs", "echo 'PEND|normal|-|-|-'")
    job.hosts()
    assert " waits in " in job.waits()
    job._known_at -= batch._UNKNOWN_SECONDS / 2
    for name in TOLD:
        put(commands, name, "exit 1")
    assert job.hosts() == []


@pytest.mark.parametrize(
    ("reason", "running", "ends"),
    [
        ("PartitionTimeLimit", "6", True),
        ("QOSMaxWallDurationPerJobLimit", "6", True),
        ("AssocMaxNodePerJobLimit", "", True),
        ("QOSMaxJobsPerUserLimit", "", True),
        ("QOSMaxJobsPerUserLimit", "6", False),  # which may end
        ("Priority", "", False),
        ("Resources", "", False),
        ("QOSGrpNodeLimit", "", False),  # others' jobs may end
    ],
)
def test_a_reason_that_never_ends_by_itself_ends_the_wait(
    commands, tmp_path, reason, running, ends
):
    put(
        commands,
        "squeue",
        f'case "$*" in\n*RUNNING*) echo {running};;\n'
        f"*-j*) echo 'PENDING|{reason}|N/A|main|';;\nesac",
    )
    put(commands, "scancel", "exit 0")
    job = slurm.SlurmJob(
        "7", 2, str(tmp_path / "invitation"), str(tmp_path / "output"), ["scancel"]
    )
    if not ends:
        assert job.hosts() == []
        assert f"({reason})" in job.waits()
    else:
        with pytest.raises(
            StartFailed, match=rf"job 7 to run, found that it cannot .*\({reason}\)"
        ):
            job.hosts()
    job.close()


@pytest.mark.parametrize("words", [["--array=0-3"], ["-a", "0-3"], ["-a0-3"], ["--array", "1,2"]])
def test_an_array_of_jobs_is_refused_before_it_is_submitted(commands, words):
    put(commands, "sbatch", "exit 1")
    with pytest.raises(UsageError, match="expected one job for all ranks, found "):
        slurm.SlurmLauncher(options=["--nodes", "2", *words])


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def submit(commands: Path, tmp_path: Path, script: str) -> StartFailed:
    put(commands, "sbatch", script)
    with pytest.raises(StartFailed) as failed:
        slurm.SlurmLauncher(options=["--nodes", "2"]).run(
            INVITATION, str(tmp_path), lambda *_: None
        )
    assert not (tmp_path / "invitation").exists()
    return failed.value


def test_a_silent_submit_command_is_ended_with_its_children_and_one_without_a_number_is_named(
    commands, tmp_path, monkeypatch
):
    monkeypatch.setattr(batch, "_ASK_SECONDS", 0.5)
    known = f"98765.{os.getpid()}"  # of this run of the tests only
    failed = submit(commands, tmp_path, f"sleep {known} &\nwait")
    assert str(failed).startswith("expected Slurm to accept a job within 0.5 s, found no answer.")
    assert "The command was: sbatch --job-name=allranks" in str(failed)
    # One that has been killed ends when the system comes to it.
    wait_until(lambda: not [p for p in psutil.process_iter() if known in words_of(p)])
    monkeypatch.setattr(batch, "_ASK_SECONDS", 20.0)
    failed = submit(commands, tmp_path, "echo later")
    assert str(failed).startswith("expected sbatch to print the job's number, found 'later'.")


def test_an_interrupt_while_a_job_is_submitted_cancels_it(commands, tmp_path, monkeypatch):
    monkeypatch.setenv("ALLRANKS_LOG_DIR", str(tmp_path / "logs"))
    asked, busy, cancelled = (commands / name for name in ("asked", "busy", "cancelled"))
    busy.touch()
    put(commands, "sinfo", "echo localhost")
    put(commands, "squeue", "echo 'PENDING|Priority|N/A|main|'")
    put(commands, "sbatch", f"touch {asked}; while [ -e {busy} ]; do sleep .05; done; echo job 7")
    put(commands, "scancel", f"echo $* > {cancelled}")

    def press() -> None:
        wait_until(asked.exists)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        busy.unlink()

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        Cluster(launcher="slurm --nodes 1").start()
    pressing.join()
    assert cancelled.read_text() == "7\n"
    assert list(tmp_path.rglob("invitation")) == []


@pytest.fixture
def _in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")


@pytest.mark.usefixtures("_in_a_job")
@pytest.mark.parametrize("script", ["exit 1", "echo h1"])
def test_a_job_whose_nodes_slurm_does_not_tell_is_named(commands, tmp_path, script):
    put(commands, "scontrol", script)
    put(commands, "sbatch", "exit 1")
    with pytest.raises(StartFailed, match=r"expected the nodes of this Slurm job, 'h\[1-2\]'"):
        slurm.SlurmLauncher().run(INVITATION, str(tmp_path), lambda *_: None)
    assert not (tmp_path / "invitation").exists()


@pytest.mark.usefixtures("_in_a_job")
def test_an_srun_that_does_not_end_is_killed(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "_ENDING_SECONDS", 0.2)
    put(commands, "scontrol", "echo h1 h2")
    put(commands, "sbatch", "exit 1")
    put(commands, "srun", f"trap '' TERM; touch {tmp_path}/runs; exec sleep 98764")
    job = slurm.SlurmLauncher().run(INVITATION, str(tmp_path), lambda *_: None)
    wait_until((tmp_path / "runs").exists)
    job.close()
    assert job._running.returncode == -9


class Nowhere(MultiHostLauncher):
    """Starts nothing, and has two hosts for it."""

    name = "nowhere"

    def hosts(self):
        return [Host("h1", 2), Host("h2", 2)]

    def address(self):
        return "127.0.0.1"

    def run(self, invitation, log_dir, tell):
        return self

    def waits(self):
        return ""

    all_came = close = why_ended = size = waits


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Connection:
    monkeypatch.setenv("ALLRANKS_LOG_DIR", str(tmp_path))
    return Connection(ClusterState(4), (), Nowhere(), (), {}, NotebookHooks((NotebookHosts,)))


def test_a_start_that_takes_too_long_names_the_hosts_that_nothing_was_heard_of(
    nowhere, monkeypatch
):
    monkeypatch.setattr(limits, "START_SECONDS", -4.0)
    with pytest.raises(StartFailed) as failed:
        nowhere.start(lambda waits: None, lambda up, started, module: None)
    assert "ranks 0–3 did not start on h1, h2; no connection from h1, h2." in str(failed.value)
    assert "that host from reaching tcp://127.0.0.1:" in str(failed.value)
