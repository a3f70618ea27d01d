"""The connection of the notebook to one set of ranks, from their start to their end."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from allranks.cluster import failures
from allranks.cluster.agents import DeliverEvent, HostAgents, HostsContext, TakenHosts
from allranks.cluster.calls import Turns
from allranks.cluster.driver import AnswersSoFar, Driver
from allranks.cluster.failures import CellRecord, ProcessExit
from allranks.cluster.features import ClusterContext, Listeners, NotebookHooks
from allranks.cluster.function_sources import with_sources
from allranks.cluster.host_agent import HostAgentProcess, open_sockets
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.launchers.registry import AnyLauncher
from allranks.cluster.session_folder import name_session_folder
from allranks.cluster.sockets import (
    Answers,
    DeathsKnown,
    DeliverAnswer,
    Event,
    EventQueue,
    FromHostAgent,
    FromRank,
    InterruptRequested,
    RankSockets,
    closing_if_failed,
)
from allranks.cluster.state import CellState, ClusterEvent, ClusterState, StartsAgain
from allranks.countdown import Countdown
from allranks.errors import ClusterLost, StartFailed, UsageError, WireError
from allranks.records import limits, requests
from allranks.records.agent import Clients, End, OpenedCuda, RanksUp, Registered, to_line
from allranks.records.agent import Event as AgentEvent
from allranks.records.config import CLIENTS_RANKS, HostAgentConfig
from allranks.records.deferred import deferred
from allranks.records.ranks import label
from allranks.records.wire import (
    Answer,
    Ends,
    EpochBegun,
    EpochEnded,
    Hello,
    Output,
    Query,
    Reply,
    Result,
)

_ASK_SECONDS = 30.0
_POLL_SECONDS = 0.1


class Shown(Protocol):
    """Shows the cell that the ranks run. ``state`` is the cell as far as it is shown."""

    state: CellState

    def take(self, record: CellRecord, payloads: list[bytes]) -> None: ...

    def died(self, ends: Sequence[ProcessExit]) -> None:
        """Shows that ranks have died, and others are left."""

    def show_late(self) -> None:
        """Shows what ranks have written since their last cell."""

    def press(self) -> None:
        """Handles an interrupt of the user."""

    @property
    def next_press(self) -> str:
        """What the next interrupt does, in words; "" where there is nothing to say."""


class Connection:
    """A set of ranks, up and reachable once :meth:`start` has returned, and their ``roster``."""

    #: Whether this notebook starts the ranks; else another one has.
    starts_ranks = True

    def __init__(
        self,
        roster: ClusterState,
        gpus: tuple[str, ...],
        launcher: AnyLauncher,
        preload: tuple[str, ...],
        settings: Mapping[str, str],
        hooks: NotebookHooks | None = None,
        kept_dirs: tuple[str, ...] = (),
        turns: Turns | None = None,
    ) -> None:
        self.roster, self.size = roster, roster.size
        self.turns = Turns(roster, lambda: None) if turns is None else turns
        #: Applies events; other threads only handle, here, what follows for users and features.
        self.driver = Driver(roster)
        self.words = self.driver.words
        #: What shows the cell of the roster.
        self.run: Shown | None = None
        #: Gets each record of a cell first while a feature has reserved the ranks; returns whether
        #: it was for the feature.
        self.intercept: Callable[[CellRecord, list[bytes]], bool] | None = None
        #: How many deaths threads that wait have handled.
        self.deaths = 0
        #: What ranks have written after the ends of their cells.
        self.late: list[Output] = []
        #: Lines of hosts for the user.
        self.notices = self.driver.notices
        #: Whether these ranks have ended, or are left: the roster may be that of others since.
        self._has_ended = False
        self.hooks = NotebookHooks(()) if hooks is None else hooks
        #: Whether the controller of clients starts as soon as all ranks are up.
        self.expects_clients = self.size <= CLIENTS_RANKS
        self._launcher = launcher
        self._cause = ""
        #: Functions of features that hear the host agents, and what they close at the end.
        self.listeners: Listeners = {}
        self._of_features = ExitStack()
        self._numbers = itertools.count(1)
        self._delivers: dict[int, Callable[[Answer, list[bytes]], object]] = {}
        #: While a thread waits until ranks have answered requests of clients: what it waits for,
        #: and interrupts of that wait.
        self.awaits_clients: EventQueue | None = None
        # No thread, feature or socket may refer to the connection: it closes with its last
        # reference.
        self.inbox = self.driver.inbox
        #: Events that are to be handled before the next ones of the inbox.
        self._unhandled = deque[Event]()
        self._wire, self.config, self.session_dir = self._open(gpus, preload, kept_dirs, settings)
        self.send = self._wire.send
        self.log_dir = self.config.log_dir
        #: None or one; a list, because the finalizer must not refer to the connection.
        self._agents: list[HostAgents] = []
        with closing_if_failed(self._wire):
            self.hooks.started(
                ClusterContext(
                    self.size,
                    self.send,
                    self.starts_ranks,
                    dict(settings),
                    self.log_dir,
                    partial(_start_controller, self._agents),
                    self.listeners,
                    self._wire.observers,
                    self.session_dir,
                    self._of_features,
                    roster,
                    partial(_post, self._wire, self.hooks),
                )
            )
        can_replace = self.config.can_replace
        relocates = can_replace and getattr(launcher, "outlives_hosts", False)
        roster.connect(can_replace, relocates)
        self.driver.begin()
        # Runs when the connection is garbage, and when the kernel exits.
        held = self._of_features, self._agents, self._wire, self.session_dir
        self._finalizer = weakref.finalize(self, _end_anywhere, *held)

    def _open(
        self,
        gpus: tuple[str, ...],
        preload: tuple[str, ...],
        kept_dirs: tuple[str, ...],
        settings: Mapping[str, str],
    ) -> tuple[RankSockets, HostAgentConfig, str]:
        """Returns the sockets for the ranks, the configuration of their host agent, and the folder
        by which other notebooks find them; on several hosts it is their caretaker's.
        """
        wire, config = open_sockets(
            self._launcher, self.size, gpus, preload, kept_dirs, self.driver, self.hooks, settings
        )
        self.driver.wire = wire
        if isinstance(self._launcher, MultiHostLauncher):
            return wire, config, name_session_folder()
        return wire, config, config.session_dir

    def launch(self) -> HostAgents:
        """Starts the host agents, which start the ranks; nothing of them is left if that fails."""
        try:
            # An interrupt waits until the job, for example, is known and can be cancelled.
            with self.inbox.hearing_interrupts():
                agent = self._start_agent()
            if self.step(0):
                raise KeyboardInterrupt
            return agent
        except BaseException:
            self.close()
            raise

    def start(self, tell: Callable[[str], None], progress: Callable[[int, int, str], None]) -> None:
        """Brings up the ranks; after StartFailed only their logs are left.

        ``tell`` is called repeatedly while hosts are in a queue; ``progress`` several times a
        second with the number of ranks that are up, of the processes, and the module that is
        preloaded.
        """
        patience = limits.START_SECONDS + self.size
        patience += limits.PRELOAD_SECONDS if self.config.preload else 0
        deadline = time.monotonic() + patience
        try:
            with self.inbox.hearing_interrupts():
                agent = self._agents[0] if self._agents else self.launch()
                unreached = set(range(self.size))
                while self.roster.missing or not self._reach_each(unreached):
                    if waits := agent.begin():
                        deadline = time.monotonic() + patience
                        tell(waits)
                    elif blocked := agent.blocked():
                        raise StartFailed(blocked)
                    if InterruptRequested() in self.step(_POLL_SECONDS):
                        raise KeyboardInterrupt
                    driver = self.driver
                    progress(len(self.roster.hellos), len(driver.started), driver.preloading)
                    if self.roster.ends or time.monotonic() > deadline:
                        raise StartFailed(self._start_problem())
                # The ranks may have come since the last step.
                progress(self.size, self.size, "")
                # A module may have opened CUDA before.
                if InterruptRequested() in self.step(0):
                    raise KeyboardInterrupt
            with self._wire.lock:
                if not (died := bool(self.roster.ends)):
                    self.roster.set_phase("running")
            if died:
                raise StartFailed(self._start_problem())
        except BaseException:
            self.close()
            raise
        self.all_up()

    def _reach_each(self, unreached: set[int]) -> bool:
        """Whether all ranks get what is sent; removes those that do.

        A rank's two sockets connect apart: a cell that is sent between them would be lost.
        """
        ask = Query(next(self._numbers), requests.STATUS, {})  # nothing waits for the answer
        unreached -= {rank for rank in unreached if self.send((rank,), ask)}
        return not unreached

    @property
    def agent(self) -> HostAgents:
        """What starts the ranks, once it runs."""
        (agent,) = self._agents
        return agent

    def _agent_listener(self) -> DeliverEvent:
        driver, wire, hooks = self.driver, self._wire, self.hooks
        listeners, agents = self.listeners, self._agents

        def deliver(event: AgentEvent, host: str) -> None:
            if not isinstance(event, Registered):  # this concerns features alone
                wire.post(partial(driver.put, FromHostAgent(event, host)))
            if hear := listeners.get(type(event)):
                pids = (each.pid for each in agents)
                hooks.call_each(hear, event, next(pids, None))

        return deliver

    def _start_agent(self) -> HostAgents:
        deliver = self._agent_listener()
        made: HostAgents
        try:
            if isinstance(self._launcher, MultiHostLauncher):
                made = self._agents_of_hosts(deliver)
            else:
                self._wire.start()  # it listens once the agent has made the folder
                made = HostAgentProcess(self.config, deliver)
        except PermissionError as error:
            raise StartFailed(
                f"expected to start {sys.executable} for the ranks, found {error}: this user may "
                "not run it. Start the notebook's kernel with a Python that this user may run: "
                "python -m ipykernel install --user"
            ) from error
        except OSError as error:
            raise StartFailed(
                f"expected to start a process for the ranks, found {error}. "
                "End other processes, and type: %distributed start"
            ) from error
        self._agents.append(made)
        return made

    def _agents_of_hosts(
        self, deliver: DeliverEvent, taken: TakenHosts | None = None
    ) -> HostAgents:
        assert isinstance(self._launcher, MultiHostLauncher)
        hosts = HostsContext(self._launcher, self.config, self._wire, deliver, taken)
        return self.hooks.host_agents(hosts)

    def _start_problem(self) -> str:
        # Other exits, and the launcher's lines, come just after the first exit.
        self.wait_until(lambda: False, _POLL_SECONDS)
        missing, ends = self.roster.missing, self.roster.ends
        on = "".join(each.where(missing) for each in self._agents)
        told = failures.last_lines(self.log_dir, ends, self.driver.launcher_text)
        if not ends:
            told = "\n".join(filter(None, [failures.startup_places(self.log_dir, missing), told]))
        found = self.size - len(missing)
        cores, load = os.cpu_count() or 1, os.getloadavg()[0]
        here = not isinstance(self._launcher, MultiHostLauncher)
        if not ends and here and max(self.size, load) > cores:
            fewer = max(1, min(cores, self.size // 2))
            told = (
                f"This machine has {cores} cores and a load of {load:.0f}. Start fewer ranks, "
                f"or end other programs first. Type: %distributed start -n {fewer}\n{told}"
            )
        what = f"found {found}: {label(missing)} did not start{on}"
        if not missing:
            what = "found that one has ended just after the start"
            what = what if ends else "found some that cannot be reached"
        return (
            f"expected {self.size} ranks, {what}. "
            f"{failures.describe_exits(ends)}\n{told}\nThe logs are in {self.log_dir}"
        )

    def close(self, phase: str = "stopped", why: str = "") -> None:
        """Ends the ranks; returns when all their processes have ended."""
        with self._wire.lock:  # another thread may find the same end
            if was_open := not self._has_ended:
                self.roster.set_phase(phase, why)
            self._has_ended = True  # last: an interrupt before leaves all to the next call
        if was_open:
            self.hooks.stopped()
        for agent in self._agents if self.roster.ends else ():
            # A launcher's job is asked before it is ended from here.
            self._cause = self._cause or agent.why_ended()
        with self.inbox.hearing_interrupts():  # an interrupt must not stop this; it ends soon
            # Not by a call, which does not wait in another thread than the main one.
            if (held := self._finalizer.detach()) is not None:
                _, _, parts, _ = held
                _end(*parts)
            self.step(0)

    def stay(self, stays: bool) -> None:
        """Sets whether the ranks stay when the kernel exits, as far as this process decides."""
        self._finalizer.atexit = not stays

    def leave_to_parent(self) -> None:
        """This process is forked: not even its exit ends the ranks."""
        self._finalizer.detach()
        # A thread of the parent may have had it, and is not in this process.
        self._wire.lock = threading.RLock()

    def release(self, why: str) -> None:
        """Leaves the ranks to other notebooks; ``why`` is the answer to who needs them here."""
        # Whatever a feature raises, and where an interrupt comes: else no notebook has them.
        with deferred(), ExitStack() as ends:
            for agent in self._agents:
                ends.callback(agent.let_go)
            # Before, because the next notebook listens at the same address.
            ends.callback(self._wire.close)
            ends.callback(self._of_features.close)
            ends.callback(self._finalizer.detach)
            self.roster.set_phase("stopped", why)
            self._has_ended = True
            self.hooks.stopped()

    def step(self, seconds: float) -> list[InterruptRequested]:
        """Handles what has come for users and features within ``seconds``, in its order; returns
        the interrupts among it. While another thread waits for its cell, that one does it.

        It handles all events before it raises what reading or showing one of them raised, with the
        others' errors as notes, so that no reply is lost; the next call returns the interrupts.
        """
        pressed: list[InterruptRequested] = []
        failed: dict[str, Exception] = {}
        wait = 0.0 if self._unhandled else seconds
        # As long as it runs, no cell of another thread does. In this order: see `begin_cell`.
        running, this = self.roster.cell, threading.get_ident()
        own = running if self.roster.thread == this else None
        # Meanwhile no cell of another thread begins, whose first events this one would take; and
        # the events that have changed the state are all there.
        with nullcontext() if wait > 0 else self._wire.lock:
            if not (is_of_another := own is None and self.turns.is_of_another):
                self.inbox.move(self._unhandled, wait)
        if is_of_another:
            if seconds > 0:
                self.turns.await_own(seconds)
            return pressed
        # A hook or view that calls this itself goes on with the next event, and so does the thread
        # of a cell that begins meanwhile.
        while self._unhandled:
            is_own = own is not None and own is self.roster.cell and self.roster.thread == this
            if not is_own and self.turns.is_of_another:
                break
            if (event := self._next()) is None:
                break
            if isinstance(event, InterruptRequested):
                pressed.append(event)
                continue
            try:
                self._handle(event)
            except Exception as error:
                failed.setdefault(f"{type(error).__name__}: {error}", error)
        if not failed:
            return pressed
        for press in pressed:
            self.inbox.put(press)
        (_, first), *others = failed.items()
        for text, _ in others:
            first.add_note(text)
        raise first

    def _next(self) -> Event | None:
        try:
            return self._unhandled.popleft()
        except IndexError:  # between cells, another thread may have taken it
            return None

    def _take(self, record: CellRecord, payloads: list[bytes]) -> None:
        if isinstance(record, Reply) and record.report is not None:
            record = replace(record, report=with_sources(record.report))
        if self.intercept is not None and self.intercept(record, payloads):
            return
        run = None if self.roster.abandoned else self.run
        if run is not None and record.cell == run.state.cell:
            if not isinstance(record, Result):
                run.take(record, payloads)
        elif isinstance(record, Output) and record.entries:
            self.late.append(record)
            if run is not None:
                # The rank had not begun this cell yet: output of the cell comes later.
                run.show_late()
        elif isinstance(record, Reply) and self.run is not None:
            # To a cell that was abandoned: a rank that dies now has not died in it.
            self.run.state.apply(record)

    def wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Handles events until ``done`` or the time is over, also those that came before it was
        done; interrupts stay for the next wait.
        """
        limit, pressed = Countdown(seconds), list[InterruptRequested]()
        try:
            while not done() and limit.left() > 0:
                pressed += self.step(min(_POLL_SECONDS, seconds))
            pressed += self.step(0)
        finally:
            # Not earlier: an event in the queue ends each step at once.
            self._put_back(pressed)

    def _put_back(self, pressed: Iterable[InterruptRequested]) -> None:
        for press in pressed:
            self.inbox.put(press)

    @contextmanager
    def _asking(self, name: str, arguments: dict[str, Any]) -> Iterator[tuple[Query, AnswersSoFar]]:
        got = AnswersSoFar()

        def take(answer: Answer, payloads: list[bytes]) -> None:
            got[answer.rank] = answer, payloads

        ask = Query(next(self._numbers), name, arguments)
        self._delivers[ask.request] = take
        try:
            yield ask, got
        finally:
            del self._delivers[ask.request]

    @contextmanager
    def asking(
        self, ranks: Iterable[int], name: str, arguments: dict[str, Any], *payloads: bytes
    ) -> Iterator[AnswersSoFar]:
        """Makes a request of ranks; within, their answers are there as they come."""
        with self._asking(name, arguments) as (ask, got):
            self.send(ranks, ask, *payloads)
            yield got

    def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        *payloads: bytes,
        ranks: Iterable[int] | None = None,
        seconds: float = _ASK_SECONDS,
        strict: bool = True,
    ) -> Answers:
        """Returns the ranks' answers to a request (see ``allranks.records.requests``); by default
        those of all that live, also at its end.

        Raises UsageError if a rank refuses, or (when ``strict``) has died or does not answer in
        time; ClusterLost if all end meanwhile.
        """
        roster = self.roster
        chosen = roster.alive if ranks is None else tuple(ranks)
        ask, limit = Query(next(self._numbers), name, arguments), Countdown(seconds)
        pressed = list[InterruptRequested]()
        with self.driver.requesting(ask.request) as request, ExitStack() as over:
            over.callback(self._put_back, pressed)
            self.send(chosen, ask, *payloads)
            while not roster.ends and limit.left() > 0:
                gone = [*roster.dead]  # first: a rank may answer, and die then
                if all(rank in request.answers or rank in gone for rank in chosen):
                    break
                pressed += self.step(0)
                request.wait(min(_POLL_SECONDS, seconds))
            pressed += self.step(0)
        got = request.answers
        if strict and roster.ends:
            raise ClusterLost(self.loss_text())
        problems = [answer.problem for _, (answer, _) in sorted(got.items()) if answer.problem]
        silent = set(chosen) - set(got)
        if ranks is not None and silent & set(roster.dead):
            problems.append(f"{self.words.deaths_text()}. Type: {self.hooks.replaces_ranks}")
        silent -= set(roster.dead)
        if silent:
            problems.append(
                f"{label(silent)} did not answer within {seconds:g} s: a call in C may be blocking "
                "Python there. Try again, or see what the ranks do: %distributed status"
            )
        if strict and problems:
            raise UsageError(problems[0])
        return {r: (a.content, bufs) for r, (a, bufs) in sorted(got.items()) if not a.problem}

    def ask_soon(
        self, name: str, arguments: dict[str, Any], deliver: DeliverAnswer, ranks: Iterable[int]
    ) -> None:
        """Makes a request of ranks; ``deliver`` gets each answer, however late."""
        ask = Query(next(self._numbers), name, arguments)
        self._delivers[ask.request] = lambda answer, _: deliver(answer)
        self.send(ranks, ask)

    def await_clients(self, ranks: Collection[int], tell: Callable[[str], object]) -> None:
        """Waits until ranks have answered all requests of clients: see `holds_cells` of
        `NotebookFeature`.
        """
        if self.hooks.holds_cells:
            name = "await_clients"
            # Not by `command`: what views and other features raise meanwhile is not this one's.
            self.hooks.commands[name](name, self, ranks, tell)

    def interrupt_clients(self) -> bool:
        """Interrupts what ranks do for clients of any notebook, while no cell runs; returns whether
        they did anything for one.
        """
        name = "interrupt_clients"
        return name in self.hooks.commands and bool(self.hooks.command(name, self))

    def _handle(self, event: Event) -> None:
        if isinstance(event, WireError) and self._end_sender(event):
            return
        if isinstance(event, StartFailed):
            if self._has_ended:  # its agent has removed the folder already
                return
            raise event
        if isinstance(event, Exception):
            raise WireError(
                f"expected a readable message from a rank, found {event}: its content is lost. The "
                "ranks kept their variables: run the cell again"
            ) from event
        if isinstance(event, FromRank):
            record = event.record
            if isinstance(record, CellRecord):
                self._take(record, event.payloads)
            elif isinstance(record, Answer):
                # An answer that comes too late is dropped.
                if record.request in self._delivers:
                    self._delivers[record.request](record, event.payloads)
            elif not isinstance(record, Hello | EpochBegun | EpochEnded | Ends):
                self.hooks.message_received(record, event.payloads)
        elif isinstance(event, DeathsKnown):
            self._show_deaths(event)
        elif isinstance(event, FromHostAgent) and isinstance(event.event, OpenedCuda):
            raise StartFailed(
                f"--preload {event.event.module}: importing this module initializes CUDA, "
                "and ranks that are forked after that cannot use a GPU. Leave it out and "
                "import it in a cell, or use the GPU inside its functions only."
            )

    def _end_sender(self, error: WireError) -> bool:
        """Ends the rank that has sent what cannot be read; returns whether it is known."""
        if error.is_unknown:
            return False
        known: dict[str, Any] = {"pid": error.pid} if error.pid else {"rank": error.rank}
        if not error.pid:
            if error.rank not in range(self.size):
                return False
            # A record may name any rank.
            if error.host and self._wire.host_of.get(error.rank) != error.host:
                return False
        # Processes of other hosts may have the same number.
        self._say_end(str(error), error.host, **known)
        return True

    def end_rank(self, rank: int, why: str) -> None:
        """Has the process of a rank killed; ``why`` is in the report of its death."""
        self._say_end(why, rank=rank)

    def _say_end(self, why: str, host: str = "", **known: int) -> None:
        """Sends to the agent of ``host``, or to all, which process is to end."""
        end = End(why, **known)
        if host:
            self._wire.command(host, "say", to_line(end).decode())
            return
        for agent in self._agents:
            agent.say(end)

    def apply(self, event: ClusterEvent) -> None:
        """Applies an event that this notebook makes to the state of the ranks."""
        if isinstance(event, StartsAgain):  # other threads may have posted news of the old ranks
            self._wire.settle()
        self.driver.apply(event)

    def _show_deaths(self, deaths: DeathsKnown) -> None:
        self.deaths += len(deaths.ends)
        for end in deaths.ends:
            self.hooks.rank_died(end.rank)
        if deaths.shown and self.run is not None and self.roster.cell is not None:
            self.run.died(deaths.ends)

    def begin_cell(self, cell: int, ranks: Sequence[int], run: Shown) -> None:
        """Begins a cell of this thread, which ``run`` shows."""
        with self._wire.lock:
            self.roster.begin_cell(cell, ranks, threading.get_ident())
        self.run = run

    def note_deaths(self, ranks: Iterable[int]) -> None:
        """Handles deaths that came between the choice of a cell's ranks and its begin."""
        roster = self.roster
        with self._wire.lock:
            ends = [roster.dead[rank] for rank in ranks if rank in roster.dead]
            if roster.cell is not None:
                for end in ends:
                    roster.cell.apply(end)
        if ends and self.run is not None:
            self.run.died(ends)

    def reserve(self, text: str) -> bool:
        """Lets no cell begin, see `ClusterState.reserve`; returns false if a rank has died."""
        with self._wire.lock:
            if self.roster.dead:
                return False
            self.roster.reserve(text, threading.get_ident())
            return True

    def end_cell(self) -> None:
        with self._wire.lock:
            self.roster.end_cell()
        self.run = None

    def is_left(self, cell: CellState) -> bool:
        """Whether all ranks have left a cell, as far as it is shown, or none can do that any
        longer.
        """
        run = None if self.roster.abandoned else self.run
        if run is not None and run.state.cell == cell.cell:
            cell = run.state
        if not cell.pending:
            return True
        # Asked several times a second: most of the time no rank has ended.
        ended = self._has_ended or self.roster.ends or self.roster.phase != "running"
        return bool(ended) and self.over

    @property
    def up(self) -> bool:
        running = not self._has_ended and self.roster.phase == "running"
        return running and not self.roster.ends

    @property
    def closed(self) -> bool:
        return self._has_ended or self.roster.closed

    @property
    def over(self) -> bool:
        # The ranks were ended or have died: no event can follow.
        return self.closed or failures.all_over(self.roster.ends, self.size)

    def all_up(self) -> None:
        # The agents then note the processes that the ranks share.
        for agent in self._agents:
            agent.say(RanksUp())
            if self.expects_clients:
                agent.say(Clients())

    def lose(self, shown: bool = False) -> str:
        """Ends the ranks after a death; returns the text of :meth:`loss_text`."""
        self.close("lost")
        why = self.loss_text(shown)
        self.roster.set_phase("lost", why)
        return why

    def loss_text(self, shown: bool = False) -> str:
        """Returns which rank died, how, and what is lost; ``shown`` leaves out shown lines."""
        ends, hellos = self.roster.ends, self.roster.hellos
        text = self.driver.launcher_text
        why = self.why_not_replaced()
        return failures.loss_text(ends, hellos, text, self.size, shown, self._cause, why)

    def can_replace(self, count: int) -> bool:
        """Whether this number of ranks can be replaced: some hosts start no new processes."""
        return self.roster.can_relocate or all(count <= one.spares for one in self._agents)

    def is_in_doubt(self, ranks: Iterable[int]) -> bool:
        """Whether the host of one of these ranks has not been heard of for a while."""
        return self._wire.is_in_doubt(ranks)

    def why_not_replaced(self) -> str:
        """Returns why dead ranks are not replaced; "" if they are, or if none would be left."""
        if self.roster.can_replace or self.size == 1:
            return ""
        return self._launcher.why_not_replaced()


