"""What a host agent has and decides: takes events, and returns commands.

It calls no clock, socket, process or file: `allranks.engine.host.host_agent` waits for the events,
and carries the commands out. Only that forks, and has descriptors.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from allranks.engine.host.events import NotebookSaid, Terminated
from allranks.records import agent
from allranks.records.config import HostAgentConfig
from allranks.records.frozen import frozen

#: In these variables programs read their rank.
WHO = "OMPI_COMM_WORLD_"


@frozen
class NotebookLeft:
    """No notebook has the ranks, or no relay; ``stays`` is whether they wait for another one."""

    stays: bool


@frozen
class NotebookCame:
    """Another notebook has the ranks from now on."""


@frozen
class ControllerPlanned:
    """Here is where the controller of clients will be, for them and for the ranks' kernels."""

    client: dict[str, Any]
    engine: dict[str, Any]


@frozen
class ControllerComplete:
    """All ranks' kernels have registered with the controller."""


@frozen
class ControllerEnded:
    """The controller has ended."""

    code: int


@frozen
class LauncherEnded:
    """The launcher has ended, or the daemon that it has started here."""

    code: int


@frozen
class StubCame:
    """A process of the launcher gives its place away; ``number`` is its own among all of them.

    ``replaced`` are ranks that have died, if it replaces the first of them. ``who`` are its
    variables in which programs read their rank.
    """

    number: int
    replaced: Sequence[int]
    who: Mapping[str, str]


@frozen
class Forked:
    """The process of a `Fork` runs."""

    pid: int
    fork: Fork


@frozen
class StubLeft:
    """The launcher has ended the process in whose place a rank or a spare process runs."""

    pid: int


@frozen
class ProcessEnded:
    """A rank or a spare process has ended; ``memory`` is a text about a lack of memory."""

    pid: int
    code: int
    memory: str = ""


Event = (
    NotebookSaid
    | NotebookLeft
    | NotebookCame
    | Terminated
    | ControllerPlanned
    | ControllerComplete
    | ControllerEnded
    | LauncherEnded
    | StubCame
    | Forked
    | StubLeft
    | ProcessEnded
)


@frozen
class Tell:
    """Sends the notebook an event."""

    event: agent.Event


@frozen
class AwaitNotebook:
    """Leaves the notebook, and waits for another one."""


@frozen
class StartLauncher:
    """Starts what the first host's launcher would run here by ssh."""

    line: str


@frozen
class OpenDoor:
    """Takes the launcher's processes, and its text."""


@frozen
class ForkController:
    """Starts the controller of clients."""


@frozen
class TellController:
    """Reports the death of a rank to the controller."""

    rank: int
    pid: int


@frozen
class Fork:
    """Forks the process of the launcher's process that has just come, then `Forked`.

    ``rank`` is below 0 for a spare process. ``replaced`` are the ranks that have died, if it
    replaces one. ``variables`` are for programs that read their rank there.
    """

    rank: int
    number: int
    replaced: Sequence[int]
    variables: Mapping[str, str]


@frozen
class OpenGate:
    """Lets the forked processes begin: the last one is there."""


@frozen
class Wake:
    """Wakes a spare process, which becomes a rank, or with -1 only lets others become one."""

    pid: int
    rank: int
    dead: Sequence[int]
    variables: Mapping[str, str]


@frozen
class NoteFiles:
    """Notes the files in shared memory of all processes; ``sweeps`` if ranks were replaced."""

    sweeps: bool


@frozen
class Kill:
    """Kills a process."""

    pid: int


@frozen
class NoteDeath:
    """Notes that a rank runs no cell any longer, for features as well."""

    rank: int
    code: int


@frozen
class LeaveStub:
    """Closes the connection to a process of the launcher."""

    pid: int


@frozen
class EndStub:
    """Ends a process of the launcher, with this exit code."""

    pid: int
    code: int


@frozen
class KeepStub:
    """Keeps a process of the launcher, whose own one has ended, to the end."""

    pid: int


Command = (
    Tell
    | AwaitNotebook
    | StartLauncher
    | OpenDoor
    | ForkController
    | TellController
    | Fork
    | OpenGate
    | Wake
    | NoteFiles
    | Kill
    | NoteDeath
    | LeaveStub
    | EndStub
    | KeepStub
)


