"""The teacher's side: takes the states of students, and shows a tile for each."""

from __future__ import annotations

import html
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from allranks import doors, own_files
from allranks.features.classroom import door, states

#: A notebook sends a state a second. One that sends without end must not take the processor from
#: the teacher's cells.
_PAUSE_SECONDS = 0.05
#: Of one connection, between two pauses.
_READ_NBYTES = 1 << 18
_ADMITTED_AT_ONCE = 64
#: Ranks that wait for longer than this need help.
_WAITING_SECONDS = 30.0
_FAILED, _WAITING, _RUNNING, _IDLE, _GONE = range(5)
_WORDS = {_FAILED: "failed", _WAITING: "waits", _RUNNING: "runs", _IDLE: "idle", _GONE: "left"}
_COLOURS = {
    _FAILED: "#c62828",
    _WAITING: "#c77700",
    _RUNNING: "#1f83c9",
    _IDLE: "#2e7d32",
    _GONE: "#777",
}


@dataclass
class Student:
    """One student's notebook, from its messages, which `states` reads."""

    name: str
    account: str
    uid: int = -1
    taken: float = field(default_factory=time.monotonic)
    notebook: str = ""
    cell: int = 0
    exercise: str = ""
    #: The exercises whose checks have succeeded.
    solved: str = ""
    state: str = "idle"
    error: str = ""
    waits: str = ""
    seconds: float = 0.0
    ranks: str = ""
    #: None until it has come; empty if no cell has shown a panel.
    panel: str | None = None
    shows_panel: bool = False
    gone: bool = False
    has_sent: bool = False
    #: How many panels may still come: one is under way when the teacher asks for the next.
    panels_asked: int = 0
    _received: bytearray = field(default_factory=bytearray, repr=False)

    def receive(self, data: bytes) -> None:
        """Takes what has come over the student's connection; raises `states.RefusedMessage`."""
        self._received += data
        lines, ends, rest = self._received.rpartition(b"\n")
        self._received = rest
        if ends and self.panels_asked:
            for line in lines.split(b"\n"):
                self._take_line(bytes(line))
        elif ends:  # only the newest state counts
            self._take_line(bytes(lines.rpartition(b"\n")[2]))
        if len(rest) > (states.PANEL_NBYTES if self.panels_asked else states.STATE_NBYTES):
            raise states.RefusedMessage("too long a line")

    def _take_line(self, line: bytes) -> None:
        if line.startswith(b'"'):
            if not self.panels_asked:
                raise states.RefusedMessage("expected no panel")
            self.panel = states.read_panel(line)
            self.panels_asked -= 1
        else:
            self.take(states.read_state(line))

    def take(self, state: dict[str, Any]) -> None:
        """Takes the clean fields of a state."""
        self.has_sent = True
        said = state.get("user")
        if said and said != self.account:
            self.name = f"{said} ({self.account})"
        self.notebook, self.exercise = state.get("notebook", ""), state.get("exercise", "")
        self.solved = state.get("solved", "")
        self.state, self.error = state.get("state", ""), state.get("error", "")
        self.waits, self.ranks = state.get("waits", ""), state.get("ranks", "")
        self.cell, self.seconds = state.get("cell", 0), state.get("seconds", 0.0)
        self.shows_panel = state.get("shows_panel", False)
        self.taken = time.monotonic()

    def leave(self) -> None:
        """Forgets all but the name: nothing of a student is visible after leaving."""
        self.notebook = self.exercise = self.solved = self.error = self.waits = self.ranks = ""
        self.panel, self.shows_panel, self.gone = None, False, True
        self._received.clear()

    @property
    def idle_seconds(self) -> float:
        """The time without progress: since the cell began or ended."""
        return self.seconds + time.monotonic() - self.taken

    @property
    def need(self) -> int:
        """How urgent help is: the index in the order of tiles."""
        if self.gone:
            return _GONE
        if self.state == "failed":
            return _FAILED
        if self.state != "running":
            return _IDLE
        return _WAITING if self.waits and self.idle_seconds > _WAITING_SECONDS else _RUNNING

    @property
    def line(self) -> str:
        """What a teacher wants to know first."""
        return self.error or (self.waits if self.state == "running" else "")


