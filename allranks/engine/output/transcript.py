"""A rank's transcript: one log file that everything it writes goes to, and a tail that sends it.

Standard output and standard error, of Python, of C code and of child processes, are the same file,
opened for appending: writing never blocks, the order is the order of writing, and nothing is lost
when the process dies. What the screen gets is read back from the file: the first bytes of a cell
as they come, the last ones when it ends, and a count of what stands between them in the file only.
"""

from __future__ import annotations

import codecs
import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from allranks.engine.output import bundle
from allranks.engine.output.log_room import LogRoom, as_text
from allranks.engine.output.streams import Streams

Entry = list[Any]

_CHUNK_NBYTES = 1 << 20
_TAIL_SHARE = 4  # a quarter of a cell's screen budget is kept for its last lines
_DISPLAYS_A_CELL = 64
#: What a clear does not take away.
_STAY = ("notice", "into")
#: How often room on the disk is looked for, beside at the end of each cell.
_ROOM_SECONDS = 1.0


class Transcript:
    """Owns the log file of this process and hands out what the screen has not seen.

    Args:
        path: the log file, created with mode 0600.
        limit_nbytes: how much of the disk it may take.
        sift: takes out of text what the log alone has.
    """

    def __init__(
        self, path: str, limit_nbytes: int = 10**9, sift: Callable[[str], str] = str
    ) -> None:
        self.path = path
        self._sift = sift
        # Taken again where a finalizer shows something while it is held.
        self._lock = threading.RLock()
        self._placed: list[tuple[int, Entry]] = []
        self.err_spans: tuple[list[int], ...] = ()
        """Which bytes of the last batch's part of the log are standard error."""
        self._reader = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._log = os.fstat(self._reader)
        self._sent = self._log.st_size
        self._room = LogRoom(path, limit_nbytes)
        self._room_at = 0.0
        self._into = ""
        self._begin(limit_nbytes=1 << 16)
        self._forked = False
        self.streams = Streams(path, self._reader)

    def lost(self) -> list[int]:
        """Returns those of its descriptors that are no longer the log: a cell has closed them."""
        own = [self._reader, self._room.file, *self.streams.descriptors]
        return [number for number in own if not self._is_log(number)]

    def _is_log(self, number: int) -> bool:
        try:
            return os.path.samestat(os.fstat(number), self._log)
        except OSError:
            return False

    def _begin(self, limit_nbytes: int) -> None:
        self._head_left = limit_nbytes - limit_nbytes // _TAIL_SHARE
        self._tail_nbytes = limit_nbytes // _TAIL_SHARE
        self.limit_nbytes = limit_nbytes
        self._displays_hidden = 0
        self._clears_next = False
        self._notes: set[str] = set()
        self._begin_displays()
        self._skipped_from: int | None = None
        self._hidden_lines = 0
        self._hidden_nbytes = 0
        self._said: set[str] = set()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin_cell(self, limit_nbytes: int) -> list[Entry]:
        """Starts a new screen budget; returns what was written since the last cell ended."""
        entries, *_ = self.collect(final=True)
        with self._lock:
            self._begin(limit_nbytes)
        return entries

    def _begin_displays(self) -> None:
        self._displays_left = _DISPLAYS_A_CELL
        self._displays_nbytes_left = bundle.MOST_NBYTES
        #: How many bytes each display has that may be updated.
        self._named: dict[str | None, int] = {}
        #: How many displays stand in each widget for output, and their bytes.
        self._inside: dict[str, tuple[int, int]] = {}

    def forked(self) -> None:
        """This process is a copy of the one that owns the log: it writes to it, and no more."""
        self._forked = True
        # The thread that held it is not in this process.
        self._lock = threading.RLock()
        self.streams.forget_marks()

    def place(self, entry: Entry, nbytes: int = 0) -> None:
        """Puts a display, a result or a notice at this point of the text.

        Args:
            entry: see ``allranks.records.wire.Output``.
            nbytes: of a display's data.
        """
        if self._forked:
            print(_text_of(entry), end="")
            return
        self.streams.flush()
        with self._lock:
            kind, *rest = entry
            if kind == "update" and rest[2] not in self._named:
                # Another cell has displayed it: here it is new.
                entry = ["display", *rest]
            if self._into:
                if not self._place_inside(entry, nbytes):
                    self._displays_hidden += 1
                    return
            elif entry[0] == "clear":
                self._clears_next = rest[0]
                if not rest[0]:
                    self._clear_displays(len(self._placed))
            elif entry[0] != "notice":
                if self._clears_next and entry[0] != "update":
                    self._clears_next = False
                    waiting = [at for at, (_, old) in enumerate(self._placed) if old[0] == "clear"]
                    self._clear_displays(waiting[-1] if waiting else 0)
                if not self._afford(entry, nbytes):
                    self._displays_hidden += 1
                    return
                if entry[0] == "update":
                    # Those of the same display that the screen has not had yet are stale.
                    self._placed = [
                        p for p in self._placed if p[1][0] != "update" or p[1][3] != entry[3]
                    ]
            self._placed.append((os.fstat(self._reader).st_size, entry))

    def into(self, name: str) -> None:
        """Has what follows belong in a widget for output; an empty name has it in the cell."""
        if self._forked:
            return
        self.streams.flush()
        with self._lock:
            self._into = name
            self._placed.append((os.fstat(self._reader).st_size, ["into", name]))

    def _place_inside(self, entry: Entry, nbytes: int) -> bool:
        """Counts what is placed in a widget for output; returns whether it may stand there."""
        count, size = self._inside.pop(self._into, (0, 0))
        if entry[0] == "clear":
            self._displays_left += count
            self._displays_nbytes_left += size
            return True
        new = entry[0] in ("display", "result")
        fits = entry[0] == "notice" or self._afford(entry, nbytes)
        self._inside[self._into] = (count + (fits and new), size + nbytes * (fits and new))
        return fits

    def _clear_displays(self, end: int) -> None:
        """Forgets the displays that a clear takes away: first so many of those not sent yet."""
        self._placed[:end] = [placed for placed in self._placed[:end] if placed[1][0] in _STAY]
        self._begin_displays()

    def note(self, text: str) -> None:
        """Places a notice about a display, once a cell, and no more of them than displays."""
        if text not in self._notes and len(self._notes) < _DISPLAYS_A_CELL:
            self._notes.add(text)
            self.place(["notice", text])

    def _afford(self, entry: Entry, nbytes: int) -> bool:
        """Counts a display to the cell's; returns whether it may stand among them.

        An update takes the place of what it changes.
        """
        name = entry[3] if len(entry) > 3 else None
        new = entry[0] != "update"
        changed = 0 if new else self._named[name]
        if nbytes - changed > self._displays_nbytes_left or (new and not self._displays_left):
            return False
        self._displays_nbytes_left -= nbytes - changed
        self._displays_left -= new
        if name is not None:
            self._named[name] = nbytes
        return True

    def collect(self, final: bool = False) -> tuple[list[Entry], int, int, int]:
        """Returns the new entries, the hidden lines and bytes of this cell, and the offset reached.

        Args:
            final: the cell has ended: what was held back for the tail is returned too.
        """
        self.streams.flush(c_streams=final, replaced=final)
        with self._lock:
            end = self.streams.end()
            self.err_spans = self.streams.err_spans(self._sent, end)
            placed, self._placed = self._placed, []
            entries: list[Entry] = []
            for offset, entry in placed:
                self._advance(min(offset, end), entries)
                entries.append(entry)
            self._advance(end, entries)
            if final:
                self._finish(end, entries)
            # The tail, which the end of the cell shows, may lie before what is sent by then.
            self.streams.drop_marks(self._sent - self._tail_nbytes)
            entries += [["notice", text] for text in self._look_at_room(end, final)]
            # What the tail will show is late, not hidden: nothing is until there is more than that.
            if not final and self._hidden_nbytes <= self._tail_nbytes:
                return entries, 0, 0, end
            return entries, self._hidden_lines, self._hidden_nbytes, end

    def _look_at_room(self, end: int, final: bool) -> list[str]:
        """Holds the log to its size; returns what a cell must be told, each thing once."""
        found = []
        if self._room.cut(end):
            size = as_text(self._room.limit_nbytes)
            found.append(
                f"the log has reached {size} (ALLRANKS_LOG_LIMIT): its oldest part is removed."
            )
        if final or monotonic() >= self._room_at:
            self._room_at = monotonic() + _ROOM_SECONDS
            if self._room.is_full():
                found.append(
                    f"no space left for {self.path}: output is lost. Free some space, or "
                    "start the ranks with ALLRANKS_LOG_DIR in another place."
                )
        new = [text for text in found if text not in self._said]
        self._said.update(new)
        return new

    def _advance(self, end: int, entries: list[Entry]) -> None:
        """Moves the tail to ``end``: shows what the budget allows, counts the rest."""
        if end <= self._sent:
            return
        if self._skipped_from is None:
            stop = min(end, self._sent + self._head_left)
            if stop < end:
                stop = self._line_start_before(self._sent, stop)
            self._head_left -= stop - self._sent
            self._show(self._sent, stop, entries)
            self._sent = stop
            if stop == end:
                return
            self._skipped_from = stop
            self._head_left = 0
        self._hidden_lines += self._count_lines(self._sent, end)
        self._hidden_nbytes += end - self._sent
        self._sent = end

    def _finish(self, end: int, entries: list[Entry]) -> None:
        """Shows the last lines of what was skipped, and takes them off the count."""
        if self._skipped_from is not None:
            start = max(self._skipped_from, end - self._tail_nbytes)
            if start > self._skipped_from:
                start = self._line_start_after(start, end)
            self._hidden_lines -= self._count_lines(start, end)
            self._hidden_nbytes -= end - start
            if self._hidden_nbytes:
                entries.append(["hidden", self._hidden_lines, self._hidden_nbytes])
            self._decoder.reset()
            self._show(start, end, entries)
            self._skipped_from = None
        if self._displays_hidden:
            entries.append(["notice", self._hidden_displays()])
            self._displays_hidden = 0
        rest = self._decoder.decode(b"", final=True)
        if rest:
            entries.append(["out", rest])

    def _hidden_displays(self) -> str:
        nbytes = f"{bundle.MOST_NBYTES / 1e6:.1f} MB"
        most = f"{_DISPLAYS_A_CELL} and {nbytes} a cell and rank"
        return f"{self._displays_hidden} more displays are not shown: at most {most}"

    def _show(self, start: int, end: int, entries: list[Entry]) -> None:
        """Appends the text of a range, split into standard output and standard error."""
        cuts = sorted(
            (max(a, start), min(b, end)) for a, b in self.streams.marks if a < end and b > start
        )
        at = start
        for a, b in [*cuts, (end, end)]:
            self._append("out", at, a, entries)
            self._append("err", max(a, at), b, entries)
            at = max(at, b)

    def _append(self, kind: str, start: int, end: int, entries: list[Entry]) -> None:
        if end <= start:
            return
        text = self._sift(self._decoder.decode(os.pread(self._reader, end - start, start)))
        if not text:
            return
        if entries and entries[-1][0] == kind:
            entries[-1][1] += text
        else:
            entries.append([kind, text])

    def _line_start_before(self, start: int, stop: int) -> int:
        """The end of the last whole line in the range; ``stop`` where one line fills it."""
        newline = os.pread(self._reader, stop - start, start).rfind(b"\n")
        return start + newline + 1 if newline >= 0 else stop

    def _line_start_after(self, start: int, end: int) -> int:
        newline = os.pread(self._reader, end - start, start).find(b"\n")
        return start + newline + 1 if newline >= 0 else start

    def _count_lines(self, start: int, end: int) -> int:
        count = 0
        for at in range(start, end, _CHUNK_NBYTES):
            count += os.pread(self._reader, min(_CHUNK_NBYTES, end - at), at).count(b"\n")
        return count


def _text_of(entry: Entry) -> str:
    """Returns a display as the line of text that stands for it."""
    if entry[0] not in ("display", "update"):
        return ""
    return str(entry[1].get("text/plain", "")) + "\n"
