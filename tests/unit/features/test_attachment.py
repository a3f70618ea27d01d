"""What other notebooks get to know at the socket of the host agent, and when."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack

import pytest

from allranks.features.attach import attachment as module
from allranks.features.attach.attachment import Attachment
from allranks.records.config import NOTEBOOKS_DOOR, HostAgentConfig

HOLDER, OTHER = 101, 202


class Door:
    """The socket of a host agent whose ranks the process `HOLDER` has."""

    def __init__(self, folder, monkeypatch):
        self.path, self.watched = os.path.join(folder, NOTEBOOKS_DOOR), []
        self.process, self.visitors = OTHER, []
        monkeypatch.setattr(module.os, "getppid", lambda: HOLDER)
        monkeypatch.setattr(module.os, "dup2", lambda *_: None)  # of standard input and output
        monkeypatch.setattr(module.own_files, "peer", lambda _: (self.process, os.geteuid()))
        monkeypatch.setattr(module, "sign_of", lambda pid: f"sign of {pid}")
        config = HostAgentConfig(2, (), {}, str(folder), "", "", (), "", "", "")
        self.attachment = Attachment(config, [0, 0])
        self.attachment.listen()

    def ask(self, want, process=OTHER, **more):
        """Returns a visitor that has asked, as this process."""
        visitor, self.process = socket.socket(socket.AF_UNIX), process
        self.visitors.append(visitor)
        visitor.connect(self.path)
        visitor.sendall(json.dumps({"want": want, **more}).encode() + b"\n")
        visitor.setblocking(False)
        self.about = self.attachment.visited(lambda: self.watched.append(want))
        return visitor


@pytest.fixture
def door(tmp_path, monkeypatch):
    found = Door(tmp_path, monkeypatch)
    with found.attachment.door, ExitStack() as ends:
        yield found
        for visitor in (*found.visitors, *(one.connection for one in found.attachment._waiting)):
            ends.enter_context(visitor)


def holder_in(visitor):
    """Returns the process that has the ranks, from the answer; None if there is none yet."""
    try:
        answer = visitor.recv(1 << 16)
    except BlockingIOError:
        return None
    return json.loads(answer)["holder"]


def test_a_watcher_gets_its_answer_once_the_notebook_listens(door):
    first = door.ask("watch")
    door.ask("listens", process=OTHER)
    assert holder_in(first) is None
    assert door.watched == ["watch"]
    door.ask("listens", process=HOLDER)
    assert holder_in(first) == HOLDER
    assert holder_in(door.ask("watch")) == HOLDER
    assert door.watched == ["watch", "watch"]


def test_a_watcher_of_ranks_without_a_notebook_gets_its_answer_at_once(door):
    waiting = door.ask("watch")
    door.attachment.begin()
    assert holder_in(waiting) == 0
    assert holder_in(door.ask("watch")) == 0


def test_a_notebook_that_attaches_does_not_listen_yet(door):
    door.ask("listens", process=HOLDER)
    door.attachment.begin()
    door.ask("attach")
    assert door.about is not None
    waiting = door.ask("watch", process=303)
    assert holder_in(waiting) is None
    door.ask("listens", process=OTHER)
    assert holder_in(waiting) == OTHER


@pytest.mark.parametrize("attaches", [False, True])
def test_who_waits_for_a_release_gets_the_answer_when_the_notebook_has_left(door, attaches):
    waiting = door.ask("released", holder=HOLDER)
    assert holder_in(waiting) is None
    door.attachment.begin()
    assert holder_in(waiting) == 0
    if attaches:
        door.ask("attach", process=303)
    assert holder_in(door.ask("released", holder=HOLDER)) == (303 if attaches else 0)


def test_visitors_that_wait_and_have_given_up_take_no_descriptors(door):
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(100):
        door.ask("watch").close()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + module._MOST_WAITING
