"""The status board: what every rank of a host lets the others know.

A page a rank in shared memory, written by its owner (except for `ASKED` to `ROUND`) and read by
anybody at the price of a load. Nothing on it needs a peer's cooperation: it tells about ranks that
compute, that sit in a C call, and that have left. Of ranks on other hosts it shows copies.
"""

from __future__ import annotations

import mmap
import os

PAGE = 12288
ENTERED, LEFT, FAILED, BROKEN, REFUSED, REFUSED_OF = 0, 1, 2, 3, 4, 5
"""The last two: the number of a call that a rank has refused, and its group's number + 1."""
ASKED, ASKED_ELSE, LOST, ROUND = 8, 9, 10, 11
"""What others write to a rank's page: what they ask it, that its host cannot be reached, and on the
first rank's of a host how often all hosts have told each other all."""
SILENT, ENDED = 1, 2
"""How a host was lost: it does not answer, or its first rank has ended."""
ANSWERED, TICKET, EDGE, BEAT, PID, CLOSED, TOLD, ASKING, IDLE = 16, 17, 18, 19, 20, 21, 22, 23, 24
PORTS = 25
"""The ports on which the rank's MPI listens, 16 bits each."""
REASON, WHERE, LINE, WAITING, BROKE = range(5)
TEXTS_OF_LINES = WHERE, LINE, WAITING, BROKE
"""Texts that show lines of source."""
_DIRECTORY = 512
_PROGRESS, _GROUPS = 1024, 170
"""Three words for each of so many groups: its number + 1, and how far this rank has come in it."""
GONE = 1 << 62
"""A scope number that is past every other: the rank has left for good."""

_TEXTS, _TEXT = 512, 712
_OTHERS = 8 * ASKED, 8 * ANSWERED
_FIRST = 8 * EDGE


class Board:
    """The pages of all ranks: written by themselves on this host, by its first rank for others."""

    SEGMENTS = 256
    """As many window segments can a rank show to the others."""

    def __init__(self, memory: mmap.mmap, ranks: tuple[int, ...], rank: int) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("Q")
        self.ranks = ranks
        self._page = {other: index * PAGE for index, other in enumerate(ranks)}
        self._word = {other: index * PAGE // 8 for index, other in enumerate(ranks)}
        self.rank = rank
        self._places: dict[int, int] = {}
        self._mine = self._word[rank]
        self.put(PID, os.getpid())

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes that a board for so many ranks needs."""
        return PAGE * ranks

    def move(self, memory: mmap.mmap) -> None:
        """From now on the pages are elsewhere, and this rank's is empty."""
        self.memory, self.words = memory, memoryview(memory).cast("Q")
        self._places = {}
        self.put(PID, os.getpid())

    def __contains__(self, rank: int) -> bool:
        return rank in self._page

    def get(self, rank: int, word: int) -> int:
        """One of a rank's numbers."""
        return self.words[self._word[rank] + word]

    def put(self, word: int, value: int) -> None:
        """Sets one of this rank's numbers."""
        self.words[self._mine + word] = value

    def ask(self, rank: int, ticket: int, what: int = ASKED) -> None:
        """Asks a rank for the line where it is, or for how far it has come elsewhere."""
        self.words[self._word[rank] + what] = ticket

    def text(self, rank: int, kind: int) -> str:
        """One of a rank's texts."""
        return text_of(self.memory, kind, self._page[rank])

    def write(self, kind: int, text: str) -> None:
        """Sets one of this rank's texts, cut to what fits."""
        start, data = self._page[self.rank] + _TEXTS + kind * _TEXT, _packed(text)
        self.memory[start : start + len(data)] = data

    def note(self, group: int, agreed: int, finished: int) -> None:
        """Shows how far this rank has come in a group that has no memory of its own.

        It is written before the rank says that it has left: who reads in the other order sees
        every call that it has made.
        """
        places = self._places
        place = places.pop(group, -1)
        if place < 0:
            # Where there are too many, the place of the group that has been quiet longest.
            place = len(places) if len(places) < _GROUPS else places.pop(next(iter(places)))
        places[group] = place
        at = self._mine + _PROGRESS + 3 * place
        self.words[at] = 0
        self.words[at + 1], self.words[at + 2] = agreed, finished
        self.words[at] = group + 1

    def progress(self, rank: int, group: int) -> tuple[int, int]:
        """The last call that a rank has agreed on in a group, and the last that it finished."""
        start = self._word[rank] + _PROGRESS
        for at in range(start, start + 3 * _GROUPS, 3):
            if self.words[at] == group + 1:
                return self.words[at + 1], self.words[at + 2]
        return 0, 0

    def publish(self, index: int, fd: int, nbytes: int) -> None:
        """Shows a segment of this rank's window to the others."""
        at = self._mine + _DIRECTORY + 2 * index
        self.words[at + 1] = nbytes
        self.words[at] = fd

    def segment(self, rank: int, index: int) -> tuple[str, int]:
        """Address and size of a segment of a rank's window."""
        at = self._word[rank] + _DIRECTORY + 2 * index
        return f"/proc/{self.get(rank, PID)}/fd/{self.words[at]}", self.words[at + 1]

    def page(self, rank: int) -> bytes:
        """All that a rank tells, to be shown on other hosts.

        The numbers are read first: whoever they say has left has written all else before.
        """
        start = self._page[rank]
        head = bytearray(self.memory[start : start + _TEXTS])
        head[slice(*_OTHERS)] = bytes(_OTHERS[1] - _OTHERS[0])
        texts = self.memory[start + _TEXTS : start + 8 * _DIRECTORY]
        return bytes(head) + texts + self.memory[start + 8 * _PROGRESS : start + PAGE]

    def show(self, rank: int, page: bytes) -> None:
        """Shows what a rank of another host tells, in the order in which it has written that."""
        start, texts = self._page[rank], 8 * _DIRECTORY
        self.memory[start + 8 * _PROGRESS : start + PAGE] = page[texts:]
        self.memory[start + _TEXTS : start + texts] = page[_TEXTS:texts]
        for low, high in ((_FIRST, _TEXTS), (_OTHERS[1], _FIRST), (0, _OTHERS[0])):
            self.memory[start + low : start + high] = page[low:high]


def text_of(memory: mmap.mmap | bytes, kind: int, page: int = 0) -> str:
    """One of the texts of a page that begins there."""
    start = page + _TEXTS + kind * _TEXT
    length = min(int.from_bytes(memory[start : start + 2], "little"), _TEXT - 2)
    return memory[start + 2 : start + 2 + length].decode("utf-8", "replace")


def with_text(page: bytes, kind: int, text: str) -> bytes:
    """A page with another text."""
    start = _TEXTS + kind * _TEXT
    return page[:start] + _packed(text).ljust(_TEXT, b"\0") + page[start + _TEXT :]


def _packed(text: str) -> bytes:
    data = text.encode("utf-8", "replace")[: _TEXT - 2]
    return len(data).to_bytes(2, "little") + data