def by_need(students: Iterable[Student]) -> list[Student]:
    """Returns students in the order of their tiles: those who need help first."""
    return sorted(students, key=lambda one: (one.need, -one.idle_seconds, one.name))


def _places_of(uid: int) -> int:
    # The teacher's own account is that of all students where they share one.
    return states.MAX_STUDENTS if uid == os.getuid() else states.MAX_NOTEBOOKS


def refusal(uid: int, here: Sequence[int]) -> str:
    """Returns why one more notebook of an account is not admitted, "" if it is.

    ``here`` has the accounts of all notebooks.
    """
    if len(here) >= states.MAX_STUDENTS:
        return f"it has {states.MAX_STUDENTS} notebooks, the most. One has to leave first"
    if here.count(uid) >= _places_of(uid):
        return (
            f"your account has {states.MAX_NOTEBOOKS} notebooks in it, the most. Type in one of "
            "them: %distributed leave"
        )
    return ""


class ClassBoard:
    """All students, and the thread that receives from them."""

    def __init__(self, group: str | None) -> None:
        self._door = door.listen(group)
        self._door.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._students: dict[socket.socket, Student] = {}
        self._gone: dict[tuple[int, str], Student] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.changed: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._receive, name="allranks-class", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def students(self) -> list[Student]:
        """Returns all students, those who need help first."""
        with self._lock:
            here = [one for one in self._students.values() if one.has_sent]
            # A student who joins again takes the place of the notebook that left.
            again = {(one.uid, one.name) for one in here}
            return by_need([*here, *(one for key, one in self._gone.items() if key not in again)])

    def ask_panel(self, student: Student) -> None:
        """Asks for a student's panel, which comes only if the student has allowed it."""
        with self._lock:
            found = [to for to, one in self._students.items() if one is student]
            for one in self._students.values():
                if one is not student:
                    one.panel = None  # only the one that is open is kept
        for connection in found:
            student.panels_asked = 2
            with suppress(OSError):
                door.send(connection, {"want": "panel"})

    def _receive(self) -> None:
        shown = 0.0
        while not self._over.wait(_PAUSE_SECONDS):
            for key, _ in self._selector.select(0.5):
                if key.fileobj is self._door:
                    self._admit_all()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
            if time.monotonic() - shown >= 1.0:
                shown = time.monotonic()
                self.changed()
        for connection in [self._door, *self._students]:
            self._selector.unregister(connection)
            connection.close()
        place = door.folder_of(door.own_account())
        (place / "door").unlink(missing_ok=True)
        with suppress(OSError):
            place.rmdir()

    def _admit_all(self) -> None:
        for _ in range(_ADMITTED_AT_ONCE):
            try:
                connection = doors.accept(self._door)
            except OSError:
                return
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        uid = own_files.peer(connection)[1]
        refused = refusal(uid, [one.uid for one in self._students.values()])
        try:
            door.send(connection, {"refused": refused})
        except OSError:  # it has left already
            refused = "gone"
        if refused:
            connection.close()
            return
        with self._lock:
            self._students[connection] = Student(door.full_name(uid), door.account_name(uid), uid)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        student = self._students[connection]
        try:
            data = connection.recv(_READ_NBYTES)
            if not data:
                raise OSError("the end")
            student.receive(data)
        except BlockingIOError:
            pass
        except (OSError, states.RefusedMessage):
            with self._lock:
                del self._students[connection]
                student.leave()
                if student.has_sent:
                    self._gone[student.uid, student.name] = student
                # With other names, one account could fill the list.
                own = [key for key in self._gone if key[0] == student.uid]
                for key in own[: -_places_of(student.uid)]:
                    del self._gone[key]
                for key in [*self._gone][: -states.MAX_STUDENTS]:
                    del self._gone[key]
            self._selector.unregister(connection)
            connection.close()


