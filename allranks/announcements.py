"""How other libraries find the ranks of a world, on ranks of notebooks and in scripts alike.

`MODULES` is the list of what announces a world: the collectives import no module above them, and
scripts load no features. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol


class Announcement(Protocol):
    """What lets libraries find one world, on one of its ranks."""

    def announce(self) -> None:
        """Lets libraries in this process find the world."""

    def withdraw(self) -> None:
        """Ends this: the world is replaced by another one."""

    def held(self) -> AbstractContextManager[None]:
        """Within, libraries find this world only."""


MODULES = ["allranks.rendezvous"]
"""Each has a class `Rendezvous`, an `Announcement`; `init` makes one, collective over a world."""


def prepare(base: Any, hosts: Sequence[int]) -> tuple[Announcement, ...]:
    """Makes the announcements of a world. Collective over ``base``.

    Args:
        base: a communicator of its ranks.
        hosts: for every rank the number of its host.
    """
    return tuple(import_module(name).Rendezvous(base, hosts) for name in MODULES)
