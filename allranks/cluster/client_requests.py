"""The requests of ipyparallel's clients in this process that ranks have not answered yet.

They reach a rank through the controller, a cell by a shorter way. So that a cell finds what an
earlier request has done, the notebook sends it when the ranks have answered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def follow(client: Any) -> None:
    """Includes the requests of a client from now on."""
    _clients.add(client)


def unanswered(engines: Collection[str]) -> dict[Any, list[str]]:
    """Returns the clients that wait for an answer of some of these engines, and which."""
    found = {}
    for client in list(_clients):
        waits = [] if client._closed else [e for e in engines if client._outstanding_dict.get(e)]
        if waits:
            found[client] = waits
    return found


def call_when_answered(engines: Collection[str], call: Callable[[], object]) -> None:
    """Calls ``call`` at the answer to each request, in the thread of its client."""
    for client, waits in unanswered(engines).items():
        for engine in waits:
            for request in client._outstanding_dict[engine].copy():
                if (future := client._futures.get(request)) is not None:
                    future.add_done_callback(lambda _: call())


def interrupt(engines: Collection[str]) -> None:
    """Interrupts the requests that run."""
    for client, waits in unanswered(engines).items():
        ranks = [rank for rank, engine in client._engines.items() if engine in waits]
        client.send_signal("SIGINT", targets=ranks, block=False)
