"""How a notebook finds other notebooks' ranks, by the socket of their host agent."""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import contextmanager

import pytest

from allranks.cluster import sessions
from allranks.errors import UsageError
from allranks.records.config import NOTEBOOKS_DOOR

ABOUT = {
    "pid": 7,
    "size": 4,
    "log_dir": "/logs",
    "began": 0.0,
    "running": 0,
    "holder": 0,
    "left": 60.0,
    "stays": 60.0,
    "version": "0.2.0",
}


@contextmanager
def host_agent(folder, *answers):
    """A socket whose visitors get these answers, one each; None is none at all."""
    held = []

    def serve():
        for answer in answers:
            visitor, _ = door.accept()
            visitor.makefile("rb").readline()
            if answer is None:
                held.append(visitor)
            else:
                visitor.sendall(answer)
                visitor.close()

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(os.path.join(folder, NOTEBOOKS_DOOR))
        door.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()
    for visitor in held:
        visitor.close()


def test_ranks_whose_agent_closed_a_visit_that_came_late_are_visited_again(tmp_path):
    with host_agent(tmp_path, b"", json.dumps(ABOUT).encode() + b"\n"):
        found = sessions.visit(str(tmp_path))
    assert found is not None
    assert (found.size, found.left) == (4, 60.0)


def test_ranks_whose_agent_does_not_answer_have_not_ended(tmp_path):
    with (
        host_agent(tmp_path, None),
        pytest.raises(UsageError, match=r"none within 0\.1 s: it or the whole machine stands"),
    ):
        sessions.visit(str(tmp_path), seconds=0.1)


def test_without_a_socket_or_an_answer_ranks_have_ended(tmp_path):
    with host_agent(tmp_path, b"", b""):
        assert sessions.visit(str(tmp_path)) is None
    assert sessions.visit(str(tmp_path)) is None  # nobody listens
    assert sessions.visit(str(tmp_path / "gone")) is None
