"""A process that a cell forks is no rank: it runs the cell to its end, and ends there.

It has a copy of the rank's memory, and shares the rank's sockets and its place in MPI. What it
prints reaches the rank's log; its displays are printed as text; a collective is an error in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from os import _exit, getpid
from typing import Any, NoReturn

from allranks.collectives import world
from allranks.collectives.world import World
from allranks.engine.output.transcript import Transcript
from allranks.errors import UsageError

_FAILED = 1
#: What a rank does in a world that others can see.
_SEEN_BY_OTHERS = (
    *("run", "join", "submit", "poll", "progress"),
    *("spoil", "enter", "leave", "depart", "give_up"),
)

_rank_pid = getpid()


def in_rank() -> bool:
    """Whether this process is the rank itself, and none that it has forked."""
    return getpid() == _rank_pid


def watch(transcript: Transcript, come_back: Callable[[Callable[[], object]], object]) -> None:
    """From now on, what this process forks is told from it.

    Args:
        transcript: the rank's.
        come_back: has the event loop call something: a forked process that gets there ends.
    """
    global _rank_pid
    _rank_pid = getpid()
    whole = world.current()

    def in_child() -> None:
        transcript.forked()
        for one in (whole, world.current()):
            _take_no_part(one)
        come_back(leave)

    # What is buffered would be written twice.
    os.register_at_fork(
        before=lambda: transcript.streams.flush(c_streams=True), after_in_child=in_child
    )


def _take_no_part(this: World) -> None:
    """Has everything that others could see raise; what this process knows stays known."""
    rank, parent = this.rank, _rank_pid

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"a collective must be called by a rank: process {getpid()} was forked by rank {rank} "
            f"(pid {parent}). Return the value to the rank, and make the call there."
        )

    for name in _SEEN_BY_OTHERS:
        setattr(this, name, refuse)


def leave(error: BaseException | None = None, lines: list[str] | None = None) -> NoReturn:
    """Ends a forked process as Python ends a program, but for what is the rank's to do.

    Args:
        error: what its part of the cell ended with.
        lines: the traceback.
    """
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else _FAILED if error.code else 0
            lines = [str(error.code)] if isinstance(error.code, str) else []
        elif error is not None:
            code = _FAILED
        for line in lines or []:
            print(line, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        _exit(code)