class AgentState:
    """The state of a host agent, from its configuration to `stopping`."""

    def __init__(self, config: HostAgentConfig) -> None:
        self.stopping = self.begins_again = False
        #: Whether no notebook has the ranks: if they end now, the agent removes kept variables.
        self.abandoned = False
        #: The processes of ranks, and those that began as spare ones, with their numbers.
        self.ranks: dict[int, int] = {}
        self.spares: dict[int, int] = {}
        #: Where engines connect to the controller.
        self.engine: dict[str, Any] = {}
        self._config = config
        self._has_launcher = self._launcher_runs = config.head
        self._has_controller = self._keeps_stub = False
        #: The processes in whose places the launcher has others.
        self._placed: set[int] = set()
        #: The processes of ranks that the launcher has started.
        self._first: set[int] = set()
        #: The variables in which programs read their rank, of each rank that was here.
        self._who: dict[int, Mapping[str, str]] = {}
        #: The number of the last command that has woken the spare processes.
        self._seated = 0
        #: How many processes of ranks have begun.
        self.admitted = 0
        self._forked = 0
        #: Why ranks were ended, by their processes.
        self._reasons: dict[int, str] = {}
        #: For another notebook: what was planned, and the ranks without a process.
        self._told: list[agent.Event] = []
        self._dead: dict[int, agent.Exit] = {}
        self._commands: list[Command] = []

    def apply(self, event: Event) -> list[Command]:
        self._commands = []
        match event:
            case NotebookSaid(command):
                self._obey(command)
            case NotebookLeft(stays):
                self._lose_notebook(stays)
            case NotebookCame():
                self.abandoned = False
                for each in (*self._told, *self._dead.values()):
                    self._tell(each)
            case Terminated():
                self.stopping = True
            case ControllerPlanned(client, engine):
                self.engine = engine
                self._tell_later_too(agent.Controller(client, engine))
            case ControllerComplete():
                self._tell_later_too(agent.Registered(**vars(self._told[0])))
            case ControllerEnded(code):
                self._tell(agent.ControllerExit(code))
            case LauncherEnded(code):
                self._launcher_runs = False
                self._tell(agent.LauncherExit(code))
            case StubCame():
                self._admit(event)
            case Forked(pid, fork):
                self._note_forked(pid, fork)
            case StubLeft(pid):
                self._leave(pid)
            case ProcessEnded(pid, code, memory):
                self._note_end(pid, code, memory)
            case _:
                assert_never(event)
        if self.abandoned and not (self.ranks and self._launcher_runs):
            self.stopping = True
        return self._commands

    def _tell(self, event: agent.Event) -> None:
        self._commands.append(Tell(event))

    def _tell_later_too(self, event: agent.Event) -> None:
        self._told.append(event)
        self._tell(event)

    def _lose_notebook(self, stays: bool) -> None:
        if self.stopping:
            return
        # On several hosts it is the relay that is gone, and no other one comes.
        if self._config.several_hosts or not stays:
            self.stopping = self.abandoned = True
        elif not self.abandoned:
            self.abandoned = True
            self._commands.append(AwaitNotebook())

    def _obey(self, command: agent.Command) -> None:
        match command:
            case agent.RanksUp():
                self._commands.append(NoteFiles(sweeps=len(self._who) < self.admitted))
            case agent.Clients():
                if not self._has_controller:  # a client will connect
                    self._has_controller = True
                    self._commands.append(ForkController())
            case agent.Stop() | agent.BeginAgain():
                self.stopping, self.begins_again = True, isinstance(command, agent.BeginAgain)
            case agent.End(why, pid, rank):
                for own, number in self.ranks.items():
                    if pid == own or rank == number:
                        self._reasons[own] = f"ended by allranks, because {why}"
                        self._commands.append(Kill(own))
            case agent.SeatSpares(number, dead, seats):
                if number > self._seated:
                    self._seated = number
                    self._seat_spares(dead, dict(seats))
            case agent.ReportDeath(rank, pid):
                self._commands.append(TellController(rank, pid))
            # Another notebook sends these two again if the last one has ended before it confirmed
            # the events from which they follow.
            case agent.Join(engine):
                if not self.engine:
                    self.engine = engine
                    self._open_door()
            case agent.Serve(line):
                if not self._has_launcher:
                    self._has_launcher = self._launcher_runs = True
                    self._commands.append(StartLauncher(line))
                    self._open_door()
            case _:
                raise ValueError(f"expected a command for a host agent, found {command!r:.200}")

    def _open_door(self) -> None:
        if self.engine and self._has_launcher:
            self._commands.append(OpenDoor())

    def _admit(self, stub: StubCame) -> None:
        seats = self._config.seats
        rank = seats[stub.number] if seats else stub.number
        if stub.replaced:
            rank = stub.replaced[0]
        variables: Mapping[str, str] = {}
        if rank >= 0:
            variables = self._take_seat(rank, stub.who)
            self._tell(agent.Admitted(rank))
        self._commands.append(Fork(rank, stub.number, stub.replaced, variables))

    def _take_seat(self, rank: int, who: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """Returns the variables in which programs read their rank; MPI gets it from its launcher,
        which counts spare processes too, and does not know which rank one of them has become.
        """
        self.admitted += 1
        own = dict(self._who.get(rank, {}))
        if not own and self._config.seats:
            numbers = rank, self._config.size, len(self._who), self._config.ranks_here
            names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
            own = {f"{WHO}{name}": str(each) for name, each in zip(names, numbers, strict=True)}
        self._who.setdefault(rank, {**(who or {}), **own})
        return own

    def _note_forked(self, pid: int, fork: Fork) -> None:
        self._placed.add(pid)
        if fork.rank < 0:
            self.spares[pid] = fork.number
        self._forked += 1
        if self._forked == self._config.ranks_here + self._config.spares:
            self._commands.append(OpenGate())
        if fork.replaced:
            self._seat(pid, fork.rank)
        elif fork.rank >= 0:
            self._first.add(pid)
            self.ranks[pid] = fork.rank

    def _seat(self, pid: int, rank: int) -> None:
        """Notes that a process takes the place of a dead rank."""
        for former, other in self.ranks.items():
            if other == rank and former != pid:
                self._commands.append(Kill(former))  # from an attempt to replace it that failed
        self.ranks[pid] = rank
        self._dead.pop(rank, None)
        self._tell(agent.Replaces(rank, pid))

    def _seat_spares(self, dead: Sequence[int], taken: Mapping[int, int]) -> None:
        """Wakes all spare processes: those taken become ranks, and the others let them join."""
        for pid, number in self.spares.items():
            rank = taken.get(number, -1)
            if rank < 0 and pid in self.ranks:
                continue  # it is a rank, and has been asked as one
            variables: Mapping[str, str] = {}
            if rank >= 0:
                variables = self._take_seat(rank)
                self._seat(pid, rank)
            self._commands.append(Wake(pid, rank, dead, variables))

    def _leave(self, pid: int) -> None:
        if pid in self._placed:
            self._placed.discard(pid)
            self._commands.append(LeaveStub(pid))
        # MPI's launcher has ended this process. On several hosts it does so where it has lost
        # another host: then the rank is asked for its variables first.
        if not (self._config.several_hosts and self._config.can_replace and pid in self.ranks):
            self._commands.append(Kill(pid))

    def _note_end(self, pid: int, code: int, reason: str) -> None:
        number, rank = self.spares.pop(pid, None), self.ranks.pop(pid, None)
        is_placed = pid in self._placed
        self._placed.discard(pid)
        self._first.discard(pid)
        if rank is not None:
            why = self._reasons.pop(pid, "")
            if why and code == -signal.SIGKILL:  # else it had ended before
                reason = why
            end = agent.Exit(rank, pid, code, not is_placed, reason)
            if rank not in self.ranks.values():  # else another process has its place by now
                self._dead[rank] = end
            self._tell(end)
            self._commands += [TellController(rank, pid), NoteDeath(rank, code)]
        if is_placed:
            # A rank that ends by itself has failed, also with exit code 0.
            alone = rank is None or self._config.can_replace
            self._commands.append(self._free_stub(pid) if alone else EndStub(pid, code or 1))
        if number is not None and rank is None:
            self._tell(agent.SpareExit(number, code))

    def _free_stub(self, pid: int) -> Command:
        if not (self._keeps_stub or self._first or self._config.several_hosts):
            # The last stub of the launcher's own job stays: without a process, the launcher forgets
            # the job and spawns no replacements. It must see the end of all others, to inform the
            # ranks; of this one, MPI sees the end itself.
            self._keeps_stub = True
            return KeepStub(pid)
        # Exit code 0: else the launcher would end the other ranks.
        return EndStub(pid, 0)
