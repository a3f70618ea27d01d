"""Has ``init_process_group()`` meet afresh each time, in every cell.

torch's first rank keeps the addresses of all in a store, which ends with the last thing that refers
to the group: a model, say, that has stayed in the notebook. The next group would find the addresses
of the one before, and wait there for ever. So there is one store for the life of the rank, and each
group has keys of its own in it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from allranks.collectives import world
from allranks.imported import AfterImport

_SCHEME = "env"


class Keys:
    """Counts the groups of a cell: its ranks make the same ones, in the same order."""

    def __init__(self) -> None:
        self.number = self.made = self.at_ns = 0

    def next(self) -> str:
        """What the keys of the next group begin with, the same on every rank."""
        number = world.current().scope.number
        self.made = self.made + 1 if number == self.number else 1
        self.number, self.at_ns = number, time.time_ns()
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
        if not world.exists():
            yield from own(url, *args, **kwargs)
            return
        prefix = _keys.next()
        if os.environ.get("RANK") == "0":
            where = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
            if all(where) and where not in _stores:
                _stores[where] = store()
        for found, rank, size in own(url, *args, **kwargs):
            yield sys.modules["torch.distributed"].PrefixStore(prefix, found), rank, size

    meet.allranks = True  # type: ignore[attr-defined]
    handlers[_SCHEME] = meet


def store() -> Any:
    """A store that listens where the environment says that the ranks meet."""
    make = sys.modules["torch.distributed"].TCPStore
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A group's own store of this place is the same: that is what multi_tenant says.
    return make(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)


def made() -> int:
    """How many times this rank has begun to meet the others in this cell."""
    return _keys.made if _keys.number == world.current().scope.number else 0


def met_at_ns() -> int:
    """When this rank has begun to meet the others last, by the system's clock."""
    return _keys.at_ns


install = AfterImport(["torch.distributed.rendezvous"], _meet_afresh).install
"""torch is told when it is imported, or now where that has happened."""
