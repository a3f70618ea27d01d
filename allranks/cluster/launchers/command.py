"""The launchers for hosts that a command reaches, such as ssh."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from allranks.cluster.launchers.addresses import address_towards, own_address
from allranks.cluster.launchers.job import RELAY, CommandJob, Host, Job, TakenCommandJob, Tell
from allranks.cluster.launchers.launcher import MultiHostLauncher, check_size
from allranks.errors import MissingDependency, StartFailed
from allranks.records.config import Invitation

_SSH_OPTIONS = {
    "BatchMode": "yes",  # the notebook cannot answer ssh's questions
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
}


class CommandLauncher(MultiHostLauncher):
    """Starts ranks on hosts that a command reaches; ``where`` is ``HOST:RANKS,…``, one rank by
    default. Each host's name is the one that its command ``hostname`` prints.
    """

    takes_where = True
    outlives_hosts = True
    reach: ClassVar[str]
    """The command with ``{host}``, as ``docker exec -i {host}``. The command for the host follows,
    or replaces ``{command}`` as one word that is quoted for a shell. Its standard input must reach
    the host.
    """

    def __init__(self, where: str = "", options: Sequence[str] = ()) -> None:
        super().__init__(where, options)
        self.hosts = self.parse_hosts()

    @classmethod
    def check(cls) -> None:
        program = shlex.split(cls.reach)[0]
        if shutil.which(program) is None:
            raise MissingDependency(
                f"expected {program}, by which --on {cls.name} reaches hosts, found no such "
                "program. Install it, or see the other launchers: %distributed launchers"
            )
        super().check()

    def size(self, n: int | None) -> int:
        return check_size(n, sum(host.ranks for host in self.hosts))

    def address(self) -> str:
        try:
            return address_towards(*(host.name for host in self.hosts))
        except StartFailed:
            return own_address()  # only the command knows the names

    def run(self, invitation: Invitation, log_dir: str, tell: Tell) -> CommandJob:
        self.check()
        commands = {host: self._words(host.login, invitation) for host in self.hosts}
        return CommandJob(shlex.split(self.reach)[0], commands, invitation, tell)

    def take_over(self, hosts: Sequence[Host], job: Mapping[str, Any]) -> Job:
        return TakenCommandJob(hosts, job)

    def _words(self, host: str, invitation: Invitation) -> list[str]:
        words = [word.replace("{host}", host) for word in shlex.split(self.reach)]
        if "{command}" not in words:
            return [*words, *RELAY]
        command = f"exec {shlex.join(RELAY)}"
        return [command if word == "{command}" else word for word in words]


class SshLauncher(CommandLauncher):
    """Starts ranks on hosts by ssh."""

    name = "ssh"
    example = "--on ssh:h1:2,h2:2"
    about = "hosts that ssh reaches without a password"
    reach = "ssh -T {host} {command}"

    @classmethod
    def check(cls) -> None:
        require_ssh()
        super().check()

    def address(self) -> str:
        return address_towards(*(host.name for host in self.hosts))

    def _words(self, host: str, invitation: Invitation) -> list[str]:
        # A host that is cut off is noticed by its silence; this only ends the ssh that waits for
        # it. TCP may need twice the time of an interruption to continue.
        beats = math.ceil(3 * invitation.lease_seconds / 5)
        settings = _SSH_OPTIONS | {"ServerAliveCountMax": str(beats)}
        first, *rest = super()._words(host, invitation)
        return [first, *(f"-o{name}={value}" for name, value in settings.items()), *rest]


def require_ssh() -> None:
    if shutil.which("ssh") is None:
        raise MissingDependency("expected ssh, found none. Type: apt install openssh-client")
