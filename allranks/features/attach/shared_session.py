"""The session of a notebook that leaves its ranks to others, and uses those of others.

Several notebooks may share ranks; one of them holds the ranks at a time. To run a cell, another
one asks the holder, which lets them go if it is idle. So the notebook that ran the last cell holds
them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from allranks.cluster.cluster import Cluster
from allranks.cluster.features import NotebookHooks
from allranks.cluster.options import ClusterOptions
from allranks.errors import AllranksError, UsageError
from allranks.features.attach import ownership, sessions
from allranks.features.attach.sessions import as_time, seconds_of
from allranks.features.attach.sharing import CANNOT_ASK, DetachedCell, answer, has_gone
from allranks.features.attach.watched_cells import Joined, WatchedCells
from allranks.magics.session import DEFAULT, NOTHING, Session
from allranks.records import limits
from allranks.records.ranks import label
from allranks.widgets.dashboard.view import cell_view

#: For so long ranks may be between two notebooks.
_BETWEEN_SECONDS = 1.5
_MEMBERS = (
    "The ensemble that ran is interrupted: its results were with its notebook. Run its cell again; "
    "with --store it goes on with the members that have not finished."
)


class SharedSession(Session):
    """The one cluster of a notebook, which other notebooks may use, or have started."""

    def __init__(self, hooks: NotebookHooks) -> None:
        super().__init__(hooks)
        self._own = ownership.of(hooks)
        self._stays = 0.0
        #: The ranks that it shares with other notebooks, also while another one has them.
        self.joined: Joined | None = None
        self._task: asyncio.Task[None] | None = None

    def _elsewhere(self, lost: Cluster | None) -> Cluster | None:
        if lost is not None:
            self.forget_shared()
        return self._borrow() if self.joined is not None else None

    def _waiting(self) -> str:
        return sessions.waiting()

    def _have(self, cluster: Cluster) -> None:
        super()._have(cluster)
        self._offer()
        if self._stays:
            try:
                ownership.stay(cluster.cells, self._stays, self._memo())
            except UsageError as error:  # they are there, and end with this notebook
                cluster.cells.news.append(str(error))

    def restart(self, options: ClusterOptions = NOTHING) -> None:
        joined = self.joined
        if joined is not None and joined.guest:
            raise UsageError(
                f"expected ranks of this notebook, found that {joined.ranks} are another one's. "
                "Type there: %distributed restart   or here, for others: %distributed detach"
            )
        super().restart(options)

    def stop(self) -> str:
        """Ends the ranks; those of another notebook are only left. Returns a line about it."""
        joined = self.joined
        if joined is not None and (self._is_guest or (joined.guest and self.running is None)):
            return self._leave()
        if joined is not None and self.running is None:
            self._borrow()
        self.forget_shared()
        return super().stop()

    def close(self) -> str:
        """Ends the ranks, or leaves those of another notebook. Returns a line about it."""
        here = self.running is not None or self.joined is not None
        try:
            said = self.stop()
        except UsageError:  # another notebook has the ranks: they stay
            said = self._leave()
        return said if here else ""

    def where(self) -> str:
        if self.joined is None:
            return ""
        try:
            found = sessions.visit(self.joined.folder)
        except UsageError as error:
            return f"{self.joined.ranks}: {error}."
        what = " have ended" if found is None else f": {sessions.whose(found)}"
        return f"{self.joined.ranks}{what}."

    def users(self, cluster: Cluster) -> str:
        found = sessions.visit(cluster.cells.connection.session_dir)
        return f"; {sessions.whose(found)}" if found is not None and found.watchers else ""

    def detach_on_exit(self, text: str) -> str:
        """Sets how long the ranks stay after this notebook's kernel; returns a line about it.

        ``text`` is a time, ``off``, or "" to ask.
        """
        if text:
            seconds = 0.0 if text == "off" else seconds_of(text, "detach-on-exit")
            if self.running is not None and self.running.cells.is_up(print):
                ownership.stay(self.running.cells, seconds, self._memo())
            self._stays = seconds
        if not self._stays:
            return "The ranks end with this notebook."
        return (
            f"When this notebook's kernel ends, its ranks keep running for {as_time(self._stays)}. "
            "Then type in the new kernel, or in another notebook: %distributed attach"
        )

    def _memo(self) -> dict[str, Any]:
        return asdict(self._asked)

    def detach(self, text: str = "") -> str:
        # A guest leaves the ranks to their first notebook. Returns a line about it.
        if self._is_guest or (self.running is None and self.joined is not None):
            return self._leave()
        running = self.running
        if running is None or not running.cells.is_up(print):
            raise UsageError("no ranks are running. Type: %distributed start")
        if not text and not self._stays:
            raise UsageError(
                "expected how long the ranks keep running, found nothing. "
                "Type for example: %distributed detach 30m"
            )
        seconds = seconds_of(text, "detach") if text else self._stays
        folder = running.cells.connection.session_dir
        ownership.stay(running.cells, seconds, self._memo())
        sessions.visit(folder, "leave")
        ownership.detach(running.cells)
        name = sessions.name_of(folder)
        self._cluster, self._asked = None, DEFAULT
        self.forget_shared()
        keep = "keeps" if running.size == 1 else "keep"
        return (
            f"{label(range(running.size))} {keep} running for {as_time(seconds)}. Type in another "
            f"notebook, or here: %distributed attach {name}"
        )

    def attach(self, name: str) -> str:
        """Takes over ranks that another notebook, or this one's former kernel, has left, and shows
        their last cell to its end. Ranks that another notebook holds are watched.

        An empty name is the only cluster, or the only free one. All lines are printed.
        """
        if self.running is not None and self.running.cells.is_up(print):
            raise UsageError(
                "expected a notebook without ranks, found ranks running for this one. Type first: "
                "%distributed detach 30m   or: %distributed stop"
            )
        joined = self.joined
        found = sessions.chosen(name or (joined.name if joined is not None else ""))
        if joined is not None and joined.folder != found.folder:
            raise UsageError(
                f"expected a notebook that watches no others, found that this one watches "
                f"{joined.name}. Type first: %distributed detach"
            )
        if found.holder:
            self._watch(found)
            return ""
        cluster, left = self._attach_to(found)
        if joined is not None and not joined.guest:
            self.forget_shared()
        since = time.strftime("%H:%M", time.localtime(found.began))
        seconds = self._own.stays
        stays = (
            f"When this notebook's kernel ends, they keep running for {as_time(seconds)}"
            if seconds
            else "They end with the last notebook that has run a cell on them"
        )
        ranks = f"{label(range(cluster.size))} of {found.name}"
        print(f"Attached to {ranks}, running since {since}. {stays}.")
        if left.members:
            print(_MEMBERS)
        if left.unseen:
            print(left.text)
        hellos = [cluster.hellos[rank] for rank in left.ranks or range(cluster.size)]
        ask, buttons = cluster.cells.ask_soon, self.hooks.panel_buttons
        view = cell_view("auto", hellos, ask, ago=left.seconds, buttons=buttons)
        if left.unseen:
            cluster.cells.wait(ownership.follow(cluster.cells, left, view))
        else:
            # The cell has ended before: only its late output is left to show.
            cluster.cells.show_late(view)
            view.finish()
            cluster.cells.is_up(print)  # replaces ranks that have died meanwhile
        return ""

    def _attach_to(self, found: sessions.SessionInfo) -> tuple[Cluster, DetachedCell]:
        taken = sessions.AttachedHostAgent(found)
        cluster: Cluster | None = None
        try:
            asked = ClusterOptions(**taken.memo)
            cluster = self._make(asked)
            left = ownership.attach(cluster.cells, taken, print)
            self._asked, self._stays = asked, taken.stays
            super()._have(cluster)
        except BaseException:
            try:
                # An interrupt has come just after the attach: else the ranks would end.
                if cluster is not None and cluster.state == "running":
                    ownership.detach(cluster.cells)
            finally:
                taken.let_go()
            raise
        if self._is_here(asked):
            self.last_size = cluster.size
        self._offer()
        return cluster, left

    @property
    def _is_guest(self) -> bool:
        # The ranks belong to another notebook as well.
        joined = self.joined
        if self.running is None or joined is None or not joined.guest:
            return False
        found = sessions.visit(joined.folder)
        return found is not None and bool(found.watchers)

    def _offer(self) -> None:
        # Other notebooks may ask for the ranks, if this one's kernel can answer.
        feed = self._own.feed
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # without an event loop nothing answers between cells
        # The cluster keeps the function, and must not keep the session.
        mine = weakref.WeakMethod(self._answer)

        def lend(visitor: socket.socket) -> None:
            try:
                loop.call_soon_threadsafe(_call, mine, visitor)
            except RuntimeError:  # that of a program that goes on without it
                answer(visitor, CANNOT_ASK)

        feed.lend = lend

    def _answer(self, visitor: socket.socket) -> None:
        # Runs in the kernel's loop, between cells.
        cluster: Cluster | None = self.running
        if has_gone(visitor):
            visitor.close()
        elif cluster is None:
            answer(visitor, "they have not started. Type there: %distributed status")
        elif cluster.roster.busy:
            answer(visitor, "it runs a cell. Wait for its end there")
        else:
            try:
                self._lend(cluster)
            except AllranksError as error:
                answer(visitor, f"it cannot pass them on: {error}. Wait a moment")
            else:
                answer(visitor)

    def _lend(self, cluster: Cluster) -> None:
        ownership.lend(cluster.cells, self._memo())
        self._cluster = None
        if self.joined is None:
            folder = cluster.cells.connection.session_dir
            name = sessions.name_of(folder)
            self.joined = Joined(name, folder, cluster.size, guest=False)
        self.joined.count, self.joined.news = cluster.roster.cells, list(cluster.cells.news)

    def _borrow(self) -> Cluster:
        """Borrows the shared ranks, or takes them back; returns the cluster.

        Raises UsageError if a cell of another notebook runs on them, also of one that has ended; or
        if they have ended.
        """
        joined = self.joined
        assert joined is not None
        try:
            found = sessions.borrow(joined.folder)
        except UsageError:
            if sessions.visit(joined.folder) is None:
                self.forget_shared()
            raise
        if found.running:
            raise UsageError(
                f"expected idle ranks, found that {joined.ranks} still run In[{found.running}] of "
                "a notebook whose kernel has ended. To see its end, type: %distributed attach"
            )
        cluster, left = self._attach_to(found)
        if left.unseen or left.members:
            # The ranks stay as they are.
            ownership.detach(cluster.cells)
            self._cluster = None
            raise UsageError(
                "expected ranks whose last cell was shown, found "
                f"{left.name.removeprefix('cell ')} of a notebook whose kernel has ended. "
                "To see it, type: %distributed attach"
            )
        cluster.cells.news[:0] = joined.news
        joined.news = []
        if not joined.guest:
            count = cluster.roster.cells - joined.count
            cells = f"{count} cell{'s' * (count != 1)}"
            print(f"{joined.ranks} are back: another notebook has run {cells} on them.")
            self.forget_shared()
        return cluster

    def forget_shared(self) -> None:
        """This notebook no longer shares ranks, or has them for itself."""
        self._stop_showing()
        self.joined = None

    def _stop_showing(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _watch(self, found: sessions.SessionInfo) -> None:
        # Shows another notebook's cells from now on, and prints a line about it.
        sessions.check_version(found)
        sessions.visit_to_watch(found.folder)
        if self.joined is None:
            self.joined = Joined(found.name, found.folder, found.size, guest=True)
        try:
            door = sessions.watch(found.folder, self.joined.count)
        except OSError:  # it ends just now, or does not answer: look again
            door = None
        print(
            f"Watching {self.joined.ranks}, attached to the notebook of process {found.holder}: "
            "what it runs on them is shown here. When it is idle, a %%distributed cell runs here "
            "too. To end: %distributed detach",
            flush=True,
        )
        self._stop_showing()
        # A task that kept the session would keep the ranks of a notebook that was closed.
        show = SharedSession._show(weakref.proxy(self), self.joined.folder, found.holder, door)
        try:
            self._task = asyncio.get_running_loop().create_task(show)
        except RuntimeError:  # a terminal shows nothing during input
            try:
                asyncio.run(show)
            except KeyboardInterrupt:
                print("Stopped showing it. To go on: %distributed attach")

    async def _show(self, folder: str, holder: int, door: socket.socket | None) -> None:
        # Until the ranks have ended.
        found: sessions.SessionInfo | None
        seen, left, loop = 0, asyncio.Event(), asyncio.get_running_loop()

        def note_left() -> None:
            with suppress(RuntimeError):  # the kernel is ending: its loop is closed already
                loop.call_soon_threadsafe(left.set)

        self._own.when_left = note_left
        while True:
            if door is not None:
                watched = WatchedCells(f"the notebook of process {holder}")
                await watched.show(door)
                seen, door = max(seen, watched.cell), None
            while self.running is not None:
                await left.wait()
                left.clear()
            try:
                found = await asyncio.to_thread(sessions.visit_to_watch, folder)
            except UsageError:  # no answer yet
                continue
            if found is None:
                break
            if found.holder in (0, os.getpid()):
                text = f"{found.name}: {sessions.whose(found)}."
                late = partial(print, text, flush=True)
                await _until_changed(sessions.next_holder(folder, found.holder), late)
                continue
            holder = found.holder
            seen = max(seen, self.joined.count if self.joined is not None else 0)
            try:
                door = await asyncio.to_thread(sessions.watch, folder, seen)
            except OSError:  # it ends just now, or cannot listen: it tries that when it is visited
                await _until_changed(sessions.next_holder(folder, holder))
        if self.joined is not None:
            print(f"{self.joined.ranks} have ended.", flush=True)
            self.joined = None
        self._task = None

    def _leave(self) -> str:
        had = self.running
        if had is not None:
            self._lend(had)
        joined = self.joined
        assert joined is not None
        self.forget_shared()
        if had is not None:
            # The host agent may read the next request before it knows that they are free.
            with suppress(UsageError):
                sessions.visit(joined.folder, "released", limits.RELEASES_SECONDS, os.getpid())
        found = sessions.visit(joined.folder, "leave")
        if found is None:
            return f"{joined.ranks} have ended."
        return f"{joined.ranks} are no longer watched here: {sessions.whose(found)}."


async def _until_changed(
    changes: Coroutine[Any, Any, None], late: Callable[[], object] | None = None
) -> None:
    """Awaits a change for as long as ranks may be between two notebooks; then calls ``late`` and
    goes on to wait, if there is one.
    """
    change = asyncio.ensure_future(changes)
    try:
        # Not `wait_for`: there a change that comes just now hides that the user ends the watching.
        done, _ = await asyncio.wait([change], timeout=_BETWEEN_SECONDS)
        if late is not None:
            if not done:
                late()
            await change
    finally:
        change.cancel()


def _call(method: Callable[[], Callable[[socket.socket], None] | None], it: socket.socket) -> None:
    found = method()
    if found is not None:
        found(it)
    else:
        it.close()
