"""How one rank stands: what it knows of itself and of the others, and what it tells them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from allranks.collectives.calls import board as fields
from allranks.collectives.calls.board import Board
from allranks.collectives.calls.interrupts import ear
from allranks.collectives.calls.peers import PROCESS, Peers, Scope, State

_SPIN_SECONDS = 50e-6
_SPINS = 300
"""Looks at a peer's counter that take about as long."""


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"[allranks] {text}\n")


class Standing:
    """One rank's number, its hosts, its scope and epoch, and what it tells the other ranks."""

    def __init__(self, rank: int, hosts: tuple[int, ...], board: Board) -> None:
        self.rank, self.size = rank, len(hosts)
        self.hosts = hosts
        """For every rank the number of its host, counted in the order of the ranks."""
        self.board = board
        self.peers = Peers(board)
        self.shares: tuple[int, ...] = (0,) * len(hosts)
        """For every rank the first of those with which it shares memory."""
        self.scope: Scope = PROCESS
        self.epoch = 0
        self.checks = True
        self.late_seconds = 5.0
        self.doing = ""
        self.waits: tuple[float, int] | None = None
        """Since when this rank waits, by `perf_counter`, and for which one of those missing."""
        self.failed = False
        self.offset_seconds = 0.0
        """What this host's clock lacks to the first rank's host's."""
        self.kept: dict[int, list[Any]] = {}
        """Requests under way and their buffers, and those that an interrupt left."""
        self.notice: Callable[[str], None] = _to_stderr
        self._hinted: set[str] = set()
        self.tell: Callable[[], None] | None = None
        """Lets ranks of other hosts know at once what this one tells of itself."""
        self.nudge: Callable[[], object] | None = None
        """Lets MPI go on with what is under way between ranks: it does so within its calls only."""
        self.main_thread = threading.get_ident()
        self.told = State()
        """What this rank tells of itself."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        # With more ranks than cores, a spinning rank keeps off the one that it waits for.
        self.spin_seconds = _SPIN_SECONDS if self.local_size <= cores else 0.0
        self.pending = 0
        """Calls that were posted and have not ended."""
        self.spins = _SPINS if self.local_size <= cores else 0

    @property
    def threaded(self) -> bool:
        """Whether another thread of this rank may call as well."""
        return False

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        here = self.hosts[self.rank]
        return tuple(rank for rank, host in enumerate(self.hosts) if host == here)

    @property
    def local_size(self) -> int:
        """How many ranks this host has."""
        return len(self.local_ranks)

    def hint(self, text: str) -> None:
        """Gives a notice, the first time only."""
        if text not in self._hinted:
            self._hinted.add(text)
            self.notice(text)

    @property
    def shared_by_all(self) -> bool:
        """Whether all ranks share one memory."""
        return not any(self.shares)

    def sharing(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """These ranks, those together that share memory."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.shares[rank], []).append(rank)
        return tuple(map(tuple, found.values()))

    def look(self) -> int:
        """The number of a look at the board that begins now.

        Among several hosts it is that of the last round in which all have told each other all: a
        rank whose look has a number has seen what was told before that round.
        """
        if self.shared_by_all:
            return self.board.get(self.rank, fields.BEAT) + 1
        return self.board.get(self.shares[self.rank], fields.ROUND)

    def seen_at(self, look: int, beat: int) -> int:
        """The number of a look of another rank that has seen what this one saw in ``look``.

        ``beat`` is that of its last one.
        """
        return beat + 2 if self.shared_by_all else look + 3

    def enter(self, name: str, ranks: tuple[int, ...] | None, number: int) -> None:
        """This rank starts a scope, together with ``ranks``."""
        ear.heard()  # what has come before is over
        self.scope = Scope(name, number, None if ranks is None else frozenset(ranks))
        self.told.entered = number + 1
        self.board.put(fields.FAILED, 0)
        self.board.put(fields.ENTERED, number + 1)

    def begin(self) -> None:
        """The process is a scope from now on."""
        self.enter(PROCESS.name, None, PROCESS.number)

    def asks(self, person: bool) -> None:
        """This rank waits for what a person types, or does so no longer."""
        self.doing = "waiting for what is typed" if person else ""
        self.board.put(fields.ASKING, int(person))

    def leave(self, reason: str, failed: bool, where: str, *, gone: bool = False) -> None:
        """This rank's scope has ended."""
        told = self.told
        told.reason, told.where, told.failed = reason, where, failed
        told.left = fields.GONE if gone else self.scope.number + 1
        self.board.write(fields.REASON, reason)
        self.board.write(fields.WHERE, where)
        self.board.put(fields.FAILED, int(failed))
        self.board.put(fields.LEFT, told.left)
        self.scope = PROCESS
        if self.tell is not None:
            self.tell()

    def depart(self, reason: str, failed: bool, where: str) -> None:
        """This rank leaves for good; the first reason given is kept."""
        if self.told.left >= fields.GONE:
            return
        self.failed = failed
        self.leave(reason, failed, where, gone=True)

    def give_up(self, why: str, *, deadlock: bool) -> None:
        """Says that this rank takes part in nothing more of this epoch."""
        told = self.told
        told.broken, told.broke = (self.epoch + 1) * 2 + int(deadlock), why
        self.board.write(fields.BROKE, why)
        self.board.put(fields.BROKEN, told.broken)
        if self.tell is not None:
            self.tell()

    def start_over(self, epoch: int) -> None:
        """A new epoch has begun: this rank takes part again."""
        self.epoch = epoch
        self.told.broken = 0
        self.board.put(fields.BROKEN, 0)
