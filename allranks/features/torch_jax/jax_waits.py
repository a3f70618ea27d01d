"""A rank that waits in JAX for one that has left the cell is let go, as one that waits in torch.

JAX records nothing of its collectives. But where every rank has left the cell or waits in JAX, and
none of them computes, nothing will come any more. It goes for CPUs, whose ranks are connected by
gloo: what a GPU computes cannot be seen here.
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
from allranks.engine.exceptions import is_a, text_of, traceback_of
from allranks.errors import RankLeft, UsageError
from allranks.features.torch_jax import other_ranks

_PACKAGES = "jax", "jaxlib"
_PRESSED_SECONDS, _IDLE_SECONDS, _FRESH_SECONDS = 0.5, 2.0, 1.5
_IDLE_SHARE = 0.1
"""Of a core: what a process that waits takes at most."""
_FUTEX = ("202", "98")
"""The system call that waits for another thread, on x86_64 and on aarch64."""
_ADVICE = (
    "JAX is shut down on all ranks: call jax.distributed.initialize() again, and make meshes and "
    "arrays that are spread over the ranks again."
)

_SHUT = (
    "JAX was shut down on all ranks to end a wait in an earlier cell, and would compute with this "
    "rank's devices alone. Type: jax.distributed.initialize()"
)
_ENDS = (
    "JAX was initialized with a rank that has died: it aborts the other processes when it misses "
    "that rank's heartbeats, after 100 s by default. Copy what you need with %distributed pull, "
    "then type %distributed restart."
)


class JaxWaits:
    """Looks after one rank's waits in JAX, in a thread that is not the one which waits."""

    def __init__(self) -> None:
        self._pressed = self._closed = False
        self._told = ""
        self._at: tuple[object, ...] = ()
        self._since = self._cpu = 0.0
        self._instead: tuple[BaseException, BaseException] | None = None

    def start(self) -> None:
        """From now on it looks, several times a second."""
        line_reporter = world.current().line_reporter
        if line_reporter is not None:
            line_reporter.also.append(self._look_quietly)

    def begin(self) -> None:
        """A cell begins."""
        self._pressed = self._closed = False
        self._told, self._at, self._instead = "", (), None
        if _in_use():
            world.current().board.put(fields.IDLE, 0)

    @property
    def not_to_blame(self) -> tuple[str, ...]:
        """Parts of the names of files whose frames say nothing: a wait in JAX has been ended."""
        return _folders() if self._told or self._closed else ()

    def press(self) -> None:
        """The cell has been interrupted."""
        self._pressed = True

    # ── while a cell runs ────────────────────────────────────────────────────────────────────

    def _look_quietly(self) -> None:
        # A thread that ends with an exception looks no more.
        with suppress(Exception):
            if _in_use():
                self.look()

    def look(self) -> None:
        """Tells the others whether this rank is idle; ends its wait where it can only end so."""
        this, idle_seconds = world.current(), self._idle_seconds()
        idle = idle_seconds >= _IDLE_SECONDS
        this.board.put(fields.IDLE, time.monotonic_ns() if idle else 0)
        if not this.scope.number or self._closed:
            return
        if idle and not self._told:
            self._told = self._why()
        if self._told or (self._pressed and idle_seconds >= _PRESSED_SECONDS):
            self._closed = True
            other_ranks.close()

    def _idle_seconds(self) -> float:
        """For how long this rank has done nothing but wait in JAX, or nothing outside of a cell."""
        frame, now, cpu = frames.of_main_thread(), time.monotonic(), time.process_time()
        at = (id(frame), frame.f_lasti) if frame is not None else ()
        in_cell = bool(world.current().scope.number)
        moves = (at != self._at or not _waits_in_jax()) if in_cell else False
        if moves or cpu - self._cpu > _IDLE_SHARE * max(now - self._since, 0.1):
            self._at, self._since, self._cpu = at, now, cpu
        return now - self._since

    def _why(self) -> str:
        """Which rank will never come, in a sentence; "" while it may."""
        this, gone = world.current(), other_ranks.gone()
        near = this.local_ranks  # those of other hosts go by another clock
        since = time.monotonic_ns() - int(_FRESH_SECONDS * 1e9)
        if not gone or any(
            rank not in near or this.board.get(rank, fields.IDLE) < since
            for rank in range(this.size)
        ):
            return ""
        return _sentence(gone)

    # ── when it has ended ────────────────────────────────────────────────────────────────────

    def instead_of(self, error: BaseException) -> BaseException:
        """Returns what a cell has ended with: `RankLeft`, or the interrupt, for what JAX raised."""
        if self._instead is not None and self._instead[0] is error:
            return self._instead[1]
        if not _in_use():
            return error
        interrupted = is_a(error, KeyboardInterrupt)
        # An interrupt is heard once JAX has raised, which may be outside of the cell's lines.
        raised = error.__context__ if interrupted else error
        if raised is None or not is_a(raised, Exception) or "Gloo" not in text_of(raised):
            return error
        if not interrupted and not self._told:
            gone = other_ranks.gone()
            if not gone or not other_ranks.have_closed(world.current().epoch):
                return error
            self._told = _sentence(gone)  # another rank was let go first
        ended = KeyboardInterrupt() if interrupted else RankLeft(self._told)
        ended.__traceback__, ended.__suppress_context__ = traceback_of(raised), True
        self._instead = error, ended
        return ended

    def leave(self, error: BaseException | None) -> None:
        """Takes in that the cell has ended."""
        if self._closed or self._told:
            world.current().spoil("has left a call of JAX")
            if error is None:
                world.current().notice(_ADVICE)

    def after_death(self) -> str:
        """What is to be known where another rank has died and this one goes on; "" for nothing."""
        return _ENDS if _initialized() else ""

    def renew(self, epoch: int) -> None:
        """Between two cells: shuts JAX down where a rank has closed its connections.

        Args:
            epoch: the one that has ended.
        """
        if not _in_use() or not other_ranks.have_closed(epoch):
            return
        api: Any = sys.modules.get("jax._src.api")
        with suppress(Exception):
            sys.modules["jax"].distributed.shutdown()
        with suppress(Exception):
            api.clear_backends()
        with suppress(Exception):
            _refuse_until_initialized(sys.modules["jax._src.xla_bridge"])


