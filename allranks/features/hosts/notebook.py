"""The agents of several hosts in the notebook, imported where ranks are on several hosts."""

from __future__ import annotations

from allranks.cluster.agents import HostAgents, HostsContext
from allranks.cluster.features import NotebookFeature


class NotebookHosts(NotebookFeature):
    """Starts ranks on several hosts."""

    in_cells = False

    def host_agents(self, hosts: HostsContext) -> HostAgents:
        from allranks.cluster.host_agent import MultiHostAgents

        return MultiHostAgents(hosts)


FEATURE = NotebookHosts
