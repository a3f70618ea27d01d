"""A rank's transcript: one log file for all its output, and the part for the notebook.

Standard output and standard error, of Python, of C code and of child processes, are the same file,
opened for appending: writing never blocks, the order is the order of writing, and nothing is lost
when the process dies. The notebook's part is read back from the file: the first bytes of a cell at
once, the last ones when it ends, and the number of bytes between them, which are in the file only.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import io
import logging
import os
import sys
import threading
from collections.abc import Callable
from itertools import takewhile
from time import monotonic
from typing import Any

from allranks.records.config import size_text

Entry = list[Any]

_CHUNK_NBYTES = 1 << 20
_SPANS_A_BATCH = 2000
_STANDARD = ("standard input", "standard output", "standard error")
TAIL_SHARE = 4  # a quarter of a cell's screen budget is kept for its last lines
DISPLAYS_A_CELL = 64
#: For the displays of a cell and rank: some 50 figures, or a page with its own scripts.
DISPLAYS_NBYTES = 8 << 20
#: A clear leaves these.
_STAY = ("notice", "into")
#: How often free space on the disk is checked, in addition to the end of each cell.
_ROOM_SECONDS = 1.0
_BLOCK_NBYTES = 4096
# linux/falloc.h
_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_libc = ctypes.CDLL(None, use_errno=True)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Transcript:
    """Owns the log file of this process, and returns the output that was not sent yet.

    ``limit_nbytes`` is the space of the log on the disk.

    Attributes:
        sift: removes text that only the log shall have, from what contains one of ``sift_marks``.
    """

    def __init__(self, path: str, limit_nbytes: int = 10**9) -> None:
        self.path = path
        self.sift: Callable[[str], str] = str
        self.sift_marks: tuple[str, ...] = ()
        # Reentrant, because a finalizer may display something while it is held.
        self._lock = threading.RLock()
        self._placed: list[tuple[int, Entry]] = []
        #: Which bytes of the last batch's part of the log are standard error.
        self.err_spans: tuple[list[int], ...] = ()
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
        # Descriptors that a cell has closed: they are no longer those of the log.
        own = [self._reader, self._room.file, self.streams.spare[1], self.streams.spare[2]]
        return [number for number in own if not self._is_log(number)]

    def _is_log(self, number: int) -> bool:
        try:
            return os.path.samestat(os.fstat(number), self._log)
        except OSError:
            return False

    def _begin(self, limit_nbytes: int) -> None:
        self._head_left = limit_nbytes - limit_nbytes // TAIL_SHARE
        self._tail_nbytes = limit_nbytes // TAIL_SHARE
        self.limit_nbytes = limit_nbytes
        self._displays_hidden = 0
        self._clears_next = False
        self._notes: set[str] = set()
        self._begin_displays()
        self._skipped_from: int | None = None
        self._hidden_lines = 0
        self._hidden_nbytes = 0
        self._said: set[str] = set()
        # A character may be split between two batches.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin_cell(self, limit_nbytes: int) -> list[Entry]:
        # The disk is looked at when a cell ends, and regularly between cells.
        entries, *_ = self.collect(final=True, look=False)
        with self._lock:
            self._begin(limit_nbytes)
        return entries

    def _begin_displays(self) -> None:
        self._displays_left = DISPLAYS_A_CELL
        self._displays_nbytes_left = DISPLAYS_NBYTES
        #: The size of each display that may be updated.
        self._named: dict[str | None, int] = {}
        #: The number of displays in each widget for output, and their size.
        self._inside: dict[str, tuple[int, int]] = {}

    def forked(self) -> None:
        # In a forked copy of the rank, which from now on only writes to the log.
        self._forked = True
        # A thread that holds it in the rank does not exist in this process.
        self._lock = threading.RLock()
        self.streams.forget_marks()

    def place(self, entry: Entry, nbytes: int = 0) -> None:
        """Puts a display, a result or a notice at this point of the text."""
        if self._forked:
            print(_text_of(entry), end="")
            return
        kind, *rest = entry
        if kind != "notice":  # which may come from another thread, or after the cell's end
            self.streams.flush_replaced()
        self.streams.flush()
        with self._lock:
            if kind == "update" and rest[2] not in self._named:
                # Displayed in another cell: it is new in this one.
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
                    # Earlier updates of the same display that were not sent yet are stale.
                    self._placed = [
                        p for p in self._placed if p[1][0] != "update" or p[1][3] != entry[3]
                    ]
            self._placed.append((os.fstat(self._reader).st_size, entry))

    def into(self, name: str) -> None:
        """Directs later output to a widget for output, or with an empty name to the cell."""
        if self._forked:
            return
        self.streams.flush_replaced()
        self.streams.flush()
        with self._lock:
            self._into = name
            self._placed.append((os.fstat(self._reader).st_size, ["into", name]))

    def _place_inside(self, entry: Entry, nbytes: int) -> bool:
        """Counts an entry in a widget for output; returns whether the limits allow it."""
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
        self._placed[:end] = [placed for placed in self._placed[:end] if placed[1][0] in _STAY]
        self._begin_displays()

    def note(self, text: str) -> None:
        # Once in a cell, and at most one for each display.
        if text not in self._notes and len(self._notes) < DISPLAYS_A_CELL:
            self._notes.add(text)
            self.place(["notice", text])

    def _afford(self, entry: Entry, nbytes: int) -> bool:
        """Counts a display; returns whether the limits of the cell allow it."""
        name = entry[3] if len(entry) > 3 else None
        new = entry[0] != "update"
        # An update replaces an earlier display.
        changed = 0 if new else self._named[name]
        if nbytes - changed > self._displays_nbytes_left or (new and not self._displays_left):
            return False
        self._displays_nbytes_left -= nbytes - changed
        self._displays_left -= new
        if name is not None:
            self._named[name] = nbytes
        return True

    def collect(
        self, final: bool = False, *, look: bool = True
    ) -> tuple[list[Entry], int, int, int]:
        """Returns the new entries, the hidden lines and bytes of this cell, and the offset
        reached.
        """
        self.streams.flush(c_streams=final)
        with self._lock:
            end, self.err_spans = self.streams.measure(self._sent)
            placed, self._placed = self._placed, []
            entries: list[Entry] = []
            for offset, entry in placed:
                self._advance(min(offset, end), entries)
                entries.append(entry)
            self._advance(end, entries)
            if final:
                self._finish(end, entries)
            if self.streams.marks:
                # The tail, shown at the end of the cell, may begin before the end of the sent text.
                self.streams.drop_marks(self._sent - self._tail_nbytes)
            if look:
                entries += [["notice", text] for text in self._look_at_room(end, final)]
            # Text that the tail will show is not hidden, only late.
            if not final and self._hidden_nbytes <= self._tail_nbytes:
                return entries, 0, 0, end
            return entries, max(self._hidden_lines, 0), self._hidden_nbytes, end

    def _look_at_room(self, end: int, final: bool) -> list[str]:
        """Limits the size of the log; returns the warnings for the cell, each of them once."""
        found = []
        if self._room.cut(end):
            size = size_text(self._room.limit_nbytes)
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
        """Advances to ``end``: shows as much as the budget allows, counts the rest."""
        if end <= self._sent:
            return
        if self._skipped_from is None:
            stop = min(end, self._sent + self._head_left)
            if stop < end:
                # The first part ends with a whole line.
                stop = self._line_start_before(self._sent, stop)
            self._head_left -= stop - self._sent
            self._show(self._sent, stop, entries)
            self._sent = stop
            if stop == end:
                return
            self._skipped_from = stop
            self._head_left = 0
            # Of the line that is cut there, the reader sees the beginning: it is not a hidden one.
            self._hidden_lines = 0 if self._begins_line(stop) else -1
            self._hidden_nbytes = 0
        self._hidden_lines += self._count_lines(self._sent, end)
        self._hidden_nbytes += end - self._sent
        self._sent = end

    def _finish(self, end: int, entries: list[Entry]) -> None:
        if self._skipped_from is not None:
            # The last lines were held back; now they are shown, and no longer count as hidden.
            start = max(self._skipped_from, end - self._tail_nbytes)
            if start > self._skipped_from:
                # A newline at the very end begins no line.
                newline = os.pread(self._reader, end - start - 1, start).find(b"\n")
                start += newline + 1  # if one line fills the tail, it is shown from its middle on
            self._hidden_lines -= self._count_lines(start, end)
            self._hidden_nbytes -= end - start
            if self._hidden_nbytes:
                entries.append(["hidden", max(self._hidden_lines, 0), self._hidden_nbytes])
            # The skipped text may have begun within a character.
            self._decoder.reset()
            self._show(start, end, entries)
            self._skipped_from = None
        if self._displays_hidden:
            most = f"{DISPLAYS_A_CELL} and {DISPLAYS_NBYTES / 1e6:.1f} MB a cell and rank"
            more = f"{self._displays_hidden} more displays are not shown: at most {most}"
            entries.append(["notice", more])
            self._displays_hidden = 0
        rest = self._decoder.decode(b"", final=True)
        if rest:
            entries.append(["out", rest])

    def _show(self, start: int, end: int, entries: list[Entry]) -> None:
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
        text = self._decoder.decode(os.pread(self._reader, end - start, start))
        if any(mark in text for mark in self.sift_marks):
            text = self.sift(text)
        if not text:
            return
        if entries and entries[-1][0] == kind:
            entries[-1][1] += text
        else:
            entries.append([kind, text])

    def _begins_line(self, at: int) -> bool:
        return not at or os.pread(self._reader, 1, at - 1) == b"\n"

    def _line_start_before(self, start: int, stop: int) -> int:
        """Returns the end of the last whole line in the range; ``stop`` if one line fills it."""
        newline = os.pread(self._reader, stop - start, start).rfind(b"\n")
        return start + newline + 1 if newline >= 0 else stop

    def _count_lines(self, start: int, end: int) -> int:
        count = 0
        for at in range(start, end, _CHUNK_NBYTES):
            count += os.pread(self._reader, min(_CHUNK_NBYTES, end - at), at).count(b"\n")
        return count


class _MarkedFile(io.FileIO):
    """Standard error: appends to the log, and records in ``marks`` which bytes of it are its own.

    ``marking`` is held during a write and until it is recorded.
    """

    def __init__(
        self, descriptor: int, marks: list[tuple[int, int]], marking: threading.RLock
    ) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._marks: list[tuple[int, int]] | None = marks
        self._marking = marking

    def forget(self) -> None:
        self._marks = None

    def write(self, data: Any, /) -> int:
        if self._marks is None:
            return super().write(data)
        with self._marking:
            written = super().write(data)
            # With O_APPEND the offset after a write is the end of the written bytes.
            end = os.lseek(self.fileno(), 0, os.SEEK_CUR)
            self._marks.append((end - written, end))
        return written


class Streams:
    """Connects the output of this process to its log, and restores that after a cell.

    Attributes:
        marks: which bytes of the log are standard error.
        spare: descriptors to restore descriptors 0 to 2 from, by these numbers.
    """

    def __init__(self, path: str, log: int) -> None:
        self.path = path
        self._log = log
        self._streams: dict[str, io.TextIOWrapper] = {}
        self.marks: list[tuple[int, int]] = []
        # Reentrant, because a finalizer may write while it is held.
        self._marking = threading.RLock()
        self.spare: dict[int, int] = {}

    def capture(self) -> None:
        self.spare[0] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(self.spare[0], 0)
        for number in (1, 2):
            # Two open file descriptions, because `_MarkedFile` reads the offset of its own.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.dup2(descriptor, number)
            self.spare[number] = descriptor
        for name in ("stdout", "stderr"):
            self._open(name)

    def _open(self, name: str) -> None:
        former = (vars(sys).get(name), vars(sys)[f"__{name}__"])
        if name == "stdout":
            file = io.FileIO(1, "w", closefd=False)
        else:
            file = self._err = _MarkedFile(2, self.marks, self._marking)
        stream = io.TextIOWrapper(
            io.BufferedWriter(file),
            encoding="utf-8",
            # UTF-8 refuses a lone surrogate, which is then printed as an escape.
            errors="backslashreplace",
            line_buffering=True,
        )
        self._streams[name] = stream
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        _log_to(stream, former)

    def mend(self) -> list[str]:
        """Restores descriptors 0 to 2, and streams that a cell has closed; returns their names."""
        moved = [number for number, spare in self.spare.items() if not same_file(number, spare)]
        for number in moved:
            os.dup2(self.spare[number], number)
        closed = []
        for name in self._streams:
            stream: Any = vars(sys).get(name)
            try:
                # A stream with which a cell has replaced one stays, also one with no more than
                # ``write``.
                usable = callable(stream.write) and not getattr(stream, "closed", False)
            except Exception:  # a stream whose buffer was detached
                usable = False
            if not usable:
                closed.append(name)
        for name in closed:
            self._open(name)
        names = [f"{_STANDARD[number]} (descriptor {number})" for number in moved]
        return names + [f"sys.{name}" for name in closed]

    def reopen_err(self) -> None:
        # By a new descriptor: the cell may have closed the spare one.
        os.dup2(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), 2)

    def flush(self, c_streams: bool = False) -> None:
        """Flushes Python's standard streams; on request, C's too."""
        for own in self._streams.values():
            try:
                # Not ``own.flush()``: a cell may have replaced the method.
                io.TextIOWrapper.flush(own)
            except Exception:
                pass  # the cell closed it, or a flush is under way in another thread
        if c_streams:
            _libc.fflush(None)

    def replaced(self) -> list[Any]:
        """Returns the streams with which a cell has replaced Python's."""
        return [
            stream
            for name, own in self._streams.items()
            if (stream := vars(sys).get(name)) is not own and stream is not None
        ]

    def flush_replaced(self) -> None:
        """Flushes the streams with which a cell has replaced Python's: their code is a cell's."""
        for stream in self.replaced():
            try:
                stream.flush()
            except Exception:
                pass  # the cell closed it

    def measure(self, start: int) -> tuple[int, tuple[list[int], ...]]:
        """Returns the log's length, and which bytes from ``start`` on are standard error."""
        with self._marking:  # all that is in the file by now is in `marks`
            end = os.fstat(self._log).st_size
        spans: list[list[int]] = []
        for a, b in self.marks:
            if b <= start or a >= end:
                continue
            # Adjoining spans are merged, and their number is limited: they are sent.
            if spans and spans[-1][1] >= a:
                spans[-1][1] = b
            elif len(spans) < _SPANS_A_BATCH:
                spans.append([a, b])
        return end, tuple(spans)

    def drop_marks(self, end: int) -> None:
        # Another thread may add a mark meanwhile.
        passed = sum(1 for _ in takewhile(lambda mark: mark[1] <= end, self.marks))
        del self.marks[:passed]

    def forget_marks(self) -> None:
        # In a process that a cell has forked: the marks are the rank's.
        self._err.forget()