def _refuse_until_initialized(bridge: Any) -> None:
    """Has JAX raise where it would go on with this rank's devices alone, and with wrong sums."""
    own = bridge.backends

    def backends() -> Any:
        if not _initialized():
            raise UsageError(_SHUT)
        bridge.backends = own
        return own()

    bridge.backends = backends


def _initialized() -> bool:
    """Whether JAX has met the other ranks."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return getattr(state, "client", None) is not None


def _in_use() -> bool:
    """Whether JAX has met the other ranks, and computes on CPUs only."""
    if not _initialized():
        return False
    backends = getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", {})
    return not set(backends) - {"cpu", "interpreter"}


def _sentence(gone: list[tuple[bool, int, int, str]]) -> str:
    (*_, rank, why), *_ = gone
    needed = other_ranks.every(tuple(range(world.current().size)))
    return (
        f"a collective of JAX needs {needed}: rank {rank} {why}. Make the same calls on every "
        f"rank. {_ADVICE}"
    )


def _waits_in_jax() -> bool:
    """Whether the main thread waits in JAX, and no other thread is in a callback of JAX's."""
    main = threading.main_thread().ident
    for thread, frame in frames.of_threads().items():
        if thread == main and not (_is_of_jax(frame) or _waits_for_a_thread()):
            return False
        if thread != main and any(_is_of_jax(outer) for outer, _ in traceback.walk_stack(frame)):
            return False
    return True


def _is_of_jax(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_folders())


def _folders() -> tuple[str, ...]:
    """What the names of JAX's files begin with, once it is imported."""
    return tuple(os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in _PACKAGES)


def _waits_for_a_thread() -> bool:
    """Whether the main thread does: what `jax.jit` has made calls none of JAX's Python."""
    try:
        # The main thread's, whichever asks.
        call = Path(f"/proc/{os.getpid()}/syscall").read_text()
    except OSError:
        return False
    return call.split()[0] in _FUTEX
