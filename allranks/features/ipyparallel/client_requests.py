"""The requests of ipyparallel's clients in this process that ranks have not answered yet.

They reach a rank through the controller, a cell by a shorter way. So that a cell finds what an
earlier request has done, the notebook sends it when the ranks have answered.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from allranks.errors import UsageError
from allranks.features.ipyparallel.connection_files import try_to_connect
from allranks.features.ipyparallel.metadata import (
    BLOCKS,
    CALL,
    CELL,
    CLIENT,
    NOTEBOOK,
    OF_RANKS,
    REQUESTS,
)

#: Another thread may make a client: only copies are read.
_clients: list[weakref.ref[Any]] = []
#: Requests for whose answers the user has not waited.
_given_up: set[str] = set()
_ended: weakref.WeakSet[Any] = weakref.WeakSet()
#: From which files clients know the ranks of other notebooks.
_visits: weakref.WeakKeyDictionary[Any, Path] = weakref.WeakKeyDictionary()
#: The requests that are tasks, with the engines that may run each; without any, all of them may.
_tasks: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
#: Engines for which clients have waited in vain.
_missed: set[str] = set()
#: The numbers of the last calls of their views.
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
#: That no two calls have one number.
_calls_lock = threading.Lock()
#: The call that this thread makes.
_made = threading.local()
#: A rank is up some tenths of a second before its engine is registered.
_REGISTER_SECONDS = 5.0
#: What waits for ranks or sends to them: one of these is the first of each call of a client.
_USES_RANKS = (
    *("_build_targets", "_send", "send_apply_request", "send_execute_request"),
    "wait_for_engines",
)


def follow(client: Any) -> None:
    """Includes the requests of a client from now on."""
    _clients.append(weakref.ref(client, _clients.remove))


@contextmanager
def in_call(client: Any, blocks: bool) -> Iterator[None]:
    """Within, this thread makes the requests of one call; if it ``blocks``, nothing else before all
    of them have been answered.
    """
    before = call_metadata()
    if not before:
        with _calls_lock:
            # Never below the numbers of requests that are of no call, see `rank._number_of`.
            number = max(_calls.get(client, 0) + 1, client.session.message_count)
            _calls[client] = number
        _made.metadata = {CALL: number, BLOCKS: blocks}
    try:
        yield
    finally:
        _made.metadata = before


def call_metadata() -> dict[str, Any]:
    """Returns what requests of this thread carry as those of a call; empty if it makes none."""
    found: dict[str, Any] = getattr(_made, "metadata", {})
    return found


def are_followed(key: str | None) -> bool:
    """Whether a client can make requests, or has lost the ranks whose messages have this key."""
    lost = any(one in _ended and one._config.get("key") == key for one in _all_clients())
    return lost or bool(_open_clients())


def _all_clients() -> list[Any]:
    return [client for one in tuple(_clients) if (client := one()) is not None]


def _open_clients() -> list[Any]:
    return [client for client in _all_clients() if not client._closed]


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


def has_sent() -> bool:
    """Whether clients of this process have sent requests that have not been answered."""
    return any(client.outstanding for client in _open_clients())


def are_awaited(requests: Collection[str], engines: Collection[str]) -> bool:
    """Whether a client of these engines waits for some of these requests, tasks included, which
    are of no engine that the client knows.
    """
    return any(
        not client.outstanding.isdisjoint(requests)
        for client in _open_clients()
        if not set(engines).isdisjoint(list(client._engines.values()))
    )


def have_to_answer(requests: Collection[str], engines: Iterable[str]) -> set[str]:
    """Returns which of these engines have not answered some of these requests of direct views."""
    return {
        engine
        for client in _open_clients()
        for engine in engines
        if not client._outstanding_dict.get(engine, set()).isdisjoint(requests)
    }


def given_up(engines: Collection[str]) -> set[str]:
    """Returns which of these engines have not answered what `give_up` has interrupted."""
    return {
        engine
        for client in _open_clients()
        for engine in engines
        if client._outstanding_dict.get(engine, set()) & _given_up
    }


def call_when_answered(engines: Collection[str], call: Callable[[], object]) -> None:
    """Calls ``call`` at the answer to each request, in the thread of its client."""
    for future in unanswered_futures(engines):
        future.add_done_callback(lambda _: call())


def unanswered_futures(engines: Collection[str]) -> list[Any]:
    """Returns the futures of the requests that `unanswered` returns."""
    return [
        future
        for client, waits in unanswered(engines).items()
        for request in set().union(*waits.values())
        if (future := client._futures.get(request)) is not None
    ]


def give_up(engines: Collection[str]) -> None:
    """Interrupts the requests of these engines and the tasks that they run, and waits for none of
    them from now on.
    """
    for client, waits in unanswered(engines).items():
        _given_up.update(*waits.values())
        # A copy: the client's own thread changes it.
        for rank, engine in list(client._engines.items()):
            if engine in waits:  # a rank would keep the ids of requests that it never gets
                which = {CLIENT: _name(client), REQUESTS: sorted(waits[engine])}
                _send_interrupt(client, [rank], which)


def interrupt(client: Any, rank: int, requests: Collection[str]) -> Future[list[Any]]:
    """Interrupts these requests of a client on a rank, also if they have yet to begin there, and
    nothing else; returns the rank's answer.
    """
    return _send_interrupt(client, [rank], {REQUESTS: sorted(requests)})


def ask(client: Any, rank: int, requests: Collection[str]) -> Future[list[Any]]:
    """Has a rank say what it runs, if that is none of these requests."""
    return _send_interrupt(client, [rank], {REQUESTS: sorted(requests), "sig": 0})


def waiting_at(requests: Collection[str]) -> dict[Any, list[int]]:
    """Returns the clients, and their ranks that have not answered some of these requests of direct
    views.
    """
    return {
        client: [
            rank
            for rank, engine in list(client._engines.items())
            if not client._outstanding_dict.get(engine, set()).isdisjoint(requests)
        ]
        for client in _clients_of_ranks()
    }


def note_task(request: Any, engines: Iterable[str]) -> None:
    """Lets `waiting_tasks` know which engines may run a task."""
    _tasks[request] = frozenset(engines)


def waiting_tasks(requests: Collection[str]) -> dict[Any, tuple[list[str], list[int]]]:
    """Returns the clients, and of these requests the tasks that have not been answered, with the
    ranks that may run one.
    """
    found = {}
    for client in _clients_of_ranks():
        futures = {one: client._futures.get(one) for one in requests}
        tasks = {one: _tasks[future] for one, future in futures.items() if future in _tasks}
        engines = frozenset().union(*tasks.values()) if all(tasks.values()) else None
        known = list(client._engines.items()) if tasks else []
        ranks = [rank for rank, engine in known if engines is None or engine in engines]
        found[client] = [*tasks], ranks
    return found


def _clients_of_ranks() -> list[Any]:
    return [client for client in _open_clients() if client._config.get(OF_RANKS)]


def interrupt_running(engines: Collection[str], cell: int | None = None) -> None:
    """Interrupts what these engines run for clients of this process, tasks included; with a
    ``cell``, not what they have begun after it.
    """
    before = {} if cell is None else {CELL: cell}
    for client in _open_clients() if engines else ():
        ranks = [rank for rank, engine in list(client._engines.items()) if engine in engines]
        if ranks and client.outstanding:
            _send_interrupt(client, ranks, {CLIENT: _name(client), **before})


def _send_interrupt(
    client: Any, ranks: Collection[int], which: dict[str, Any]
) -> Future[list[Any]]:
    # Not by ``send_signal``, which has no place for it, and here ends a cell, too.
    content = {"sig": "SIGINT", **which}
    sent: Future[list[Any]] = client._send_control_request(
        [*ranks], "signal_request", content, block=False
    )
    return sent


def names() -> set[str]:
    """Returns the ids of the clients in this process, as their requests carry them."""
    return {_name(client) for client in _open_clients()}


def _name(client: Any) -> str:
    found: str = client.session.session
    return found


def of_ranks(key: str | None) -> list[Any]:
    """Returns the open clients of the ranks whose messages have this key."""
    return [client for client in _open_clients() if client._config.get("key") == key]


def await_engines(key: str | None, engines: Mapping[int, str]) -> None:
    """Waits until the clients of the ranks whose messages have this key know these engines."""
    for client in of_ranks(key):
        awaited = {rank: one for rank, one in engines.items() if one not in _missed}
        if not _knows(client, awaited) and not _comes_to_know(client, awaited):
            _missed.update(awaited.values())


def _knows(client: Any, engines: Mapping[int, str]) -> bool:
    return all(client._engines.get(rank) == one for rank, one in engines.items())


def _comes_to_know(client: Any, engines: Mapping[int, str]) -> bool:
    # Not an event, whose wait is Python: an interrupt in it would leave the event's lock held, for
    # which the thread of the client would wait.
    known: SimpleQueue[None] = SimpleQueue()

    def look(_: object = None) -> None:  # in the thread of the client
        if _knows(client, engines):
            known.put(None)

    client._registration_callbacks.append(look)
    try:
        look()  # it may have been registered before
        known.get(timeout=_REGISTER_SECONDS)
    except Empty:
        return False
    finally:
        client._registration_callbacks.remove(look)
    return True


class _NoIds(list[int]):
    """The ids of engines that have ended: to read them raises an error."""

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def __iter__(self) -> NoReturn:
        self._refuse()


def end(clients: Iterable[Any], why: Callable[[], str]) -> None:
    """Closes clients whose ranks have ended, from any thread; all their requests fail with what
    ``why`` returns then.

    Nothing would answer those that are made, and views would wait for those to come.
    """

    def refuse(*_arguments: object, **_options: object) -> NoReturn:
        raise UsageError(why())

    for client in clients:
        _ended.add(client)
        client._closed, client._ids = True, _NoIds(refuse)
        vars(client).update(dict.fromkeys(_USES_RANKS, refuse))
        client._task_stream.closed = refuse  # a load-balanced view asks this first
        # Only its own thread uses its sockets; it closes them when its loop has stopped.
        client._io_loop.add_callback(_fail_requests, client, why())
        client._io_loop.add_callback(client._io_loop.stop)


def visit(client: Any, file: Path) -> None:
    """Has a client of another notebook's ranks end with them: it knows them from this file."""
    _visits[client] = file


