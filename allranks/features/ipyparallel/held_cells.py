"""Cells that ranks cannot begin, because they run requests of clients: the wait for these.

An interrupt of such a cell ends the requests of this notebook that it waits for, too. Those of
other notebooks go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack

from allranks.cluster.connection import Connection
from allranks.cluster.sockets import ClientAnswered, EventQueue, InterruptRequested
from allranks.countdown import Countdown
from allranks.errors import CellInterrupted
from allranks.features.ipyparallel import client_requests
from allranks.features.ipyparallel.late_notices import late_lines
from allranks.records import requests
from allranks.records.ranks import label
from allranks.records.wire import BETWEEN_CELLS, Interrupt

_REQUEST = "a request of an ipyparallel client"
_STATUS_SECONDS = 1.0
_SLOW_SECONDS = 2.0
_POLL_SECONDS = 0.1


def unanswered(ranks: Connection, chosen: Iterable[int]) -> dict[str, int]:
    """Returns the kernels (`Hello.engine`) of ranks that have not answered a request of a client of
    this notebook, and the ranks. A rank that has died is left out.
    """
    engines = _engines(ranks, chosen)
    waits = client_requests.unanswered(engines).values()
    return {engine: engines[engine] for of_client in waits for engine in of_client}


def _engines(ranks: Connection, chosen: Iterable[int]) -> dict[str, int]:
    roster = ranks.roster
    if roster.ends or ranks.closed:
        return {}
    there = set(chosen) - set(roster.dead)
    return {roster.hellos[rank].engine: rank for rank in there if rank in roster.hellos}


def await_clients(
    ranks: Connection, chosen: Collection[int], tell: Callable[[str], object]
) -> None:
    """Waits until ranks have answered all requests of the clients of this notebook.

    An interrupt interrupts the requests, and raises KeyboardInterrupt, or CellInterrupted in
    another thread than the main one. A rank that has died is not waited for. ``tell`` gets a
    line if it takes long, and what ranks say meanwhile.
    """
    known = _engines(ranks, chosen)
    if deaf := client_requests.given_up(known):
        which = label(sorted(known[engine] for engine in deaf))
        tell(f"{which} must first answer {_REQUEST}, which was interrupted")
    if not (engines := unanswered(ranks, chosen)):
        return
    events = EventQueue()
    client_requests.call_when_answered(engines, lambda: events.put(ClientAnswered()))
    quiet: Countdown | None = Countdown(_SLOW_SECONDS)
    with ExitStack() as over:
        over.callback(_pass_on_interrupts, events, ranks)
        over.enter_context(events.hearing_interrupts())
        over.callback(setattr, ranks, "awaits_clients", None)
        ranks.awaits_clients = events
        while engines := unanswered(ranks, chosen):
            if ranks.step(0) or InterruptRequested() in events.wait(_POLL_SECONDS):
                client_requests.give_up(engines)
                where = label(sorted(engines.values()))
                too = f"{_REQUEST} on {where} was interrupted, too"
                if threading.current_thread() is threading.main_thread():
                    raise KeyboardInterrupt(too)
                raise CellInterrupted(f"the cell was interrupted before it began; {too}")
            if quiet is not None and quiet.left() <= 0:
                quiet = None
                which = label(sorted(engines.values()))
                tell(f"{which} must first answer {_REQUEST}; interrupt to end both")
            if quiet is None:
                for line in late_lines(client_requests.unanswered_futures(engines)):
                    tell(line)


def _pass_on_interrupts(events: EventQueue, ranks: Connection) -> None:
    # One that came with the last answer concerns what follows.
    for event in events.wait(0):
        if isinstance(event, InterruptRequested):
            ranks.inbox.put(event)


def interrupt_clients(ranks: Connection) -> bool:
    """Interrupts what ranks do for clients of any notebook, while no cell runs; returns whether
    they did anything for one.
    """
    told = ranks.ask(requests.STATUS, {}, seconds=_STATUS_SECONDS, strict=False)
    found = {rank: one for rank, (content, _) in told.items() if (one := content.get("request"))}
    engines, own = unanswered(ranks, range(ranks.size)), client_requests.names()
    client_requests.give_up(engines)
    # What `give_up` does not reach: requests of other notebooks, and tasks, of which no process
    # knows which rank runs them.
    reached = {
        rank for rank in engines.values() if rank not in found or found[rank]["client"] in own
    }
    others = set(ranks.roster.alive) - reached
    ranks.send(sorted(others), Interrupt(BETWEEN_CELLS, requests_too=True))
    return bool(engines or found)


#: By rank, the request that it runs: see `allranks.engine.epochs.RankEpochs.in_request`.
Requests = Mapping[int, Mapping[str, str]]


def leave_held_cell(ranks: Connection, held: Requests) -> str:
    """Interrupts the requests of this notebook that hold a cell; returns what has ended."""
    hellos = ranks.roster.hellos
    client_requests.interrupt_running([hellos[rank].engine for rank in held if rank in hellos])
    return ended_text(held)


def held_text(held: Requests) -> str:
    """Returns for which ranks a cell waits, and what an interrupt ends."""
    ours, others = _by_notebook(held)
    said = [f"{label(ours)} must first answer {_REQUEST}; interrupt to end both"] if ours else []
    for notebook, ranks in others.items():
        said.append(
            f"{label(ranks)} must first answer {_REQUEST} of {notebook}; interrupt to leave the "
            "cell out, and to end the request as well, type then: ranks.interrupt()"
        )
    return "\n".join(said)


def ended_text(held: Requests) -> str:
    """Returns what an interrupt of that cell has ended beside it, and what goes on."""
    ours, others = _by_notebook(held)
    said = [f"{_REQUEST} on {label(ours)} was interrupted, too"] if ours else []
    for notebook, ranks in others.items():
        goes = "goes" if len(ranks) == 1 else "go"
        said.append(
            f"{label(ranks)} {goes} on with {_REQUEST} of {notebook}; to end it, type: "
            "ranks.interrupt()"
        )
    return "; ".join(said)


def _by_notebook(held: Requests) -> tuple[list[int], dict[str, list[int]]]:
    """Returns the ranks that run requests of this notebook, and those of others by their names."""
    ours, others = list[int](), dict[str, list[int]]()
    own = client_requests.names()
    for rank, request in sorted(held.items()):
        if request["client"] in own:
            ours.append(rank)
        else:
            name = f" ({request['notebook']})" if request["notebook"] else ""
            others.setdefault(f"another notebook{name}", []).append(rank)
    return ours, others
