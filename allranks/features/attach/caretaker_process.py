"""The notebook's connection to the caretaker (`allranks.features.attach.caretaker`)."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from allranks.cluster.host_agent import DeliverEvent, HostAgentProcess, MultiHostAgents
from allranks.errors import UsageError
from allranks.features.attach.records import CaretakerConfig, HostRuns, Keep, Ready, Running, Stay
from allranks.records import limits
from allranks.records.agent import AgentExit, Event
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

    def release(self) -> None:
        # Their ranks are idle, which the hosts may not have reported yet.
        for host in self._hosts:
            self.process.say(HostRuns(host, 0))
        self.process.let_go()

    def stop(self) -> None:
        self.process.stop()


def take_care(agents: MultiHostAgents, folder: str, config: HostAgentConfig) -> None:
    """Starts the caretaker, with which the ranks of several hosts can stay when this notebook ends.

    Raises UsageError if the launcher's job would end with the notebook.
    """
    if agents.stand_in is not None:
        return
    if why := agents.why_not_left():
        raise UsageError(why)
    listening = agents.wire.listening
    came: SimpleQueue[Event] = SimpleQueue()
    assert listening is not None
    care = CaretakerConfig(
        folder=folder,
        ranks=dataclasses.asdict(config),
        key=listening.key,
        secret_key=listening.secret_key,
        lease_seconds=agents.wire.lease_seconds,
        listening=(listening.commands, listening.events),
    )

    def deliver(event: Event, host: str) -> None:
        came.put(event)
        if not isinstance(event, Ready | AgentExit):
            agents.deliver(event, host)

    process = CaretakerProcess(config, care, deliver)
    # First: an interrupt of the wait must not leave relays that end with this notebook.
    agents.outlive_notebook(CaretakerStandIn(process), _STAY)
    with suppress(Empty):
        if isinstance(came.get(timeout=limits.CARETAKER_SECONDS), AgentExit):
            agents.lose_stand_in()  # its log says why
