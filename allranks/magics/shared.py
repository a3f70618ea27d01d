"""Ranks that a notebook shares with others: it watches what they run, has them lent, or lends them.

One notebook holds the ranks at a time. Who is to run a cell asks the one that holds them, and that
one lets them go if it is idle. So the notebook that ran the last cell holds them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from allranks.cluster import failures, sessions
from allranks.cluster.cells import View
from allranks.cluster.cluster import Cluster
from allranks.cluster.sessions import borrow, messages, watch
from allranks.cluster.sharing import DetachedCell, answer, has_gone
from allranks.errors import AllranksError, UsageError
from allranks.records.ranks import label
from allranks.records.telemetry import Points, Pulse, Strip, Timings
from allranks.records.wire import (
    Died,
    Hello,
    Output,
    Prompt,
    Record,
    Reply,
    RunCell,
    RunMember,
    decode,
)
from allranks.widgets.dashboard.view import cell_view
from allranks.widgets.displays import VIEW


class WatchedCells:
    """Shows one cell after the other, each below a line with its notebook."""

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self._hellos: dict[int, Hello] = {}
        #: The number of the last cell.
        self.cell = 0
        self._ensemble = ""
        self._ranks: tuple[int, ...] = ()
        self._view: View | None = None
        self._replies: dict[int, Reply] = {}
        self._lost: set[int] = set()

    def take(self, head: dict[str, Any], frames: Sequence[bytes]) -> None:
        if not frames:
            self._say(
                f"{head['lost']} messages ({head['nbytes'] / 1e6:.1f} MB) are not shown: this "
                f"notebook was too slow for them. All text is in the logs{self._logs()}"
            )
            return
        record, payloads = decode(frames)
        if isinstance(record, Hello):
            self._hellos[record.rank] = record
            self._lost.discard(record.rank)
        elif isinstance(record, RunCell):
            self._begin(record, head.get("ago", 0.0))
        elif isinstance(record, RunMember):
            if self._ensemble != record.ensemble:
                self.end()
                self._ensemble = record.ensemble
                print(f"{self.whose} runs an ensemble, which is shown there.", flush=True)
        elif self._view is not None:
            self._take(self._view, record, payloads)

    def _begin(self, cell: RunCell, ago: float) -> None:
        if self._view is not None and cell.cell == self.cell:
            return  # a repetition after lost messages
        self.end()
        self.cell, self._ensemble = cell.cell, ""
        self._ranks = cell.ranks or tuple(sorted(self._hellos))
        self._replies.clear()
        name = cell.label.removeprefix("cell ")
        since = f", began {ago:.0f} s ago; its output from now on" if ago else ""
        print(f"{name} of {self.whose}, on {label(self._ranks)}{since}:", flush=True)
        hellos = [self._hellos[rank] for rank in self._ranks if rank in self._hellos]
        self._view = cell_view("auto", hellos, None, ago=ago)
        for rank in self._lost.intersection(self._ranks):
            self._view.left(rank, "lost")

    def _take(self, view: View, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, Died):
            self._lost.add(record.rank)
            view.left(record.rank, "lost")
            view.notice(f"rank {record.rank} {record.how}")
        elif isinstance(record, Output):
            if record.cell == self.cell:
                view.output(replace(record, entries=tuple(map(_without_widget, record.entries))))
        elif isinstance(record, Prompt):
            view.notice(f"rank {record.rank} asks for input in {self.whose}: {record.text}")
        elif isinstance(record, Points | Pulse | Strip | Timings):
            view.telemetry(record, payloads)
        elif isinstance(record, Reply) and record.cell == self.cell:
            if record.rank not in self._replies:
                view.left(record.rank, record.status)
            self._replies[record.rank] = record
        # The other notebook does not say that its cell has ended.
        if self.cell and set(self._ranks) <= set(self._replies) | self._lost:
            self.end()

    def refresh(self) -> None:
        if self._view is not None:
            self._view.refresh()

    def end(self) -> None:
        # All ranks have left the cell, or the connection has ended.
        view, self._view = self._view, None
        if view is None:
            return
        view.finish()
        reports = [reply.report for _, reply in sorted(self._replies.items()) if reply.report]
        if reports:
            print(failures.describe(reports, self._ranks), flush=True)

    def _say(self, text: str) -> None:
        if self._view is not None:
            self._view.notice(text)
        else:
            print(text, flush=True)

    def _logs(self) -> str:
        log = next((hello.log for hello in self._hellos.values()), "")
        return f" in {log.rpartition('/')[0]}" if log else ""


def _without_widget(entry: list[Any]) -> list[Any]:
    """Returns a display as its text: its widget lives in the other notebook."""
    kind, *rest = entry
    if kind in ("display", "update", "result") and VIEW in rest[0]:
        return [kind, {mime: data for mime, data in rest[0].items() if mime != VIEW}, *rest[1:]]
    return entry


_TICK_SECONDS = 0.1
_AGAIN_SECONDS = 0.05
_LOOKS = 10


@dataclass
class Joined:
    """The ranks that a notebook shares.

    ``guest`` is true if they are another notebook's, else it has lent its own. ``count`` is the
    number of their cells when they were lent; ``news`` are the lines not shown by then.
    """

    name: str
    folder: str
    size: int
    guest: bool
    count: int = 0
    news: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> str:
        # The subject of a sentence.
        return f"{label(range(self.size))} of {self.name}"


class Holder(Protocol):
    """The part of a notebook's session that sharing uses."""

    @property
    def running(self) -> Cluster | None: ...

    def attach_to(self, found: sessions.SessionInfo) -> tuple[Cluster, DetachedCell]: ...

    def lend(self) -> None: ...

    def let_go(self) -> None: ...


