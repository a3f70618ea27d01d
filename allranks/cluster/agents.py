"""What starts the ranks, and ends them: the interface of the host agents.

`allranks.cluster.host_agent` has the agent of this machine. A feature makes those of several hosts,
by the hook `NotebookFeature.host_agents`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.sockets import RankSockets
from allranks.records.agent import Command, Event
from allranks.records.config import HostAgentConfig

DeliverEvent = Callable[[Event, str], None]
"""Takes a host agent's event and its host, in any thread. On this machine the host is empty."""


class NotebookStandIn(Protocol):
    """A process that has the hosts from the end of this notebook until another one comes.

    A feature may have one, and then gets the hosts' events.
    """

    def save(self, state: dict[str, Any]) -> None:
        """Stores what the next notebook has to know."""

    def event_came(self, event: Event, host: str) -> None:
        """A host has sent an event."""

    def say(self, command: Command) -> None:
        """Sends it a command."""

    def release(self) -> None:
        """Lets it have the hosts: this notebook leaves the ranks."""

    def stop(self) -> None:
        """Ends it: the ranks have ended."""


StartStandIn = Callable[[RankSockets, DeliverEvent], NotebookStandIn]
"""Starts such a process, which listens at the same place; its events are to be delivered."""


@dataclass(frozen=True)
class TakenHosts:
    """Hosts of another notebook: what it knew of them, the lines of the events since it has ended,
    each with its host, and for how many seconds each host has been ``silent``.
    """

    stand_in: NotebookStandIn
    state: dict[str, Any]
    news: Sequence[tuple[str, str]]
    silent: Mapping[str, float]


@dataclass(frozen=True)
class HostsContext:
    """What a feature may use to start ranks on several hosts.

    Attributes:
        launcher: starts a program on each host.
        config: the configuration for the host agents.
        wire: the sockets that the hosts connect to.
        deliver: gets the events of the host agents.
        taken: the hosts of another notebook, if it has started the ranks.
    """

    launcher: MultiHostLauncher
    config: HostAgentConfig
    wire: RankSockets
    deliver: DeliverEvent
    taken: TakenHosts | None = None


class HostAgents:
    """The host agents of one set of ranks. The defaults are those of one agent on this machine."""

    pid: int | None = None
    """The agent's process, if it is on this machine."""
    starts_again = False
    """Whether ranks are started again, and do not have their variables yet."""
    record: Mapping[str, Any] = MappingProxyType({})
    """What the next notebook needs to go on with this one's recovery."""

    @property
    def spares(self) -> float:
        """How many dead ranks can be replaced; here MPI starts a new process for each."""
        return math.inf

    def begin(self) -> str:
        """Starts the ranks once every host is there; until then returns the reason of the wait."""
        return ""

    def blocked(self) -> str:
        """Returns which hosts cannot connect to each other, once ranks have been waited for."""
        return ""

    def where(self, missing: Iterable[int]) -> str:
        """Returns on which hosts these ranks did not come up, and which hosts sent nothing."""
        return ""

    def why_ended(self) -> str:
        """Returns why the launcher's job has ended, or ""."""
        return ""

    def say(self, command: Command) -> None:
        """Sends a command to the agents of all hosts, or the first one's for `Clients`."""
        raise NotImplementedError

    def seat_spares(self, dead: Sequence[int]) -> str:
        """Has spare processes take the places of dead ranks, where hosts have them. Returns why
        there are too few, or "".
        """
        return ""

    def repeat_seats(self) -> None:
        """Sends the seats of the last notebook again, of which some hosts may not have heard."""

    def hosts(self) -> dict[str, list[int]]:
        """Returns the ranks of each of several hosts."""
        return {}

    def relocate(
        self, decided: Callable[[dict[str, list[int]]], object] = lambda hosts: None
    ) -> bool:
        """Makes the hosts that are left start all ranks again, also those of lost hosts: each on
        the host that stores a copy of what it has kept. Returns whether a host is left.
        ``decided`` is called with the ranks of each host, before the hosts hear of it.
        """
        return False

    def note(self, record: dict[str, Any]) -> None:
        """Saves what the next notebook needs to go on with this one's recovery."""

    def outlive_notebook(self, start: StartStandIn, command: Command) -> bool:
        """Lets the ranks stay when this notebook ends. If they need a process in its place, it is
        started, the agents get the feature's command, and this returns true.

        Raises UsageError if the launcher's job would end with the notebook.
        """
        return False

    def lose_stand_in(self) -> None:
        """That process has ended."""

    def say_stay(self, command: Command) -> None:
        """Sends a command to what has the ranks when this notebook has ended, if anything has."""
        self.say(command)

    def let_go(self) -> None:
        """Leaves the ranks, which stay, to another notebook."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ends every process of the cluster; returns when they have ended."""
        raise NotImplementedError
