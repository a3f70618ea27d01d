"""Ends a rank's wait in torch's own process groups, of gloo or NCCL, for a rank that has left the
cell, with an error that names it. The groups of allranks (`process_group`) do not need it.

torch waits in C++, where no signal reaches it, for half an hour. The end of the connections to the
other ranks ends such a wait: torch raises, and the rank lives on. Process groups are useless
without connections; between two cells all ranks forget theirs.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from time import perf_counter
from types import FrameType
from typing import Any

from allranks import rendezvous
from allranks.collectives import world
from allranks.collectives.calls import frames
from allranks.collectives.calls.call import Pause
from allranks.engine.exceptions import is_a, text_of, traceback_of
from allranks.engine.interrupts import MAIN_THREAD
from allranks.engine.wire import give_up
from allranks.errors import CollectiveMismatch, RankLeft
from allranks.features.torch_jax import other_ranks, stores, torch_state
from allranks.features.torch_jax.call_log import (
    ADVICE,
    AGAIN,
    CallLog,
    PostedCall,
    PostedTransfer,
    rank_calls,
    with_advice,
)

#: A main thread that has not moved for this time waits.
_STILL_SECONDS = 1.0
#: The largest share of a core of a thread that waits.
_IDLE_SHARE = 0.05
_STUCK_SECONDS, _SETTLING_SECONDS = 20.0, 1.0
#: Parts of messages of gloo and of torch's store about a connection that has ended.
_LOST = ("gloo/transport/tcp/", "TCPStore", "onnection was likely closed")
_DEATH = f"torch's process groups are closed on all ranks, as a rank of theirs has died: {AGAIN}"
#: Parts of messages of DDP's reducer, in which a backward has ended before its last gradient.
_UNFINISHED_BACKWARD = (
    "unmarked_param_indices",
    "Expected to have finished reduction in the prior",
)
_WRAP_AGAIN = (
    "If an error or an interrupt has ended a backward of this model before its end, wrap the model "
    "again: model = DistributedDataParallel(model.module)"
)
_NO_GROUP = "Default process group has not been initialized"


class TorchWaits(other_ranks.LibraryWaits):
    """`LibraryWaits` in torch."""

    def __init__(self) -> None:
        super().__init__()
        self._closed_at = 0.0
        self._instead: tuple[BaseException, BaseException] | None = None
        self._cell = self._forgotten = ""
        self._forgotten_ns = 0
        self._stopped_main = self._mismatched = False
        self._stands_at: tuple[int, ...] = ()
        self._stands_since = 0.0
        rank_calls.instead_of = self.instead_of

    def begin(self) -> None:
        super().begin()
        self._closed_at, self._instead = 0.0, None
        self._stopped_main = self._mismatched = False
        rank_calls.begin()

    @property
    def not_to_blame(self) -> tuple[str, ...]:
        # At the end of the traceback of an error of ours, or of an interrupt.
        return (torch_state.folder(),) if torch_state.c10d() is not None else ()

    def look(self) -> None:
        """Ends the wait of the main thread where nothing else can."""
        this = world.current()
        cell = this.scope.number
        if not cell or torch_state.c10d() is None:
            return
        still = self._is_still()
        if this.queued and (stood := self._standing_seconds()) >= _STILL_SECONDS:
            this.look_at_queued(stood)
        stuck = self._pressed and still and _waits_in_torch()
        if self._pressed and still:
            torch_state.end_waits_in_cpp()
        made = _group_being_made() if still else None
        # Groups of allranks need no end of their waits.
        if made is None and not stuck and not torch_state.own_groups():
            return
        call = _awaited(still)
        if rank_calls.reason is None:
            reason = self._why(call) or _why_never_made(made)
            if this.scope.number == cell:  # else it is of a cell that has ended meanwhile
                rank_calls.reason = reason
        ended = rank_calls.reason is not None and (call is not None or made is not None)
        if not ended and not (self._pressed and still):
            return
        if not self._closed_at:
            self._closed_at = time.monotonic()
        elif time.monotonic() - self._closed_at > _STUCK_SECONDS:
            give_up(this.rank, f"cannot leave torch: {rank_calls.reason or 'interrupted'}")
        if ended and call is not None and call.on_gpu and not self._stopped_main:
            # The end of a wait in CUDA raises nothing, and leaves a wrong value.
            self._stopped_main = True
            signal.pthread_kill(MAIN_THREAD, signal.SIGINT)
        torch_state.close(cell)

    def _is_still(self) -> bool:
        """Whether the main thread has neither moved nor computed for a while."""
        frame, now = frames.frame_of_main_thread(), time.monotonic()
        at = (id(frame), frame.f_lasti) if frame is not None else ()
        cpu = _main_thread_seconds()
        if at != self._at or cpu - self._cpu > _IDLE_SHARE * max(now - self._since, 0.1):
            self._at, self._since, self._cpu = at, now, cpu
        return now - self._since >= (_STILL_SECONDS / 2 if self._pressed else _STILL_SECONDS)

    def _standing_seconds(self) -> float:
        """For how long the main thread has been at one place, also computing: a wait in CUDA
        spins.
        """
        frame, now = frames.frame_of_main_thread(), time.monotonic()
        at = (id(frame), frame.f_lasti) if frame is not None else ()
        if at != self._stands_at:
            self._stands_at, self._stands_since = at, now
        return now - self._stands_since

    def _why(
        self, call: PostedCall | PostedTransfer | None, waited: float | None = None
    ) -> CollectiveMismatch | RankLeft | None:
        """Returns why a call can never end; None while it may."""
        this = world.current()
        for log in _logs():
            if text := log.mismatch():
                if not log.begun_by_all() and not self._mismatched:
                    self._mismatched = True  # the others may begin it before the next look
                    return None
                this.give_up(text, deadlock=True)
                return CollectiveMismatch(with_advice(text))
        (acquired,) = map(this.lock.acquire, (False,))  # as in `World.run`
        if not acquired:
            return None  # the main thread is in a call of allranks
        try:
            if call is not None:
                this.watch.look(call, perf_counter() - call.started if waited is None else waited)
            else:
                this.watch.rest()
        except CollectiveMismatch as mismatch:
            this.give_up(str(mismatch), deadlock=True)
            return type(mismatch)(with_advice(str(mismatch)))
        except RankLeft as left:
            return type(left)(with_advice(str(left)))
        finally:
            this.lock.release()
        return None

    def instead_of(self, error: BaseException) -> BaseException:
        """Returns the error of the cell: the reason for an error of torch at the end of its
        wait.
        """
        if self._instead is not None and self._instead[0] is error:
            return self._instead[1]
        if is_a(error, KeyboardInterrupt) and other_ranks.have_closed(world.current().epoch):
            # Hides the error that torch raised meanwhile. Python may raise the interrupt later,
            # outside of the cell's lines.
            context, ended = error.__context__, KeyboardInterrupt()
            place = context if context is not None and is_a(context, RuntimeError) else error
            if self._stopped_main and not self._pressed and rank_calls.reason is not None:
                self._instead = error, other_ranks.with_traceback_of(error, rank_calls.reason)
            else:
                self._instead = error, other_ranks.with_traceback_of(place, ended)
            return self._instead[1]
        if not is_a(error, (RuntimeError, ValueError)) or torch_state.c10d() is None:
            return error
        inside = _frames_of(error)
        # ``work.wait()`` is no Python of torch's; JAX's gloo raises errors of JAX's own types.
        if not inside and not (type(error) is RuntimeError and _tells_of_a_loss(error)):
            return error
        raised = is_a(error, RuntimeError)
        lost = raised and other_ranks.have_lost_one(_tells_of_a_loss(error))
        if lost and rank_calls.reason is None:
            # Another rank has died, or its wait ended first, which ended the one here.
            rank_calls.reason = self._why_after(inside)
        if not raised or rank_calls.reason is None:
            self._explain(error)
            return error
        self._instead = error, other_ranks.with_traceback_of(error, rank_calls.reason)
        return self._instead[1]

    def _explain(self, error: BaseException) -> None:
        # Adds the reason to an error of torch about a group that does not exist any more.
        text, since = text_of(error), self._forgotten_ns > rendezvous.torch_met_at_ns()
        said = self._forgotten in text
        if any(part in text for part in _UNFINISHED_BACKWARD):
            error.args = (f"{text}\n{_WRAP_AGAIN}",)
        if not said and (_tells_of_a_loss(error) or (_NO_GROUP in text and since)):
            error.args = (f"{text} {self._forgotten}",)

    def _why_after(self, inside: list[FrameType]) -> CollectiveMismatch | RankLeft | None:
        """As `_why`, after the end of the call."""
        this, pause, waited = world.current(), Pause(), 0.0
        unfinished = rank_calls.unfinished()
        call: Any = rank_calls.failed or (unfinished[0] if unfinished else None)
        while call is not None and waited < _SETTLING_SECONDS:
            reason = self._why(call, waited)
            if reason is not None:
                return reason
            waited = pause()
        gone = other_ranks.gone()
        if not gone:
            return None
        (*_, rank, why), *_ = gone
        return RankLeft(_sentence(torch_state.called(inside), tuple(range(this.size)), rank, why))

    def leave(self, error: BaseException | None) -> None:
        this = world.current()
        if torch_state.c10d() is None:
            return
        self._cell = this.scope.name
        reason = rank_calls.reason
        if isinstance(reason, CollectiveMismatch):
            this.spoil(str(reason), deadlock=True)
        elif self._closed_at or reason is not None:
            this.spoil("has left a call of torch")

    def renew(self, epoch: int) -> None:
        # Between two cells, after the end of an epoch in which a rank has closed its connections.
        other_ranks.finish_closing()
        if torch_state.c10d() is not None and other_ranks.have_closed(epoch):
            self._forget(
                "torch's process groups were closed on all ranks to end a wait in "
                f"{self._cell}: {AGAIN}"
            )

    def after_death(self) -> str:
        # A rank of the groups has died.
        return _DEATH if self._forget(_DEATH) else ""

    def _forget(self, why: str) -> bool:
        """Destroys torch's groups; returns whether there were some."""
        c10d = torch_state.c10d()
        state: Any = sys.modules.get("accelerate.state")
        found = c10d is not None and c10d.is_initialized()
        if found:
            self._forgotten, self._forgotten_ns = why, time.time_ns()
        rank_calls.forget()
        world.current().divided = False  # as on a rank that has taken the place of another
        for group in torch_state.own_groups():
            group.log = None  # what a model still calls raises torch's own error
        with other_ranks.shown_as("ending torch's groups"):
            torch_state.end_groups()
        with suppress(Exception):
            state.AcceleratorState._reset_state(True)
            state.GradientState._reset_state()
        return found


