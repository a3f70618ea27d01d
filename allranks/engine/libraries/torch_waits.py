"""A rank that waits in torch for one that has left the cell is let go, and told for whom it waited.

torch waits in C++, where no signal is heard, for half an hour. What ends such a wait is the end of
the connections to the other ranks: it raises in torch, and the rank lives on. Process groups whose
connections have ended are of no use; between two cells all ranks forget theirs.
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
from allranks.collectives.calls import board as fields
from allranks.collectives.calls import frames
from allranks.collectives.start import for_torch
from allranks.engine.libraries import other_ranks, torch_state
from allranks.engine.libraries.other_ranks import every
from allranks.engine.report import is_a, traceback_of
from allranks.engine.wire import give_up
from allranks.errors import RankLeft

_STILL_SECONDS = 1.0
"""A main thread that has not moved for so long waits."""
_IDLE_SHARE = 0.05
"""Of a core: what a thread that waits takes at most."""
_LENT_SECONDS = 2.0
"""Within so long a rank that looks for the first one's store finds the one that it is lent."""
_STUCK_SECONDS = 20.0
_ADVICE = (
    "torch's process groups are closed on all ranks: call init_process_group() again, and wrap "
    "models again."
)
#: The numbers of torch's groups on the board, which are far from those of our own.
_FIRST = 1 << 40
_MAKING = _FIRST - 1


class TorchWaits:
    """Looks after one rank's waits in torch, in a thread that is not the one which waits."""

    def __init__(self) -> None:
        self._pressed = False
        self._told = ""
        self._closed_at = 0.0
        self._lent: Any = None
        self._lent_at = 0.0
        self._instead: tuple[BaseException, RankLeft] | None = None
        self._noted: set[str] = set()
        self._asked: dict[int, int] = {}
        self._left = 0, 0, 0
        self._at: tuple[object, ...] = ()
        self._since = self._cpu = 0.0

    def start(self) -> None:
        """From now on it looks, several times a second."""
        whereabouts = world.current().whereabouts
        if whereabouts is not None:
            whereabouts.also.append(self._look_quietly)

    def begin(self) -> None:
        """A cell begins."""
        self._pressed, self._told, self._at = False, "", ()
        self._closed_at, self._lent, self._lent_at = 0.0, None, 0.0
        self._instead = None
        self._asked = {}

    @property
    def not_to_blame(self) -> tuple[str, ...]:
        """Part of the names of files whose frames say nothing: a wait in torch has been ended."""
        return (torch_state.FOLDER,) if self._told or self._closed_at else ()

    def press(self) -> None:
        """The cell has been interrupted."""
        self._pressed = True

    # ── while a cell runs ────────────────────────────────────────────────────────────────────

    def _look_quietly(self) -> None:
        # A thread that ends with an exception looks no more.
        with suppress(Exception):
            self.answer()
            self.look()

    def answer(self) -> None:
        """Tells how far this rank has come in torch, if another one has asked.

        What torch has recorded takes long to read: too long for the end of each cell.
        """
        this, board = world.current(), world.current().board
        asked = board.get(this.rank, fields.ASKED_ELSE)
        if asked == board.get(this.rank, fields.TOLD):
            return
        cell, made, failed = self._left
        board.note(_MAKING, made, cell)
        known = torch_state.recorded()
        self._noted |= known.keys()
        for group in self._noted:
            # 0 in a group whose name is that of one before, and in which nothing was called.
            begun = known[group].begun - failed if group in known else 0
            board.note(_number(group), begun, 0)
        board.put(fields.TOLD, asked)

    def look(self) -> None:
        """Ends the wait of the main thread where it can only end so."""
        if not world.current().scope.number or torch_state.c10d() is None:
            return
        if not self._is_still() or not (self._pressed or other_ranks.gone()):
            return
        called = torch_state.frames_in_torch(frames.of_main_thread())
        if not self._told:
            self._told = self._why(called)
        if not self._told and not (self._pressed and _in_use(called)):
            return
        if called and torch_state.is_meeting(called) and self._lend():
            return
        if not self._closed_at:
            self._closed_at = time.monotonic()
        elif time.monotonic() - self._closed_at > _STUCK_SECONDS:
            give_up(world.current().rank, f"cannot leave torch: {self._told or 'interrupted'}")
        self._close()

    def _is_still(self) -> bool:
        """Whether the main thread has neither moved nor computed for a while."""
        frame, now = frames.of_main_thread(), time.monotonic()
        at = (id(frame), frame.f_lasti) if frame is not None else ()
        cpu = _main_thread_seconds()
        if at != self._at or cpu - self._cpu > _IDLE_SHARE * max(now - self._since, 0.1):
            self._at, self._since, self._cpu = at, now, cpu
        return now - self._since >= (_STILL_SECONDS / 2 if self._pressed else _STILL_SECONDS)

    def _why(self, called: list[FrameType]) -> str:
        """Which rank will never come to what the main thread waits for, in a sentence; or ""."""
        gone = [entry for entry in other_ranks.gone() if self._has_told(entry[2])]
        for what, needed, behind in self._awaited(called) if gone else ():
            for *_, rank, why in gone:
                if rank in needed and behind(rank):
                    return _sentence(what, needed, rank, why)
        return ""

    def _has_told(self, rank: int) -> bool:
        """Whether a rank that has left has said how far it had come; it is asked."""
        board = world.current().board
        if rank not in world.current().local_ranks:
            return False
        if rank not in self._asked:
            self._asked[rank] = time.time_ns()
            board.ask(rank, self._asked[rank], fields.ASKED_ELSE)
        return board.get(rank, fields.TOLD) >= self._asked[rank]

    def _awaited(self, called: list[FrameType]) -> list[tuple[str, tuple[int, ...], Any]]:
        """What this rank may wait for: its name, whom it needs, and who has not come to it."""
        this = world.current()
        everybody = tuple(range(this.size))
        found: list[tuple[str, tuple[int, ...], Any]] = []
        for group, known in torch_state.recorded().items():
            if known.awaited:
                number = known.awaited

                def behind(rank: int, group: str = group, number: int = number) -> bool:
                    return this.peers.progress(rank, _number(group))[0] < number

                found.append((known.title, torch_state.members(group) or everybody, behind))
        if called and not found:
            peer = torch_state.peer_of(called)
            if peer is not None:
                return [(torch_state.called(called), (this.rank, peer), lambda _: True)]
            made = _made()
            found.append(
                (
                    torch_state.called(called),
                    everybody,
                    lambda rank: _has_made(this, rank) < made,
                )
            )
        return found

    def _lend(self) -> bool:
        """Has a store where the first rank's would be; whether there is time to find it.

        Who looks for one looks again and again, for half an hour, and is set free by nothing
        else. On one host any rank can open it.
        """
        now = time.monotonic()
        if not self._lent_at:
            self._lent_at = now
            with suppress(Exception):  # another rank lends one
                self._lent = for_torch.store()
        return now - self._lent_at < _LENT_SECONDS

    def _close(self) -> None:
        """Ends this rank's connections to the other ranks."""
        this = world.current()
        self._lent = None
        if this.board is not None:
            other_ranks.close()
        for group in list(getattr(getattr(torch_state.c10d(), "_world", None), "pg_map", ())):
            # Nothing for gloo; NCCL's may take its time.
            threading.Thread(target=_abort, args=(group,), daemon=True).start()

    # ── when it has ended ────────────────────────────────────────────────────────────────────

    def instead_of(self, error: BaseException) -> BaseException:
        """Returns what a cell has ended with: `RankLeft` for what torch has raised over that."""
        if is_a(error, KeyboardInterrupt) and other_ranks.have_closed(world.current().epoch):
            error.__suppress_context__ = True  # what torch has raised over that
        if self._instead is not None and self._instead[0] is error:
            return self._instead[1]
        if not is_a(error, RuntimeError) or torch_state.c10d() is None:
            return error
        inside = _frames_of(error)
        if not inside:
            return error
        if not self._told and other_ranks.gone():
            # Another rank was let go first, and has taken this one along.
            self._told = self._why_after(inside)
        if not self._told:
            return error
        left = RankLeft(self._told)
        left.__traceback__, left.__suppress_context__ = traceback_of(error), True
        self._instead = error, left
        return left

    def _why_after(self, inside: list[FrameType]) -> str:
        """As `_why`, where the call has ended already."""
        this = world.current()
        if not other_ranks.have_closed(this.epoch):
            return ""
        (*_, rank, why), *_ = other_ranks.gone()
        what, needed = torch_state.called(inside), tuple(range(this.size))
        known = torch_state.recorded()
        if len(known) == 1 and torch_state.peer_of(inside) is None:
            # What a backward, say, has called in the only group.
            ((group, last),) = known.items()
            members = torch_state.members(group)
            if rank in members:
                what, needed = last.title, members
        return _sentence(what, needed, rank, why)

    def leave(self, error: BaseException | None) -> None:
        """Takes in that the cell has ended: `answer` tells how far this rank has come."""
        this = world.current()
        if torch_state.c10d() is None:
            return
        if self._closed_at or self._told:
            this.spoil("has left a call of torch")
        # Where torch has raised, the last call of each group may be the one that did not come.
        self._left = this.scope.number, _made(), int(error is not None and bool(_frames_of(error)))

    def renew(self, epoch: int) -> None:
        """Between two cells: forgets torch's groups where a rank has closed its connections.

        Args:
            epoch: the one that has ended.
        """
        if torch_state.c10d() is None or not other_ranks.have_closed(epoch):
            return
        with suppress(Exception):
            torch_state.c10d().destroy_process_group()
        with suppress(Exception):
            # By it torch names groups, and one that was not made to its end has been counted.
            torch_state.c10d()._world.group_count = 0
        state: Any = sys.modules.get("accelerate.state")
        with suppress(Exception):
            state.AcceleratorState._reset_state(True)
            state.GradientState._reset_state()


