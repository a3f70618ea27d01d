"""The notebook's cluster: started when it is first needed, and again after it was lost.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

from allranks.cluster import devices, sessions
from allranks.cluster.cluster import Cluster
from allranks.cluster.features import NotebookHooks
from allranks.cluster.healing import HEALING, AfterCells
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.options import TYPED, ClusterOptions
from allranks.cluster.sessions import as_time, seconds_of
from allranks.cluster.sharing import DetachedCell, answer, has_gone
from allranks.errors import AllranksError, UsageError
from allranks.magics.shared import Joined, WatchedCells
from allranks.records.ranks import label
from allranks.widgets.cell_history import CellHistory

_NAMES = "rank, size, local_rank, local_size, comm, MPI, device, allreduce, broadcast, barrier …"
_NOTHING = ClusterOptions()
_DEFAULT = ClusterOptions(preload="")
_TICK_SECONDS = 0.1
_AGAIN_SECONDS = 0.05
_LOOKS = 10


class Session:
    """The one cluster of a notebook, and the options of the next one."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self.hooks = NotebookHooks()
        #: The cells of the notebook that have ended.
        self.past = CellHistory()
        self._default = self._asked = _DEFAULT
        #: How many ranks started last on this machine, without a choice of GPUs.
        self._last_size: int | None = None
        self._healing = "on"
        self._keeping: AfterCells | None = None
        self._stays = 0.0
        #: The ranks that it shares with other notebooks, also while another one has them.
        self.joined: Joined | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> Cluster | None:
        # None unless the ranks are up.
        cluster = self._cluster
        return cluster if cluster is not None and cluster.state == "running" else None

    def cluster(self, options: ClusterOptions = _NOTHING) -> Cluster:
        """Returns the running cluster, started now if necessary.

        Raises UsageError if the running one has another size, launcher, GPUs or modules than
        ``options``.
        """
        running = self.running
        if running is not None and running.cells.is_up(print):
            self._check(running, options)
            self._show_news(running)
            return running
        if running is not None:
            print(running.lost_because.splitlines()[0])
            self.forget_shared()
        if self.joined is not None:
            taken = self._borrow()
            self._check(taken, options)
            self._show_news(taken)
            return taken
        lost = self._cluster is not None and self._cluster.state == "lost"
        wanted = options.over(self._asked)
        as_before = wanted.n is None and self._last_size is not None and self._is_here(wanted)
        if as_before:
            wanted = replace(wanted, n=self._last_size)
        cluster = wanted.make(Cluster)
        # The notebook's, not this cluster's: a profile can be asked for before ranks run.
        cluster.cells.hooks = self.hooks
        # The options last until a stop, also after a failed start or a loss; the number of ranks
        # that have started lasts longer.
        self._asked = replace(wanted, n=cluster.size)
        if not lost and (waiting := sessions.waiting()):
            print(f"Starting new ranks. {waiting}")
        started = time.monotonic()
        cluster.heal_when(self._healing)
        cluster.cells.keeping = self._keeping
        if lost and self._cluster is not None:
            cluster.cells.kept = self._cluster.cells.kept
        # The last call is cached: a state of the start is printed when it changes.
        cluster.start(lru_cache(maxsize=1)(partial(print, flush=True)))
        self._cluster = cluster
        if self._is_here(wanted):
            self._last_size = cluster.size
        self._offer(cluster)
        if self._stays:
            try:
                cluster.ownership.stay(self._stays, self._memo())
            except UsageError as error:  # they are there, and end with this notebook
                cluster.cells.news.append(str(error))
        print(start_text(cluster, time.monotonic() - started, again=lost, as_before=as_before))
        for line in self.hooks.start_texts(dict(wanted.settings)):
            print(line)
        self._show_news(cluster)
        if not isinstance(cluster.launcher, MultiHostLauncher):  # else only the ranks see them
            for line in devices.notices(cluster.gpus, cluster.size):
                print(line)
        return cluster

    @staticmethod
    def _is_here(options: ClusterOptions) -> bool:
        # Other hosts, and chosen GPUs, have room for other numbers of ranks.
        here = options.effective("launcher") == "local"
        return here and not options.gpus and not options.exclusive

    @staticmethod
    def _show_news(cluster: Cluster) -> None:
        for line in cluster.cells.news:
            print(line)
        cluster.cells.news.clear()

    def start_with(self, options: ClusterOptions) -> None:
        # The default options, of this cluster and of later ones.
        self._default = self._asked = options.over(_DEFAULT)

    def of_size(self, n: int | None) -> Cluster:
        return self.cluster(ClusterOptions(n))

    def _check(self, running: Cluster, options: ClusterOptions) -> None:
        for name, option in TYPED.items():
            asked = getattr(options, name)
            if asked is None:
                continue  # as in most cells: the default launcher is not looked up again
            have = self._asked.effective(name)
            if asked != have:
                # Do not offer a restart that cannot succeed.
                replace(options, exclusive=False).make(Cluster)
                what = f"{have} ranks are" if option == "-n" else f"{option} {have or 'none'} is"
                raise UsageError(
                    f"{option} {asked} was given, but {what} running. Leave out {option}, or "
                    f"type: %distributed restart {option} {asked}   (this deletes all variables "
                    "on the ranks)"
                )
        for name, value in options.settings:
            if dict(self._asked.settings).get(name) != value:
                raise UsageError(
                    f"--{name} {value} was given, but the ranks run without it. Leave it out, or "
                    f"type: %distributed restart --{name} {value}   (this deletes all variables "
                    "on the ranks)"
                )
        if options.exclusive:
            devices.check_exclusive(running.gpus, running.size)

    def heal_when(self, healing: str) -> None:
        # In this cluster and in later ones.
        if healing not in HEALING:
            raise UsageError(f"expected {', '.join(HEALING)}, found {healing!r}")
        self._healing = healing
        if self._cluster is not None:
            self._cluster.heal_when(healing)

    def keep_after_cells(self, keeping: AfterCells | None) -> None:
        # In this cluster and in later ones.
        self._keeping = keeping
        if self._cluster is not None:
            self._cluster.cells.keeping = keeping

    def detach_on_exit(self, text: str) -> str:
        """Sets how long the ranks stay after this notebook's kernel; returns a line about it.

        ``text`` is a time, ``off``, or "" to ask.
        """
        if text:
            seconds = 0.0 if text == "off" else seconds_of(text, "detach-on-exit")
            if self.running is not None and self.running.cells.is_up(print):
                self.running.ownership.stay(seconds, self._memo())
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
        running.ownership.stay(seconds, self._memo())
        sessions.visit(running.cells.connection.session_dir, "leave")
        running.ownership.detach()
        name = sessions.name_of(running.cells.connection.session_dir)
        self._cluster, self._asked = None, _DEFAULT
        self.forget_shared()
        keep = "keeps" if running.size == 1 else "keep"
        return (
            f"{label(range(running.size))} {keep} running for {as_time(seconds)}. Type in another "
            f"notebook, or here: %distributed attach {name}"
        )

    def attach(self, name: str = "") -> tuple[Cluster, DetachedCell, str] | None:
        """Takes over ranks that another notebook, or this one's former kernel, has left.

        Ranks that another notebook holds are watched: then the result is None, else the cluster,
        its last cell, and a line about it. An empty name is the only cluster, or the only free one.
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
            return None
        cluster, left = self._attach_to(found)
        if joined is not None and not joined.guest:
            self.forget_shared()
        since = time.strftime("%H:%M", time.localtime(found.began))
        seconds = cluster.cells.roster.stays
        stays = (
            f"When this notebook's kernel ends, they keep running for {as_time(seconds)}"
            if seconds
            else "They end with the last notebook that has run a cell on them"
        )
        return (
            cluster,
            left,
            f"Attached to {label(range(cluster.size))} of {found.name}, running since {since}. "
            f"{stays}.",
        )

    def _attach_to(self, found: sessions.SessionInfo) -> tuple[Cluster, DetachedCell]:
        taken = sessions.AttachedHostAgent(found)
        asked = ClusterOptions(**taken.memo)
        try:
            cluster = asked.make(Cluster)
            cluster.cells.hooks = self.hooks
            cluster.heal_when(self._healing)
            cluster.cells.keeping = self._keeping
            left = cluster.ownership.attach(taken, print)
        except BaseException:
            taken.let_go()
            raise
        self._cluster, self._asked, self._stays = cluster, asked, taken.stays
        self._offer(cluster)
        return cluster, left

    @property
    def _is_guest(self) -> bool:
        # The ranks belong to another notebook as well.
        joined = self.joined
        if self.running is None or joined is None or not joined.guest:
            return False
        found = sessions.visit(joined.folder)
        return found is not None and bool(found.watchers)

    def restart(self, options: ClusterOptions = _NOTHING) -> None:
        """Ends the ranks and starts others, by default with the same options."""
        joined = self.joined
        if joined is not None and joined.guest:
            raise UsageError(
                f"expected ranks of this notebook, found that {joined.ranks} are another one's. "
                "Type there: %distributed restart   or here, for others: %distributed detach"
            )
        wanted = options.over(self._asked)
        wanted.make(Cluster)  # raises before the old ranks are lost
        self.stop()
        self.cluster(wanted)

    def stop(self) -> str:
        """Ends the ranks; those of another notebook are only left. Returns a line about it."""
        joined = self.joined
        if joined is not None and (self._is_guest or (joined.guest and self.running is None)):
            return self._leave()
        if joined is not None and self.running is None:
            self._borrow()
        # A cluster that is lost is stopped as well.
        running, held, self._cluster = self.running, self._cluster, None
        self.forget_shared()
        self._asked = self._default
        if held is not None:
            held.stop()
        lines = ["The ranks are stopped."] if running is not None else []
        if lines := [*lines, *self.hooks.ended()]:
            return "\n".join(lines)
        return f"No ranks are running. {sessions.waiting()}".rstrip()

    def close(self) -> None:
        try:
            self.stop()
        except UsageError:  # another notebook has the ranks: they stay
            self._leave()

    def _offer(self, cluster: Cluster) -> None:
        # Other notebooks may ask for these ranks, if this one's kernel can answer.
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # without an event loop nothing answers between cells
        # The cluster keeps the function, and must not keep the session.
        mine = weakref.WeakMethod(self._answer)

        def lend(visitor: socket.socket) -> None:
            loop.call_soon_threadsafe(_call, mine, visitor)

        cluster.cells.connection.sharing.lend = lend

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
        cluster.ownership.lend(self._memo())
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
            cluster.ownership.detach()
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
        if self.joined is None:
            self.joined = Joined(found.name, found.folder, found.size, guest=True)
        sessions.visit(found.folder, "watch")
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
        show = Session._show(weakref.proxy(self), self.joined.folder, found.holder, door)
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
        seen = looks = 0
        while True:
            if door is not None:
                watched = WatchedCells(f"the notebook of process {holder}")
                await watched.show(door)
                seen, door = max(seen, watched.cell), None
            await asyncio.sleep(_AGAIN_SECONDS)
            if self.running is not None:
                continue
            try:
                found = await asyncio.to_thread(sessions.visit, folder, "watch")
            except UsageError:  # no answer yet
                continue
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
                door = await asyncio.to_thread(sessions.watch, folder, seen)
        if self.joined is not None:
            print(f"{self.joined.ranks} have ended.", flush=True)
            self.joined = None
        self._task = None

    def shared_line(self) -> str:
        """Returns a line about the shared ranks; empty if there are none."""
        if self.joined is None:
            return ""
        try:
            found = sessions.visit(self.joined.folder)
        except UsageError as error:
            return f"{self.joined.ranks}: {error}."
        what = " have ended" if found is None else f": {sessions.whose(found)}"
        return f"{self.joined.ranks}{what}."

    def _leave(self) -> str:
        if self.running is not None:
            self._lend(self.running)
        joined = self.joined
        assert joined is not None
        self.forget_shared()
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


def start_text(
    cluster: Cluster, seconds: float, again: bool = False, as_before: bool = False
) -> str:
    hellos = list(cluster.hellos.values())
    hosts = ", ".join(sorted({hello.host for hello in hellos}))
    gpus = {(hello.host, hello.device) for hello in hellos if hello.device != "cpu"}
    where = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}" if gpus else "CPU"
    what = "started again" if again else "started"
    return (
        f"allranks {what} {label(range(cluster.size))} on {hosts} ({where}, {hellos[0].mpi}) in "
        f"{seconds:.1f} s{', as many as before' * as_before}.\nEach has: {_NAMES}"
    )


def watchers(cluster: Cluster) -> str:
    # The end of a line.
    found = sessions.visit(cluster.cells.connection.session_dir)
    return f"; {sessions.whose(found)}" if found is not None and found.watchers else ""


@contextmanager
def short_interrupts(session: Session, line: str) -> Iterator[None]:
    """Within, an interrupt is shown as one line: ``line``, and whether ranks run."""
    try:
        yield
    except KeyboardInterrupt as pressed:
        kept = "The ranks keep running." if session.running is not None else _NONE
        text = f"KeyboardInterrupt: {line}. {kept}"
        # IPython shows these lines in place of a traceback.
        setattr(pressed, "_render_traceback_", lambda: [text])  # noqa: B010  unknown to mypy
        raise


BEFORE_THE_CELL = "the cell was interrupted before the ranks began it"
_NONE = "No ranks are running; the next cell starts them."

RANKS = "ranks"


#: What a cluster has since it was made, not its class.
_PARTS = ("cells", "ownership", "roster", "size")


class RanksProxy:
    """The notebook's ``allranks.Cluster``: its first use starts the ranks."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        # IPython asks every object for _repr_html_ and the like: that starts nothing.
        if name.startswith("_"):
            raise AttributeError(name)
        known = name in _PARTS or hasattr(Cluster, name)
        if not known and self._session.running is None:
            raise AttributeError(f"no ranks are running, and a cluster has no {name!r}")
        return getattr(self._session.cluster(), name)

    def stop(self) -> None:
        # Without ranks it starts none.
        if self._session.running is not None:
            self._session.running.stop()

    def __dir__(self) -> list[str]:
        return [*_PARTS, *(name for name in dir(Cluster) if not name.startswith("_"))]

    def __repr__(self) -> str:
        running = self._session.running
        return repr(running) if running is not None else "<ranks, not started yet>"
