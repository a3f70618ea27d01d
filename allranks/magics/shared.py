"""Ranks that a notebook shares with others: it watches what they run, has them lent, or lends them.

One notebook holds the ranks at a time. Who is to run a cell asks the one that holds them, and that
one lets them go where it is idle; so they go to and fro, and whoever ran the last cell has them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from allranks.cluster import sessions
from allranks.cluster.left import Left
from allranks.cluster.sharing import answer, has_gone
from allranks.cluster.watching import begin, borrow, messages
from allranks.ensemble.mapping import Cluster
from allranks.errors import AllranksError, UsageError
from allranks.magics.watched import Watched
from allranks.records.ranks import label

_TICK_SECONDS = 0.1
_AGAIN_SECONDS = 0.05
_LOOKS = 10


@dataclass
class Joined:
    """The ranks that a notebook shares.

    ``guest`` says whether it has come to them, else it has lent its own; ``count`` how many cells
    had been run on them when they were lent; ``news`` what it had not shown then.
    """

    name: str
    folder: str
    size: int
    guest: bool
    count: int = 0
    news: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> str:
        """What they are called in a sentence."""
        return f"{label(range(self.size))} of {self.name}"


class Holder(Protocol):
    """What holds the ranks of a notebook, where it has some."""

    @property
    def running(self) -> Cluster | None:
        """The cluster, if its ranks are up."""

    def attach_to(self, found: sessions.Found) -> tuple[Cluster, Left]:
        """Takes over ranks that nobody has."""

    def lend(self) -> None:
        """Leaves the ranks to another notebook that shares them."""

    def let_go(self) -> None:
        """Leaves the ranks as they were found."""


class Shared:
    """What one notebook has to do with ranks that others have.

    Args:
        session: the notebook's.
    """

    def __init__(self, session: Holder) -> None:
        self._session: Holder = weakref.proxy(session)
        #: The ranks that it shares, whether or not it has them now.
        self.joined: Joined | None = None
        self._task: asyncio.Task[None] | None = None

    # ── to lend ──────────────────────────────────────────────────────────────────────────────

    def offer(self, cluster: Cluster) -> None:
        """Has other notebooks ask for these ranks, where this one's kernel can answer."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # nothing could be answered while nothing is typed
        mine = weakref.WeakMethod(self._lend)

        def lend(visitor: socket.socket) -> None:
            loop.call_soon_threadsafe(_call, mine, visitor)

        cluster.lends(lend)

    def _lend(self, visitor: socket.socket) -> None:
        """Lets the ranks go where they are idle; in the kernel's loop, between cells."""
        cluster: Cluster | None = self._session.running
        if has_gone(visitor):
            visitor.close()
        elif cluster is None:
            answer(visitor, "they are not up. Type there: %distributed status")
        elif cluster.busy:
            answer(visitor, "it runs a cell. Wait for its end there")
        else:
            try:
                self._session.lend()
            except AllranksError as error:
                answer(visitor, f"it cannot let them go: {error}. Wait a moment")
            else:
                answer(visitor)

    def lent(self, cluster: Cluster) -> None:
        """Takes in that the ranks are another notebook's."""
        if self.joined is None:
            folder = cluster.session_dir
            name = sessions.name_of(folder)
            self.joined = Joined(name, folder, cluster.size, guest=False)
        self.joined.count, self.joined.news = cluster.count, list(cluster.news)

    # ── to have them lent ────────────────────────────────────────────────────────────────────

    def take(self) -> Cluster:
        """Has the ranks lent, or back; returns the cluster.

        Raises:
            UsageError: a notebook runs a cell on them, or one that is gone has; or they have ended.
        """
        joined = self.joined
        assert joined is not None
        try:
            found = borrow(joined.folder)
        except UsageError:
            if sessions.visit(joined.folder) is None:
                self.forget()
            raise
        if found.running:
            raise UsageError(
                f"expected idle ranks, found that {joined.ranks} still run In[{found.running}] of "
                "a notebook that is gone. Type, to see its end: %distributed attach"
            )
        cluster, left = self._session.attach_to(found)
        if left.unseen or left.members:
            self._session.let_go()
            raise UsageError(
                f"expected ranks whose last cell was seen, found {left.name.removeprefix('cell ')} "
                "of a notebook that is gone. Type, to see it: %distributed attach"
            )
        cluster.news[:0] = joined.news
        joined.news = []
        if not joined.guest:
            count = cluster.count - joined.count
            cells = f"{count} cell{'s' * (count != 1)}"
            print(f"{joined.ranks} are back: another notebook has run {cells} on them.")
            self.forget()
        return cluster

    def forget(self) -> None:
        """This notebook has nothing to do with them any longer, or has them for itself."""
        self.stop_showing()
        self.joined = None

    # ── to watch ─────────────────────────────────────────────────────────────────────────────

    def watch(self, found: sessions.Found) -> None:
        """Shows from now on what another notebook runs, and says so.

        Raises:
            UsageError: it runs another version of allranks.
        """
        sessions.check_version(found)
        if self.joined is None:
            self.joined = Joined(found.name, found.folder, found.size, guest=True)
        sessions.visit(found.folder, "watch")
        try:
            door = begin(found.folder, self.joined.count)
        except OSError:  # it goes just now, or does not answer: looked for again
            door = None
        print(
            f"Watching {self.joined.ranks}, attached to the notebook of process {found.holder}: "
            "what it runs on them is shown here. When it is idle, a %%distributed cell runs here "
            "too. To end: %distributed detach",
            flush=True,
        )
        self.stop_showing()
        show = self._show(self.joined.folder, found.holder, door)
        try:
            self._task = asyncio.get_running_loop().create_task(show)
        except RuntimeError:  # a terminal: nothing is shown while something is typed
            try:
                asyncio.run(show)
            except KeyboardInterrupt:
                print("Stopped showing it. To go on: %distributed attach")

    def stop_showing(self) -> None:
        """Shows no longer what others run."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _show(self, folder: str, holder: int, door: socket.socket | None) -> None:
        """Shows what other notebooks run until the ranks have ended."""
        found: sessions.Found | None
        seen = looks = 0
        while True:
            if door is not None:
                watched = Watched(f"the notebook of process {holder}")
                await _show_one(door, watched)
                seen, door = max(seen, watched.cell), None
            await asyncio.sleep(_AGAIN_SECONDS)
            if self._session.running is not None:
                continue
            found = await asyncio.to_thread(sessions.visit, folder, "watch")
            if found is None:
                break
            if found.holder in (0, os.getpid()):
                looks += 1
                if looks == _LOOKS:  # else they change hands
                    print(f"{found.name}: {sessions.whose(found)}.", flush=True)
                await asyncio.sleep(_TICK_SECONDS)
                continue
            holder, looks = found.holder, 0
            seen = max(seen, self.joined.count if self.joined is not None else 0)
            with suppress(OSError):  # it goes just now
                door = await asyncio.to_thread(begin, folder, seen)
        if self.joined is not None:
            print(f"{self.joined.ranks} have ended.", flush=True)
            self.joined = None
        self._task = None

    def line(self) -> str:
        """Returns a line about the ranks that this notebook shares; empty where it has none."""
        if self.joined is None:
            return ""
        found = sessions.visit(self.joined.folder)
        if found is None:
            return f"{self.joined.ranks} have ended."
        return f"{self.joined.ranks}: {sessions.whose(found)}."

    # ── to leave ─────────────────────────────────────────────────────────────────────────────

    def leave(self) -> str:
        """Ends what this notebook has to do with ranks of others; returns a line about it."""
        joined = self.joined
        assert joined is not None
        self.forget()
        found = sessions.visit(joined.folder, "leave")
        if found is None:
            return f"{joined.ranks} have ended."
        return f"{joined.ranks} are no longer watched here: {sessions.whose(found)}."


def _call(method: Callable[[], Callable[[socket.socket], None] | None], it: socket.socket) -> None:
    found = method()
    if found is not None:
        found(it)
    else:
        it.close()


async def _show_one(door: socket.socket, watched: Watched) -> None:
    """Shows what one notebook runs while it has the ranks."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            watched.refresh()

    ticking = asyncio.create_task(tick())
    try:
        async for head, frames in messages(door):
            watched.take(head, frames)
    except OSError:
        pass  # it has gone: the nursery knows who has the ranks
    finally:
        ticking.cancel()
        watched.end()
