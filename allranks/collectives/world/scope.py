"""The scope as an engine sees it: enter before a cell, leave after it."""

from __future__ import annotations

import threading

from allranks.collectives import world


def enter(name: str, ranks: tuple[int, ...] | None = None, number: int = 1) -> None:
    """This rank starts a cell.

    Args:
        name: as messages call it, for instance "this cell".
        ranks: the ranks that run it, None for all; the same on each of them.
        number: counts cells from 1 on every rank alike, those that it does not run included:
            a rank that has not come to this number is late, one that has left it is gone.
    """
    this = world.current()
    this.notebook, this.told_of_strays = True, False
    this.left_behind = {
        thread
        for thread in threading.enumerate()
        # Others, as TensorFlow's, are no cell's: they call for whichever cell waits for them.
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
    """This rank waits for what a person types, or does so no longer.

    Ranks that wait for it meanwhile do not call it late.
    """
    world.current().asks(person)
