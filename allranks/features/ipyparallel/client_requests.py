"""The requests of ipyparallel's clients in this process that ranks have not answered yet.

They reach a rank through the controller, a cell by a shorter way. So that a cell finds what an
earlier request has done, the notebook sends it when the ranks have answered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

#: Another thread may make a client: only copies are read.
_clients: list[weakref.ref[Any]] = []
#: Requests for whose answers the user has not waited.
_given_up: set[str] = set()


def follow(client: Any) -> None:
    """Includes the requests of a client from now on."""
    _clients.append(weakref.ref(client, _clients.remove))


def are_followed() -> bool:
    """Whether a client can make requests, or wait for answers."""
    return bool(_open_clients())


def _open_clients() -> list[Any]:
    found = [one() for one in tuple(_clients)]
    return [client for client in found if client is not None and not client._closed]


def unanswered(engines: Collection[str]) -> dict[Any, dict[str, set[str]]]:
    """Returns the clients that wait for answers of some of these engines, and their requests."""
    found = {}
    for client in _open_clients():
        waits = {
            engine: client._outstanding_dict[engine] - _given_up
            for engine in engines
            if engine in client._outstanding_dict
        }
        if any(waits.values()):
            found[client] = {engine: requests for engine, requests in waits.items() if requests}
    return found


def call_when_answered(engines: Collection[str], call: Callable[[], object]) -> None:
    """Calls ``call`` at the answer to each request, in the thread of its client."""
    for client, waits in unanswered(engines).items():
        for request in set().union(*waits.values()):
            if (future := client._futures.get(request)) is not None:
                future.add_done_callback(lambda _: call())


def give_up(engines: Collection[str]) -> None:
    """Interrupts the requests that run, and leaves all of them out from now on."""
    for client, waits in unanswered(engines).items():
        _given_up.update(*waits.values())
        # A copy: the client's own thread changes it.
        ranks = [rank for rank, engine in list(client._engines.items()) if engine in waits]
        client.send_signal("SIGINT", targets=ranks, block=False)