def same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


def _log_to(stream: Any, former: tuple[Any, ...]) -> None:
    # In log handlers of preloaded modules, for example.
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [ref() for ref in logging._handlerList]  # type: ignore[attr-defined]
    for logger in loggers:
        handlers += getattr(logger, "handlers", [])
    for handler in handlers:
        kept = getattr(handler, "stream", None)
        if kept is None or not isinstance(handler, logging.StreamHandler):
            continue  # including a FileHandler that is not open yet
        if any(kept is one for one in former):
            handler.stream = stream  # setStream() would flush one that is closed


def _text_of(entry: Entry) -> str:
    if entry[0] not in ("display", "update"):
        return ""
    return str(entry[1].get("text/plain", "")) + "\n"


class LogRoom:
    """Limits the size of one log, and checks that the disk has space for more.

    Processes that a cell has started write to the log by descriptors of their own, so it stays the
    same file, and every byte keeps its offset: the oldest part is cut out, which leaves a hole.
    """

    def __init__(self, path: str, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        # Not opened for appending: the note is written at the beginning.
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._gone = 0

    def cut(self, end: int) -> bool:
        if end - self._gone <= self.limit_nbytes:
            return False
        # Half of the limit stays: the next cut is far away.
        upto = (end - self.limit_nbytes // 2) // _BLOCK_NBYTES * _BLOCK_NBYTES
        if _allocate(self.file, _PUNCH_HOLE | _KEEP_SIZE, 0, upto):
            # This file system cannot make holes: remove all text, and keep the offsets.
            upto = end
            os.ftruncate(self.file, 0)
            os.ftruncate(self.file, end)
        self._gone = upto
        os.pwrite(self.file, self._note().encode(), 0)
        return True

    def _note(self) -> str:
        return (
            f"allranks: this log has reached {size_text(self.limit_nbytes)} (ALLRANKS_LOG_LIMIT), "
            f"and its first {self._gone:,} bytes were removed. To read the rest: "
            f"tail -c +{self._gone + 1}\n"
        )

    def is_full(self) -> bool:
        # The disk may be full, or the user's quota.
        end = os.fstat(self.file).st_size
        # Allocates the next block if necessary, and leaves the size.
        problem = _allocate(self.file, _KEEP_SIZE, end, 1)
        if problem in (0, errno.EBADF):  # a cell has closed it, which `Transcript.lost` finds
            return False
        return problem in _NO_ROOM or os.fstatvfs(self.file).f_bavail == 0


def _allocate(file: int, mode: int, start: int, nbytes: int) -> int:
    """Calls Linux's fallocate; returns 0, or the number of the error."""
    if sys.platform != "linux":
        return errno.EOPNOTSUPP
    failed = _libc.fallocate64(file, mode, ctypes.c_int64(start), ctypes.c_int64(nbytes))
    return ctypes.get_errno() if failed else 0
