"""Ends a rank's wait in JAX for a rank that has left the cell, as `torch_waits` does in torch.

JAX records nothing of its collectives. But if every rank has left the cell or waits in JAX, and
none of them computes, no wait can complete. This holds for CPUs, whose ranks are connected by gloo:
the work of a GPU cannot be seen here.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from allranks.collectives import world
from allranks.collectives.calls import frames
from allranks.collectives.calls import rank_state as fields
from allranks.engine.exceptions import is_a, text_of
from allranks.errors import RankLeft, UsageError
from allranks.features.torch_jax import jax_hook, other_ranks

_PACKAGES = "jax", "jaxlib"
_PRESSED_SECONDS, _IDLE_SECONDS, _FRESH_SECONDS = 0.5, 2.0, 1.5
#: The largest share of a core of a process that waits.
_IDLE_SHARE = 0.1
#: The system call that waits for another thread, on x86_64 and on aarch64.
_FUTEX = ("202", "98")
_AGAIN = (
    "call jax.distributed.initialize() again, and make meshes and arrays that are spread over the "
    "ranks again."
)
_ADVICE = f"JAX is shut down on all ranks: {_AGAIN}"
_DEATH = f"JAX is shut down on all ranks, because one of them has died: {_AGAIN}"
_SHUT = (
    "JAX was shut down on all ranks, because a wait was ended or a rank has died, and would "
    "compute with this rank's devices alone. Type: jax.distributed.initialize()"
)
_ENDS = (
    "JAX was initialized with a rank that has died: it aborts the other processes when it misses "
    "that rank's heartbeats, after 100 s by default. Copy what you need with %distributed pull, "
    "then type %distributed restart."
)
#: Parts of JAX's messages about arrays and meshes that it made before it was shut down.
_STALE = ("Gloo", "Received incompatible devices")
_MAKE_AGAIN = (
    "JAX was shut down and initialized again in this process: meshes, arrays that are spread over "
    "the ranks, and functions that use them must be made again."
)


class JaxWaits(other_ranks.LibraryWaits):
    """`LibraryWaits` in JAX."""

    def __init__(self) -> None:
        super().__init__()
        self._closed = self._was_shut = False
        self._instead: tuple[BaseException, BaseException] | None = None

    def begin(self) -> None:
        super().begin()
        self._closed, self._instead = False, None
        if _in_use():
            world.current().board.put(fields.IDLE, 0)

    @property
    def not_to_blame(self) -> tuple[str, ...]:
        # After the end of a wait in JAX, its frames have no meaning for the user.
        return _folders() if self._told or self._closed else ()

    def look(self) -> None:
        """Shows the other ranks whether this one is idle; ends its wait where nothing else can."""
        if not _in_use():
            return
        this, idle_seconds = world.current(), self._idle_seconds()
        idle = idle_seconds >= _IDLE_SECONDS
        this.board.put(fields.IDLE, time.monotonic_ns() if idle else 0)
        cell = this.scope.number
        if not cell or self._closed:
            return
        if idle and not self._told:
            self._told = self._why()
        if self._told or (self._pressed and idle_seconds >= _PRESSED_SECONDS):
            self._closed = True
            other_ranks.close(cell)

    def _idle_seconds(self) -> float:
        """Returns how long this rank has only waited in JAX, or has been idle outside of a cell."""
        frame, now, cpu = frames.frame_of_main_thread(), time.monotonic(), time.process_time()
        at = (id(frame), frame.f_lasti) if frame is not None else ()
        in_cell = bool(world.current().scope.number)
        moves = (at != self._at or not _waits_in_jax()) if in_cell else False
        if moves or cpu - self._cpu > _IDLE_SHARE * max(now - self._since, 0.1):
            self._at, self._since, self._cpu = at, now, cpu
        return now - self._since

    def _why(self) -> str:
        """Returns a sentence about a rank that will never come; "" while all may."""
        this, gone = world.current(), other_ranks.gone()
        near = this.local_ranks  # other hosts have another clock
        since = time.monotonic_ns() - int(_FRESH_SECONDS * 1e9)
        if not gone or any(
            rank not in near or this.board.get(rank, fields.IDLE) < since
            for rank in range(this.size)
            if rank not in this.died
        ):
            return ""
        return _sentence(gone)

    def instead_of(self, error: BaseException) -> BaseException:
        """Returns the error of the cell: `RankLeft`, or the interrupt, for an error that JAX
        raised.
        """
        if self._instead is not None and self._instead[0] is error:
            return self._instead[1]
        if not _in_use():
            return error
        interrupted = is_a(error, KeyboardInterrupt)
        # Python raises an interrupt once JAX has raised, maybe outside of the cell's lines.
        raised = error.__context__ if interrupted else error
        if raised is None or not is_a(raised, Exception):
            return error
        if "Gloo" not in text_of(raised):
            return self._explained(error)
        if not interrupted and not self._told:
            if not other_ranks.have_lost_one(True):
                return self._explained(error)
            # Another rank has died, or its wait ended first.
            self._told = _sentence(other_ranks.gone())
        ended = KeyboardInterrupt() if interrupted else RankLeft(self._told)
        self._instead = error, other_ranks.with_traceback_of(raised, ended)
        return ended

    def _explained(self, error: BaseException) -> BaseException:
        text = text_of(error)
        if not self._was_shut or not any(part in text for part in _STALE):
            return error
        # JAX's own exceptions keep their text apart from ``args``.
        explained = type(error)(f"{text}\n{_MAKE_AGAIN}")
        self._instead = error, other_ranks.with_traceback_of(error, explained)
        return explained

    def leave(self, error: BaseException | None) -> None:
        if self._closed or self._told:
            world.current().spoil("has left a call of JAX")
            if error is None:
                world.current().notice(_ADVICE)

    def after_death(self) -> str:
        """Returns a warning for the ranks that go on; "" for none."""
        if not (_in_use() or _initialized()):
            return ""
        if not jax_hook.survives_deaths():
            return _ENDS
        self._shut_down()
        return _DEATH

    def renew(self, epoch: int) -> None:
        # Between two cells, after the end of an epoch in which a rank has closed its connections.
        other_ranks.finish_closing()
        if _in_use() and other_ranks.have_closed(epoch):
            self._shut_down()

    def _shut_down(self) -> None:
        api: Any = sys.modules.get("jax._src.api")
        with other_ranks.shown_as("shutting JAX down"):
            with suppress(Exception):
                sys.modules["jax"].distributed.shutdown()
            with suppress(Exception):
                api.clear_backends()
        with suppress(Exception):
            _refuse_until_initialized(sys.modules["jax._src.xla_bridge"])
        self._was_shut = True


def _refuse_until_initialized(bridge: Any) -> None:
    # JAX would go on with this rank's devices alone, and with wrong sums.
    own = bridge.backends

    def backends() -> Any:
        if not _initialized():
            raise UsageError(_SHUT)
        bridge.backends = own
        return own()

    bridge.backends = backends


def _initialized() -> bool:
    """Whether JAX is connected to the other ranks."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return getattr(state, "client", None) is not None