def _post(wire: RankSockets, hooks: NotebookHooks, call: Callable[[], object]) -> bool:
    """Posts a call of a feature: what it raises is no message that cannot be read."""
    return wire.post(partial(hooks.call_each, (call,)))


def _start_controller(agents: list[HostAgents]) -> None:
    for agent in agents:
        agent.say(Clients())


def _end_anywhere(
    of_features: ExitStack, agents: list[HostAgents], wire: RankSockets, session_dir: str
) -> None:
    """Ends what a connection holds, from any thread: garbage collection may call it."""
    held = of_features, agents, wire, session_dir
    is_main = threading.current_thread() is threading.main_thread()
    # It may come while this thread sends, or lists threads: `_end` waits for a thread that needs
    # the lock of the sockets to receive, and that of `threading` to end.
    locks: list[Any] = [wire.lock, getattr(threading, "_active_limbo_lock")]  # noqa: B009
    if is_main and not any(lock._is_owned() for lock in locks):
        _end(*held)
        return
    try:
        # `_end` may wait for the calling thread.
        threading.Thread(target=_end, args=held, name="allranks-end").start()
    except RuntimeError:
        pass  # the process ends: so does the host agent, whose input closes


def _end(
    of_features: ExitStack,
    agents: list[HostAgents],
    wire: RankSockets,
    session_dir: str,
) -> None:
    """Ends what a connection holds; it must not hold the connection itself."""
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, session_dir, ignore_errors=True)
        ends.callback(wire.close)
        for agent in agents:
            ends.callback(agent.stop)
        ends.callback(of_features.close)