def _tells_of_a_loss(error: BaseException) -> bool:
    text = text_of(error)
    return any(part in text for part in _LOST)


def _sentence(what: str, needed: tuple[int, ...], rank: int, why: str) -> str:
    advice = other_ranks.advice(rank, why)
    return f"torch's {what} needs {other_ranks.every(needed)}: rank {rank} {why}. {advice} {ADVICE}"


def _logs() -> list[CallLog]:
    logs = (getattr(group, "log", None) for group in torch_state.own_groups())
    return [log for log in logs if log is not None]


def _awaited(still: bool) -> PostedCall | PostedTransfer | None:
    """The call that the main thread waits for, or one on a GPU that another rank has not begun."""
    if rank_calls.awaited is not None:
        return rank_calls.awaited
    behind = [call for call in rank_calls.unfinished() if call.missing() or rank_calls.reason]
    anywhere = still or rank_calls.is_polled()
    return next((call for call in behind if call.on_gpu or anywhere), None)


def _group_being_made() -> tuple[str, tuple[int, ...]] | None:
    """The call in which the main thread makes a group, and the members of the group."""
    with frames.no_collection():
        called = torch_state.frames_in_torch(frames.frame_of_main_thread())
    members = torch_state.members_of_new(called)
    if members is None:
        return None
    return torch_state.called(called), members or tuple(range(world.current().size))


def _waits_in_torch() -> bool:
    """Whether the main thread is in C++ code that a function of `torch.distributed` has called."""
    frame = frames.frame_of_main_thread()
    return stores.is_waiting(frame) or torch_state.is_of_torch(frame)


def _why_never_made(made: tuple[str, tuple[int, ...]] | None) -> RankLeft | None:
    # No rank leaves before all members have made the group.
    title, members = made or ("", ())
    for *_, rank, why in other_ranks.gone():
        if rank in members:
            return RankLeft(_sentence(title, members, rank, why))
    return None


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
