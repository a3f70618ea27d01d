"""Which notebook has the ranks: this one, or another one, to which it leaves them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from allranks.cluster.cell_run import CellRun, View
from allranks.cluster.cells import Cells
from allranks.cluster.connection import Connection
from allranks.cluster.features import ClusterContext, NotebookFeature, NotebookHooks
from allranks.cluster.kept_folders import KeptFolders
from allranks.cluster.renewal import not_idle
from allranks.errors import UsageError
from allranks.features.attach.caretaker_process import take_care
from allranks.features.attach.connection import DETACHED, AttachedConnection
from allranks.features.attach.records import Stay, Watched
from allranks.features.attach.requests import RESUME, SEEN, STAY
from allranks.features.attach.sessions import AttachedHostAgent, say_listens, visit
from allranks.features.attach.sharing import DetachedCell, WatcherFeed
from allranks.records import requests
from allranks.records.agent import Event
from allranks.records.deferred import deferred
from allranks.records.ranks import label
from allranks.records.wire import Answer, Interrupt

#: How long the members of an ensemble have, which were interrupted, and how often that is asked.
_INTERRUPTED_SECONDS, _LOOK_SECONDS = 10.0, 0.25


class Ownership(NotebookFeature):
    """Whether the ranks of one cluster stay when its notebook ends, and who watches them.

    They stay for ``stays`` seconds; if ``shared``, other notebooks use them too. ``feed`` sends
    messages to the notebooks that watch.
    """

    in_cells = False

    def __init__(self) -> None:
        #: Called when this notebook has the ranks no longer, in any thread.
        self.when_left: Callable[[], object] = lambda: None

    def started(self, cluster: ClusterContext) -> None:
        self.feed = WatcherFeed(cluster.roster)
        self._roster = cluster.roster
        self.set(0.0, False)
        cluster.observers.append(self.feed)
        cluster.listen(partial(_open, self.feed, cluster.session_dir, cluster.post), Watched)

    def set(self, stays: float, shared: bool) -> None:
        self.stays, self.shared = stays, shared
        self.in_cells = bool(stays) or shared

    def stopped(self) -> None:
        self.when_left()

    def cell_finished(self) -> None:
        # A notebook that attaches later then does not show the cell again, nor one that a feature
        # has run at its end.
        if self.cell is not None:
            seen = {"cell": self._roster.cells}
            self.cell.ask_soon(SEEN, seen, _drop, range(self._roster.size))


def _open(
    feed: WatcherFeed,
    folder: str,
    post: Callable[[Callable[[], object]], bool],
    _event: Event,
    _pid: int | None,
) -> None:
    def open_feed() -> None:
        feed.open(folder)
        say_listens(folder)  # also if that has failed: then the connection does, at once

    if not post(open_feed):
        open_feed()  # the ranks have just ended


def _drop(answer: Answer) -> None:
    """Needs no answer."""


def of(hooks: NotebookHooks) -> Ownership:
    """Returns that of the ranks of a notebook, or of a `Cluster`."""
    return next(one for one in hooks.features if isinstance(one, Ownership))


def stay(cells: Cells, seconds: float, memo: dict[str, Any]) -> None:
    """Sets how long the ranks keep running when this notebook ends; 0 for not at all.

    ``memo`` is for the next notebook. Raises UsageError if the launcher's job would end with this
    one.
    """
    cells.catch_up()
    ranks, own = cells.connection, of(cells.hooks)
    if seconds:
        take_care(ranks.agent, ranks.session_dir, ranks.config)
        _check_folder(ranks)
    home = ranks.config.session_dir if seconds or own.shared else ""
    ranks.ask(STAY, {"home": home})
    ranks.agent.say_stay(Stay(seconds, memo))
    own.set(seconds, own.shared)
    # The kernel's exit must not end ranks that stay.
    ranks.stay(own.in_cells)
    if cells.kept is not None:
        cells.kept.stay(seconds > 0)


def detach(cells: Cells) -> None:
    """Detaches from the ranks, to which another notebook can attach."""
    cells.check_idle()
    _release(cells)


def lend(cells: Cells, memo: dict[str, Any]) -> None:
    """Leaves the ranks to another notebook; they stay as long as this one runs."""
    cells.catch_up()
    cells.check_idle()
    if cells.occupied:
        raise UsageError(
            "expected idle ranks, found one in a cell that was interrupted. Wait for its end, or "
            "type: %distributed restart"
        )
    ranks = cells.connection
    ranks.ask(STAY, {"home": ranks.config.session_dir})
    ranks.agent.say_stay(Stay(of(cells.hooks).stays, memo))
    _check_folder(ranks, "share")  # before they are released: else they would end
    _release(cells)


def _check_folder(ranks: Connection, want: str = "about") -> None:
    if visit(ranks.session_dir, want) is None:
        raise UsageError(
            f"expected {ranks.session_dir}, by which another notebook finds the ranks, found "
            "that it has been removed: they end with this one. Fetch what you need, for example"
            " with %distributed pull NAME, and type: %distributed restart"
        )


def _release(cells: Cells) -> None:
    with deferred():
        try:
            cells.connection.release(DETACHED)
        finally:
            if cells.kept is not None:
                cells.kept.let_go()


def attach(
    cells: Cells, taken: AttachedHostAgent, tell: Callable[[str], None] | None = None
) -> DetachedCell:
    """Takes over another notebook's ranks; returns their last cell. If they do not answer, they
    stay detached. ``tell`` gets a line about what takes long; else the next cell shows it.
    """
    tell = tell or cells.news.append
    connection: AttachedConnection | None = None
    try:
        # An interrupt in it would end the connection, and remove the folder of the ranks.
        with deferred():
            connection = cells.connect(partial(AttachedConnection, taken=taken))
        of(cells.hooks).set(taken.stays, taken.shared)
        told = connection.attach()
        # The host agent decides whether ranks end that other notebooks have had.
        connection.stay(of(cells.hooks).in_cells)
        left = DetachedCell.of(told)
        cells.kept = KeptFolders(taken.config.kept_dirs)
        cells.kept.hold()
        cells.kept.stay(True)
        record = connection.record if connection.record.get("cells", -1) >= left.cell else {}
        own = set(record.get("own", ()))
        roster = cells.roster
        roster.cells, roster.epoch, roster.saved = record.get("cells", left.cell), left.epoch, own
        if not told:
            said, pressed = cells.hooks.command("continue_recovery", connection, tell, record)
            tell(said)
            if pressed:
                raise KeyboardInterrupt
            return left
        if left.members:
            _end_members(connection, left.members)
        if not left.unseen:
            _resume(connection)
            connection.ask(requests.SEND, {}, strict=False)
        # Another notebook has replaced them, and has ended before it has shown what they have.
        new = {rank for rank, about in told.items() if about["new"]}
        # What a rank has saved itself, and has back, is newer than what was kept.
        back = own - new
        gone = {end["rank"] for end in record.get("gone", ())} - back
        if new := new | told.keys() & gone:
            cells.news.append(cells.hooks.command("restore_ranks", connection, tell, new))
        # After the replacements, which end what had needed the dead ranks.
        roster.needs = {rank: about.get("needs", -1) for rank, about in told.items()}
        cells.news += connection.notices
    except BaseException:
        if connection is not None and not connection.closed:
            detach(cells)
        raise
    return left


def _resume(ranks: Connection) -> None:
    """Ranks send what the last notebook may not have shown, and all that follows."""
    ranks.ask_soon(RESUME, {}, _drop, ranks.roster.alive)


def _note_seen(ranks: Connection, cell: int, chosen: Iterable[int]) -> None:
    ranks.ask_soon(SEEN, {"cell": cell}, _drop, chosen)


def _end_members(ranks: Connection, members: Mapping[int, int]) -> None:
    """Interrupts the members of an ensemble whose notebook has ended: cells, by rank."""
    for rank, cell in members.items():
        ranks.send((rank,), Interrupt(cell))
        _note_seen(ranks, cell, (rank,))
    deadline = time.monotonic() + _INTERRUPTED_SECONDS
    while (busy := not_idle(ranks, members)) and time.monotonic() < deadline:
        ranks.wait_until(lambda: False, _LOOK_SECONDS)
    if busy:
        raise UsageError(
            f"expected idle ranks, found {label(busy)} still in a member of an ensemble that "
            "was interrupted. Try again: %distributed attach   or type: %distributed restart"
        )
    ranks.roster.epoch.dirty = True
    for rank, cell in members.items():
        _note_seen(ranks, cell, (rank,))
    ranks.ask(requests.MEMBERS, {"ranks_each": 0}, ranks=range(ranks.size))


def follow(cells: Cells, left: DetachedCell, view: View) -> CellRun:
    """Returns the ranks' unfinished cell, in flight and shown from its beginning.

    If some ranks have not received it, the others may wait for them, and are interrupted.
    """
    connection = cells.connection
    for press in connection.step(0):  # deaths from before the cell is shown
        connection.inbox.put(press)
    run = CellRun(left.cell, left.ranks, connection, view, None)
    if connection.roster.lost_hosts:
        view.notice(connection.words.deaths_text())
    of(cells.hooks).feed.follow(left)
    _resume(connection)
    if left.missed and left.running:
        view.notice(
            f"interrupted: its notebook ended before {label(left.missed)} received this cell"
        )
        run.interrupt()
    return run
