"""The profile of a cell, or of some seconds of it: asked of its ranks, and shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from allranks.cluster.connection import Connection
from allranks.records import requests
from allranks.records.profile import Profile
from allranks.records.wire import Answer

_ASK_SECONDS = 10.0
"""Ranks answer at once; one whose C code holds the interpreter, when it lets go of it."""
_MARGIN_SECONDS = 0.05


class Profiling:
    """Has the ranks of one cell look where they spend their time.

    Args:
        show: called once, with what each of them has seen that has seen something.
        seconds: how long; 0 for all of the cell.
        empty: whether it is called in any case.
    """

    def __init__(
        self, show: Callable[[list[Profile]], object], seconds: float = 0.0, empty: bool = False
    ) -> None:
        self._show = show
        self._seconds = seconds
        self._ranks: tuple[int, ...] = ()
        self._over_at: float | None = None
        self._profiles: dict[int, Profile] = {}
        self._shown = False
        self._empty = empty

    @property
    def over(self) -> bool:
        """Whether it has been shown."""
        return self._shown

    def begin(self, ranks: Iterable[int], connection: Connection) -> None:
        """Asks the ranks to look, from now on or from the beginning of their next cell."""
        self._ranks = tuple(ranks)
        arguments = {"seconds": self._seconds}
        connection.ask_soon(requests.PROFILE, arguments, lambda _: None, self._ranks)
        if self._seconds:
            self._over_at = time.monotonic() + self._seconds + _MARGIN_SECONDS

    def step(self, pending: Iterable[int], connection: Connection) -> None:
        """While the cell runs: begins, if it has not, and shows what there is when time is up."""
        if not self._ranks:
            self.begin(pending, connection)
        if self._over_at is not None and time.monotonic() >= self._over_at:
            self._over_at = None
            connection.ask_soon(requests.PROFILED, {}, self._heard, self._ranks)

    def finish(self, connection: Connection) -> None:
        """The cell has ended: shows what its ranks have seen, those that are left."""
        missing = [rank for rank in self._ranks if rank not in self._profiles]
        if missing:
            told = connection.ask(
                requests.PROFILED, {}, ranks=missing, seconds=_ASK_SECONDS, strict=False
            )
            for rank, (content, _) in told.items():
                self._profiles.setdefault(rank, Profile.from_content(rank, content))
        self._say()

    def _heard(self, answer: Answer) -> None:
        if not answer.problem:
            told = Profile.from_content(answer.rank, answer.content)
            self._profiles.setdefault(answer.rank, told)
        if set(self._profiles) >= set(self._ranks):
            self._say()

    def _say(self) -> None:
        seen = [profile for _, profile in sorted(self._profiles.items()) if profile.stacks]
        if (seen or self._empty) and not self._shown:
            self._shown = True
            self._show(seen)
