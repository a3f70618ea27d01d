"""The scope as an engine sees it: enter before a cell, leave after it."""

from __future__ import annotations

import threading

from allranks.collectives import world


def enter(name: str, ranks: tuple[int, ...] | None = None, number: int = 1) -> None:
    """This rank starts a cell.

    Args:
        name: for messages, for instance "this cell".
        ranks: the ranks that run it, the same on each of them; None for all.
        number: counts the cells of all ranks from 1. A rank that has not reached this number is
            late, one that has left it is gone.
    """
    this = world.current()
    this.notebook, this.strays_reported = True, False
    this.left_behind = {
        thread
        for thread in threading.enumerate()
        # Threads of libraries, as TensorFlow's, call for the cell that waits for them.
        if not isinstance(thread, threading._DummyThread)
    }
    this.enter(name, ranks, number)


def leave(reason: str = "", failed: bool = False, where: str | None = None) -> None:
    """This rank's cell has ended; ranks that wait for it raise `RankLeft`.

    Args:
        reason: for the others' messages, for instance "ValueError: bad shape".
        failed: whether it raised.
        where: the line at which it raised.
    """
    world.current().leave(reason, failed, where or "")


def asks(person: bool) -> None:
    """Publishes whether this rank waits for typed input: then it is not reported as late."""
    world.current().asks(person)
