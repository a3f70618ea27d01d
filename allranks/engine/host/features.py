"""The hooks of features in the host agent, which starts the ranks of one host.

A feature's ``host.py`` sets ``FEATURE`` to a subclass of `HostFeature`. The hooks are called in
this order: ``started``, ``controller``, then those of the notebook's commands and its end, and of
the ends of ranks, as they come; ``stopping`` last. On several hosts the agent may begin again,
with all ranks: the same instance is ``started`` once more.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from allranks.hooks import declares_hooks
from allranks.records.agent import Command, Event
from allranks.records.config import HostAgentConfig


class HostContext(Protocol):
    """The part of its host agent that a feature may use.

    Attributes:
        config: the configuration, which changes if the ranks are left to another notebook.
        running: for each rank, the number of the cell that it runs, or 0.
    """

    config: HostAgentConfig
    running: memoryview[int]

    def tell(self, event: Event) -> None:
        """Sends the notebook an event."""

    def call_when_readable(self, source: socket.socket, call: Callable[[], object]) -> None:
        """Calls a function whenever there is something to read or accept."""

    def notebook_left(self) -> None:
        """The notebook has ended: the ranks end too, unless they stay."""

    def notebook_came(self, greeting: Mapping[str, Any]) -> None:
        """Another notebook has the ranks, and gets this greeting: the feature has made its
        connection the standard input and output.
        """

    def end(self) -> None:
        """Ends the ranks, which no notebook has."""


class ClientController(Protocol):
    """A process of the first host, by which programs reach the ranks' kernels.

    Attributes:
        client: how programs connect to it.
        engine: how kernels do, on each host.
    """

    client: dict[str, Any]
    engine: dict[str, Any]

    def run(self, complete: Callable[[], object], deaths: int) -> None:
        """Runs until its process ends; calls ``complete`` once all kernels are there.

        ``deaths`` is a pipe, with the rank and the process of each that has ended, a line each.
        """

    def free_ports(self) -> None:
        """It listens now: its ports need not be reserved any longer."""


@declares_hooks
class HostFeature:
    """One feature in the host agent: override the hooks that it needs.

    The agent has no cell to fail, so errors of hooks are written to the agent's log.
    """

    def started(self, host: HostContext) -> None:
        """The agent has its folders; the launcher has been started, and no rank has come yet."""

    def controller(self, config: HostAgentConfig) -> ClientController | None:
        """Returns a process for clients, which this first host shall start when it is needed.

        The first that any feature returns is used.
        """
        return None

    def command_received(self, command: Command) -> bool:
        """The notebook has sent a command; returns whether it was for this feature."""
        return False

    def poll(self) -> None:
        """Called at least twice a second."""

    def ranks_stay(self) -> bool:
        """Returns whether the ranks wait for another notebook when theirs has ended.

        A new rank calls it too, in its own process, with the memory of its feature as it was when
        this process was forked.
        """
        return False

    def notebook_left(self) -> None:
        """The notebook has ended, and the ranks stay until the feature finds another one."""

    def rank_died(self, rank: int, code: int) -> None:
        """A rank of this host has ended, with an exit code or minus a signal's number."""

    def stopping(self) -> None:
        """All processes have ended; the session's folder is removed next."""
