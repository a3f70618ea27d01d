"""The output of simulated ranks: what each prints and displays, until it is sent."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from typing import Any

from allranks.engine.transcript import DISPLAYS_A_CELL, DISPLAYS_NBYTES, TAIL_SHARE, Transcript

Entry = list[Any]

_LOG_NBYTES, _LOGS_NBYTES = 100 * 10**6, 2 * 10**9
"""A longer log of one rank begins again, and so does its share of what all logs may have."""
_UNWRITTEN_NBYTES = 16 << 10


class RankOutput:
    """The output of one rank in one cell: its beginning and its end for the screen.

    If it is longer than ``limit_nbytes``, all of it is in the log at ``path``.
    """

    def __init__(self, path: str, limit_nbytes: int, ranks: int) -> None:
        self._path = path
        self._log_limit = min(_LOG_NBYTES, _LOGS_NBYTES // ranks)
        self.limit_nbytes = limit_nbytes
        self._lock = threading.RLock()
        self._entries: list[Entry] = []
        self._head_left = limit_nbytes - limit_nbytes // TAIL_SHARE
        self._shown: list[str] = []
        """The text of the screen, for the log, as long as there is no log."""
        self._tail: list[str] = []
        self._tail_size = 0
        self._hidden_nbytes = self._hidden_lines = 0
        self._unwritten: list[str] = []
        self._unwritten_nbytes = 0
        self._displays, self._displays_nbytes = 0, 0
        self._notes: set[str] = set()
        self.log_nbytes = 0

    def write(self, kind: str, text: str) -> None:
        with self._lock:
            if len(text) <= self._head_left:
                self._head_left -= len(text)
                self._shown.append(text)
                if self._entries and self._entries[-1][0] == kind:
                    self._entries[-1][1] += text
                else:
                    self._entries.append([kind, text])
                return
            self._head_left = 0
            self._write_log(text)
            self._tail.append(text)
            self._tail_size += len(text)
            if self._tail_size > 2 * self.limit_nbytes:
                self._cut_tail()

    def _write_log(self, text: str) -> None:
        self._unwritten += [*self._shown, text]
        self._shown.clear()
        self._unwritten_nbytes += len(text)
        if self._unwritten_nbytes > _UNWRITTEN_NBYTES:
            self._flush_log()

    def _flush_log(self) -> None:
        # Opened each time: a process may not have as many files open as there are ranks.
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with open(self._path, "a", encoding="utf-8", errors="backslashreplace") as log:
                if log.tell() > self._log_limit:
                    log.truncate(0)
                    log.write("allranks: this log was full, and begins again here.\n")
                log.write("".join(self._unwritten))
        except OSError as error:  # such as a full disk: the cell goes on
            self.note(f"a part of the log is lost: {error}")
        self._unwritten.clear()
        self._unwritten_nbytes = 0

    def _cut_tail(self) -> None:
        keep, tail = self.limit_nbytes // TAIL_SHARE, "".join(self._tail)
        # A newline at the very end begins no line.
        cut = tail.find("\n", max(0, len(tail) - keep), -1) + 1 or len(tail) - keep
        hidden, self._tail, self._tail_size = tail[:cut], [tail[cut:]], len(tail) - cut
        self._hidden_nbytes += len(hidden)
        self._hidden_lines += hidden.count("\n")

    def place(self, entry: Entry, nbytes: int = 0) -> None:
        """Adds a display, as `Transcript.place`."""
        with self._lock:
            new = entry[0] in ("display", "result")
            if self._displays + new > DISPLAYS_A_CELL:
                return self.note(f"more than {DISPLAYS_A_CELL} displays are not shown")
            if self._displays_nbytes + nbytes > DISPLAYS_NBYTES:
                return self.note(f"displays beyond {DISPLAYS_NBYTES / 1e6:.1f} MB are not shown")
            self._displays += new
            self._displays_nbytes += nbytes
            self._entries.append(entry)

    def note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self._entries.append(["notice", text])

    @property
    def contents(self) -> tuple[tuple[str, Any], ...]:
        """The output so far, without what `take` has taken."""
        with self._lock:
            # What follows is the number of a display.
            return *((entry[0], entry[1]) for entry in self._entries), ("out", "".join(self._tail))

    def take(self, final: bool = False) -> tuple[list[Entry], int, int]:
        """Returns the new entries, and the number of lines and bytes that are only in the log."""
        with self._lock:
            if self._unwritten:
                self._flush_log()
            entries, self._entries = self._entries, []
            if final and self._tail:
                if self._tail_size > self.limit_nbytes // TAIL_SHARE:
                    self._cut_tail()
                if self._hidden_nbytes:
                    entries.append(["hidden", self._hidden_lines, self._hidden_nbytes])
                entries.append(["out", "".join(self._tail)])
                self._tail.clear()
            return entries, self._hidden_lines, self._hidden_nbytes


class Screen:
    """In place of the process's transcript: passes all on to the rank that runs."""

    def __init__(self, process: Transcript, current: Callable[[], RankOutput | None]) -> None:
        self._process, self._current = process, current

    @property
    def limit_nbytes(self) -> int:
        return (self._current() or self._process).limit_nbytes

    def place(self, entry: Entry, nbytes: int = 0) -> None:
        (self._current() or self._process).place(entry, nbytes)

    def note(self, text: str) -> None:
        (self._current() or self._process).note(text)


class RankStream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of the rank that runs; in other threads, the process's."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, kind: str, process: Any, current: Callable[[], RankOutput | None]) -> None:
        self._kind, self._process, self._current = kind, process, current

    def write(self, text: str) -> int:
        output = self._current()
        if output is None:
            written: int = self._process.write(text)
            return written
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        output.write(self._kind, text)
        return len(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._process.flush()

    def fileno(self) -> int:
        number: int = self._process.fileno()
        return number
