"""Attacks on the ports at which the notebook, or its caretaker, listens for other hosts."""

import dataclasses
import json
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.addresses import ANY_PORTS, LOOPBACK
from allranks.cluster.sockets import EventQueue, ListeningSockets, RankSockets
from allranks.errors import StartFailed
from allranks.features.attach.records import CaretakerConfig, Keep, Stay
from allranks.records.agent import to_line
from allranks.records.config import HostAgentConfig
from tests.attacks import send_large_messages, stay_idle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the caretaker needs Linux")


@pytest.fixture
def listening():
    return ListeningSockets.open(LOOPBACK, ANY_PORTS)


@pytest.fixture
def notebook(listening):
    wire = RankSockets(EventQueue(), NotebookHooks(()), listening)
    wire.listen()
    yield
    wire.close()


@pytest.fixture
def caretaker(listening, tmp_path):
    """A caretaker whose notebook has ended."""
    folder = tmp_path / "session"
    ranks = HostAgentConfig(1, (), {}, str(folder), "", "", (), *listening.urls(), interface="tcp")
    descriptors = listening.commands, listening.events
    config = CaretakerConfig(
        str(folder),
        dataclasses.asdict(ranks),
        listening.key,
        listening.secret_key,
        60.0,
        descriptors,
    )
    state = {"hosts": [["h1"]], "ended": [], "dead": [], "replaced": [], "starts_again": False}
    with subprocess.Popen(
        [sys.executable, "-m", "allranks.features.attach.caretaker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=descriptors,
        text=True,
    ) as process:
        said = [
            config.to_json(),
            to_line(Keep(state)).decode(),
            to_line(Stay(600.0, {})).decode(),
        ]
        process.stdin.write("\n".join(said) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"event": "ready"}
        process.stdin.close()
        yield
        assert process.poll() is None
        process.kill()
    listening.close()


@pytest.mark.parametrize("listens", ["notebook", "caretaker"])
def test_without_the_key_a_connection_takes_little_memory_and_ends_soon(
    listens, listening, request
):
    ports = [int(urlsplit(url).port or 0) for url in listening.urls()]
    request.getfixturevalue(listens)
    assert send_large_messages(*ports) == ["ended", "ended"]
    assert stay_idle(*ports) == ["ended", "ended"]


def test_a_folder_that_can_have_no_sockets_is_named(tmp_path):
    urls = f"ipc://{tmp_path}/missing/commands", f"ipc://{tmp_path}/missing/events"
    wire = RankSockets(EventQueue(), NotebookHooks(()), urls)
    try:
        with pytest.raises(StartFailed, match=f"expected to listen at {urls[0]}, found .*No such"):
            wire.listen()
    finally:
        wire.close()
