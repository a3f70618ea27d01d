"""Whether all hosts can connect to each other, as the notebook finds out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping

from allranks.records.agent import HostConnected, HostListens


class NetworkTest:
    """Whether each host can connect to each other one, as the processes of MPI do.

    Each host listens on a port, and then all try to connect. If some cannot, all try once more: a
    host may have stood still. ``over`` is whether there is a result.
    Answers carry the name of their round: late ones to an earlier one, maybe of the notebook
    before, do not count.
    """

    def __init__(self, addresses: Mapping[str, str], command: Callable[[str, str, str], None]):
        self.over = False
        self._addresses = dict(addresses)
        self._command = command
        self._name = ""
        self._ports: dict[str, int] = {}
        self._found: dict[str, dict[str, str]] = {}
        #: What each host could not connect to in the first round; None before its end.
        self._failed: dict[str, dict[str, str]] | None = None

    def begin(self) -> None:
        self._name, self._ports, self._found = secrets.token_hex(8), {}, {}
        for host in self._addresses:
            self._command(host, "listen", self._name)

    def take(self, event: HostListens | HostConnected, host: str) -> None:
        """Takes an event of a host: that it listens, and then to which others it has connected."""
        if event.test != self._name:
            return
        if isinstance(event, HostConnected):
            self._found[host] = event.problems
            if len(self._found) == len(self._addresses):
                self._end_round()
            return
        self._ports[host] = event.port
        if len(self._ports) == len(self._addresses):
            for source in self._addresses:
                targets = [
                    (host, self._addresses[host], port)
                    for host, port in self._ports.items()
                    if host != source
                ]
                self._command(source, "connect", json.dumps([self._name, targets]))

    def _end_round(self) -> None:
        if self._failed is None and any(self._found.values()):
            self._failed = self._found
            self.begin()
        else:
            self.over = True

    def problems(self) -> list[str]:
        """Returns a sentence for each pair of hosts without a connection, once it is over."""
        return [
            f"{source} cannot connect to {host} ({self._addresses[host]}, port "
            f"{self._ports[host]}): {why}"
            for source, found in (self._failed or {}).items()
            for host, why in (self._found[source].items() if self.over else ())
            if host in found
        ]