def _in_use() -> bool:
    """Whether JAX is connected to the other ranks, and computes on CPUs only."""
    backends = getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", {})
    if set(backends) - {"cpu", "interpreter"}:
        return False
    # The user's own ``shutdown()`` leaves the connections between the CPUs.
    cpu = backends.get("cpu")
    return _initialized() or (cpu is not None and cpu.device_count() > cpu.local_device_count())


def _sentence(gone: list[tuple[bool, int, int, str]]) -> str:
    (*_, rank, why), *_ = gone
    needed = other_ranks.every(tuple(range(world.current().size)))
    advice = other_ranks.advice(rank, why)
    return f"a collective of JAX needs {needed}: rank {rank} {why}. {advice} {_ADVICE}"


def _waits_in_jax() -> bool:
    """Whether the main thread waits in JAX, and no other thread is in a callback of JAX."""
    main = threading.main_thread().ident
    for thread, frame in frames.frames_of_threads().items():
        if thread == main and not (_is_of_jax(frame) or _waits_in_c(frame)):
            return False
        if thread != main and any(_is_of_jax(outer) for outer, _ in traceback.walk_stack(frame)):
            return False
    return True


def _is_of_jax(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_folders())


def _folders() -> tuple[str, ...]:
    # The beginnings of the names of JAX's files, once it is imported.
    return tuple(os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in _PACKAGES)


def _waits_in_c(frame: FrameType) -> bool:
    # Functions that `jax.jit` has made call no Python code of JAX, and wait for a thread. So do
    # Python's own waits, as at a prompt.
    if frame.f_code.co_filename == threading.__file__:
        return False
    try:
        # Of the main thread, from any thread.
        call = Path(f"/proc/{os.getpid()}/syscall").read_text()
    except OSError:
        return False
    return call.split()[0] in _FUTEX
