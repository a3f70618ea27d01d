"""The notebooks that share ranks with the one that holds them: some watch, some have had them."""

from __future__ import annotations

import socket
import struct

_UCRED = struct.Struct("3i")


class Others:
    """Processes of notebooks, as long as they live."""

    def __init__(self) -> None:
        self._signs: dict[int, str] = {}
        self._had: set[int] = set()

    def come(self, pid: int, had: bool) -> None:
        """Takes in that a notebook watches.

        Args:
            pid: its process.
            had: whether it has had the ranks, and lends them to another one.
        """
        self._signs[pid] = sign_of(pid)
        if had:
            self._had.add(pid)

    def leave(self, pid: int) -> None:
        """Takes in that it is no longer interested."""
        self._signs.pop(pid, None)
        self._had.discard(pid)

    def watching(self, but: int) -> list[int]:
        """Returns the processes that are there, but for one."""
        for pid, sign in list(self._signs.items()):
            if not sign or sign_of(pid) != sign:
                self.leave(pid)
        return sorted(set(self._signs) - {but})

    @property
    def sharing(self) -> list[int]:
        """Those that have had the ranks and are there: for these they are to stay."""
        return [pid for pid in self.watching(but=0) if pid in self._had]


def process_of(visitor: socket.socket) -> int:
    """Returns who is at the other end; 0 where nobody tells, as of another container."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    told = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(told)[0])


def sign_of(pid: int) -> str:
    """Returns what tells a process from a later one of the same number; empty where it is gone.

    That is when it was started, in ticks that no change of the clock moves.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
