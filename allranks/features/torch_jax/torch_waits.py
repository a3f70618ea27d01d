"""Ends a rank's wait in torch's own process groups, of gloo or NCCL, for a rank that has left the
cell, with an error that names it. The groups of allranks (`process_group`) do not need it.

torch waits in C++, where no signal reaches it, for half an hour. The end of the connections to the
other ranks ends such a wait: torch raises, and the rank lives on. Process groups are useless
without connections; between two cells all ranks forget theirs.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import zlib
from contextlib import suppress
from types import FrameType
from typing import Any

from allranks.collectives import world
from allranks.collectives.calls import guard
from allranks.collectives.calls import rank_state as fields
from allranks.collectives.start import under_mpi
from allranks.engine.exceptions import is_a, text_of, traceback_of
from allranks.engine.wire import give_up
from allranks.errors import RankLeft
from allranks.features.torch_jax import other_ranks, torch_state

#: A main thread that has not moved for this time waits.
_STILL_SECONDS = 1.0
#: The largest share of a core of a thread that waits.
_IDLE_SHARE = 0.05
_STUCK_SECONDS = 20.0
#: Parts of messages of gloo and of torch's store about a connection that has ended.
_LOST = ("gloo/transport/tcp/", "TCPStore", "onnection was likely closed")
#: The occasion of a question to a rank that has left the cell; others have numbers.
_GONE = -1
_AGAIN = "call init_process_group() again, and wrap models again."
_ADVICE = f"torch's process groups are closed on all ranks: {_AGAIN}"
_DEATH = f"torch's process groups are closed on all ranks, as a rank of theirs has died: {_AGAIN}"
_NO_GROUP = "Default process group has not been initialized"
#: The numbers of torch's groups on the board, which are far from those of our own.
_FIRST = 1 << 40


class TorchWaits(other_ranks.LibraryWaits):
    """`LibraryWaits` in torch."""

    def __init__(self) -> None:
        super().__init__()
        self._closed_at = 0.0
        self._instead: tuple[BaseException, RankLeft] | None = None
        self._noted: set[str] = set()
        self._asked: dict[tuple[int, int], int] = {}
        self._failed = 0
        self._cell = self._forgotten = ""
        self._forgotten_ns = 0

    def begin(self) -> None:
        super().begin()
        self._closed_at, self._instead, self._asked = 0.0, None, {}

    @property
    def not_to_blame(self) -> tuple[str, ...]:
        # At the end of the traceback of an error of ours, or of an interrupt.
        return (torch_state.folder(),) if torch_state.c10d() is not None else ()

    def _answer(self) -> None:
        """Shows this rank's progress in torch, if another rank has asked for it.

        The records of torch take long to read: too long for the end of each cell.
        """
        this, board = world.current(), world.current().board
        asked = board.get(this.rank, fields.ASKED_ELSE)
        if asked == board.get(this.rank, fields.TOLD):
            return
        known = torch_state.recorded()
        self._noted |= known.keys()
        for group in self._noted:
            # 0 for a group without calls that has the name of an earlier one.
            begun = known[group].begun - self._failed if group in known else 0
            board.note(_number(group), begun, 0)
        board.put(fields.TOLD, asked)

    def look(self) -> None:
        """Ends the wait of the main thread where nothing else can."""
        self._answer()
        if not world.current().scope.number or torch_state.c10d() is None:
            return
        if not self._is_still():
            return
        with guard.no_collection():
            called = torch_state.frames_in_torch(guard.frame_of_main_thread())
        # Groups of allranks need no end of their waits.
        if not _groups() and torch_state.members_of_new(called) is None:
            return
        if not self._told:
            self._told = self._why(called)
        if not self._told and not self._pressed:
            return
        if not self._closed_at:
            self._closed_at = time.monotonic()
        elif time.monotonic() - self._closed_at > _STUCK_SECONDS:
            give_up(world.current().rank, f"cannot leave torch: {self._told or 'interrupted'}")
        self._close()

    def _is_still(self) -> bool:
        """Whether the main thread has neither moved nor computed for a while."""
        frame, now = guard.frame_of_main_thread(), time.monotonic()
        at = (id(frame), frame.f_lasti) if frame is not None else ()
        cpu = _main_thread_seconds()
        if at != self._at or cpu - self._cpu > _IDLE_SHARE * max(now - self._since, 0.1):
            self._at, self._since, self._cpu = at, now, cpu
            self._asked = {key: when for key, when in self._asked.items() if key[1] == _GONE}
        return now - self._since >= (_STILL_SECONDS / 2 if self._pressed else _STILL_SECONDS)

    def _why(self, called: list[FrameType]) -> str:
        """Returns a sentence about a rank that will never come to the call of the main thread,
        or "".
        """
        died = world.current().died
        gone = [
            entry
            for entry in other_ranks.gone()
            if entry[2] in died or self._has_told(entry[2], _GONE)
        ]
        for what, needed, behind in self._awaited(called) if gone else ():
            for *_, rank, why in gone:
                if rank in needed and (rank in died or behind(rank)):
                    return _sentence(what, needed, rank, why)
        return ""

    def _has_told(self, rank: int, occasion: int) -> bool:
        """Whether a rank has shown its progress; on each occasion it is asked once."""
        board = world.current().board
        if rank not in world.current().local_ranks or rank == board.rank:
            return False
        if (rank, occasion) not in self._asked:
            self._asked[rank, occasion] = time.time_ns()
            board.ask(rank, self._asked[rank, occasion], fields.ASKED_ELSE)
        return board.get(rank, fields.TOLD) >= self._asked[rank, occasion]

    def _awaited(self, called: list[FrameType]) -> list[tuple[str, tuple[int, ...], Any]]:
        """Returns calls that this rank may wait for: name, needed ranks, and a test for ranks
        behind it.
        """
        this = world.current()
        everybody = tuple(range(this.size))
        found: list[tuple[str, tuple[int, ...], Any]] = []
        new = torch_state.members_of_new(called)
        if new is not None:
            # No rank leaves before all members have made the group.
            return [(torch_state.called(called), new or everybody, lambda _: True)]
        for group, known in torch_state.recorded().items():
            if known.awaited:
                number = known.awaited

                def behind(rank: int, group: str = group, number: int = number) -> bool:
                    return this.board.progress(rank, _number(group))[0] < number

                found.append((known.title, torch_state.members(group) or everybody, behind))
        if called and not found:
            peer = torch_state.peer_of(called)
            if peer is not None:
                return [(torch_state.called(called), (this.rank, peer), lambda _: True)]
        return found

    def _close(self) -> None:
        this = world.current()
        if this.board is not None:
            other_ranks.close()
        for group in _groups():
            # Does nothing for gloo; for NCCL it may take long.
            threading.Thread(target=_abort, args=(group,), daemon=True).start()

    def instead_of(self, error: BaseException) -> BaseException:
        """Returns the error of the cell: `RankLeft` for an error of torch at the end of its
        wait.
        """
        if is_a(error, KeyboardInterrupt) and other_ranks.have_closed(world.current().epoch):
            error.__suppress_context__ = True  # hides the error that torch raised meanwhile
        if self._instead is not None and self._instead[0] is error:
            return self._instead[1]
        if not is_a(error, (RuntimeError, ValueError)) or torch_state.c10d() is None:
            return error
        inside = _frames_of(error)
        # ``work.wait()`` is no Python of torch's; JAX's gloo raises errors of JAX's own types.
        if not inside and not (type(error) is RuntimeError and _tells_of_a_loss(error)):
            return error
        raised = is_a(error, RuntimeError)
        if raised and not self._told and other_ranks.have_lost_one(_tells_of_a_loss(error)):
            # Another rank has died, or its wait ended first, which ended the one here.
            self._told = self._why_after(inside)
        if not raised or not self._told:
            self._explain(error)
            return error
        left = RankLeft(self._told)
        left.__traceback__, left.__suppress_context__ = traceback_of(error), True
        self._instead = error, left
        return left

    def _explain(self, error: BaseException) -> None:
        # Adds the reason to an error of torch about a group that does not exist any more.
        text, since = text_of(error), self._forgotten_ns > under_mpi.torch_met_at_ns()
        said = self._forgotten in text
        if not said and (_tells_of_a_loss(error) or (_NO_GROUP in text and since)):
            error.args = (f"{text} {self._forgotten}",)

    def _why_after(self, inside: list[FrameType]) -> str:
        """As `_why`, after the end of the call."""
        this = world.current()
        (*_, rank, why), *_ = other_ranks.gone()
        what, needed = torch_state.called(inside), tuple(range(this.size))
        known = torch_state.recorded()
        if len(known) == 1 and torch_state.peer_of(inside) is None:
            # For example, of a backward pass in the only group.
            ((group, last),) = known.items()
            members = torch_state.members(group)
            if rank in members:
                what, needed = last.title, members
        return _sentence(what, needed, rank, why)

    def leave(self, error: BaseException | None) -> None:
        this = world.current()
        if torch_state.c10d() is None:
            return
        self._cell = this.scope.name
        if self._closed_at or self._told:
            this.spoil("has left a call of torch")
        # Where torch has raised, the last call of each group may be the one that did not come.
        self._failed = int(error is not None and bool(_frames_of(error)))

    def renew(self, epoch: int) -> None:
        # Between two cells, after the end of an epoch in which a rank has closed its connections.
        if torch_state.c10d() is not None and other_ranks.have_closed(epoch):
            self._forget(
                "torch's process groups were closed on all ranks to end a wait in "
                f"{self._cell}: {_AGAIN}"
            )

    def after_death(self) -> str:
        # A rank of the groups has died.
        for group in _groups():
            _abort(group)
        return _DEATH if self._forget(_DEATH) else ""

    def _forget(self, why: str) -> bool:
        """Destroys torch's groups; returns whether there were some."""
        c10d = torch_state.c10d()
        state: Any = sys.modules.get("accelerate.state")
        found = c10d is not None and c10d.is_initialized()
        if found:
            self._forgotten, self._forgotten_ns = why, time.time_ns()
        with suppress(Exception):
            c10d.destroy_process_group()
        with suppress(Exception):
            state.AcceleratorState._reset_state(True)
            state.GradientState._reset_state()
        return found


def _tells_of_a_loss(error: BaseException) -> bool:
    text = text_of(error)
    return any(part in text for part in _LOST)


def _sentence(what: str, needed: tuple[int, ...], rank: int, why: str) -> str:
    return (
        f"torch's {what} needs {other_ranks.every(needed)}: rank {rank} {why}. Make the same calls "
        f"on every rank. {_ADVICE}"
    )


def _number(group: str) -> int:
    return _FIRST + zlib.crc32(group.encode())


def _groups() -> list[Any]:
    # Those of torch's own backends.
    every = list(getattr(getattr(torch_state.c10d(), "_world", None), "pg_map", ()))
    return [group for group in every if not type(group).__module__.startswith("allranks.")]


def _frames_of(error: BaseException) -> list[FrameType]:
    found: list[FrameType] = []
    own = torch_state.folder()
    for frame, _ in traceback.walk_tb(traceback_of(error)):
        found = [*found, frame] if frame.f_code.co_filename.startswith(own) else []
    return found


def _main_thread_seconds() -> float:
    # Its computing time; 0 where the system has no such clock.
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return 0.0
    return time.clock_gettime(clock_of(threading.main_thread().ident))


def _abort(group: Any) -> None:
    with suppress(Exception):
        group.abort()
