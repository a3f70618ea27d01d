"""A rank changes from one notebook to another: what the new one is told, and what it is sent."""

from __future__ import annotations

from time import monotonic

from allranks import collectives
from allranks.engine.wire import Wire
from allranks.records import requests
from allranks.records.wire import Answer, Ask, Hello, RunCell, RunMember


class Attaching:
    """Answers what notebooks ask that let a rank go, or take it over; in the wire's thread.

    Args:
        wire: the rank's.
        hello: what it has said when it came up.
    """

    def __init__(self, wire: Wire, hello: Hello) -> None:
        self._wire = wire
        self._hello = hello
        self._last: RunCell | RunMember | None = None
        self._in_ensemble = False
        self._came = monotonic()
        self._took = 0.0

    def sent(self, cell: RunCell | RunMember) -> None:
        """Takes in that a cell has come, which may not have begun yet."""
        self._last = cell
        self._in_ensemble = isinstance(cell, RunMember)
        self._came = monotonic()

    def heard(self, ask: Ask) -> None:
        """Takes in what else a rank that is idle is asked: after an ensemble, nothing to show."""
        if ask.name == requests.MEMBERS and not ask.arguments["ranks_each"]:
            self._in_ensemble = False
            if self._wire.unseen is not None:
                self._wire.unseen.clear()

    def ended(self) -> None:
        """Takes in that it has ended."""
        self._took = monotonic() - self._came

    def answer(self, ask: Ask) -> None:
        """Does what is asked, and answers it."""
        wire = self._wire
        answer = Answer(ask.request, wire.rank, {}, "")
        if ask.name == requests.STAY:
            wire.stay(ask.arguments["home"])
        elif ask.name == requests.SEEN:
            if wire.unseen is not None and ask.arguments["cell"] == wire.cell and not wire.busy:
                wire.unseen.clear()
        elif ask.name == requests.RESUME:
            wire.resume(answer)
            return
        else:
            wire.send(self._hello)
            answer.content.update(self._about())
        wire.send(answer)

    def _about(self) -> dict[str, object]:
        wire, last = self._wire, self._last
        busy = last is not None and (wire.busy or wire.cell != last.cell)
        return {
            "cell": last.cell if last is not None else 0,
            "label": last.label if last is not None else "",
            "member": self._in_ensemble,
            "busy": busy,
            "unseen": wire.unseen is not None and wire.unseen.has_reply,
            "seconds": monotonic() - self._came if busy else self._took,
            "epoch": collectives.epoch(),
            "dirty": collectives.dirty(),
        }
