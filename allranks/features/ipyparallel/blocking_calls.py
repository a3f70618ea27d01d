"""Interrupts of a view's blocking call, as ``dv.apply_sync(f)``: they end it, also on the ranks.

ipyparallel drops an interrupt there: the cell goes on without the values, and the engines with the
call. Those of other waits, as ``ar.get()``, end the wait only, and say so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from functools import wraps
from typing import TYPE_CHECKING, Any

from allranks.cluster import cluster
from allranks.errors import CellInterrupted
from allranks.features.ipyparallel import client_requests
from allranks.features.ipyparallel.metadata import OF_RANKS
from allranks.records.ranks import label

if TYPE_CHECKING:
    from ipyparallel.client.asyncresult import AsyncResult

#: Where a view itself waits. An interrupt of ``ar.get()`` in a cell leaves the call alone: the user
#: has a result to come back to.
_VIEWS = ("ipyparallel.client.view", "ipyparallel.client.remotefunction")
#: Ranks that react have ended the call by then.
_END_SECONDS = 3.0
_INTERRUPT = "ranks.interrupt()"
#: Where the ranks are those of another notebook.
_SIGNAL = 'rc.send_signal("SIGINT")'
_GOES_ON = (
    "the wait was interrupted; the ranks go on with the request. To interrupt them as well, type: "
    f"{_INTERRUPT}"
)


def end_by_interrupt(kind: type[AsyncResult]) -> Callable[[], None]:
    """Has views raise `CellInterrupted` where ipyparallel's drop an interrupt; returns what undoes
    it.
    """
    plain: Any = kind.get

    @wraps(plain)
    def get(result: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return plain(result, *arguments, **options)
        except KeyboardInterrupt:
            by_view = sys._getframe(1).f_globals.get("__name__") in _VIEWS
            ranks = _ranks_of(result) if by_view else []
            if not ranks:
                raise
            if behind := _behind(result, ranks):
                # They would hear it in the earlier request, which may be a training.
                does = "has" if len(behind) == 1 else "have"
                raise CellInterrupted(
                    f"the wait for the call of {result._fname} was interrupted. {label(behind)} "
                    f"{does} an earlier request to answer first, and then this one. To end both, "
                    f"type: {_INTERRUPT if _are_of_this_notebook(result._client) else _SIGNAL}"
                ) from None
            _end(result, ranks)
        raise CellInterrupted(*_told(result, ranks))

    setattr(kind, "get", get)  # noqa: B010  mypy refuses an assignment
    return lambda: setattr(kind, "get", plain)


def say_it_goes_on(pressed: KeyboardInterrupt, requests: Collection[str]) -> None:
    """Has IPython show a line in place of the frames of a wait, if ranks go on with requests."""
    running = cluster.running()
    engines = [hello.engine for hello in running.hellos.values()] if running is not None else []
    if client_requests.are_awaited(requests, engines):
        # Here: scripts need no magics.
        from allranks.magics.session import show_as_line

        show_as_line(pressed, _GOES_ON)


def _ranks_of(result: Any) -> list[int]:
    """Returns the ranks that have still to answer a direct view, also those of another notebook.

    A task of a load-balanced view runs on a rank that this process does not know.
    """
    client = result._client
    if not client._config.get(OF_RANKS):
        return []  # engines of ipyparallel
    engines = dict(client._engines)
    asked, waits = {*result.msg_ids}, client._outstanding_dict
    busy = [rank for rank, engine in engines.items() if asked & waits.get(engine, set())]
    # A broadcast view has one request for all.
    return busy or [rank for rank in result._targets or () if rank in engines]


def _are_of_this_notebook(client: Any) -> bool:
    running = cluster.running()
    engines = [hello.engine for hello in running.hellos.values()] if running is not None else []
    return not set(engines).isdisjoint(list(client._engines.values()))


def _behind(result: Any, ranks: Collection[int]) -> list[int]:
    """Returns those of these ranks that have still to answer an earlier request."""
    client, asked = result._client, {*result.msg_ids}
    waits = client._outstanding_dict
    return [rank for rank in ranks if waits.get(client._engines.get(rank), set()) - asked]


def _end(result: Any, ranks: Collection[int]) -> None:
    try:
        client_requests.interrupt(result._client, ranks, result.msg_ids)
        result.wait(_END_SECONDS)
    except KeyboardInterrupt:
        pass  # pressed again: the wait ends at once


def _told(result: Any, ranks: Collection[int]) -> tuple[str, str]:
    """Returns what happened, in one line, and with the place where a rank was interrupted."""
    call = f"the call of {result._fname} on {label(ranks)}"
    if not result.ready():
        left = _ranks_of(result)
        it, its = ("it", "its") if len(left) == 1 else ("they", "their")
        react = "does" if len(left) == 1 else "do"
        client = "ranks.client()" if _are_of_this_notebook(result._client) else "rc"
        line = (
            f"{call} was interrupted, and {label(left)} {react} not react: {it} may have a request "
            f"of another notebook to answer first, after which the call ends, or be in a call that "
            f"does not return to Python. To end {label(left)} with {its} variables, type: "
            f'{client}.send_signal("SIGKILL", targets={left})'
        )
        return line, line
    line = f"{call} was interrupted; the ranks keep their variables"
    error = result.exception()
    found = getattr(error, "elist", None) or [_error_of_rank(error)]
    # Ranks that waited have a text; another one may be the reason why they did.
    _, _, trace, _ = min(found, key=lambda one: bool(one[1]))
    waits: dict[str, list[int]] = {}
    for name, text, _, about in found:
        if name == KeyboardInterrupt.__name__ and text:
            waits.setdefault(text, []).append(about["engine_id"])
    said = [f"{label(there)}: {text}" for text, there in waits.items()]
    return line, "\n\n".join(filter(None, [trace, *said, f"CellInterrupted: {line}"]))


def _error_of_rank(error: Any) -> tuple[str, str, str, dict[str, Any]]:
    """Returns the error of a view of one rank as that of several has it; empty if there is none."""
    names = ("ename", "evalue", "traceback")
    name, text, trace = (getattr(error, one, "") for one in names)
    return name, text, trace, getattr(error, "engine_info", {})
