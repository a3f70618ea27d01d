"""The host agent's socket and first line, and what lets a hundred ranks start on a few cores."""

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from types import SimpleNamespace

import pytest

from allranks.cluster import options
from allranks.engine import processes
from allranks.engine.host.host_agent import HostAgent
from allranks.engine.processes import first_line
from allranks.records.agent import LauncherText, to_line
from allranks.records.config import HostAgentConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the host agent needs Linux")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("said", [b"", b"abc", (100).to_bytes(8, "little") + b"half of it"])
def test_a_process_that_dies_at_the_door_is_let_go_with_all_it_held(said, tmp_path):
    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as stub:
        door.bind(str(tmp_path / "door"))
        door.listen()
        stub.connect(str(tmp_path / "door"))
        reader, writer = os.pipe()
        if said:
            socket.send_fds(stub, [said], [writer])
        os.close(writer)
        stub.shutdown(socket.SHUT_WR)
        HostAgent._admit(SimpleNamespace(door=door))
        # The end of a pipe or connection is read once nobody holds its other end.
        with open(reader, "rb") as pipe:
            assert pipe.read() == b""
        with suppress(ConnectionResetError):
            assert stub.recv(1) == b""


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (b'{"size": 2}\njoin {}\nserve ', (b'{"size": 2}', b"join {}\nserve ")),
        (b'{"size": 2}\n', (b'{"size": 2}', b"")),
        (b'{"size"', None),
    ],
)
def test_what_is_said_right_behind_the_configuration_is_kept_for_later(said, found):
    reader, writer = os.pipe()
    try:
        os.write(writer, said)
        os.close(writer)
        assert first_line(reader) == found
    finally:
        os.close(reader)


def test_there_may_be_128_ranks_on_any_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert options.choose_size(128, ()) == 128


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a thread sleep longer")
def test_ranks_that_outnumber_the_cores_sleep_longer_while_mpi_starts():
    def slack() -> int:
        return ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)

    before = slack()
    with processes.sleeping_longer(100 * (os.cpu_count() or 1)):
        assert slack() > before
    assert slack() == before
    with processes.sleeping_longer(1):
        assert slack() == before


def test_mpis_files_are_not_in_a_folder_that_another_user_may_have_made(tmp_path):
    taken = tmp_path / "allranks-mpi-0badcafe"
    taken.mkdir()
    taken.chmod(0o777)
    agent = SimpleNamespace(
        config=SimpleNamespace(shared_dir=str(taken), several_hosts=False), _shared=-1
    )
    HostAgent._make_shared_dir(agent)
    assert agent._shared == -1  # then the session's folder is used
    agent.config.several_hosts = True  # where the first host may use that name
    with pytest.raises(PermissionError, match="for you alone"):
        HostAgent._make_shared_dir(agent)
    agent.config.shared_dir = str(tmp_path / "free")
    HostAgent._make_shared_dir(agent)
    assert (tmp_path / "free").stat().st_mode & 0o777 == 0o700
    os.close(agent._shared)


def test_the_folder_of_mpis_files_has_no_name_that_others_know_before_it_is_made(tmp_path):
    def config():
        session = str(tmp_path / "allranks-session-1-0badcafe")
        return HostAgentConfig(2, (), {}, session, "l", "w", (), "", "")

    def made():
        assert not os.path.lexists(agent.config.session_dir)
        raise ZeroDivisionError

    assert len({config().shared_dir, config().shared_dir}) == 2
    agent = SimpleNamespace(config=config(), _make_shared_dir=made)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ZeroDivisionError):
            HostAgent.run(agent)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_file_in_shared_memory_that_was_there_before_is_not_one_of_the_ranks():
    """Such files are removed at the end; a cell may have mapped one of the user's."""
    with tempfile.NamedTemporaryFile(prefix="allranks-test-", dir="/dev/shm") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            began = os.stat(file.name).st_ctime
            assert file.name in processes.shared_segments(os.getpid(), began)
            assert file.name not in processes.shared_segments(os.getpid(), began + 10)
            assert file.name in processes.segments_since(began)
            assert file.name not in processes.segments_since(began + 10)


def test_an_event_is_whole_though_a_signal_ends_its_write_early(monkeypatch):
    written = []

    def write_a_part(descriptor, data):
        assert descriptor == 1
        written.append(bytes(data[:1000]))
        return len(written[-1])

    monkeypatch.setattr(os, "write", write_a_part)
    processes.write_all(1, to_line(LauncherText("x" * 5000)))
    assert json.loads(b"".join(written)) == {"event": "launcher_text", "text": "x" * 5000}
