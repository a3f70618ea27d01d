"""What `torch_waits` and `jax_waits` share: their state, which other ranks have left the cell, and
the connections to them. An end of the connections ends a wait in C++, which no signal reaches: the
library raises, and the rank lives on.
"""

from __future__ import annotations

import gc
import io
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psutil

from allranks import rendezvous
from allranks.collectives import world
from allranks.collectives.calls import rank_state as fields
from allranks.collectives.calls.call import Pause
from allranks.engine.exceptions import traceback_of
from allranks.errors import RankLeft
from allranks.records.ranks import BETWEEN, RUNNING, Activity, label

_REPORT_SECONDS, _ENDING_SECONDS = 5.0, 0.2


E = TypeVar("E", bound=BaseException)
_closing = threading.Lock()


class LibraryWaits:
    """Watches one rank's waits in a library, in a thread other than the one that waits."""

    def __init__(self) -> None:
        self._pressed = False
        # A sentence about a rank that will never come, once it is known.
        self._told = ""
        # Where the main thread was when it last moved or computed, when, and its computing time.
        self._at: tuple[object, ...] = ()
        self._since = self._cpu = 0.0

    def start(self) -> None:
        line_reporter = world.current().line_reporter
        if line_reporter is not None:
            line_reporter.also.append(self._look_quietly)

    def begin(self) -> None:
        finish_closing()
        self._pressed, self._told, self._at = False, "", ()

    def press(self) -> None:
        # The cell has been interrupted.
        self._pressed = True

    def _look_quietly(self) -> None:
        # An exception would end the thread, and with it all further checks.
        with suppress(Exception):
            self.look()

    def look(self) -> None:
        raise NotImplementedError


def gone() -> list[tuple[bool, int, int, str]]:
    """Returns how, which and why ranks have left the cell; a rank that itself waited comes last."""
    this = world.current()
    found = []
    for rank in range(this.size):
        if rank != this.rank:
            why = this.departure(rank)
            if why is not None:
                # A rank that itself waited is not to blame.
                found.append((RankLeft.__name__ in why[1] or why[0] == 2, why[0], rank, why[1]))
    return sorted(found)


def advice(rank: int, why: str) -> str:
    """Returns what to do about a rank that `gone` returns with this reason."""
    return world.current().advice(rank, why) or "Make the same calls on every rank."


def every(ranks: tuple[int, ...]) -> str:
    # All of them are needed.
    return f"all of {label(ranks)}" if len(ranks) > 1 else label(ranks)


def show_mpi_ports(ports: Sequence[int]) -> None:
    # MPI connects ranks by TCP where one has replaced a dead rank. Those connections must stay.
    packed = sum(port << 16 * place for place, port in enumerate(ports[:4]))
    world.current().board.put(fields.PORTS, packed)


def close(cell: int) -> None:
    """Ends this rank's connections to the other ranks of its host, and informs them. Does nothing
    once the cell of this number has ended: the connections are then those of a later cell.
    """
    this = world.current()
    with _closing:
        if this.scope.number != cell:
            return
        this.board.put(fields.CLOSED, this.epoch + 1)
        ports = {
            this.board.get(rank, fields.PORTS) >> shift & 0xFFFF
            for rank in this.local_ranks
            for shift in (0, 16, 32, 48)
        }
        pids = [this.board.get(rank, fields.PID) for rank in this.local_ranks]
        _shut(_connections(pids, ports))


def finish_closing() -> None:
    """Returns once no thread ends connections any more. The main thread calls it before a later
    cell makes new ones, which may get the same descriptors.
    """
    with _closing:
        pass


def has_closed(rank: int) -> bool:
    """Whether a rank of this host has ended its connections in this epoch."""
    this = world.current()
    return this.board.get(rank, fields.CLOSED) == this.epoch + 1


def have_closed(epoch: int) -> bool:
    this = world.current()
    return any(this.board.get(rank, fields.CLOSED) == epoch + 1 for rank in this.local_ranks)


@contextmanager
def shown_as(doing: str) -> Iterator[None]:
    """Within, the notebook shows this as what the rank does between two cells."""
    this = world.current()
    this.doing = Activity(BETWEEN, doing)
    try:
        yield
    finally:
        this.doing = RUNNING


def have_lost_one(connection_ended: bool) -> bool:
    """Whether a library has raised because a rank has died, or has closed its connections.

    ``connection_ended`` is whether its error is about one that has ended.
    """
    this = world.current()
    if connection_ended and not gone():
        pause = Pause()  # gloo may notice a death before the report of it comes
        while not this.died:
            if pause() > (_REPORT_SECONDS if have_ended() else _ENDING_SECONDS):
                return False
    closed = have_closed(this.epoch) and bool(gone())
    return closed or (connection_ended and bool(this.died))


def with_traceback_of(raised: BaseException, shown: E) -> E:
    """The error that is shown in place of the one that the library has raised."""
    shown.__traceback__, shown.__suppress_context__ = traceback_of(raised), True
    return shown


def have_ended() -> bool:
    this = world.current()
    for rank in this.local_ranks:
        try:
            if psutil.Process(this.board.get(rank, fields.PID)).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.Error:
            return True
    return False


def _connections(pids: list[int], kept: set[int]) -> list[int]:
    """Returns the descriptors of this process's TCP connections to these processes, itself
    included, but those that Python code has opened: torch and JAX open theirs in C++.
    """
    # Without its coordinator, JAX ends the process.
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    for address in (os.environ.get(rendezvous.JAX_ADDRESS), state and state.coordinator_address):
        coordinator = (address or "").rpartition(":")[2]
        kept = kept | ({int(coordinator)} if coordinator.isdigit() else set())
    theirs: set[tuple[object, object]] = set()
    for pid in pids:
        with suppress(psutil.Error):
            theirs |= {_ends(link) for link in psutil.Process(pid).net_connections("tcp")}
    own = psutil.Process().net_connections("tcp")
    of_python = _opened_by_python()
    between = [link for link in own if _ends(link)[::-1] in theirs and link.fd not in of_python]
    return [link.fd for link in between if kept.isdisjoint((link.laddr[1], link.raddr[1]))]


def _opened_by_python() -> set[int]:
    kinds: list[Any] = [socket.socket, io.FileIO]
    connection = sys.modules.get("multiprocessing.connection")
    if connection is not None:
        kinds.append(connection._ConnectionBase)
    found = set()
    for each in gc.get_objects():
        # Not by isinstance, which may run code of the user.
        kind = next((kind for kind in kinds if issubclass(type(each), kind)), None)
        if kind is not None:
            with suppress(OSError, ValueError):  # it is closed
                found.add(kind.fileno(each))
    return found


def _ends(link: Any) -> tuple[object, object]:
    # A socket that listens has one end, and is not the other end of any connection.
    return _plain(link.laddr), _plain(link.raddr) if link.raddr else None


def _plain(address: Any) -> tuple[str, int]:
    return address.ip.removeprefix("::ffff:"), address.port


def _shut(descriptors: list[int]) -> None:
    # The other end of a connection notices that, and closes it.
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as link:
            link.shutdown(socket.SHUT_RDWR)
