"""The folders of what ranks keep: they outlive the ranks, and go with the cluster."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from allranks.cluster.variables import OnRank
from allranks.cluster.wire import Answers
from allranks.errors import UsageError

_NAME = "allranks-kept-"
_MEMORY = "/dev/shm"
_GRACE_SECONDS = 60.0

keep_here = OnRank("allranks.collectives.ops.keeping", "keep")


class AfterCells:
    """Which variables are kept after a cell; ``every`` is the least interval in seconds."""

    def __init__(self, names: Sequence[str], every: float = 0.0) -> None:
        other = next((name for name in names if not name.isidentifier()), None)
        if other is not None:
            raise UsageError(
                f"expected the names of variables, found {other}. "
                "Type for example: %distributed keep x, y"
            )
        if not every >= 0:
            raise UsageError(
                f"--every expected 0 seconds or more, found {every:g}. Type for example: --every 60"
            )
        self.names, self.every = tuple(names), every
        self._last = float("-inf")

    def due(self) -> bool:
        """Whether it is time; if so, the interval starts again."""
        now = time.monotonic()
        if now - self._last < self.every:
            return False
        self._last = now
        return True


class KeptFolders:
    """A folder in memory, if possible, and one on disk; both mode 0700.

    The host agent makes them. They are removed by :meth:`close`, by garbage collection, when the
    kernel exits, and by the agent if the kernel is killed or nothing was kept. The next kernel
    removes the folders of a kernel that was killed when it had no agent.
    """

    def __init__(self, paths: Sequence[str] = ()) -> None:
        name = f"{_NAME}{secrets.token_hex(8)}"
        places = dict.fromkeys((_MEMORY, tempfile.gettempdir()))
        for place in places:
            _sweep(Path(place))
        self.paths = tuple(paths) or tuple(os.path.join(place, name) for place in places)
        self._held: list[int] = []
        self.close = weakref.finalize(self, _end, self.paths, self._held)

    def hold(self) -> None:
        # The lock keeps other kernels from removing the folders, which exist by now.
        _let_go(self._held)
        for path in self.paths:
            with suppress(OSError):  # no files can be made there
                self._held.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                fcntl.flock(self._held[-1], fcntl.LOCK_SH)

    def stay(self, stays: bool) -> None:
        """Sets whether they stay, with the ranks, when the kernel exits."""
        self.close.atexit = not stays

    def let_go(self) -> None:
        self.close.detach()
        _let_go(self._held)


def _end(paths: Sequence[str], held: list[int]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    _let_go(held)


def _let_go(held: list[int]) -> None:
    while held:
        os.close(held.pop())


def _sweep(place: Path) -> None:
    for folder in place.glob(f"{_NAME}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # A new folder may not be locked yet.
                if time.time() - os.fstat(descriptor).st_mtime > _GRACE_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
        except OSError:
            continue  # a process holds it, or it is another user's


def restored(answers: Answers) -> str:
    """Returns what new ranks have again, as ``model and step kept 12 s ago``."""
    told = [content for content, _ in answers.values() if content["names"]]
    if not told:
        return ""
    seconds = max(content["seconds"] for content in told)
    return f"{listed(told[0]['names'])} kept {_ago(seconds)} ago"


def listed(names: Sequence[str]) -> str:
    """Returns names as ``model, optimizer and step``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
