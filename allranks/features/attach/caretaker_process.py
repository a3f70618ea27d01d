"""The notebook's connection to the caretaker (`allranks.features.attach.caretaker`)."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from allranks.cluster.agents import DeliverEvent, HostAgents
from allranks.cluster.host_agent import HostAgentProcess
from allranks.cluster.sockets import RankSockets
from allranks.features.attach.records import CaretakerConfig, HostRuns, Keep, Ready, Running, Stay
from allranks.records import limits
from allranks.records.agent import AgentExit, Command, Event
from allranks.records.config import HostAgentConfig

#: For the host agents; the caretaker decides how long the ranks stay.
_STAY = Stay(1, {})


class CaretakerProcess(HostAgentProcess):
    """The process on this machine that has the ranks of several hosts while no notebook has them.
    Its end does not end them.
    """

    def __init__(self, config: HostAgentConfig, care: CaretakerConfig, deliver: DeliverEvent):
        self.config = config
        self._start("allranks.features.attach.caretaker", "caretaker.log", {}, care.listening)
        self._write(care.to_json().encode())
        self.listen(deliver)

    def _listen(self, deliver: DeliverEvent) -> None:
        super()._listen(deliver)
        deliver(AgentExit(self._process.wait()), "")

    def _exit_code(self, stopped: bool) -> int | None:
        return None


class CaretakerStandIn:
    """What the caretaker gets while this notebook has the hosts (`NotebookStandIn`)."""

    def __init__(self, process: HostAgentProcess) -> None:
        self.process = process
        self._hosts: list[str] = []

    def save(self, state: dict[str, Any]) -> None:
        self._hosts = [name for name, *_ in state["hosts"]]
        self.process.say(Keep(state))

    def event_came(self, event: Event, host: str) -> None:
        if isinstance(event, Running):
            self.process.say(HostRuns(host, event.cell))

    def say(self, command: Command) -> None:
        self.process.say(command)

    def release(self) -> None:
        # Their ranks are idle, which the hosts may not have reported yet.
        for host in self._hosts:
            self.process.say(HostRuns(host, 0))
        self.process.let_go()

    def stop(self) -> None:
        self.process.stop()


def take_care(agents: HostAgents, folder: str, config: HostAgentConfig) -> None:
    """Starts the caretaker where the ranks need it to stay when this notebook ends: on several
    hosts.

    Raises UsageError if the launcher's job would end with the notebook.
    """
    came: SimpleQueue[Event] = SimpleQueue()

    def start(wire: RankSockets, deliver: DeliverEvent) -> CaretakerStandIn:
        listening = wire.listening
        assert listening is not None
        care = CaretakerConfig(
            folder=folder,
            ranks=dataclasses.asdict(config),
            key=listening.key,
            secret_key=listening.secret_key,
            lease_seconds=wire.lease_seconds,
            listening=(listening.commands, listening.events),
        )

        def came_of(event: Event, host: str) -> None:
            came.put(event)
            if not isinstance(event, Ready | AgentExit):
                deliver(event, host)

        return CaretakerStandIn(CaretakerProcess(config, care, came_of))

    # It asks the hosts at once: an interrupt of the wait must not leave relays that end with this
    # notebook.
    if not agents.outlive_notebook(start, _STAY):
        return
    with suppress(Empty):
        if isinstance(came.get(timeout=limits.CARETAKER_SECONDS), AgentExit):
            agents.lose_stand_in()  # its log says why
