"""What a host answers while something takes long there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.cluster.host_agent import event_of
from allranks.cluster.launchers.addresses import ANY_PORTS, LOOPBACK
from allranks.cluster.launchers.launcher import RELAY
from allranks.cluster.wire import Wire
from allranks.records.config import EVERY_GPU, Invitation, NurseryConfig
from tests.kernel import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the relay needs Linux")
SECONDS = 30


@pytest.mark.timeout(200)
def test_a_driver_that_takes_long_keeps_no_host_from_answering(tmp_path: Path):
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        f"#!/bin/sh\ntouch {tmp_path}/asked\nuntil [ -e {tmp_path}/free ]; do sleep .05; done\n"
    )
    driver.chmod(0o755)
    told: list[str] = []
    wire = Wire(lambda *_: None, lambda _: None, LOOPBACK, ANY_PORTS)
    wire.deliver_host = lambda host, line: told.append(event_of(line)[0])
    environment = {name: value for name, value in os.environ.items() if "VISIBLE" not in name}
    relay = subprocess.Popen(
        RELAY,
        stdin=subprocess.PIPE,
        env=environment | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
        text=True,
    )
    assert relay.stdin is not None
    try:
        relay.stdin.write(
            Invitation(wire.commands_url, wire.events_url, wire.key, "h1").to_json() + "\n"
        )
        relay.stdin.flush()
        wait_until(lambda: "host_up" in told)
        folder = str(tmp_path)
        config = NurseryConfig(
            size=1,
            launch=(),
            environment={},
            session_dir=f"{folder}/session",
            log_dir=folder,
            work_dir=folder,
            devices=(EVERY_GPU,),
            commands_url=f"ipc://{folder}/session/commands",
            events_url=f"ipc://{folder}/session/events",
            wire_key="",
            local_size=1,
            head=False,
            interface=f"tcp://{LOOPBACK}",
        )
        wire.say("h1", "config", config.to_json())
        wait_until((tmp_path / "asked").exists)
        wire.say("h1", "stop", "")
        wait_until(lambda: "host_ends" in told)
        (tmp_path / "free").touch()
        assert relay.wait(SECONDS) == 0
        wait_until(lambda: told[-1] == "host_down")
    finally:
        (tmp_path / "free").touch()
        relay.stdin.close()
        relay.wait(SECONDS)
        wire.close()
