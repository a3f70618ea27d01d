"""How far a rank is with its requests of collectives, which others read from the board.

The request of a collective may complete for one rank, which then finishes its cell, long before it
does for another. So a rank that waits reads which ranks have made their part.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

from allranks.collectives.calls.rank_state import EPOCH_SHIFT, RankState

_KEY, _INDEX_BITS = 1 << 62, 30
"""The keys of posts among the numbers of groups, and the place of the index in a key."""
_KNOWN = 64


class Posts:
    """The requests of collectives that this rank posts on a group, in the order of all its ranks.

    A persistent request has posts of its own: ranks may start several in any order.
    """

    def __init__(self, own: RankState, group: int, index: int = 0) -> None:
        self._own, self._group = own, group
        self.is_persistent = index > 0
        # Also of the group of this rank alone, whose number is negative.
        self._key = _KEY | index << _INDEX_BITS | group & (1 << _INDEX_BITS) - 1
        self._number = self._persistent = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        """The requests that may not have completed."""
        self._most = _KNOWN
        self._left_open: set[Posts] = set()

    def persistent(self) -> Posts:
        """The posts of the next persistent request, the same one on every rank."""
        self._persistent = self._next(self._persistent)
        made = Posts(self._own, self._group, self._persistent & (1 << _INDEX_BITS) - 1)
        made._known = self._known
        return made

    def add(self, request: Any) -> int:
        """Publishes that this rank makes its part of the next one, and returns its number."""
        self._number = self._next(self._number)
        self._own.board.note(self._key, self._number, self._number)
        known = self._known
        known[id(request)] = weakref.ref(request)
        if len(known) > self._most:
            for key in [key for key, one in list(known.items()) if not _is_open(one())]:
                known.pop(key, None)
            self._most = max(_KNOWN, 2 * len(known))
        return self._number

    def leave(self, dropped: Collection[Any]) -> None:
        """Publishes which requests have not completed when this rank leaves its cell: no call of it
        moves their data then. ``dropped`` are those to which the program holds no reference.
        """
        if not (self._known or self._left_open or dropped):
            return
        alive = [one() for one in list(self._known.values())]  # another thread may post one
        ours = [one for one in (*alive, *dropped) if getattr(one, "posts", None) is not None]
        found = [
            one
            for one in ours
            if one.posts._group == self._group
            and one.number >> EPOCH_SHIFT == self._own.epoch  # else it never completes
            and _is_open(one)
        ]
        self._known.clear()  # persistent requests share it
        self._known.update({id(one): weakref.ref(one) for one in found})
        ends = {posts: posts._number for posts in self._left_open}
        for one in found:
            ends[one.posts] = min(ends.get(one.posts, one.number), one.number - 1)
        for posts, end in ends.items():
            self._own.board.note(posts._key, posts._number, end)
        self._left_open = {one.posts for one in found}

    def missing(self, ranks: Sequence[int], number: int) -> tuple[int, ...]:
        """Those of the ranks that have not made their part, as far as this host knows."""
        board = self._own.board
        return tuple(rank for rank in self._behind(ranks, number, 0) if board.has_every_group(rank))

    def unfinished(self, ranks: Sequence[int], number: int) -> tuple[int, ...]:
        """Those of the ranks that cannot move their data any more, if they have left. So count
        those that have had too many groups to show this one: who has left does not come.
        """
        return tuple(
            rank for rank in ranks if self._own.is_lost(rank) or self._behind((rank,), number, 1)
        )

    def _behind(self, ranks: Sequence[int], number: int, which: int) -> tuple[int, ...]:
        progress, key = self._own.board.progress, self._key
        return tuple(rank for rank in ranks if progress(rank, key)[which] < number)

    def _next(self, number: int) -> int:
        # A rank that has been replaced counts as the others do: from the beginning of the epoch.
        return max(number, self._own.epoch << EPOCH_SHIFT) + 1


def _is_open(request: Any) -> bool:
    return request is not None and not request.has_ended()
