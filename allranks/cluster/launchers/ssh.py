"""Ranks on hosts that ssh reaches without a password for anything: ``--on ssh:h1:2,h2:2``."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from allranks.cluster.launchers.launcher import Host, Tell
from allranks.cluster.launchers.spread import RELAY, Spread, address_towards, check_size
from allranks.errors import MissingDependency, UsageError
from allranks.records.config import Invitation

_HOST = re.compile(r"([\w.@-]+)(?::(\d+))?")
_OPTIONS = {
    "BatchMode": "yes",  # a question could not be answered
    "ConnectTimeout": "10",
    # A host that is cut off is told by its own silence; this only ends what waits for it here.
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
}
_CLOSE_SECONDS = 2.0
_SHOWN_LINES = 5


class SshLauncher(Spread):
    """Starts ranks on hosts by ssh.

    Args:
        where: ``HOST:RANKS`` for each host, with commas between; one rank where it says no number.

    Raises:
        UsageError: it is not that.
    """

    name = "ssh"

    def __init__(self, where: str) -> None:
        self.hosts = tuple(_host(part, where) for part in where.split(","))
        names = [host.name for host in self.hosts]
        if len(set(names)) < len(names):
            raise UsageError(
                f"expected each host once, found ssh:{where}. Give its ranks together: HOST:4"
            )

    def size(self, n: int | None) -> int:
        """Returns how many ranks the hosts are given."""
        return check_size(n, sum(host.ranks for host in self.hosts))

    def address(self) -> str:
        """Returns this machine's address on the way to the hosts."""
        return address_towards(*(host.name for host in self.hosts))

    def describe(self) -> str:
        """Returns the hosts."""
        return ", ".join(host.name for host in self.hosts)

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> SshJob:
        """Runs the relay on every host; its invitation is its standard input."""
        require_ssh()
        return SshJob(self.hosts, invitation, tell)


def require_ssh() -> None:
    """Makes sure that there is an ssh.

    Raises:
        MissingDependency: there is none.
    """
    if shutil.which("ssh") is None:
        raise MissingDependency("expected ssh, found none. Type: apt install openssh-client")


def _host(part: str, where: str) -> Host:
    found = _HOST.fullmatch(part)
    if found is None or found[2] == "0" or part.startswith("-"):
        raise UsageError(
            f"expected hosts and how many ranks each has, found ssh:{where}. "
            "Type for example: --on ssh:h1:2,h2:2"
        )
    return Host(found[1].rpartition("@")[2], int(found[2] or 1), login=found[1])


class SshJob:
    """An ssh to every host, each of which ends when its relay does, and the other way round."""

    def __init__(self, hosts: Sequence[Host], invitation: Invitation, tell: Tell) -> None:
        self._hosts = hosts
        self._tell = tell
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        options = [f"-o{name}={value}" for name, value in _OPTIONS.items()]
        for host in hosts:
            command = f"exec {shlex.join(RELAY)}"
            started = self._running[host.name] = subprocess.Popen(
                ["ssh", "-T", *options, host.login, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # An interrupt of the kernel goes to its whole process group: not to this one.
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != "DISPLAY"},
            )
            line = dataclasses.replace(invitation, host=host.name).to_json()
            assert started.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: its last lines tell why
                started.stdin.write(line.encode() + b"\n")
                started.stdin.flush()
            watch = threading.Thread(
                target=self._watch, args=(host.name, started), name="allranks-ssh", daemon=True
            )
            watch.start()

    def hosts(self) -> Sequence[Host]:
        """Returns the hosts: none has to be waited for."""
        return self._hosts

    def waits(self) -> str:
        """Returns nothing."""
        return ""

    def all_came(self) -> None:
        """Has nothing to take back: the invitation went to standard input."""

    def why_ended(self) -> str:
        """Returns nothing: ssh knows of its own end only."""
        return ""

    def _watch(self, host: str, started: subprocess.Popen[bytes]) -> None:
        assert started.stderr is not None
        with started.stderr as written:
            said = written.read().decode("utf-8", "replace")
        code = started.wait()
        lines = "\n".join(said.strip().splitlines()[-_SHOWN_LINES:])
        what = f"was left by ssh, which ended with exit code {code}"
        self._tell(host, what + (f": {lines}" if lines else ""))

    def close(self) -> None:
        """Ends every ssh; a relay that lives notices, and ends its host's ranks."""
        for started in self._running.values():
            assert started.stdin is not None
            with suppress(BrokenPipeError):
                started.stdin.close()
        # One that leads to a host that is cut off would wait for it.
        deadline = time.monotonic() + _CLOSE_SECONDS
        for started in self._running.values():
            try:
                started.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
