"""The host agents of several hosts: which ranks each host has, and what has become of it."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from allranks.cluster.agents import (
    HostAgents,
    HostsContext,
    NotebookStandIn,
    StartStandIn,
    TakenHosts,
)
from allranks.cluster.failures import ending
from allranks.cluster.host_agent import event_of
from allranks.cluster.launchers.job import Host
from allranks.cluster.launchers.mpiexec import LASTING
from allranks.errors import UsageError
from allranks.features.hosts.held_ends import HeldEnds
from allranks.features.hosts.network_test import NetworkTest
from allranks.records import limits
from allranks.records.agent import (
    Admitted,
    Clients,
    Command,
    Controller,
    Event,
    Exit,
    HostAgain,
    HostBeat,
    HostConnected,
    HostDown,
    HostEnds,
    HostEvent,
    HostLate,
    HostLeft,
    HostListens,
    HostRefused,
    HostSilent,
    HostUp,
    Join,
    LauncherExit,
    RanksUp,
    Reach,
    Registered,
    Replaces,
    ReportDeath,
    SeatSpares,
    Serve,
    SpareExit,
    to_line,
)
from allranks.records.config import (
    SPARES,
    HostAgentConfig,
    Invitation,
    spares_on_each,
    tcp_url,
    version,
)
from allranks.records.ranks import copy_holders, label

#: A shell's exit code for a command that a signal has ended: this number, and the signal's.
_SIGNALLED = 128
_SHOWN_PAIRS = 4
#: Events that change what the next notebook has to know.
_STATE = (
    Admitted,
    Controller,
    Exit,
    HostDown,
    HostRefused,
    HostSilent,
    Registered,
    Replaces,
    SpareExit,
)


class MultiHostAgents(HostAgents):
    """The host agents of several hosts, started by one job of the launcher.

    The first host's agent runs mpiexec; through the agent it asks the notebook to run commands on
    the other hosts. So no host has to be able to log in to another.
    """

    def __init__(self, context: HostsContext) -> None:
        self._launcher, self._config = context.launcher, context.config
        self.wire, self.deliver = context.wire, context.deliver
        self._hosts: Sequence[Host] = ()
        self._expected: Sequence[Host] = ()
        self._host_of: dict[int, str] = {}
        #: The hosts that have connected, and their addresses.
        self.addresses: dict[str, str] = {}
        self._ended_hosts: set[str] = set()
        #: Why hosts are lost.
        self._reported: dict[str, str] = {}
        #: For what is known of the hosts and their ranks: events come in the wire's thread, ends of
        #: the job's commands in others, and the main thread chooses spare processes. The state for
        #: the next notebook is saved with it, so that no earlier one is saved last.
        # No condition, whose methods are Python: an interrupt in them would leave it locked.
        self._hosts_lock = threading.RLock()
        self._all_ended: SimpleQueue[None] = SimpleQueue()
        self._stopping = False
        self._held = HeldEnds(self.deliver, self._config.can_replace)
        self._spares = 0
        self._seats: list[int] = []
        #: The spare processes of each host, by their numbers among the launcher's processes.
        self._spares_on: dict[str, list[int]] = {}
        #: The spare processes that have become ranks, and their hosts.
        self._seated: dict[int, tuple[str, int]] = {}
        #: How often spare processes were chosen, and the last command about it for each host.
        #: Another notebook may have ended before it had sent it to all.
        self._choices = 0
        self._seat_lines: dict[str, str] = {}
        self._may_miss_seats = False
        #: Hosts that start their ranks again, and have not ended the old ones.
        self._moving: set[str] = set()
        #: The name of the last relocation. A host's answer to an earlier one may come after it.
        self._relocation = ""
        self.record = {}
        self._began = 0.0
        self._test: NetworkTest | None = None
        #: For the next notebook: the ranks that have died, and where its clients connect.
        self._dead: dict[int, dict[str, Any]] = {}
        #: The processes that take the places of dead ranks. Until these have joined, the ends of
        #: the former ones stay in `_dead`.
        self._replaced: dict[int, int] = {}
        self._told: dict[str, Event] = {}
        self.stand_in: NotebookStandIn | None = None
        wire = self.wire
        wire.deliver_host = self._handle
        if context.taken is not None:
            self._take_over(context.taken)
            return
        # The job is started last: its hosts may connect at once.
        invitation = Invitation(
            wire.commands_url, wire.events_url, wire.key, lease_seconds=wire.lease_seconds
        )
        self.job = self._launcher.run(invitation, self._config.log_dir, self._host_ended)

    def begin(self) -> str:
        if self._hosts:
            return ""
        hosts = self._expected = self.job.hosts()
        with self._hosts_lock:
            missing = [host.name for host in hosts if host.name not in self.addresses]
        if not hosts or missing:
            return self.job.waits()
        self._hosts = hosts
        self._began = time.monotonic()
        self.job.all_came()
        ranks = iter(range(self._config.size))
        self._place({host.name: [next(ranks) for _ in range(host.ranks)] for host in hosts})
        # The first one last: commands for the others follow from its events, and a relay without a
        # host agent drops them.
        for host in reversed(self._hosts):
            self.wire.command(host.name, "config", self._config_of(host).to_json())
        return ""

    def _place(self, places: Mapping[str, Sequence[int]]) -> None:
        """Decides which ranks each host has; those without any are left out."""
        self._hosts = [
            dataclasses.replace(host, ranks=len(places[host.name]))
            for host in self._hosts
            if places.get(host.name)
        ]
        # After the loss of a host as many as before: more would make the new start slower.
        if self._config.can_replace and not self._spares:
            self._spares = spares_on_each([host.ranks for host in self._hosts])
        self._host_of = {rank: host for host, there in places.items() for rank in there}
        self.wire.host_of = self._host_of
        self._seats, self._spares_on, self._seated = [], {}, {}
        # Hosts are filled one after the other, as mpiexec does with --map-by slot.
        for host in self._hosts:
            there = places[host.name]
            first = len(self._seats) + len(there)
            self._spares_on[host.name] = list(range(first, first + self._spares))
            self._seats += [*there, *[-1] * self._spares]

    def ranks_of(self, host: str) -> list[int]:
        """Returns the ranks of a host."""
        return sorted(rank for rank, name in self._host_of.items() if name == host)

    def hosts(self) -> dict[str, list[int]]:
        return {host.name: self.ranks_of(host.name) for host in self._hosts}

    def why_ended(self) -> str:
        return self.job.why_ended()

    def relocate(
        self, decided: Callable[[dict[str, list[int]]], object] = lambda hosts: None
    ) -> bool:
        old = [self._host_of[rank] for rank in range(self._config.size)]
        holders = copy_holders(tuple(old))
        places: dict[str, list[int]] = {
            host.name: [] for host in self._hosts if host.name not in self._reported
        }
        if not places:
            return False
        for rank, host in enumerate(old):
            if host not in places:
                host = old[holders[rank]]
            if host not in places:  # lost too
                host = min(places, key=lambda name: len(places[name]))
            places[host].append(rank)
        with self._hosts_lock:
            # Their relays may still run: nothing of them is to be taken for news of the new ranks.
            for host in self._reported.keys() - self._ended_hosts:
                self.wire.forget(host)
                self._ended_hosts.add(host)
        self._place(places)
        # First: a host's answer to the last relocation may come in this moment.
        self._relocation = secrets.token_hex(8)
        self._moving, self.starts_again = set(places), True
        self._dead, self._replaced, self._told = {}, {}, {}
        self._save()
        self._held = HeldEnds(self.deliver, self._config.can_replace)
        self._test, self._began = None, time.monotonic()
        decided(self.hosts())
        for each in reversed(self._hosts):  # as in `begin`
            self.wire.command(each.name, "again", self._config_of(each).to_json())
        return True

    def outlive_notebook(self, start: StartStandIn, command: Command) -> bool:
        if self.stand_in is not None:
            return False
        if not self.job.outlives():
            raise UsageError(
                "expected ranks on this machine, or on hosts that ssh or another command reaches, "
                f"found --on {self._launcher.typed}: these ranks end with the notebook. "
                "Keep it open, or keep their values: %distributed pull NAME"
            )
        self.stand_in = start(self.wire, self.deliver)
        self._save()
        for host in self._hosts:
            self.wire.command(host.name, "stay", to_line(command).decode())
        return True

    def lose_stand_in(self) -> None:
        with self._hosts_lock:
            self.stand_in = None

    def say_stay(self, command: Command) -> None:
        if self.stand_in is not None:
            self.stand_in.say(command)

    def note(self, record: dict[str, Any]) -> None:
        self.record = record
        self._save()

    def let_go(self) -> None:
        self._stopping = True
        assert self.stand_in is not None
        self.stand_in.release()

    def _save(self) -> None:
        with self._hosts_lock:
            if self.stand_in is None:
                return
            state = {
                "hosts": [dataclasses.astuple(host) for host in self._hosts],
                "host_of": list(self._host_of.items()),
                "addresses": self.addresses,
                "ended": list(self._ended_hosts),
                "lost": self._reported,
                "starts_again": self.starts_again,
                "record": self.record,
                "spares": self._spares,
                "seats": self._seats,
                "spares_on": self._spares_on,
                "seated": list(self._seated.items()),
                "choices": self._choices,
                "seat_lines": self._seat_lines,
                "dead": list(self._dead.values()),
                "replaced": list(self._replaced.items()),
                "told": [to_line(event).decode() for event in self._told.values()],
                "job": self.job.outlives(),
            }
            self.stand_in.save(state)

    def _take_over(self, taken: TakenHosts) -> None:
        """Continues with what the last notebook knew, and the events since then."""
        state = taken.state
        self._hosts = self._expected = [Host(*each) for each in state["hosts"]]
        self._host_of = dict(state["host_of"])
        self.addresses, self._ended_hosts = state["addresses"], set(state["ended"])
        self._spares, self._seats = state["spares"], state["seats"]
        self._spares_on = state["spares_on"]
        self._seated = {rank: (host, place) for rank, (host, place) in state["seated"]}
        self._choices, self._seat_lines = state["choices"], state["seat_lines"]
        self._may_miss_seats = True
        self.job = self._launcher.take_over(self._hosts, state["job"])
        self.wire.host_of = self._host_of
        self.starts_again, self.record = state["starts_again"], state["record"]
        self._moving = set(self.addresses) if self.starts_again else set()
        self._reported = state["lost"]
        for host, why in self._reported.items():
            if self.ranks_of(host):  # they have not been started on other hosts yet
                self.deliver(HostLeft(why), host)
        self._told = {event.name: event for event in map(event_of, map(str.encode, state["told"]))}
        for event in self._told.values():
            self.deliver(event, "")
        for end in state["dead"]:
            self._dead[end["rank"]] = end
            fields = dict(end)
            host = fields.pop("host")
            self.deliver(Exit(**fields), host)
        self._replaced = dict(state["replaced"])
        for rank, pid in self._replaced.items():
            self.deliver(Replaces(rank, pid), "")
        for host, line in taken.news:
            self._handle(host, line.encode())
        self.stand_in = taken.stand_in
        self.wire.take_over({host: taken.silent.get(host, 0.0) for host in self.addresses})
        for host in self._ended_hosts:
            self.wire.forget(host)
        self._save()

    def test_network(self) -> NetworkTest:
        """Tests the connections between all hosts, which must have come; the result comes later."""
        if self._test is None:
            self._test = NetworkTest(self.addresses, self.wire.command)
            self._test.begin()  # its events may come at once
        return self._test

    def blocked(self) -> str:
        if not self._hosts or time.monotonic() < self._began + limits.PORT_TEST_AFTER_SECONDS:
            return ""
        problems = self.test_network().problems()
        if not problems:
            return ""
        shown, more = problems[:_SHOWN_PAIRS], len(problems) - _SHOWN_PAIRS
        found = "\n".join([*shown, *([f"and {more} more pairs"] if more > 0 else [])])
        return (
            f"expected connections between all hosts, which MPI needs, found:\n{found}\nAllow them "
            "in the firewall: MPI's processes listen on any port. To check again: "
            f"allranks doctor --on {self._launcher.typed}"
        )

    def _config_of(self, host: Host) -> HostAgentConfig:
        first = self._hosts[0]
        folder = self._config.session_dir
        program, *options = self._launcher.command(self._hosts, self._spares)
        return dataclasses.replace(
            self._config,
            launch=(program, *(LASTING if self._config.can_replace else ()), *options),
            spares=self._spares,
            seats=tuple(self._seats),
            relocation=self._relocation,
            local_size=host.ranks,
            head=host is first,
            interface=tcp_url(self.addresses[first.name]),
            commands_url=f"ipc://{folder}/relay-commands",
            events_url=f"ipc://{folder}/relay-events",
        )

    def where(self, missing: Iterable[int]) -> str:
        if self._host_of:
            on = list(dict.fromkeys(self._host_of[rank] for rank in sorted(missing)))
        else:
            on = [host.name for host in self._expected]
        # If a host has ended, others may just not have connected yet.
        silent = [name for name in on if name not in self.addresses and not self._reported]
        said = f" on {', '.join(on)}" if on else ""
        if silent:
            said += (
                f"; no connection from {', '.join(silent)}. Check that no firewall keeps that host "
                f"from reaching {self.wire.commands_url}"
            )
        return said

    def say(self, command: Command) -> None:
        for host in self._hosts[:1] if isinstance(command, Clients) else self._hosts:
            self._say(host.name, command)
        if isinstance(command, RanksUp):
            self.starts_again = False
            with self._hosts_lock:  # the wire's thread notes deaths
                for rank, pid in self._replaced.items():
                    if rank in self._dead and self._dead[rank]["pid"] != pid:
                        del self._dead[rank]
            self._save()

    def seat_spares(self, dead: Sequence[int]) -> str:
        # If possible on the same host; all other spare processes take part in it.
        with self._hosts_lock:  # the wire's thread notes deaths
            problem = self._choose_spares(dead)
        if not problem:
            self._send_seats()
        return problem

    def repeat_seats(self) -> None:
        if self._may_miss_seats:
            self._send_seats()

    def _send_seats(self) -> None:
        self._may_miss_seats = False
        for host, line in self._seat_lines.items():
            self.wire.command(host, "say", line)

    @property
    def spares(self) -> int:
        # Each by a process that waits.
        with self._hosts_lock:
            return sum(map(len, self._spares_on.values()))

    def _choose_spares(self, dead: Sequence[int]) -> str:
        """Chooses those that take the places; returns why there are too few, or ""."""
        fresh = [rank for rank in dead if rank not in self._seated]
        spare = sum(map(len, self._spares_on.values()))
        if spare < len(fresh):
            each = "each of " if len(fresh) > 1 else ""
            return (
                f"expected a spare process for {each}{label(fresh)}, found {spare}: each "
                f"host had {self._spares} at first. To have more, set {SPARES} before the start, "
                f"for example: %env {SPARES}={2 * self._spares}"
            )
        for rank in fresh:
            most = max(self._spares_on, key=lambda name: len(self._spares_on[name]))
            host = self._host_of[rank] if self._spares_on.get(self._host_of[rank]) else most
            self._seated[rank] = host, self._spares_on[host].pop(0)
        taken: dict[str, list[tuple[int, int]]] = {name: [] for name in self._spares_on}
        for rank in dead:  # also those that wait since the last try, which has failed
            host, number = self._seated[rank]
            taken[host].append((number, rank))
        self._choices += 1
        self._seat_lines = {
            host: to_line(SeatSpares(self._choices, list(dead), seats)).decode()
            for host, seats in taken.items()
        }
        # First: if this process ends now, the next notebook asks the same ones.
        self._save()
        return ""

    def _say(self, host: str, command: Command) -> None:
        self.wire.command(host, "say", to_line(command).decode())

    def stop(self) -> None:
        # Not those of a host that is cut off, which ends its own.
        with self._hosts_lock:
            self._stopping = True
            there = set(self.addresses) - self._ended_hosts
        for host in there:
            self.wire.command(host, "stop", "")
        if there:
            with suppress(Empty):
                self._all_ended.get(timeout=limits.STOP_SECONDS)
        self.job.close()
        if self.stand_in is not None:
            self.stand_in.stop()

    def _handle(self, host: str, line: bytes) -> None:
        """Handles a host's event, in the wire's thread."""
        event = event_of(line)
        with self._hosts_lock:
            if host in self._moving and not isinstance(event, HostEvent):
                return  # of the ranks that end there
            if self.stand_in is not None:
                self.stand_in.event_came(event, host)
            self._handle_event(host, event)
            if isinstance(event, _STATE):
                self._save()

    def _handle_event(self, host: str, event: Event) -> None:
        match event:
            case HostAgain(relocation):
                if relocation == self._relocation:
                    self._moving.discard(host)
            case HostUp(address, its_version):
                self.addresses[host] = address
                if self._stopping:  # stop() has not seen this host
                    self.wire.command(host, "stop", "")
                if its_version != version():
                    why = f"has allranks {its_version}, and the notebook {version()}"
                    self._report(host, why)
                self.deliver(event, host)  # for who waits for all hosts
            case HostSilent():
                self._lose(host, self.wire.lease_seconds)
            case HostLate():
                if self._held.wait_for(host):  # so the cause of these ends is found
                    self._lose(host, limits.LATE_SECONDS)
            case HostBeat():
                self._held.beat(host)
            case HostRefused(problem):
                self._host_ended(host, f"could not start: {problem}")
            case HostListens() | HostConnected():
                if self._test is not None:
                    self._test.take(event, host)
                self.deliver(event, host)
            case HostEnds(why):
                self._report(host, why)
            case LauncherExit(code) if host != self._hosts[0].name:
                if code < 0 or code > _SIGNALLED:
                    died = ending(min(code, _SIGNALLED - code), explain=False)
                    self._report(host, f"has lost Open MPI's daemon prted, which {died}")
            case HostDown(why):
                self._host_ended(host, why)
            case Reach(other) if other == host:
                why = "has another host name, so mpiexec would look for it elsewhere"
                self._report(host, f"{why}: use the name that its command hostname prints")
            case Reach(other, command):
                self._say(other, Serve(command))
            case Admitted(rank):
                self._host_of[rank] = host
                self.deliver(event, host)
            case Replaces(rank, pid):
                self._host_of[rank] = host
                self._replaced[rank] = pid
                self.deliver(event, host)
            case SpareExit(place):
                if place in self._spares_on[host]:
                    self._spares_on[host].remove(place)
                # If it was about to become a rank, another one takes its place.
                seats = self._seated.items()
                self._seated = {rank: seat for rank, seat in seats if seat != (host, place)}
            case Exit(rank, pid):
                end = {"host": host, **vars(event)}
                # It may come again, also after a spare process was chosen, or has the place.
                if self._replaced.get(rank, pid) == pid and self._dead.get(rank) != end:
                    self._seated.pop(rank, None)
                    self._dead[rank] = end
                self._tell_controller(host, rank, pid)
                self._hold(event, host)
            case LauncherExit():
                self._hold(event, host)
            case Controller() | Registered():
                self._told[event.name] = event
                if isinstance(event, Controller):
                    for each in self._hosts[1:]:
                        self._say(each.name, Join(event.engine))
                self.deliver(event, host)
            case _:
                self.deliver(event, host)

    def _hold(self, end: Exit | LauncherExit, host: str) -> None:
        # A host that is reported as lost may have no more news, although its relay has not ended.
        others = {each.name for each in self._hosts} - self._reported.keys() - self._ended_hosts
        self._held.take(end, host, others - {host})

    def _tell_controller(self, host: str, rank: int, pid: int) -> None:
        # It runs on the first host, where the agent reports the deaths of its own ranks.
        first = self._hosts[0].name
        if host != first:
            self._say(first, ReportDeath(rank, pid))

    def _lose(self, host: str, seconds: float) -> None:
        self._host_ended(host, f"is cut off or has crashed: no heartbeat for {seconds:g} s")
        self.job.give_up(host)

    def _host_ended(self, host: str, why: str) -> None:
        """Handles the end of a host, in the thread that has found it."""
        with self._hosts_lock:
            self._ended_hosts.add(host)
            if self._stopping and self._ended_hosts >= set(self.addresses):
                self._all_ended.put(None)
            self.wire.forget(host)
            self._report(host, why)

    def _report(self, host: str, why: str) -> None:
        """Reports why a host is lost; only the first reason counts."""
        if not self._stopping and host not in self._reported:
            self._reported[host] = why
            self._save()
            self._held.release((HostLeft(why), host))
