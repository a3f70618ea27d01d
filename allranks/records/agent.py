"""The events of host agents and relays, and their commands: each is a line of JSON.

A line has the name of an event or a command, and its fields. `to_line` writes it; `read_event` and
`read_command` read it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, ClassVar, TypeVar

from allranks.records.frozen import frozen
from allranks.records.wire import check_types, read_object


def _name(cls: type[Any]) -> str:
    return re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()


class Event:
    """A message from a host agent or a relay to the notebook."""

    word = "event"
    name: ClassVar[str]
    known: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        cls.name = _name(cls)
        cls.known[cls.name] = cls


class HostEvent(Event):
    """What concerns a host and not its ranks."""


class Command:
    """A message from the notebook to a host agent."""

    word = "command"
    name: ClassVar[str]
    known: ClassVar[dict[str, type[Command]]] = {}

    def __init_subclass__(cls) -> None:
        cls.name = _name(cls)
        cls.known[cls.name] = cls


_Said = TypeVar("_Said", Event, Command)


def to_line(said: Event | Command) -> bytes:
    """Returns the line, without its end, that `read_event` or `read_command` reads."""
    fields = {each.name: getattr(said, each.name) for each in dataclasses.fields(said)}  # type: ignore[arg-type]
    return json.dumps({said.word: said.name, **fields}).encode()


def read_event(line: bytes) -> Event:
    """Returns the event of a line. Text that a preloaded module has printed becomes `LauncherText`.

    Raises ValueError if the event is unknown, or a field is of another type.
    """
    found = read_object(line)
    if Event.word not in found:
        return LauncherText(line.decode("utf-8", "replace"))
    return _read(found, Event)


def read_command(line: bytes) -> Command:
    """Returns the command of a line. Raises ValueError if it is unknown, or does not fit."""
    return _read(read_object(line), Command)


def _read(found: dict[str, Any], kind: type[_Said]) -> _Said:
    name = found.pop(kind.word, None)
    try:
        made: _Said = kind.known[name](**found)
        check_types(made)
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"expected a known {kind.word} and its fields, found {name!r:.60}: {error!r:.200}"
        ) from error
    return made


# Of a host agent.


@frozen
class FolderMade(Event):
    """The session's folder is there."""


@frozen
class Controller(Event):
    """Where the controller of clients will be, for them and for the ranks' kernels."""

    client: dict[str, Any]
    engine: dict[str, Any]


@frozen
class Registered(Event):
    """All engines have registered there."""

    client: dict[str, Any]
    engine: dict[str, Any]


@frozen
class ControllerExit(Event):
    """The controller of clients has ended."""

    code: int


@frozen
class Preloading(Event):
    """It imports a module that all ranks share; without a name, it has imported the last one."""

    module: str


@frozen
class OpenedCuda(Event):
    """A preloaded module has initialized CUDA, so no rank could use a GPU."""

    module: str


@frozen
class Reach(Event):
    """The launcher wants to run a command on another host."""

    host: str
    command: str


@frozen
class Admitted(Event):
    """The process of a rank has begun."""

    rank: int


@frozen
class Replaces(Event):
    """A process takes the place of a dead rank."""

    rank: int
    pid: int


@frozen
class Exit(Event):
    """The process of a rank has ended, ``by_launcher`` if MPI had let it go before.

    ``reason`` is a text about a lack of memory, or why allranks has ended it.
    """

    rank: int
    pid: int
    code: int
    by_launcher: bool
    reason: str = ""


@frozen
class SpareExit(Event):
    """A spare process has ended; ``place`` is its number among the launcher's processes."""

    place: int
    code: int


@frozen
class LauncherText(Event):
    """Text of the launcher, or of a preloaded module."""

    text: str


@frozen
class LauncherExit(Event):
    """The launcher has ended."""

    code: int


@frozen
class Again(Event):
    """All ranks have ended, and the agent awaits its next configuration."""


@frozen
class Stopped(Event):
    """Nothing of the cluster is left here."""


# Of a relay.


@frozen
class HostUp(HostEvent):
    """The relay has come; ``address`` is the host's."""

    address: str
    version: str


@frozen
class HostListens(HostEvent):
    """The host listens on a port for a test of the network."""

    test: str
    port: int


@frozen
class HostConnected(HostEvent):
    """Why it could not connect to others in this test, by host."""

    test: str
    problems: dict[str, str]


@frozen
class HostRefused(HostEvent):
    """The host cannot begin."""

    problem: str


@frozen
class HostAgain(HostEvent):
    """What follows is of the ranks of this relocation."""

    relocation: str


@frozen
class HostEnds(HostEvent):
    """The relay ends the ranks of its host."""

    why: str


@frozen
class HostDown(HostEvent):
    """Nothing is left on the host."""

    why: str


@frozen
class Notice(Event):
    """A text for the user."""

    text: str


# Of the notebook's connection to a host.


@frozen
class HostBeat(HostEvent):
    """The host has sent a heartbeat."""


@frozen
class HostLate(HostEvent):
    """The host has missed heartbeats."""


@frozen
class HostSilent(HostEvent):
    """The host has been silent for its lease."""


@frozen
class HostLeft(HostEvent):
    """The host is lost."""

    why: str


@frozen
class AgentExit(Event):
    """The host agent of this machine has ended."""

    code: int


# For a host agent.


@frozen
class RanksUp(Command):
    """All ranks are up."""


@frozen
class Clients(Command):
    """Start the controller of clients: one will connect."""


@frozen
class Stop(Command):
    """End all ranks."""


@frozen
class BeginAgain(Command):
    """End all ranks; the next configuration follows."""


@frozen
class End(Command):
    """End a process, that of a rank if ``pid`` is 0."""

    why: str
    pid: int = 0
    rank: int = -1


@frozen
class SeatSpares(Command):
    """Wake all spare processes. Those of ``seats``, by their numbers, become these ranks.

    ``number`` counts these commands: one that comes again changes nothing.
    """

    number: int
    dead: list[int]
    seats: list[tuple[int, int]]


@frozen
class ReportDeath(Command):
    """A rank of another host has died; the controller of clients is here."""

    rank: int
    pid: int


@frozen
class Join(Command):
    """Connect the ranks to the controller, which is on the first host."""

    engine: dict[str, Any]


@frozen
class Serve(Command):
    """Run the command that the first host's launcher would run here by ssh."""

    line: str
