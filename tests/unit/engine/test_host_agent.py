"""What comes to the host agent's socket and dies there does not keep it."""

import os
import socket
import sys
from types import SimpleNamespace

import pytest

from allranks.engine.host.host_agent import HostAgent, first_line

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the host agent needs Linux")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("said", [b"", b"abc", (100).to_bytes(8, "little") + b"half of it"])
def test_a_process_that_dies_at_the_door_is_let_go_with_all_it_held(said, tmp_path):
    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as stub:
        door.bind(str(tmp_path / "door"))
        door.listen()
        stub.connect(str(tmp_path / "door"))
        before = len(os.listdir("/proc/self/fd"))
        if said:
            socket.send_fds(stub, [said], [0])
        stub.shutdown(socket.SHUT_WR)
        HostAgent._admit(SimpleNamespace(door=door))
        # Fewer where what earlier tests held has been let go meanwhile.
        assert len(os.listdir("/proc/self/fd")) <= before


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
