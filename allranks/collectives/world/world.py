"""One rank's world: who there is, what is under way, and how a call is driven to its end.

Runs in every rank. There is one world a process, behind ``init()``; the loopback has one a thread.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from allranks.collectives.calls import board as fields
from allranks.collectives.calls.board import Board
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.interrupts import ear
from allranks.collectives.calls.journal import Recorder
from allranks.collectives.calls.peers import PROCESS, Peers, Scope, State
from allranks.collectives.calls.wait import Steps, drive
from allranks.collectives.calls.watch import Watch
from allranks.collectives.world.group import Group
from allranks.errors import CollectiveMismatch, NotInitialized, RankLeft, UsageError

if TYPE_CHECKING:
    from allranks.collectives.calls.whereabouts import Watcher
    from allranks.collectives.gpu.device import Device
    from allranks.collectives.host.window import Window
    from allranks.collectives.mpi.communicators import MpiSide

_SPIN_SECONDS = 50e-6
FIRST_MADE = 1 << 20
"""Numbers from here on belong to groups of communicators, those below to process sets."""
_SPINS = 300
"""Looks at a peer's counter that take about as long."""


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"[allranks] {text}\n")


class World:
    """Everything that one rank knows."""

    def __init__(self, rank: int, hosts: tuple[int, ...], board: Board | None) -> None:
        self.rank, self.size = rank, len(hosts)
        self.hosts = hosts
        """For every rank the number of its host, counted in the order of the ranks."""
        self.board = board
        self.peers = Peers(board)
        self.window: Window | None = None
        self.gpu: Device | None = None
        """This rank's GPU, from the first array on one on."""
        self.quarantine: list[Any] = []
        """Arrays of calls that were left: a peer may still write to them in this epoch."""
        self.scope: Scope = PROCESS
        self._told = State()
        self.epoch = 0
        self.groups: dict[int, Group] = {}
        self.sets: dict[int, tuple[int, ...]] = {}
        """The process sets by number, those that this rank is not in as well."""
        self.made = FIRST_MADE
        """The number of the last group that a communicator has made."""
        self.pending = 0
        self.dirty = False
        self.checks = True
        self.late_seconds = 5.0
        self.doing = ""
        self.kept: dict[int, list[Any]] = {}
        """Requests under way and their buffers, and those that an interrupt left."""
        self.lock = threading.RLock()
        self.recorder = Recorder()
        self.watch = Watch(self)
        self.notice: Callable[[str], None] = _to_stderr
        self.attend_messages: Callable[[], None] | None = None
        self.mpi: MpiSide | None = None
        self.watcher: Watcher | None = None
        self.notebook = False
        """True once an engine has entered a cell: then the scope is not the process."""
        self.failed = False
        self.main_thread = threading.get_ident()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        # With more ranks than cores, a spinning rank keeps off the one that it waits for.
        self.spin_seconds = _SPIN_SECONDS if self.local_size <= cores else 0.0
        self.spins = _SPINS if self.local_size <= cores else 0

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        here = self.hosts[self.rank]
        return tuple(rank for rank, host in enumerate(self.hosts) if host == here)

    @property
    def local_size(self) -> int:
        """How many ranks this host has."""
        return len(self.local_ranks)

    def run(self, call: Call) -> Any:
        """Drives a call to its end and returns its result."""
        with self.lock:
            self.check_clean(call)
            if self.pending:
                if call.ordered:
                    self._enqueue(call)
                    return self._drive(call, self.until(call))
                result = self._drive(call, self.alongside(call))
            else:
                result = self._drive(call, call.steps)
            self.finish(call)
            return result

    def join(self, call: Call) -> Any:
        """Waits for a call that was submitted and returns its result."""
        with self.lock:
            if not call.done:
                self.check_clean(call)
                return self._drive(call, self.until(call))
            if call.error is not None:
                raise call.error
            return call.result

    def _drive(self, call: Call, steps: Steps[Any]) -> Any:
        try:
            return drive(steps, self.watch.attend, self.spin_seconds)  # type: ignore[arg-type]
        except BaseException as error:
            self.fail(call, error)
            raise
        finally:
            self.watch.rest()

    def submit(self, call: Call) -> Call:
        """Posts a call as far as it goes without waiting."""
        with self.lock:
            self.check_clean(call)
            self._enqueue(call)
            self.progress()
            return call

    def _enqueue(self, call: Call) -> None:
        # In this order: one too many ends the epoch with the cell, one too few mixes two cells.
        self.pending += 1
        call.group.queue.append(call)

    def progress(self) -> None:
        """Takes every group's first call as far as it goes without waiting."""
        for group in list(self.groups.values()):
            while group.queue:
                call = group.queue[0]
                try:
                    if not self._advance(call):
                        break
                except BaseException as error:
                    # Its steps are over, and nobody can go on with it.
                    call.posted = True
                    self.fail(call, error)
                    raise
                call.done = True
                group.queue.popleft()
                self.pending -= 1

    def _advance(self, call: Call) -> bool:
        """Takes a call as far as it goes without waiting; True at its end."""
        try:
            next(call.steps)
        except StopIteration as end:
            call.result = end.value
            self.finish(call)
        except (CollectiveMismatch, UsageError) as error:
            call.error = error
        else:
            return False
        return True

    def finish(self, call: Call) -> None:
        """Notes the end of a call."""
        call.ended = perf_counter()
        if call.ordered:
            call.group.finish(call)
        self.recorder.add(call)

    def alongside(self, call: Call) -> Steps[Any]:
        """Drives a call that takes no part in the group's order, and everything under way."""
        while True:
            self.progress()
            try:
                yield next(call.steps)
            except StopIteration as end:
                return end.value

    def until(self, call: Call) -> Steps[Any]:
        """Drives everything under way until one call is done."""
        while True:
            self.progress()
            if call.done:
                break
            yield call.group.queue[0]
        if call.error is not None:
            raise call.error
        return call.result

    def check_clean(self, call: Call) -> None:
        """Lets no call begin in an epoch that is over for this rank."""
        if self.dirty:
            raise RankLeft(
                f"{call.spec.title} needs an epoch that is whole: this rank has left an earlier "
                "collective of it unfinished. The next cell starts a fresh one; in a script call "
                "allranks.collectives.renew() on every rank."
            )

    def fail(self, call: Call, error: BaseException) -> None:
        """Says on the board that this rank has left a collective, if it has."""
        # A usage error that comes after all have agreed comes on all: the epoch is whole.
        if isinstance(error, (CollectiveMismatch, UsageError)) and not call.deadlock:
            return
        if call.deadlock:
            self.spoil(call.deadlock, call, deadlock=True)
        elif not call.posted:
            return
        elif isinstance(error, RankLeft):
            self.spoil(f"has given up {call.spec.title} at {call.site}", call)
        else:
            self.spoil(f"has left {call.spec.title} at {call.site} ({type(error).__name__})", call)
        self.quarantine.append(call.held)

    def spoil(self, why: str, call: Call | None = None, *, deadlock: bool = False) -> None:
        """This rank can take part in no further collective of this epoch."""
        if self.dirty:
            return
        self.dirty = True
        for group in list(self.groups.values()):
            group.abandon()
        if call is not None and call.spec.device and self.gpu is not None:
            self.gpu.hold(call)
        self._told.broken, self._told.broke = (self.epoch + 1) * 2 + int(deadlock), why
        if self.board is not None:
            self.board.write(fields.BROKE, why)
            self.board.put(fields.BROKEN, self._told.broken)
        if self.mpi is not None:
            self.mpi.tell()

    def enter(self, name: str, ranks: tuple[int, ...] | None, number: int) -> None:
        """This rank starts a scope, together with ``ranks``."""
        ear.heard()  # what has come before is over
        self.scope = Scope(name, number, None if ranks is None else frozenset(ranks))
        self._told.entered = number + 1
        if self.board is not None:
            self.board.put(fields.FAILED, 0)
            self.board.put(fields.ENTERED, number + 1)

    def leave(self, reason: str, failed: bool, where: str, *, gone: bool = False) -> None:
        """This rank's scope has ended."""
        if self.pending:
            self.spoil(f"has left {self.scope.name} without synchronize() on a handle")
        told = self._told
        told.reason, told.where, told.failed = reason, where, failed
        told.left = fields.GONE if gone else self.scope.number + 1
        if self.board is not None:
            self.board.write(fields.REASON, reason)
            self.board.write(fields.WHERE, where)
            self.board.put(fields.FAILED, int(failed))
            self.board.put(fields.LEFT, told.left)
        self.scope = PROCESS
        if self.mpi is not None:
            self.mpi.tell()

    def depart(self, reason: str, failed: bool, where: str) -> None:
        """This rank leaves for good; the first reason given is kept."""
        if self._told.left >= fields.GONE:
            return
        self.failed = failed
        self.leave(reason, failed, where, gone=True)

    def begin(self) -> None:
        """The process is a scope from now on."""
        self.enter(PROCESS.name, None, PROCESS.number)

    def agree_by_messages(self, group: Group, call: Call, extent: int) -> Steps[None]:
        """Agreement between hosts."""
        assert self.mpi is not None
        yield from self.mpi.agree(group, call, extent)

    def missing_by_messages(self, group: Group, call: Call) -> tuple[int, ...]:
        """The ranks of other hosts, or all, that keep a call from going on."""
        assert self.mpi is not None
        return self.mpi.missing(group, call)

    def sites_by_messages(self, group: Group, call: Call) -> dict[int, Site]:
        """Where those who are known to wait have called from."""
        if self.mpi is None or self.mpi.messages is None:
            return {self.rank: call.site}
        return self.mpi.messages.sites(group, call)

    def finished_by_messages(self, group: Group, call: Call) -> None:
        """Keeps what other hosts must know when this rank leaves."""
        if self.mpi is not None and self.mpi.messages is not None:
            self.mpi.messages.note(group, call, group.full_sequence(call))

    def own_state(self) -> State:
        """What this rank tells of itself."""
        return replace(self._told)

    def renewed(self, epoch: int) -> None:
        """A new epoch has begun: nothing of the old one counts any more."""
        self.epoch, self.dirty, self.pending = epoch, False, 0
        self.quarantine.clear()
        self._told.broken = 0
        if self.board is not None:
            self.board.put(fields.BROKEN, 0)
        for group in list(self.groups.values()):
            group.abandon()
        # Groups that Split() and Dup() have made end with their epoch.
        self.groups = {n: group for n, group in list(self.groups.items()) if n < FIRST_MADE}
        for _, group in sorted(self.groups.items()):
            group.renew()
            if self.mpi is not None:
                self.mpi.open(group, now=True)


_process: World | None = None
_threads = threading.local()
_threaded = False
"""True once a thread has had a world of its own: looking that up costs every call."""


def current() -> World:
    """This rank's world.

    Raises:
        NotInitialized: before ``init()``, or after ``shutdown()``.
    """
    found = _found() if _threaded else _process
    if found is None:
        raise NotInitialized(
            "collectives need init() first, and it has not been called on this rank. "
            "Call allranks.collectives.init()."
        )
    return found


def set_process(world: World | None) -> None:
    """Makes a world this process's."""
    global _process
    _process = world


def set_thread(world: World | None) -> None:
    """Makes a world this thread's: the loopback."""
    global _threaded
    _threaded = True
    _threads.world = world


def exists() -> bool:
    """True between ``init()`` and ``shutdown()``."""
    return _found() is not None


def _found() -> World | None:
    own: World | None = getattr(_threads, "world", None)
    return own or _process
