"""Standard output and standard error of this process: of Python, of C and of children, one file."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import sys
import threading
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

_SPANS_A_BATCH = 2000


class _MarkedFile(io.FileIO):
    """Standard error: appends like the others, and notes which bytes of the file are its own.

    Args:
        descriptor: what it writes to.
        marks: where it notes them.
        marking: held from before they are in the file until they are noted.
    """

    def __init__(
        self, descriptor: int, marks: list[tuple[int, int]], marking: threading.RLock
    ) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._marks: list[tuple[int, int]] | None = marks
        self._marking = marking

    def forget(self) -> None:
        """Nobody asks for the marks any more."""
        self._marks = None

    def write(self, data: Any, /) -> int:
        if self._marks is None:
            return super().write(data)
        with self._marking:
            written = super().write(data)
            # With O_APPEND the offset after a write is the end of what was written.
            end = os.lseek(self.fileno(), 0, os.SEEK_CUR)
            self._marks.append((end - written, end))
        return written


class Streams:
    """Points what this process writes at its log, and back again after a cell.

    Args:
        path: the log file.
        log: a descriptor of it.

    Attributes:
        marks: which bytes of the log are standard error.
    """

    def __init__(self, path: str, log: int) -> None:
        self.path = path
        self._log = log
        self._libc = ctypes.CDLL(None)
        self._streams: dict[str, io.TextIOWrapper] = {}
        self.marks: list[tuple[int, int]] = []
        # Taken again where a finalizer writes while it is held.
        self._marking = threading.RLock()
        #: Descriptors 1 and 2 as they were, by their numbers.
        self._spare: dict[int, int] = {}

    @property
    def descriptors(self) -> Iterable[int]:
        """Those that it needs to put right what a cell has done to 1 and 2."""
        return self._spare.values()

    def capture(self) -> None:
        """Points descriptors 1 and 2 and Python's standard streams at the log file."""
        for number in (1, 2):
            # Two open file descriptions, because marks read the offset of the second one.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.dup2(descriptor, number)
            self._spare[number] = descriptor
        for name in ("stdout", "stderr"):
            self._open(name)

    def _open(self, name: str) -> None:
        """Makes one of Python's standard streams anew."""
        former = (vars(sys).get(name), vars(sys)[f"__{name}__"])
        if name == "stdout":
            file = io.FileIO(1, "w", closefd=False)
        else:
            file = self._err = _MarkedFile(2, self.marks, self._marking)
        stream = io.TextIOWrapper(
            io.BufferedWriter(file),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        self._streams[name] = stream
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        _log_to(stream, former)

    def mend_descriptors(self) -> list[int]:
        """Points descriptors 1 and 2 at the log again; returns those that a cell had not left."""
        moved = [number for number in self._spare if not same_file(number, self._log)]
        for number in moved:
            os.dup2(self._spare[number], number)
        return moved

    def mend_python(self) -> list[str]:
        """Opens the standard streams that a cell has closed; returns their names.

        One that it has replaced by another open one stays.
        """
        closed = []
        for name in self._streams:
            stream = vars(sys).get(name)
            try:
                if stream is None or stream.closed:
                    closed.append(name)
            except AttributeError:
                pass  # it writes, and has nothing else of a file
        for name in closed:
            self._open(name)
        return [f"sys.{name}" for name in closed]

    def reopen_err(self) -> None:
        """Points descriptor 2 at the log, for a last word, whatever a cell has closed."""
        os.dup2(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), 2)

    def flush(self, c_streams: bool = False, replaced: bool = True) -> None:
        """Writes what Python's streams, and C's where asked, still hold.

        Args:
            c_streams: C's, too.
            replaced: those, too, that a cell has put in the place of Python's.
        """
        for name, own in self._streams.items():
            try:
                # Not as a method: a cell may have given the stream another one.
                io.TextIOWrapper.flush(own)
                if replaced and vars(sys)[name] is not own:
                    vars(sys)[name].flush()
            except Exception:
                pass  # the cell closed it, or a flush is under way in another thread
        if c_streams:
            self._libc.fflush(None)

    def end(self) -> int:
        """Returns how long the log is, with all marks of what stands before there."""
        with self._marking:
            return os.fstat(self._log).st_size

    def err_spans(self, start: int, end: int) -> tuple[list[int], ...]:
        """Returns the marks of a part of the log, adjoining ones as one; the first thousands."""
        spans: list[list[int]] = []
        for a, b in self.marks:
            if b <= start or a >= end:
                continue
            if spans and spans[-1][1] >= a:
                spans[-1][1] = b
            elif len(spans) < _SPANS_A_BATCH:
                spans.append([a, b])
        return tuple(spans)

    def drop_marks(self, end: int) -> None:
        """Nobody asks for those before ``end`` again; another thread may be adding one."""
        passed = sum(1 for _ in takewhile(lambda mark: mark[1] <= end, self.marks))
        del self.marks[:passed]

    def forget_marks(self) -> None:
        """Nobody asks for any more: this process is a copy of the one that owns the log."""
        self._err.forget()


def same_file(one: int, other: int) -> bool:
    """Whether two descriptors are of one file."""
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


def _log_to(stream: Any, former: tuple[Any, ...]) -> None:
    """Handlers of logs that keep a former standard stream, as preloaded modules' do, take this."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [ref() for ref in logging._handlerList]  # type: ignore[attr-defined]
    for logger in loggers:
        handlers += getattr(logger, "handlers", [])
    for handler in handlers:
        kept = getattr(handler, "stream", None)
        if kept is None or not isinstance(handler, logging.StreamHandler):
            continue  # a log file that is not open yet is a StreamHandler too
        if any(kept is one for one in former):
            handler.stream = stream  # setStream() would flush one that is closed
