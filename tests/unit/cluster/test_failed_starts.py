"""A start that fails leaves no socket, and a part that ends is named."""

import os
from functools import partial
from types import SimpleNamespace

import pytest

from allranks.cluster import connection, sockets
from allranks.cluster.connection import Connection
from allranks.cluster.features import NotebookFeature, NotebookHooks
from allranks.cluster.host_agent import open_sockets
from allranks.cluster.launchers.addresses import ANY_PORTS, LOOPBACK
from allranks.cluster.launchers.command import SshLauncher
from allranks.cluster.launchers.launcher import LocalLauncher
from allranks.cluster.sockets import EventQueue, ListeningSockets, RankSockets
from allranks.cluster.state import ClusterState
from allranks.errors import StartFailed


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


class ReplacesRanks(NotebookFeature):
    replaces_ranks = "%distributed heal"


def fail(*_, **__):
    raise StartFailed("no more")


def test_the_first_listening_socket_is_closed_if_there_is_no_port_for_the_second(monkeypatch):
    listen, opened = sockets._listening, []

    def once(*words):
        if opened:
            fail()
        opened.append(listen(*words))
        return opened[0]

    monkeypatch.setattr(sockets, "_listening", once)
    with pytest.raises(StartFailed):
        ListeningSockets.open(LOOPBACK, ANY_PORTS)
    assert opened[0].fileno() == -1


def test_listening_sockets_are_closed_if_no_thread_can_be_started(monkeypatch):
    listening = ListeningSockets.open(LOOPBACK, ANY_PORTS)
    descriptors = listening.commands, listening.events
    monkeypatch.setattr(sockets, "_expect_threads", fail)
    with pytest.raises(StartFailed):
        RankSockets(EventQueue(), NotebookHooks(()), listening)
    assert not any(map(is_open, descriptors))


@pytest.mark.parametrize("launcher", [LocalLauncher(), SshLauncher("localhost:2")])
def test_ranks_survive_a_death_only_if_a_feature_replaces_dead_ones(
    launcher, monkeypatch, tmp_path
):
    monkeypatch.setenv("ALLRANKS_LOG_DIR", str(tmp_path))
    for kind in (LocalLauncher, SshLauncher):
        monkeypatch.setattr(kind, "why_not_replaced", lambda _: "")

    def can_replace(*features):
        hooks = NotebookHooks(features)
        wire, config = open_sockets(launcher, 2, (), (), (), EventQueue(), hooks, {})
        wire.close()
        return config.can_replace

    assert [can_replace(), can_replace(ReplacesRanks)] == [False, True]


def test_the_sockets_are_closed_if_a_feature_fails_before_a_start(monkeypatch):
    closed = []
    close = partial(closed.append, "wire")
    wire = SimpleNamespace(close=close, send=None, post=None, observers=[])
    config = SimpleNamespace(can_replace=False, log_dir="/l", session_dir="/s")
    monkeypatch.setattr(connection, "open_sockets", lambda *_: (wire, config))
    hooks = SimpleNamespace(started=fail)
    with pytest.raises(StartFailed):
        Connection(ClusterState(2), (), SimpleNamespace(), (), {}, hooks)
    assert closed == ["wire"]
