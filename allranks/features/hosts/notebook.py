"""Ranks on several hosts: what makes their agents, and checks the hosts.

The modules for that are imported where ranks are on several hosts.
"""

from __future__ import annotations

from typing import Any

from allranks.cluster.agents import HostAgents, HostsContext
from allranks.cluster.features import NotebookFeature


class NotebookHosts(NotebookFeature):
    """Starts ranks on several hosts, and checks hosts before a start."""

    in_cells = False
    commands = frozenset({"examine_hosts"})

    def host_agents(self, hosts: HostsContext) -> HostAgents:
        from allranks.features.hosts.agents import MultiHostAgents

        return MultiHostAgents(hosts)

    def command(self, name: str, *arguments: Any) -> Any:
        from allranks.features.hosts.doctor import examine_hosts

        return examine_hosts(*arguments)


FEATURE = NotebookHosts
