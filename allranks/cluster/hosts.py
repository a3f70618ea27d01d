"""The notebook's hold on the nurseries of several hosts, through the relay that each host has."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from allranks.cluster.launchers.launcher import Host, MultiHostLauncher
from allranks.cluster.nursery import event_of
from allranks.cluster.wire import Wire
from allranks.records.config import LIMIT_SECONDS, Invitation, NurseryConfig, version

_STOP_SECONDS = 10.0
_SILENT = f"is cut off or has crashed: no heartbeat for {LIMIT_SECONDS:g} s"


class Hosts:
    """Nurseries on several hosts, started by one job of their launcher.

    The first host's runs mpiexec, which asks the notebook, by way of its nursery, to run what it
    needs on the others. So no host has to be able to log in to another.

    Args:
        launcher: what runs the relays.
        config: what the nurseries are to bring up together.
        wire: on which they, and their ranks, are heard.
        deliver: called, in a thread, with each event that one tells: its name, and what it is
            about, with the ``host``.
    """

    def __init__(
        self,
        launcher: MultiHostLauncher,
        config: NurseryConfig,
        wire: Wire,
        deliver: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._launcher = launcher
        self._config = config
        self._wire = wire
        self._deliver = deliver
        self._hosts: Sequence[Host] = ()
        self._expected: Sequence[Host] = ()
        self._host_of: dict[int, str] = {}
        self._addresses: dict[str, str] = {}
        self._gone: set[str] = set()
        self._told: set[str] = set()
        self._changed = threading.Condition()
        self._stopping = False
        wire.deliver_host = self._take
        invitation = Invitation(wire.commands_url, wire.events_url, wire.key)
        self.job = launcher.run(invitation, config.log_dir, self._left)

    def begin(self) -> str:
        """Has the ranks started once every host is there; returns what is waited for until then.

        Raises:
            StartFailed: the launcher will not run anything.
        """
        if self._hosts:
            return ""
        hosts = self._expected = self.job.hosts()
        with self._changed:
            missing = [host.name for host in hosts if host.name not in self._addresses]
        if not hosts or missing:
            return self.job.waits()
        self._hosts = hosts
        self.job.all_came()
        ranks = iter(range(self._config.size))
        for host in hosts:
            self._host_of |= {next(ranks): host.name for _ in range(host.ranks)}
        self._wire.reach(self._host_of)
        for host in hosts:
            self._wire.say(host.name, "config", self._config_of(host).to_json())
        return ""

    def _config_of(self, host: Host) -> NurseryConfig:
        first = self._hosts[0]
        folder = self._config.session_dir
        return dataclasses.replace(
            self._config,
            launch=tuple(self._launcher.command(self._hosts)),
            local_size=host.ranks,
            head=host is first,
            interface=f"tcp://{self._addresses[first.name]}",
            # The relay's, which holds the key.
            commands_url=f"ipc://{folder}/relay-commands",
            events_url=f"ipc://{folder}/relay-events",
            wire_key="",
        )

    def where(self, missing: Iterable[int]) -> str:
        """Returns on which hosts these ranks did not come up, and of which nothing was heard."""
        if self._host_of:
            on = list(dict.fromkeys(self._host_of[rank] for rank in sorted(missing)))
        else:
            on = [host.name for host in self._expected]
        silent = [name for name in on if name not in self._addresses]
        said = f" on {', '.join(on)}" if on else ""
        if silent:
            said += (
                f"; no connection from {', '.join(silent)}. Check that no firewall keeps that host "
                f"from reaching {self._wire.commands_url}"
            )
        return said

    def why_ended(self) -> str:
        """Returns what ended the job, where its launcher knows; to be asked before it is ended."""
        return self.job.why_ended()

    def all_up(self) -> None:
        """Says that every rank is up: time to note what they share."""
        for host in self._hosts:
            self._wire.say(host.name, "say", "up")

    def clients(self) -> None:
        """Has ipyparallel's controller come up, where it has not yet: somebody may look for it."""
        self._wire.say(self._hosts[0].name, "say", "clients")

    def stop(self) -> None:
        """Ends every process of the cluster; returns when they are gone where that can be known.

        A host that is cut off ends its own.
        """
        with self._changed:
            self._stopping = True
            there = set(self._addresses) - self._gone
        for host in there:
            self._wire.say(host, "stop", "")
        with self._changed:
            self._changed.wait_for(lambda: self._gone >= set(self._addresses), _STOP_SECONDS)
        self.job.close()

    def _take(self, host: str, line: bytes) -> None:
        """Handles, in the wire's thread, what a host tells."""
        name, fields = event_of(line)
        if name == "host_up":
            with self._changed:
                self._addresses[host] = fields["address"]
                late = self._stopping
            if late:
                self._wire.say(host, "stop", "")
            if fields["version"] != version():
                why = f"has allranks {fields['version']}, and the notebook {version()}"
                self._tell(host, why)
        elif name == "host_silent":
            self._left(host, _SILENT)
        elif name == "host_refused":
            self._left(host, f"could not start: {fields['problem']}")
        elif name == "host_ends":
            self._tell(host, fields["why"])
        elif name == "host_down":
            self._left(host, fields["why"])
        elif name == "reach" and fields["host"] == host:
            why = "does not know itself by that name, so mpiexec would look for it elsewhere"
            self._tell(host, f"{why}: use the name that its command hostname prints")
        elif name == "reach":
            self._wire.say(fields["host"], "say", f"serve {json.dumps(fields['command'])}")
        elif name == "admitted":
            self._host_of[fields["rank"]] = host
            self._deliver(name, fields)
        else:
            if name == "connection":
                join = f"join {json.dumps(fields['engine'])}"
                for other in self._hosts[1:]:
                    self._wire.say(other.name, "say", join)
            self._deliver(name, {**fields, "host": host})

    def _left(self, host: str, why: str) -> None:
        """A host has nothing of the cluster any longer, or can be heard no longer."""
        with self._changed:
            self._gone.add(host)
            self._changed.notify_all()
        self._wire.forget(host)
        self._tell(host, why)

    def _tell(self, host: str, why: str) -> None:
        """Says why there is nothing on a host any longer; what is said first counts."""
        if not self._stopping and host not in self._told:
            self._told.add(host)
            self._deliver("host_left", {"host": host, "why": why})
