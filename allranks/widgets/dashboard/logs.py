"""The ranks' whole output, read from their log files piece by piece for whoever looks at it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from allranks.records.wire import Hello, Output

#: So much text a rank is sent at once, ten times a second; and so much of what was before.
PIECE_NBYTES = 512 * 1024
BEHIND_NBYTES = 32 << 20


class Piece(NamedTuple):
    """Some bytes of a rank's output.

    ``err_spans`` are the ranges of it that are standard error; ``skipped`` bytes before it are in
    the log file only.
    """

    rank: int
    text: bytes
    err_spans: list[list[int]]
    skipped: int


class _Tail:
    """One rank's log from where the cell began, as far as it is known to be complete."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.start = self.at = self.known = _size(path)
        self.spans: list[list[int]] = []

    def take(self, batch: Output) -> None:
        self.known = max(self.known, batch.log_nbytes)
        self.spans += batch.err_spans

    def read(self, rank: int, behind_nbytes: int) -> Piece | None:
        at = max(self.at, self.known - behind_nbytes)
        skipped, self.at = at - self.at, at
        try:
            with open(self.path, "rb") as log:
                log.seek(at)
                text = log.read(min(self.known - at, PIECE_NBYTES))
        except OSError:
            text = b""  # the log has been removed
        if not text:
            return None
        end = self.at = at + len(text)
        spans = [[max(a, at) - at, min(b, end) - at] for a, b in self.spans if a < end and b > at]
        return Piece(rank, text, spans, skipped)


class _RemoteOutput:
    """A rank of another host: only the text that it sends for the screen can be had."""

    def __init__(self) -> None:
        self.text = b""
        self.spans: list[list[int]] = []
        self.at = 0

    def take(self, batch: Output) -> None:
        for kind, *rest in batch.entries:
            if kind in ("out", "err"):
                piece = rest[0].encode("utf-8", "replace")
                if kind == "err":
                    self.spans.append([len(self.text), len(self.text) + len(piece)])
                self.text += piece

    def read(self, rank: int, behind_nbytes: int) -> Piece | None:
        before, self.at = self.at, len(self.text)
        at = max(before, self.at - behind_nbytes)
        if at == self.at:
            return None
        spans = [[max(a, at) - at, b - at] for a, b in self.spans if b > at]
        return Piece(rank, self.text[at:], spans, at - before)


class Logs:
    """The output of the ranks of one cell.

    Args:
        hellos: who they are, and where their logs lie.
    """

    def __init__(self, hellos: Sequence[Hello]) -> None:
        here = socket.gethostname()
        self.paths = {h.rank: h.log for h in hellos}
        self._ranks: dict[int, _Tail | _RemoteOutput] = {
            h.rank: _Tail(h.log) if h.host == here and os.path.exists(h.log) else _RemoteOutput()
            for h in hellos
        }

    def take(self, batch: Output) -> None:
        """Takes in that a rank has written."""
        rank = self._ranks.get(batch.rank)
        if rank is not None:
            rank.take(batch)

    def read(self, behind_nbytes: int = BEHIND_NBYTES) -> list[Piece]:
        """Returns what each rank has written since the last time, in bounded pieces.

        Args:
            behind_nbytes: what lies farther from the end than that is skipped.
        """
        pieces = [reader.read(rank, behind_nbytes) for rank, reader in self._ranks.items()]
        return [piece for piece in pieces if piece is not None]

    def ends(self, nbytes: int) -> list[Piece]:
        """Returns the last that each rank has written, so much of all ranks together."""
        self.rewind()
        return self.read(nbytes // max(1, len(self._ranks)))

    def rewind(self) -> None:
        """Begins again at the cell's beginning: somebody looks anew."""
        for reader in self._ranks.values():
            reader.at = reader.start if isinstance(reader, _Tail) else 0


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
