"""Has ``init_process_group()`` meet afresh each time, in every cell.

torch's first rank keeps the addresses of all in a store, which ends with the last thing that refers
to the group: a model, say, that has stayed in the notebook. The next group would find the addresses
of the one before, and wait there for ever. So there is one store for the life of the rank, and each
group has keys of its own in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from allranks.collectives import world
from allranks.imported import AfterImport

_SCHEME = "env"


class Keys:
    """Counts the groups of a cell: its ranks make the same ones, in the same order."""

    def __init__(self) -> None:
        self.number = self.made = 0

    def next(self) -> str:
        """What the keys of the next group begin with, the same on every rank."""
        number = world.current().scope.number
        self.made = self.made + 1 if number == self.number else 1
        self.number = number
        return f"allranks/{number}/{self.made}"


_keys = Keys()
_stores: dict[tuple[str, str], Any] = {}
"""The stores that this rank keeps open, by address and port."""


def _meet_afresh(rendezvous: Any) -> None:
    """Puts what finds the store by the environment in front of torch's own, which it asks."""
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    own = handlers.get(_SCHEME)
    if own is None or hasattr(own, "allranks"):
        return

    def meet(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        if world.exists():
            _keep_store(rendezvous.TCPStore)
        for store, rank, size in own(url, *args, **kwargs):
            if world.exists():
                store = sys.modules["torch.distributed"].PrefixStore(_keys.next(), store)
            yield store, rank, size

    meet.allranks = True  # type: ignore[attr-defined]
    handlers[_SCHEME] = meet


def _keep_store(make: Any) -> None:
    """On the first rank, has the store listen for as long as the rank lives."""
    where = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    first = os.environ.get("RANK") == "0"
    if first and all(where) and where[1].isdecimal() and where not in _stores:
        # A group's own store of this place is the same: that is what multi_tenant says.
        _stores[where] = make(
            where[0], int(where[1]), is_master=True, wait_for_workers=False, multi_tenant=True
        )


install = AfterImport(["torch.distributed.rendezvous"], _meet_afresh).install
"""torch is told when it is imported, or now where that has happened."""
