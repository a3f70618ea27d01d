"""What a notebook writes for other programs, and what tidies up however its process ends."""

import io
import json
import os
import subprocess
import sys
import tempfile
import threading

import pytest

from allranks.cluster.cleanup import CleanupProcess
from allranks.cluster.launchers import slurm
from allranks.features.ipyparallel import connection_files
from allranks.features.ipyparallel.connection_files import ConnectionFiles, _set_name
from tests.kernel import wait_until

SECONDS = 60
NOTEBOOK = """
import os, sys
from allranks.cluster.cleanup import CleanupProcess
keeper = CleanupProcess('touch "$1"', sys.argv[1])
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(monkeypatch):
    """Every pipe to a process has a second end, as in a process that was forked."""
    copies = []
    start = subprocess.Popen.__init__

    def begin(process, *words, **options):
        start(process, *words, **options)
        copies.append(os.dup(process.stdin.fileno()))

    monkeypatch.setattr(subprocess.Popen, "__init__", begin)
    yield
    for copy in copies:
        os.close(copy)


@pytest.mark.usefixtures("held")
def test_a_keeper_does_what_it_is_told_to_though_another_process_holds_its_pipe(tmp_path):
    keeper = CleanupProcess('rm "$1"; touch "$2"', *map(str, (tmp_path / "old", tmp_path / "new")))
    (tmp_path / "old").touch()
    keeper.close(SECONDS)
    keeper.close(SECONDS)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


class SharedPipe(io.FileIO):
    """A pipe on which another thread acts while the first write runs."""

    act = staticmethod(lambda: None)

    def write(self, line):
        act, self.act, descriptor = self.act, lambda: None, self.fileno()
        other = threading.Thread(target=act)
        other.start()
        other.join()
        return os.write(descriptor, line)


def test_a_keeper_may_be_closed_by_two_threads_at_once(tmp_path, monkeypatch):
    def begin(process, *words, **options):
        start(process, *words, **options)
        with process.stdin as pipe:
            process.stdin = SharedPipe(os.dup(pipe.fileno()), "wb")

    start = subprocess.Popen.__init__
    monkeypatch.setattr(subprocess.Popen, "__init__", begin)
    keeper = CleanupProcess('touch "$1"', str(tmp_path / "new"))
    keeper._process.stdin.act = lambda: keeper.close(0)
    keeper.close(SECONDS)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.usefixtures("held")
def test_a_job_is_cancelled_though_another_process_holds_the_pipe(tmp_path):
    invitation = tmp_path / "invitation"
    invitation.touch()
    cancels = ["sh", "-c", f"touch {tmp_path / 'cancelled'}"]
    job = slurm.SlurmJob("7", 2, str(invitation), str(tmp_path / "output"), cancels)
    job.close()
    wait_until((tmp_path / "cancelled").exists)
    assert [path.name for path in tmp_path.iterdir()] == ["cancelled"]


def test_a_keeper_tidies_up_after_a_killed_notebook_while_what_it_has_forked_lives(tmp_path):
    done = tmp_path / "done"
    notebook = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, str(done)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert notebook.stdin is not None
    assert notebook.stdout is not None
    child = int(notebook.stdout.readline())
    try:
        notebook.kill()
        notebook.wait()
        wait_until(done.exists)
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, 9)
        notebook.stdin.close()
        notebook.stdout.close()


NO_PROCESS = 2**22  # above the largest that Linux gives


@pytest.fixture
def security(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setattr(connection_files, "_CLOSE_SECONDS", SECONDS)
    folder = tmp_path / "profile_default" / "security"
    folder.mkdir(parents=True)
    return folder


def names(security):
    return sorted(path.name for path in security.iterdir())


class Watched(dict):
    """What is written: notes which files are there while it is."""

    def __init__(self, security):
        super().__init__(key="secret")
        self.security, self.seen = security, []

    def items(self):
        self.seen += self.security.glob("*.json")
        return super().items()


def test_a_file_is_whole_as_soon_as_it_has_its_name(security):
    files, client = ConnectionFiles(4), Watched(security)
    files.write(client, {}, None)
    assert client.seen == []
    assert json.loads((security / "ipcontroller-client.json").read_text()) == {"key": "secret"}
    assert len(names(security)) == 3
    files.close()
    assert names(security) == []


@pytest.mark.parametrize(
    "found",
    [
        {"engines": {"sets": {_set_name(): {"pid": NO_PROCESS}}}},
        {"engines": {"sets": {_set_name(): {"pid": "none"}}}},
        {"engines": {"sets": {_set_name(): {"pid": 10**30}}}},
        {"engines": []},
    ],
)
def test_whatever_a_file_of_another_cluster_says_the_files_are_written(security, found):
    (security / "cluster-other.json").write_text(json.dumps(found))
    files = ConnectionFiles(4)
    files.write({}, {}, None)
    assert "cluster-.json" in names(security)
    files.close()
    gone = found["engines"] and found["engines"]["sets"][_set_name()]["pid"] == NO_PROCESS
    assert names(security) == ([] if gone else ["cluster-other.json"])


def test_where_there_is_no_home_no_temporary_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.delenv("IPYTHONDIR", raising=False)
    monkeypatch.setenv("HOME", "/nowhere/home")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = ConnectionFiles(4)
    files.write({}, {}, None)
    files.close()
    assert slurm.slurm_settings() == slurm.SlurmSettings()
    assert names(tmp_path) == []
