"""Which notebook has the ranks: this one, or another one, to which it leaves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allranks.cluster import healing
from allranks.cluster.cell_run import CellRun, View
from allranks.cluster.cells import Cells
from allranks.cluster.kept_folders import KeptFolders
from allranks.cluster.recovered import text_of_new
from allranks.cluster.renewal import end_members
from allranks.cluster.sessions import AttachedHostAgent
from allranks.cluster.sharing import DetachedCell
from allranks.errors import UsageError
from allranks.records import requests
from allranks.records.ranks import label


class Ownership:
    """Attaches a cluster to ranks that another notebook has left, and leaves its own to others."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def stay(self, seconds: float, memo: dict[str, Any]) -> None:
        """Sets how long the ranks keep running when this notebook ends; 0 for not at all.

        ``memo`` is for the next notebook. Raises UsageError if the launcher's job would end with
        this one.
        """
        self._cells.catch_up()
        self._cells.connection.stay(seconds, memo)
        if self._cells.kept is not None:
            self._cells.kept.stay(seconds > 0)

    def detach(self) -> None:
        """Detaches from the ranks, to which another notebook can attach."""
        self._cells.check_idle()
        self._cells.connection.let_go()
        self._leave_kept()

    def lend(self, memo: dict[str, Any]) -> None:
        """Leaves the ranks to another notebook; they stay as long as this one runs."""
        self._cells.catch_up()
        self._cells.check_idle()
        if self._cells.occupied:
            raise UsageError("expected idle ranks, found one in a cell that was interrupted")
        self._cells.connection.lend(memo)
        self._leave_kept()

    def _leave_kept(self) -> None:
        if self._cells.kept is not None:
            self._cells.kept.let_go()

    def attach(
        self, taken: AttachedHostAgent, tell: Callable[[str], None] | None = None
    ) -> DetachedCell:
        """Takes over another notebook's ranks; returns their last cell. If they do not answer, they
        stay detached. ``tell`` gets a line about what takes long; else the next cell shows it.
        """
        cells = self._cells
        connection, tell = cells.connect(taken), tell or cells.news.append
        told = connection.attach()
        left = DetachedCell.of(told)
        cells.kept = KeptFolders(taken.config.kept_dirs)
        cells.kept.hold()
        cells.kept.stay(True)
        try:
            record = connection.record if connection.record.get("cells", -1) >= left.cell else {}
            own = set(record.get("own", ()))
            roster = cells.roster
            roster.cells, roster.epoch, roster.saved = (
                record.get("cells", left.cell),
                left.epoch,
                own,
            )
            if not told:
                said, pressed = healing.go_on(connection, record, tell)
                tell(said)
                if pressed:
                    raise KeyboardInterrupt
                return left
            if left.members:
                end_members(connection, left.members)
            if not left.unseen:
                connection.resume()
                connection.ask(requests.SEND, {}, strict=False)
            # Another notebook has replaced them, and has ended before it said what they have.
            new = {rank for rank, about in told.items() if about["new"]}
            # What a rank has saved itself, and has back, is newer than what was kept.
            back = own - new
            gone = {end["rank"] for end in record.get("gone", ())} - back
            if new := new | told.keys() & gone:
                cells.news.append(text_of_new(healing.restore(connection, new, tell), new))
            # After the replacements, which end what had needed the dead ranks.
            roster.needs = {rank: about.get("needs", -1) for rank, about in told.items()}
            cells.news += connection.notices
        except BaseException:
            if not connection.closed:
                self.detach()
            raise
        return left

    def follow(self, left: DetachedCell, view: View) -> CellRun:
        """Returns the ranks' unfinished cell, in flight and shown from its beginning.

        If some ranks have not received it, the others may wait for them, and are interrupted.
        """
        connection = self._cells.connection
        run = CellRun(left.cell, left.ranks, connection, view, None)
        if connection.roster.lost_hosts:
            view.notice(connection.words.deaths_text())
        connection.sharing.follow(left)
        connection.resume()
        if left.missed and left.running:
            view.notice(
                f"interrupted: its notebook ended before {label(left.missed)} received this cell"
            )
            run.interrupt()
        return run