def by_label(students: Sequence[Student]) -> dict[str, Student]:
    """Returns the students by their names; those of several notebooks also by the notebook's."""
    count = Counter(one.name for one in students)
    return {
        one.name if count[one.name] == 1 else f"{one.name}, {one.notebook}": one
        for one in reversed(students)
    }


def age(seconds: float) -> str:
    if seconds < 10:
        return "now"
    return f"{int(seconds // 10)}0 s" if seconds < 60 else f"{int(seconds // 60)} min"


def as_text(students: Sequence[Student]) -> str:
    """Returns a line for each student."""
    if not students:
        return "No student has joined yet."
    rows = [
        (
            one.name,
            one.notebook,
            f"In[{one.cell}]",
            one.exercise,
            f"solved: {one.solved}" if one.solved else "",
            _WORDS[one.need],
            age(one.idle_seconds),
        )
        for one in students
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        + (f"  {student.line}" if student.line else "")
        for row, student in zip(rows, students, strict=True)
    ]
    return "\n".join(line.rstrip() for line in lines)


_STYLE = """<style>
.ar-class { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 6px;
  font-family: var(--jp-ui-font-family, sans-serif); color: var(--jp-ui-font-color1, #222) }
.ar-class > div { border-left: 5px solid; padding: 4px 8px; overflow-wrap: anywhere;
  background: var(--jp-layout-color2, #eee); line-height: 1.35 }
.ar-class small { color: var(--jp-ui-font-color2, #555) } .ar-class b { font-size: 14px }
</style>"""


def as_html(students: Sequence[Student]) -> str:
    """Returns a tile for each student; every text of theirs is escaped."""
    if not students:
        return "<p>No student has joined yet.</p>"
    tiles = []
    for one in students:
        at = f"In[{one.cell}]" + (f", exercise {one.exercise}" if one.exercise else "")
        tiles.append(
            f'<div style="border-color: {_COLOURS[one.need]}"><b>{html.escape(one.name)}</b> '
            f"{_WORDS[one.need]}, {age(one.idle_seconds)}<br>"
            f"<small>{html.escape(one.notebook)} {html.escape(at)}</small>"
            + (f"<br>✓ solved: {html.escape(one.solved)}" if one.solved else "")
            + (f"<br>{html.escape(one.line)}" if one.line else "")
            + "</div>"
        )
    return f'{_STYLE}<div class="ar-class">{"".join(tiles)}</div>'


_NOTHING_FROM_OUTSIDE = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
)


def ranks_html(student: Student) -> str:
    """Returns a student's name and the states of the ranks."""
    ranks = f"<pre>{html.escape(student.ranks)}</pre>" if student.ranks else ": no ranks"
    return f"<b>{html.escape(student.name)}</b>{ranks}"


def panel_html(student: Student) -> str:
    """Returns the last panel of a student, in a frame that runs no script, or why there is none."""
    name = html.escape(student.name)
    if student.gone:
        return f"<p>{name} has left.</p>"
    if not student.shows_panel:
        return f"<p>{name} shows no panel: the student has joined without the word panel.</p>"
    if student.panel is None:
        return f"<p>The panel of {name} is on its way.</p>"
    if not student.panel:
        return (
            f"<p>No cell of {name} that has ended has shown a panel. The panel of a running cell "
            "comes when the cell ends.</p>"
        )
    page = html.escape(_NOTHING_FROM_OUTSIDE + student.panel, quote=True)
    return (
        '<iframe sandbox="" style="width: 100%; height: 480px; border: 1px solid #888; '
        f'background: white" srcdoc="{page}"></iframe>'
    )
