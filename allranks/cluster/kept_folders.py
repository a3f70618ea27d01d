"""The folders of kept variables."""

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

from allranks import own_files
from allranks.records.config import MPI_FILES

_KEPT = "allranks-kept-"
_MEMORY = "/dev/shm"
#: The agent of a new folder may not have locked it yet.
_GRACE_SECONDS = 60.0


class KeptFolders:
    """A folder in memory, if possible, and one on disk; both mode 0700.

    The host agent makes them; on several hosts each makes its own, and removes them at its end.
    They are removed by :meth:`close`, by garbage collection, when the kernel exits, and by the
    agent if the kernel is killed or nothing was kept. The next kernel removes the folders of a
    kernel that was killed when it had no agent.
    """

    def __init__(self, paths: Sequence[str] = (), on_several_hosts: bool = False) -> None:
        name = f"{_KEPT}{secrets.token_hex(8)}"
        places = dict.fromkeys((_MEMORY, "/tmp" if on_several_hosts else tempfile.gettempdir()))
        for place in places:
            _sweep_unlocked(Path(place), _KEPT)
        _sweep_unlocked(Path(_MEMORY), MPI_FILES)
        self.paths = tuple(paths) or tuple(os.path.join(place, name) for place in places)
        self._held: list[int] = []
        self.close = weakref.finalize(self, _end_kept, self.paths, self._held)

    def hold(self) -> None:
        # The lock keeps other kernels from removing the folders, which exist by now.
        _let_go(self._held)
        for path in self.paths:
            with suppress(OSError):  # no files can be made there, or it is another user's
                self._held.append(own_files.open_folder(path))
                fcntl.flock(self._held[-1], fcntl.LOCK_SH)

    @property
    def have_files(self) -> bool:
        """Whether ranks of this host have kept anything in the folders that are held.

        The agent has removed empty folders, and any account can take their names then.
        """
        return any(os.listdir(folder) for folder in self._held)

    def stay(self, stays: bool) -> None:
        """Sets whether they stay, with the ranks, when the kernel exits."""
        self.close.atexit = not stays

    def let_go(self) -> None:
        self.close.detach()
        _let_go(self._held)


def _end_kept(paths: Sequence[str], held: list[int]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    _let_go(held)


def _let_go(held: list[int]) -> None:
    while held:
        os.close(held.pop())


def _sweep_unlocked(place: Path, name: str) -> None:
    for folder in place.glob(f"{name}*"):
        try:
            descriptor = own_files.open_folder(str(folder))
            try:
                if time.time() - os.fstat(descriptor).st_mtime > _GRACE_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
        except OSError:
            continue  # a process holds it, or it is another user's
