"""Ranks on hosts that ssh reaches without a password for anything: ``--on ssh:h1:2,h2:2``."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence

from allranks.cluster.launchers.addresses import address_towards
from allranks.cluster.launchers.launcher import (
    RELAY,
    CommandJob,
    MultiHostLauncher,
    Tell,
    check_size,
)
from allranks.errors import MissingDependency
from allranks.records.config import Invitation

_OPTIONS = {
    "BatchMode": "yes",  # the notebook cannot answer ssh's questions
    "ConnectTimeout": "10",
    # A host that is cut off is noticed by its silence; this only ends the ssh that waits for it.
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
}


class SshLauncher(MultiHostLauncher):
    """Starts ranks on hosts by ssh; ``where`` is ``HOST:RANKS,…``, one rank by default."""

    name = "ssh"
    example = "--on ssh:h1:2,h2:2"
    about = "hosts that ssh reaches without a password"
    takes_where = True

    def __init__(self, where: str = "", options: Sequence[str] = ()) -> None:
        super().__init__(where, options)
        self.hosts = self.parse_hosts()

    @classmethod
    def check(cls) -> None:
        """Returns if there is an ssh, and an mpiexec that can be used with it."""
        require_ssh()
        super().check()

    def size(self, n: int | None) -> int:
        return check_size(n, sum(host.ranks for host in self.hosts))

    def address(self) -> str:
        return address_towards(*(host.name for host in self.hosts))

    def describe(self) -> str:
        return ", ".join(host.name for host in self.hosts)

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> CommandJob:
        require_ssh()
        options = [f"-o{name}={value}" for name, value in _OPTIONS.items()]
        command = f"exec {shlex.join(RELAY)}"
        commands = {host: ["ssh", "-T", *options, host.login, command] for host in self.hosts}
        return CommandJob("ssh", commands, invitation, tell)


def require_ssh() -> None:
    if shutil.which("ssh") is None:
        raise MissingDependency("expected ssh, found none. Type: apt install openssh-client")
