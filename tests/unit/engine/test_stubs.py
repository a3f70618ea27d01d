"""The program that a launcher runs in place of a rank, with the host agent's end of its socket."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.engine.host import stubs


@pytest.fixture
def door(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "door"))
        listening.listen()
        listening.settimeout(60)
        yield listening


def start(door: socket.socket, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    kind, *more = words
    return subprocess.Popen([*stubs.command(kind, door.getsockname()), *more], **options)


def test_a_stub_sends_its_environment_and_descriptors_and_ends_as_the_rank(door):
    reader, writer = os.pipe()
    odd = {b"PATH": b"/b\xe9n:\xc3\xa9", b"QUOTED": b'a "b"\\\n\t', b"PMI_FD": str(writer).encode()}
    stub = start(door, "rank", "[3, 4]", env=odd, pass_fds=[writer])
    place, _ = door.accept()
    with place:
        head, received, _, _ = socket.recv_fds(place, 8, 8)
        with place.makefile("rb") as rest:
            told = json.loads(rest.read(int.from_bytes(head, "little")))
        os.write(*received, b"from the stub's descriptor")
        place.sendall((7).to_bytes(8, "little", signed=True))
    found = {os.fsencode(n): os.fsencode(v) for n, v in told.pop("environment").items()}
    assert odd.items() <= found.items()  # Python may add the locale
    assert told == {"descriptors": [writer], "replaced": [3, 4]}
    assert os.read(reader, 99) == b"from the stub's descriptor"
    assert stub.wait(60) == 7
    for descriptor in (reader, writer, *received):
        os.close(descriptor)


@pytest.mark.parametrize("code", [-signal.SIGTERM, -signal.SIGKILL, 0])
def test_a_stub_ends_by_the_signal_of_the_rank(door, code):
    stub = start(door, "rank")
    place, _ = door.accept()
    with place:
        place.sendall(code.to_bytes(8, "little", signed=True))
        assert stub.wait(60) == code


def test_a_stub_ends_with_the_host_agent(door):
    stub = start(door, "rank")
    door.accept()[0].close()
    assert stub.wait(60) == 1


def test_a_stub_of_ssh_asks_for_its_command_and_waits(door):
    stub = start(door, "shell", "h1", "echo", 'a "b"', "é")
    place, _ = door.accept()
    with place, place.makefile("rb") as request:
        assert json.loads(request.readline()) == {"host": "h1", "command": 'echo a "b" é'}
    assert stub.wait(60) == 0


def test_a_stub_loads_nothing_that_takes_long(door):
    """A start of many ranks has many: socket, json and signal take as long as Python itself."""
    python, *words = stubs.command("rank", door.getsockname())
    listed = subprocess.Popen([python, "-X", "importtime", *words], stderr=subprocess.PIPE)
    place, _ = door.accept()
    with place, place.makefile("rb") as sent:  # all of it: a traceback would load more
        sent.read(int.from_bytes(sent.read(8), "little"))
    names = {
        line.rpartition(b"|")[2].strip() for line in listed.communicate(timeout=60)[1].splitlines()
    }
    assert b"_socket" in names
    assert not names & {b"socket", b"json", b"signal", b"re", b"enum", b"selectors", b"collections"}
