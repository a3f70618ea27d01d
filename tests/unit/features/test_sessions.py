"""How a notebook finds other notebooks' ranks, by the socket of their host agent."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from allranks.cluster.state import ClusterState
from allranks.errors import UsageError
from allranks.features.attach import sessions
from allranks.features.attach.records import WATCHERS_DOOR
from allranks.features.attach.watched_cells import Joined
from allranks.records.config import NOTEBOOKS_DOOR
from tests.unit.features.test_shared_session import new_session

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
def host_agent(folder, *answers, name=NOTEBOOKS_DOOR):
    """A socket whose visitors get these answers, one each; None is none at all. Yields what they
    have asked for.
    """
    held, asked = [], []

    def serve():
        for answer in answers:
            visitor, _ = door.accept()
            asked.append(json.loads(visitor.makefile("rb").readline()))
            if answer is None:
                held.append(visitor)
            else:
                visitor.sendall(answer)
                visitor.close()

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(os.path.join(folder, name))
        door.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield asked
        thread.join()
    for visitor in held:
        visitor.close()


def cluster(name, *notebooks):
    return sessions.SessionInfo(name, "/folder", **ABOUT, notebooks=notebooks)


def test_the_name_of_a_cluster_is_asked_for_with_each_line_to_type(monkeypatch):
    here, there = cluster("aaaaaaaa", sessions.own_notebook()), cluster("bbbbbbbb", "/lab.ipynb")
    for found, whose in [
        ([there], "no cluster here has been this notebook's"),
        ([here, here], "2 clusters have been this notebook's"),
    ]:
        monkeypatch.setattr(sessions, "running", lambda found=found: found)
        with pytest.raises(UsageError) as refused:
            sessions.chosen("")
        lines = [f"  %distributed attach {one.name}  ranks 0–3 of {one.notebook}" for one in found]
        assert str(refused.value).splitlines() == [
            f"expected the name of a cluster, found none, and {whose}. Type one of:",
            *lines,
        ]


def test_ranks_whose_agent_has_closed_visits_that_came_late_are_visited_again(tmp_path):
    with host_agent(tmp_path, b"", b"", b"", json.dumps(ABOUT).encode() + b"\n"):
        found = sessions.visit(str(tmp_path), seconds=60)
    assert found is not None
    assert (found.size, found.left) == (4, 60.0)


def test_ranks_whose_agent_does_not_answer_have_not_ended(tmp_path):
    with (
        host_agent(tmp_path, None),
        pytest.raises(UsageError, match=r"none within 0\.1 s: it or the whole machine stands"),
    ):
        sessions.visit(str(tmp_path), seconds=0.1)


def test_without_a_socket_or_an_answer_ranks_have_ended(tmp_path):
    with host_agent(tmp_path, *sessions._TRIES * [b""]):
        assert sessions.visit(str(tmp_path), seconds=60) is None
    assert sessions.visit(str(tmp_path)) is None  # nobody listens
    assert sessions.visit(str(tmp_path / "gone")) is None


def told(holder):
    return json.dumps(ABOUT | {"holder": holder}).encode() + b"\n"


@pytest.mark.parametrize("lent", [b'{"lent": true}\n', b"", None])
def test_who_borrows_ranks_waits_for_their_release_or_the_end_of_their_notebook(tmp_path, lent):
    with host_agent(tmp_path, told(7), told(0)) as asked:
        if lent is None:  # its process has ended
            found = sessions.borrow(str(tmp_path))
        else:
            with host_agent(tmp_path, lent, name=WATCHERS_DOOR):
                found = sessions.borrow(str(tmp_path))
    assert found.holder == 0
    assert [(one["want"], one["holder"]) for one in asked] == [("watch", 0), ("released", 7)]


def show(session, folder, capsys):
    """Returns what a notebook that watches ranks shows until they have ended."""
    session.joined = Joined("7f3a", str(folder), 4, guest=True)
    asyncio.run(session._show(str(folder), 7, None))
    return capsys.readouterr().out


def test_a_notebook_that_watches_ranks_without_one_waits_until_one_has_them(tmp_path, capsys):
    session, ends = new_session(), sessions._TRIES * [b""]
    with host_agent(tmp_path, told(0), told(9), *ends) as asked:
        assert show(session, tmp_path, capsys) == "ranks 0–3 of 7f3a have ended.\n"
    wants = [(one["want"], one["holder"]) for one in asked]
    assert wants == [("watch", 0), ("released", 0), *len(ends) * [("watch", 0)]]


def test_a_notebook_that_watches_ranks_looks_for_them_when_it_has_them_no_longer(
    tmp_path, capsys, monkeypatch
):
    session, roster, visits = new_session(), ClusterState(4), []
    session._cluster = SimpleNamespace(roster=roster)
    roster.set_phase("running")
    monkeypatch.setattr(sessions, "visit_to_watch", lambda folder: visits.append(roster.phase))

    def stop():
        roster.set_phase("stopped")
        session.hooks.stopped()

    async def watch():
        loop = asyncio.get_running_loop()
        session.joined = Joined("7f3a", str(tmp_path), 4, guest=True)
        loop.call_later(0, lambda: loop.run_in_executor(None, stop))
        await session._show(str(tmp_path), 7, None)

    asyncio.run(watch())
    assert visits == ["stopped"]
    assert capsys.readouterr().out == "ranks 0–3 of 7f3a have ended.\n"


@pytest.mark.parametrize("turns", range(4))
def test_the_watching_ends_where_the_ranks_change_hands_just_then(tmp_path, monkeypatch, turns):
    session, found = new_session(), cluster("7f3a")

    async def watch():
        loop = asyncio.get_running_loop()
        changed, asked = loop.create_future(), asyncio.Event()

        async def next_holder(folder, holder):
            assert not asked.is_set()
            asked.set()
            await changed

        def leave_after(turns):
            if turns:
                loop.call_soon(leave_after, turns - 1)
            else:
                session.forget_shared()

        monkeypatch.setattr(sessions, "visit_to_watch", lambda folder: found)
        monkeypatch.setattr(sessions, "next_holder", next_holder)
        session.joined = Joined("7f3a", str(tmp_path), 4, guest=True)
        task = session._task = asyncio.create_task(session._show(str(tmp_path), 7, None))
        await asked.wait()
        changed.set_result(None)
        leave_after(turns)
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(watch())


def test_ranks_that_their_notebook_does_not_release_are_still_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions.limits, "RELEASES_SECONDS", 0.1)
    with host_agent(tmp_path, told(7), None, told(7)):
        assert sessions.borrow(str(tmp_path)).holder == 7


def test_a_watcher_does_not_wait_as_long_for_a_notebook_as_for_a_host_agent(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions.limits, "ANSWERS_SECONDS", 0.1)
    with (
        host_agent(tmp_path, None),
        pytest.raises(UsageError, match=r"none within 0\.1 s: it or the whole machine stands"),
    ):
        sessions.borrow(str(tmp_path))


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["socket.socket.makefile", "socket.recv_fds", "read_object"])
def test_who_is_interrupted_while_it_attaches_leaves_the_ranks(tmp_path, monkeypatch, moment):
    found = replace(cluster("aaaaaaaa"), folder=str(tmp_path), version=sessions.version())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(tmp_path / NOTEBOOKS_DOOR))
        door.listen()
        ended = []

        def serve():
            with door.accept()[0] as visitor:
                socket.send_fds(visitor, [b'{"event": "attached"}\n'], [door.fileno()] * 2)
                visitor.settimeout(60)
                with suppress(ConnectionResetError):  # it has not read the answer
                    while visitor.recv(4096):
                        pass
                ended.append(True)

        thread = threading.Thread(target=serve)
        thread.start()
        open_files = set(os.listdir("/dev/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(f"allranks.features.attach.sessions.{moment}", interrupt)
            with pytest.raises(KeyboardInterrupt) as caught:
                sessions.AttachedHostAgent(found)
        thread.join()
    assert ended
    assert caught  # with the frames, as a notebook keeps those of the last error
    # The door is closed, and the file that lists the others was another one.
    assert len(set(os.listdir("/dev/fd")) - open_files) <= 1


#: The account that listens is the one of the socket's other end.
LISTENS = """
import os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.bind(sys.argv[1])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
door.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="not root: no other account can be tried")
def test_another_users_process_that_answers_for_ranks_is_not_asked(tmp_path):
    command = [sys.executable, "-c", LISTENS, tmp_path / NOTEBOOKS_DOOR]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"listens\n"
        with pytest.raises(PermissionError, match="found one of user 65534"):
            sessions._asked(str(tmp_path / NOTEBOOKS_DOOR), {}, 60)
        assert sessions.visit(str(tmp_path)) is None


@pytest.mark.parametrize("taken", ["a link", "a folder in which others write"])
def test_only_folders_of_this_user_alone_are_listed(tmp_path, monkeypatch, taken):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own, folder = tmp_path / "own", tmp_path / "allranks-session-1-0badcafe"
    (own if taken == "a link" else folder).mkdir()
    if taken == "a link":
        folder.symlink_to(own)
    monkeypatch.setattr(sessions, "visit", lambda *_, **__: pytest.fail("it was visited"))
    monkeypatch.setattr("allranks.cluster.session_folder._session_place", lambda: tmp_path)
    assert sessions.running() == []
