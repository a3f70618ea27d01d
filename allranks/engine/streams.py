"""Standard output and standard error of this process, in one file, and repairs after a cell."""

from __future__ import annotations

import builtins
import ctypes
import io
import logging
import os
import sys
import threading
from itertools import takewhile
from typing import Any

_SPANS_A_BATCH = 2000
#: Programs have reasons to replace these: a replacement that can be called stays.
_OFTEN_REPLACED = {
    *("print", "input", "open", "help", "exit", "quit", "breakpoint", "__import__"),
    *("copyright", "credits", "license", "display", "get_ipython"),
}
_NAMES = vars(builtins)
_CALLABLE = {name: value for name, value in _NAMES.items() if callable(value)}
_OWN = tuple((name, _CALLABLE[name]) for name in _CALLABLE.keys() - _OFTEN_REPLACED)
_OTHERS = tuple((name, _CALLABLE[name]) for name in _CALLABLE.keys() & _OFTEN_REPLACED)
#: IPython hides these while a cell runs. An interrupt that comes while it restores them leaves them
#: hidden, so they are not a cell's doing.
_HIDDEN = ("exit", "quit")
#: A notice lists at most this many replaced names.
_NAMED = 5
_STANDARD = ("standard input", "standard output", "standard error")


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
        spare: descriptors to restore descriptors 1 and 2 from, by these numbers.
    """

    def __init__(self, path: str, log: int) -> None:
        self.path = path
        self._log = log
        self._libc = ctypes.CDLL(None)
        self._streams: dict[str, io.TextIOWrapper] = {}
        self.marks: list[tuple[int, int]] = []
        # Reentrant, because a finalizer may write while it is held.
        self._marking = threading.RLock()
        self.spare: dict[int, int] = {}

    def capture(self) -> None:
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

    def mend_descriptors(self) -> list[int]:
        moved = [number for number in self.spare if not same_file(number, self._log)]
        for number in moved:
            os.dup2(self.spare[number], number)
        return moved

    def mend_python(self) -> list[str]:
        # An open stream with which a cell has replaced one stays.
        closed = []
        for name in self._streams:
            stream = vars(sys).get(name)
            try:
                if stream is None or stream.closed:
                    closed.append(name)
            except AttributeError:
                pass  # an object with little more than ``write``
        for name in closed:
            self._open(name)
        return [f"sys.{name}" for name in closed]

    def reopen_err(self) -> None:
        # By a new descriptor: the cell may have closed the spare one.
        os.dup2(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), 2)

    def flush(self, c_streams: bool = False, replaced: bool = True) -> None:
        """Flushes Python's standard streams; on request, C's, and those with which a cell
        replaced them.
        """
        for name, own in self._streams.items():
            try:
                # Not ``own.flush()``: a cell may have replaced the method.
                io.TextIOWrapper.flush(own)
                if replaced and vars(sys)[name] is not own:
                    vars(sys)[name].flush()
            except Exception:
                pass  # the cell closed it, or a flush is under way in another thread
        if c_streams:
            self._libc.fflush(None)

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


class Mender:
    """Restores objects that a cell has replaced: builtins, descriptors 0 to 2, the streams.

    Replacements in other modules stay: the rank uses its own references, which it took before the
    first cell.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._replaced: list[str] = []
        self._input = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(self._input, 0)

    def builtins(self) -> None:
        # First of all after a cell. No builtin can be called here that a cell may have replaced.
        for name, value in _OWN:
            if _NAMES.get(name) is not value:
                _NAMES[name] = value
                self._replaced.append(name)
        for name, value in _OTHERS:
            if not callable(_NAMES.get(name)):
                _NAMES[name] = value
                if name not in _HIDDEN:
                    self._replaced.append(name)

    def rest(self) -> list[str]:
        """Restores descriptors 0 to 2 and the streams; returns notices about all repairs."""
        notices = []
        replaced, self._replaced = self._replaced, []
        if replaced:
            names = ", ".join(sorted(replaced)[:_NAMED]) + (" …" if len(replaced) > _NAMED else "")
            notices.append(
                f"this cell replaced {names}, which all of Python uses. The originals are restored."
            )
        moved = self._streams.mend_descriptors()
        if not same_file(0, self._input):
            os.dup2(self._input, 0)
            moved.insert(0, 0)
        closed = [f"{_STANDARD[number]} (descriptor {number})" for number in moved]
        closed += self._streams.mend_python()
        if closed:
            notices.append(f"this cell closed or redirected {', '.join(closed)}: restored.")
        return notices
