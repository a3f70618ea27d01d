"""``%distributed class`` for a teacher, ``%distributed join`` and ``leave`` for students."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from IPython.core.getipython import get_ipython

from allranks.cluster import cluster
from allranks.cluster.failures import RankStatus, read_statuses, status_tree
from allranks.cluster.features import AskingFeature
from allranks.cluster.options import LineCommand
from allranks.errors import UsageError
from allranks.features.classroom import board, door, hub
from allranks.features.classroom.student import Membership, NotebookState
from allranks.records import requests
from allranks.records.ranks import label

_ANSWER_SECONDS = 0.5
#: How a panel begins in the output of a cell.
_PANEL = re.compile('(<div data-allranks="[^"]*">)?<div class="allranks-still')
_NONE = "–"


class Classroom(AskingFeature):
    """A class of the teacher's notebook, or the membership of a student's."""

    in_cells = False
    line_commands = (
        LineCommand(
            "class",
            "shows the students who have typed join, and where they are",
            "GROUP|close",
            "admits only this group's accounts; close ends the class",
        ),
        LineCommand(
            "join",
            "shows your teacher where you are, for example: join ana",
            "TEACHER panel",
            "the teacher's account; the word panel also shows your last panel",
        ),
        LineCommand("leave", "stops showing your teacher where you are"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._board: board.ClassBoard | hub.HubBoard | None = None
        self._view: _ClassView | None = None
        self._membership: Membership | hub.HubMembership | None = None
        self._state: NotebookState | None = None

    def command(self, name: str, *arguments: Any) -> Any:
        """Runs a command; returns the text to print."""
        words: list[str] = arguments[0]
        if name == "class":
            return self._class(words)
        return self._join(words) if name == "join" else self._leave()

    def _class(self, words: list[str]) -> str:
        if len(words) > 1:
            raise UsageError(
                f"expected a group or close, found {' '.join(words):.60}. Type for example: "
                "%distributed class   or: %distributed class close"
            )
        if words == ["close"]:
            if self._board is None:
                return "There is no class."
            self._board.close()
            self._board = self._view = None
            return "The class is closed."
        if self._board is None:
            if hub.is_used() and words:
                raise UsageError(
                    f"expected no group, found {words[0]!r}: this hub's class admits all its "
                    "users. Type: %distributed class"
                )
            group = words[0] if words else None
            self._board = hub.HubBoard() if hub.is_used() else board.ClassBoard(group)
        teacher = hub.own_user() if hub.is_used() else door.own_account()
        students = self._board.students()
        if getattr(get_ipython(), "kernel", None) is None:
            return f"{board.as_text(students)}\nStudents type: %distributed join {teacher}"
        # Shown again, not made again: earlier cells would keep tiles that no longer change.
        self._view = self._view or _ClassView(self._board)
        # In place of the tiles, for front ends without widgets: it does not change.
        self._view.show(f"At {time.strftime('%H:%M')}:\n{board.as_text(students)}")
        return f"Students type: %distributed join {teacher}"

    def _join(self, words: list[str]) -> str:
        if not words or words[1:] not in ([], ["panel"]):
            raise UsageError(
                "expected your teacher's account, and optionally the word panel, found "
                f"{' '.join(words) or 'none':.60}. Type for example: %distributed join ana"
            )
        self._leave()
        shell = get_ipython()
        if shell is None:
            raise UsageError("expected a notebook, found none. Type it in a notebook or in ipython")
        member = hub.HubMembership if hub.is_used() else Membership
        self._state = NotebookState(shell)  # first: the membership sends it at once
        try:
            self._membership = member(words[0], "panel" in words, self._described)
        except BaseException:
            self._leave()
            raise
        shown = "the ranks' states and your last panel" if words[1:] else "and the ranks' states"
        return (
            f"{words[0]} sees the notebook's name, the cell's number, the first line of its error, "
            f"{shown}. To stop: %distributed leave"
        )

    def _leave(self) -> str:
        member, state = self._membership, self._state
        self._membership = self._state = None
        if state is not None:
            state.close()
        if member is None or not member.is_open:
            return "You are in no class."
        member.close()
        return f"{member.teacher} no longer sees this notebook."

    def _described(self, with_panel: bool) -> dict[str, Any]:
        # Runs in the membership's thread, which waits for the ranks' answers.
        state = self._state
        found: dict[str, Any] = state.described() if state is not None else {}
        running = cluster.running()
        if running is not None and self.context is not None:
            found |= self._ranks(running)
        if with_panel:
            found["panel"] = _last_panel()
        return found

    def _ranks(self, running: cluster.Cluster) -> dict[str, str]:
        alive = [rank for rank in range(running.size) if rank not in running.roster.dead]
        ask = self.begin_ask(alive, requests.STATUS, {}, _ANSWER_SECONDS)
        ranks = read_statuses(running.hellos, ask())
        return {"waits": waits_of(ranks), "ranks": status_tree(ranks, f"{running.size} ranks")}


def waits_of(ranks: Sequence[RankStatus]) -> str:
    """Returns which ranks wait, for what and where; most of them first, "" if none waits."""
    groups: dict[tuple[str, str], list[int]] = {}
    for one in ranks:
        if one.doing.state.waits:
            groups.setdefault((one.state, one.line), []).append(one.rank)
    return "; ".join(
        f"{label(group)} {'is' if len(group) == 1 else 'are'} {state} at {line}"
        for (state, line), group in sorted(groups.items(), key=lambda item: -len(item[1]))
    )


def _last_panel() -> str:
    """Returns the panel of the last cell that has shown one, below the cell's number."""
    shell, session = get_ipython(), cluster.session
    if shell is None or session is None:
        return ""
    for number in range(shell.execution_count, 0, -1):
        with suppress(UsageError):  # a cell that did not run on ranks
            contents = session.hooks.command("shown_by_cell", number)
            shown = [data.get("text/html", "") for data, _ in contents]
            # Not other HTML: that is output, which is not sent.
            if panels := [*filter(_PANEL.match, shown)]:
                return "\n".join([f"<p>In[{number}]</p>", *panels])
    return ""


class _ClassView:
    """The tiles in the teacher's notebook, and the student who is opened."""

    def __init__(self, shown: board.ClassBoard | hub.HubBoard) -> None:
        import ipywidgets

        self._board = shown
        # The panel apart from the ranks: its frame is loaded again only when it has changed.
        self._tiles, self._ranks, self._panel = (ipywidgets.HTML() for _ in range(3))
        self._choice = ipywidgets.Dropdown(description="open", options=[_NONE])
        self._box = ipywidgets.VBox([self._tiles, self._choice, self._ranks, self._panel])
        self.update()
        shown.changed = self.update

    def show(self, text: str) -> None:
        from IPython.display import display

        display({**self._box._repr_mimebundle_(), "text/plain": text}, raw=True)

    def update(self) -> None:
        """Draws the students; called in the thread that receives from them."""
        students = self._board.students()
        self._tiles.value = board.as_html(students)
        # By name, so that a student stays open who joins again.
        named = board.by_label(students)
        options = (_NONE, *sorted(named))
        if options != self._choice.options:
            chosen = self._choice.value
            self._choice.options = options
            self._choice.value = chosen if chosen in options else _NONE
        opened = named.get(self._choice.value)
        if opened is not None:
            self._board.ask_panel(opened)
        self._ranks.value = board.ranks_html(opened) if opened is not None else ""
        self._panel.value = board.panel_html(opened) if opened is not None else ""


FEATURE = Classroom