def end_visits() -> bool:
    """Ends the clients whose ranks in other notebooks have ended; returns whether others may run.

    ipyparallel's clients do not notice it, and would wait forever.
    """
    open_ones = [(client, file) for client, file in [*_visits.items()] if not client._closed]
    lost = [(client, file) for client, file in open_ones if _is_over(client, file)]
    for client, file in lost:
        end([client], partial(_why_over, client._config.get(NOTEBOOK), file))
    return len(lost) < len(open_ones)


def _why_over(notebook: str | None, file: Path) -> str:
    return (
        f"expected ranks of {notebook or 'another notebook'}, found that they have ended. Once it "
        f"has ranks again, type: rc = ipp.Client({str(file)!r})   and make its views again"
    )


def refuse_ended(client: Any) -> None:
    """Raises UsageError for a client that `end` has closed."""
    if client in _ended:
        list(client._ids)


def _is_over(client: Any, file: Path) -> bool:
    # Removed at the end of the ranks, also where their notebook was killed. But also where ranks
    # stay when it ends or detaches, and the user may have removed a copy: then their controller
    # still listens.
    port = client._config.get("registration", "").rpartition(":")[2]
    try:
        found = json.loads(file.read_text())
        if found["key"] == client._config.get("key"):
            return False
        if str(found.get("registration")) == port:
            return True  # other ranks have their place
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # it is being written
    return not _may_answer(client)


def _may_answer(client: Any) -> bool:
    """Whether a client's controller may run."""
    if client._ssh:  # what is reached is the tunnel
        return True
    interface, _, port = client._config.get("registration", "").rpartition(":")
    try:
        try_to_connect(interface, int(port))
    except (OSError, ValueError):
        return False
    return True


def _fail_requests(client: Any, why: str) -> None:
    content = {"status": "error", "ename": "EngineError", "evalue": why, "engine_info": {}}
    content["traceback"] = [f"EngineError: {why}"]
    for future in list(client._futures.values()):
        if not future.done():
            runs_code = hasattr(future, "output")
            answer = {"content": {**content}}  # a copy: the client changes it
            future.set_result(client._unwrap_exception(content) if runs_code else answer)
    for output in list(client._output_futures.values()):
        if not output.done():
            output.set_result(None)
    client.outstanding.clear()
