"""What a host runs for the notebook answers at any time, and leaves nothing there."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from allranks.cluster.agents import HostsContext
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.addresses import ANY_PORTS, LOOPBACK
from allranks.cluster.launchers.job import RELAY
from allranks.cluster.sockets import EventQueue, ListeningSockets, RankSockets
from allranks.features.hosts.agents import MultiHostAgents
from allranks.features.hosts.relay import main as run_relay
from allranks.records.config import EVERY_GPU, HostAgentConfig, Invitation
from tests.kernel import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the relay needs Linux")
SECONDS = 60


class Notebook:
    """A wire, the relays that were started on it, and what they tell."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.wire = RankSockets(
            EventQueue(), NotebookHooks(()), ListeningSockets.open(LOOPBACK, ANY_PORTS)
        )
        self.wire.listen()
        self.wire.deliver_host = lambda host, line: self.told.append(json.loads(line))
        self.relays: list[subprocess.Popen[bytes]] = []

    def invitation(self, host: str) -> Invitation:
        return Invitation(self.wire.commands_url, self.wire.events_url, self.wire.key, host)

    def relay(
        self, invitation: Invitation, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        self.relays.append(subprocess.Popen(RELAY, stdin=subprocess.PIPE, env=environment))
        stdin = self.relays[-1].stdin
        assert stdin is not None
        stdin.write(invitation.to_json().encode() + b"\n")
        stdin.flush()
        return self.relays[-1]

    def wait_for(self, event: str) -> dict[str, Any]:
        wait_until(lambda: event in [told["event"] for told in self.told])
        return next(told for told in self.told if told["event"] == event)


@pytest.fixture
def notebook():
    made = Notebook()
    yield made
    made.wire.close()
    for relay in made.relays:
        assert relay.stdin is not None
        relay.stdin.close()
        relay.wait(SECONDS)


@pytest.fixture
def config(tmp_path):
    session, work = str(tmp_path / "session"), str(tmp_path)
    urls = f"ipc://{session}/commands", f"ipc://{session}/events"
    return HostAgentConfig(2, ("false",), {}, session, f"{work}/logs", work, (), *urls)


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ({"log_dir": "/proc/logs"}, "/proc/logs"),
        ({"commands_url": "ipc:///nowhere/commands"}, "/nowhere/commands"),
        ({"work_dir": "/nowhere"}, "the notebook's folder /nowhere is not there"),
        ({}, "exists, made by host other: two names of the same host, or two hosts with one /tmp"),
    ],
)
def test_a_host_that_cannot_begin_says_why_and_leaves_what_was_there(
    notebook, config, instead, said
):
    if not instead:
        Path(config.session_dir).mkdir()
        Path(config.session_dir, "host").write_text("other")
    relay = notebook.relay(notebook.invitation("h1"))
    notebook.wait_for("host_up")
    notebook.wire.command("h1", "config", dataclasses.replace(config, **instead).to_json())
    assert said in notebook.wait_for("host_refused")["problem"]
    assert notebook.wait_for("host_down")["why"] == "could not begin"
    assert relay.wait(SECONDS) == 0
    assert Path(config.session_dir).exists() == (not instead)


def test_a_relay_that_looks_for_the_notebook_ends_with_its_launcher(notebook, capfd):
    gone = dataclasses.replace(notebook.invitation("h1"), commands_url="tcp://127.0.0.1:9")
    relay = notebook.relay(gone)
    assert relay.stdin is not None
    relay.stdin.close()
    assert relay.wait(SECONDS) == 1
    assert "found no answer" not in capfd.readouterr().err  # it has not given up by itself


@pytest.mark.timeout(200)
def test_a_driver_that_takes_long_keeps_no_host_from_answering(notebook, config, tmp_path):
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        f"#!/bin/sh\ntouch {tmp_path}/asked\nuntil [ -e {tmp_path}/free ]; do sleep .05; done\n"
    )
    driver.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if "VISIBLE" not in name}
    environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    relay = notebook.relay(notebook.invitation("h1"), environment)
    try:
        notebook.wait_for("host_up")
        gpus = {"devices": (EVERY_GPU,), "head": False, "interface": f"tcp://{LOOPBACK}"}
        asks = dataclasses.replace(config, size=1, local_size=1, launch=(), **gpus)
        notebook.wire.command("h1", "config", asks.to_json())
        wait_until((tmp_path / "asked").exists)
        notebook.wire.command("h1", "stop", "")
        notebook.wait_for("host_ends")
    finally:
        (tmp_path / "free").touch()
    assert relay.wait(SECONDS) == 0
    notebook.wait_for("host_down")


def test_a_host_where_others_can_write_to_the_folder_of_the_logs_has_them_elsewhere(
    notebook, config, tmp_path
):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab").chmod(0o777)
    place = tmp_path / "tmp" / f"allranks-logs-{os.getuid()}"
    (place / "20261101-120000-old").mkdir(parents=True)
    place.chmod(0o700)
    os.utime(place / "20261101-120000-old", (0, 0))
    exposed = dataclasses.replace(config, log_dir=str(tmp_path / "lab" / "20261128-logs"))
    relay = notebook.relay(notebook.invitation("h1"), {**os.environ, "TMPDIR": f"{tmp_path}/tmp"})
    notebook.wait_for("host_up")
    notebook.wire.command("h1", "config", exposed.to_json())
    own = place / "20261128-logs"
    assert notebook.wait_for("notice")["text"] == (
        f"The logs of host h1 are not in {exposed.log_dir}, because other users can write to "
        f"{tmp_path}/lab there. They are in {own}"
    )
    wait_until((own / "host-agent-h1.log").exists)
    assert list((tmp_path / "lab").iterdir()) == []
    assert list(place.iterdir()) == [own]
    notebook.wire.command("h1", "stop", "")
    assert relay.wait(SECONDS) == 0


@pytest.mark.parametrize("how", ["others may write it", "it is a link"])
def test_an_invitation_that_another_user_may_have_written_is_not_read(tmp_path, how):
    invitation = tmp_path / "invitation"
    invitation.touch(0o600)
    if how == "it is a link":
        invitation.symlink_to(invitation.rename(tmp_path / "own"))
    else:
        invitation.chmod(0o666)
    with pytest.raises(OSError, match=r"for you alone|symbolic links"):
        run_relay(["--join", str(invitation), "HOSTNAME"])


class Late:
    """A launcher of two hosts, and its job, which has no say in when they come and go."""

    def run(self, *_):
        return self

    def close(self) -> None:
        pass


def test_a_host_that_comes_while_another_is_still_stopping_is_stopped_too(notebook, config):
    hosts = MultiHostAgents(HostsContext(Late(), config, notebook.wire, lambda *_: None))
    first = notebook.relay(notebook.invitation("h1"))
    wait_until(lambda: "h1" in hosts.addresses)
    first.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(first.pid).status() == psutil.STATUS_STOPPED)
    stop = threading.Thread(target=hosts.stop)
    stop.start()
    wait_until(lambda: hosts._stopping)
    try:
        assert notebook.relay(notebook.invitation("h2")).wait(SECONDS) == 0
    finally:
        first.send_signal(signal.SIGCONT)
        stop.join()
    assert first.wait(SECONDS) == 0