def _has_made(this: world.World, rank: int) -> int:
    """How many groups a rank that has left this cell had made or begun to make in it."""
    made, cell = this.peers.progress(rank, _MAKING)
    return made if cell == this.scope.number else 0


def _sentence(what: str, needed: tuple[int, ...], rank: int, why: str) -> str:
    return (
        f"torch's {what} needs {every(needed)}: rank {rank} {why}. Make the same calls on every "
        f"rank. {_ADVICE}"
    )


def _number(group: str) -> int:
    return _FIRST + zlib.crc32(group.encode())


def _made() -> int:
    """Counts the groups that this rank has made or begun to make in this cell."""
    return for_torch.made() * 1000 + torch_state.groups_made()


def _in_use(called: list[FrameType]) -> bool:
    """Whether a main thread that hears no signal may well wait in torch."""
    return bool(called) or bool(getattr(torch_state.c10d()._world, "pg_map", ()))


def _frames_of(error: BaseException) -> list[FrameType]:
    """The frames of torch in which an exception was raised, outermost first."""
    found: list[FrameType] = []
    for frame, _ in traceback.walk_tb(traceback_of(error)):
        file = frame.f_code.co_filename
        found = [*found, frame] if torch_state.FOLDER in file else []
    return found


def _main_thread_seconds() -> float:
    """How long the main thread has computed; 0 where the system does not tell."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return 0.0
    return time.clock_gettime(clock_of(threading.main_thread().ident))


def _abort(group: Any) -> None:
    with suppress(Exception):
        group.abort()