class ClusterSharing:
    """The ranks that one notebook shares with others."""

    def __init__(self, session: Holder) -> None:
        # The session has this object: a circle would keep the ranks of a notebook that was closed.
        self._session: Holder = weakref.proxy(session)
        #: The shared ranks, also while another notebook has them.
        self.joined: Joined | None = None
        self._task: asyncio.Task[None] | None = None

    def offer(self, cluster: Cluster) -> None:
        """Lets other notebooks ask for these ranks, if this one's kernel can answer."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # without an event loop nothing answers between cells
        # The cluster keeps the function, and must not keep the session.
        mine = weakref.WeakMethod(self._lend)

        def lend(visitor: socket.socket) -> None:
            loop.call_soon_threadsafe(_call, mine, visitor)

        cluster.lends(lend)

    def _lend(self, visitor: socket.socket) -> None:
        # Runs in the kernel's loop, between cells.
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
        if self.joined is None:
            folder = cluster.session_dir
            name = sessions.name_of(folder)
            self.joined = Joined(name, folder, cluster.size, guest=False)
        self.joined.count, self.joined.news = cluster.count, list(cluster.news)

    def take(self) -> Cluster:
        """Borrows the ranks, or takes them back; returns the cluster.

        Raises UsageError if a cell of another notebook runs on them, also of one that has ended; or
        if they have ended.
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
        """This notebook no longer shares ranks, or has them for itself."""
        self.stop_showing()
        self.joined = None

    def watch(self, found: sessions.SessionInfo) -> None:
        """Shows another notebook's cells from now on, and prints a line about it."""
        sessions.check_version(found)
        if self.joined is None:
            self.joined = Joined(found.name, found.folder, found.size, guest=True)
        sessions.visit(found.folder, "watch")
        try:
            door = watch(found.folder, self.joined.count)
        except OSError:  # it ends just now, or does not answer: look again
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
        except RuntimeError:  # a terminal shows nothing during input
            try:
                asyncio.run(show)
            except KeyboardInterrupt:
                print("Stopped showing it. To go on: %distributed attach")

    def stop_showing(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _show(self, folder: str, holder: int, door: socket.socket | None) -> None:
        # Until the ranks have ended.
        found: sessions.SessionInfo | None
        seen = looks = 0
        while True:
            if door is not None:
                watched = WatchedCells(f"the notebook of process {holder}")
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
                if looks == _LOOKS:  # before that, the ranks may be between two notebooks
                    print(f"{found.name}: {sessions.whose(found)}.", flush=True)
                await asyncio.sleep(_TICK_SECONDS)
                continue
            holder, looks = found.holder, 0
            seen = max(seen, self.joined.count if self.joined is not None else 0)
            with suppress(OSError):  # it ends just now
                door = await asyncio.to_thread(watch, folder, seen)
        if self.joined is not None:
            print(f"{self.joined.ranks} have ended.", flush=True)
            self.joined = None
        self._task = None

    def line(self) -> str:
        if self.joined is None:
            return ""
        found = sessions.visit(self.joined.folder)
        if found is None:
            return f"{self.joined.ranks} have ended."
        return f"{self.joined.ranks}: {sessions.whose(found)}."

    def leave(self) -> str:
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


async def _show_one(door: socket.socket, watched: WatchedCells) -> None:

    async def tick() -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            watched.refresh()

    ticking = asyncio.create_task(tick())
    try:
        async for head, frames in messages(door):
            watched.take(head, frames)
    except OSError:
        pass  # the connection has ended: ask the host agent for the holder
    finally:
        ticking.cancel()
        watched.end()
