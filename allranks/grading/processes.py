"""Finds and ends the processes that a submission has started."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from allranks import own_files

_LOOK_SECONDS = 0.5
_ENDING_SECONDS = 5.0
_ORPHANS_COME_HERE = 36  # PR_SET_CHILD_SUBREAPER
_IDS_NBYTES, _MOST_ID = 1 << 20, 1 << 31


class Processes:
    """Within, processes may be started; at the end all of them are ended.

    Attributes:
        killed: why they were killed before; empty if they were not.
    """

    def __init__(self, most: int) -> None:
        self.killed = ""
        self._most = most
        self._before = set(psutil.Process().children(recursive=True))
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Processes:
        if sys.platform == "linux":
            # What has lost its parent becomes a child of this process, where it is found.
            ctypes.CDLL(None).prctl(_ORPHANS_COME_HERE, 1, 0, 0, 0)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()
        # Ranks end by themselves once their kernel has ended.
        deadline = time.monotonic() + _ENDING_SECONDS
        while (left := self._started()) and time.monotonic() < deadline:
            psutil.wait_procs(left, timeout=0.1)
        self.kill()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            if len(self._started()) > self._most:
                self.killed = f"the notebook had more than {self._most} processes"
                self.kill()

    def _started(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.Process().children(recursive=True)
            if process not in self._before and _is_alive(process)
        ]

    def kill(self) -> None:
        """Ends the processes now."""
        # Stopped first, all of them: while some are killed, others would start more.
        while left := self._started():
            for process in left:
                with suppress(psutil.Error):
                    process.suspend()
            if set(self._started()) <= set(left):
                for process in left:
                    with suppress(psutil.Error):
                        process.kill()
                psutil.wait_procs(left, timeout=_ENDING_SECONDS)


def read_ids(file: Path) -> list[int]:
    """Returns the process ids in a file that a submission may have changed.

    Raises ValueError if it has none, or is no file.
    """
    try:
        # A pipe would never end, nor would a device.
        with open(own_files.open_any_file(str(file)), "rb") as opened:
            found = json.loads(opened.read(_IDS_NBYTES))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(
        type(pid) is int and 0 < pid < _MOST_ID for pid in found
    ):
        raise ValueError("expected ids of processes")
    return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
        if process.ppid() == psutil.Process().pid:
            process.wait(timeout=0)
    except psutil.Error:
        pass
    return False
