"""Interrupts of a view's blocking call, as ``dv.apply_sync(f)``: they end it, also on the ranks.

ipyparallel drops an interrupt there: the cell goes on without the values, and the engines with the
call. Those of other waits, as ``ar.get()``, end the wait only, and say so.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import wraps
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

from allranks.cluster import cluster
from allranks.errors import CellInterrupted, UsageError
from allranks.features.ipyparallel import client_requests
from allranks.features.ipyparallel.metadata import NOTEBOOK, OF_RANKS, RUNS
from allranks.features.ipyparallel.px_results import running_cell
from allranks.records.ranks import label

if TYPE_CHECKING:
    from ipyparallel.client.asyncresult import AsyncResult

#: Where a view itself waits. An interrupt of ``ar.get()`` in a cell leaves the call alone: the user
#: has a result to come back to.
_VIEWS = ("ipyparallel.client.view", "ipyparallel.client.remotefunction")
#: ipyparallel's own functions, which its users do not name.
_OWN = ("_pull", "_push", "_execute")
#: Packages whose frames are between a cell and the request of a view.
_BETWEEN = ("ipyparallel", "decorator", "allranks")
#: Ranks that react have answered by then, and ended the call soon after.
_END_SECONDS = 3.0
_ASK_SECONDS = 1.0
_END = "type: ranks.interrupt()"
_END_REQUEST_THERE = 'type with your client: rc.send_signal("SIGINT")'
#: A line that is typed there waits behind the cell that its kernel runs.
_END_CELL_THERE = (
    "use the stop button of the notebook that has the ranks; for a cell in the background, type "
    "there: ranks.interrupt()"
)
_GOES_ON = "the wait was interrupted; the ranks go on with the request. To interrupt them as well,"
_TASKS_GO_ON = (
    "the wait was interrupted; the tasks go on. To drop those that have yet to begin, type with "
    "your client: rc.abort()   To interrupt those that ranks run,"
)
_COMES_AFTER = "it goes on, and the request comes after it. To end it,"


def end_by_interrupt(kind: type[AsyncResult]) -> Callable[[], None]:
    """Has views raise `CellInterrupted` where ipyparallel's drop an interrupt; returns what undoes
    it.
    """
    # ``scatter`` waits, and needs no values.
    plains: dict[str, Any] = {name: getattr(kind, name) for name in ("get", "wait")}

    def ending(plain: Any) -> Any:
        @wraps(plain)
        def waiting(result: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return plain(result, *arguments, **options)
            except KeyboardInterrupt:
                caller = sys._getframe(1)
                by_view = caller.f_globals.get("__name__") in _VIEWS
                ranks = _ranks_of(result) if by_view else []
                if by_view and not ranks and result._client._config.get(OF_RANKS):
                    # A view drops an interrupt: the cell would go on.
                    if result.ready():  # it has ended just now
                        line = f"{_typed(result, caller)} was interrupted; the ranks have ended it"
                    else:  # tasks, which any rank may run
                        line = f"{_TASKS_GO_ON} {_how_to_end(result._client)}"
                    raise CellInterrupted(line) from None
                if not ranks:
                    raise
                call = _typed(result, caller)
                cell = cell_before(result.msg_ids)
                others = _end(result, ranks)
            raise CellInterrupted(*_told(result, call, ranks, cell, others))

        return waiting

    def change(functions: Mapping[str, Any]) -> None:
        for name, function in functions.items():
            setattr(kind, name, function)

    change({name: ending(plain) for name, plain in plains.items()})
    return lambda: change(plains)


def say_it_goes_on(pressed: KeyboardInterrupt, requests: Collection[str]) -> None:
    """Has IPython show a line in place of the frames of a wait, if ranks go on with requests."""
    running = cluster.running()
    engines = [hello.engine for hello in running.hellos.values()] if running is not None else []
    if client_requests.are_awaited(requests, engines):
        # Here: scripts need no magics.
        from allranks.magics.session import show_as_line

        line = f"{_GOES_ON} {_END}"
        if cell := cell_before(requests):
            line = f"the wait was interrupted. {cell} first; {_COMES_AFTER} {_END}"
        show_as_line(pressed, line)


def cell_before(requests: Collection[str]) -> str:
    """Returns which cell of this notebook comes before requests of its views, as ``rank 0 runs
    In[5] (%%px --noblock)``; "" if none does.
    """
    running = cluster.running()
    if running is None:
        return ""
    name, ranks = running_cell(running)
    engines = {running.hellos[rank].engine: rank for rank in ranks if rank in running.hellos}
    there = sorted(engines[one] for one in client_requests.have_to_answer(requests, engines))
    return f"{label(there)} run{'s' * (len(there) == 1)} {name}" if there else ""


def runs_before(requests: Collection[str]) -> str:
    """Returns what ranks run before requests of views, also those of another notebook, as
    `cell_before` does; asks them.
    """
    if cell := cell_before(requests):
        return cell
    for client, ranks in client_requests.waiting_at(requests).items():
        if first := _first(_answers(client, _ask(client, ranks, requests), _ASK_SECONDS)):
            return first
    for client, (tasks, ranks) in client_requests.waiting_tasks(requests).items():
        others = _answers(client, _ask(client, ranks, tasks), _ASK_SECONDS)
        # A rank that runs one of the tasks does not say so, and one that does not answer may.
        if len(tasks) > len(ranks) - len(others) and (first := _first(others)):
            return first
    return ""


def _ask(
    client: Any, ranks: Iterable[int], requests: Collection[str]
) -> dict[int, Future[list[Any]]]:
    asked = {}
    for rank in ranks:
        with suppress(LookupError, UsageError):  # it has died meanwhile, or all have
            asked[rank] = client_requests.ask(client, rank, requests)
    return asked


def _answers(client: Any, asked: Mapping[int, Future[list[Any]]], seconds: float) -> dict[int, str]:
    """Returns what ranks run that is none of the requests that they were asked for."""
    wait(asked.values(), seconds)
    told = {rank: one.result()[0]["content"] for rank, one in asked.items() if one.done()}
    runs = {rank: said[RUNS] for rank, said in told.items() if RUNS in said}
    notebook = "" if _own_engines(client) else client._config.get(NOTEBOOK)
    if not notebook:
        return runs
    return {
        rank: f"{what} of {notebook}" if what.startswith("cell ") else what
        for rank, what in runs.items()
    }


def _typed(result: Any, frame: FrameType) -> str:
    """Returns a call as the user knows it: by its function, or, as ``dv["x"]``, by its source."""
    name = result._fname
    if name not in _OWN:
        return f"the call of {name}"
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        if frame.f_back is None:
            break
        frame = frame.f_back
    code = frame.f_code
    line, end, first, last = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    source = linecache.getline(code.co_filename, line) if line and line == end else ""
    return source.encode()[first:last].decode().strip() or f"the {name[1:]}"


def _own_engines(client: Any) -> dict[int, str]:
    """Returns those engines of a client that are ranks of this notebook."""
    running = cluster.running()
    hellos = running.hellos if running is not None else {}
    ours = {rank: hello.engine for rank, hello in hellos.items()}
    return {rank: one for rank, one in ours.items() if client._engines.get(rank) == one}


def _how_to_end(client: Any, runs: Iterable[str] = ()) -> str:
    """Returns what ends the requests of a client, or what ranks run before them, in words."""
    if _own_engines(client):
        return _END
    runs_cell = any(what.startswith("cell ") for what in runs)
    return _END_CELL_THERE if runs_cell else _END_REQUEST_THERE


def _ranks_of(result: Any) -> list[int]:
    """Returns the ranks that have still to answer a direct view, also those of another notebook.

    A task of a load-balanced view runs on a rank that this process does not know.
    """
    client = result._client
    if not client._config.get(OF_RANKS):
        return []  # engines of ipyparallel
    engines = {**client._engines}
    asked, waits = {*result.msg_ids}, client._outstanding_dict
    busy = [rank for rank, engine in engines.items() if asked & waits.get(engine, set())]
    # A broadcast view has one request for all.
    return busy or [rank for rank in result._targets or () if rank in engines]


def _end(result: Any, ranks: Collection[int]) -> dict[int, str] | None:
    """Interrupts a call; returns what ranks run that have yet to begin it, in words. They leave it
    out then. None if it was interrupted itself before the ranks have answered.
    """
    asked = {}
    try:
        for rank in ranks:
            # It has died meanwhile, or all have, which ends its request.
            with suppress(LookupError, UsageError):
                asked[rank] = client_requests.interrupt(result._client, rank, result.msg_ids)
        others = _answers(result._client, asked, _END_SECONDS)
        if not any(others.values()):
            result.wait(_END_SECONDS)
    except KeyboardInterrupt:
        return None  # pressed again: the wait ends at once
    return others


def _told(
    result: Any, call: str, ranks: Collection[int], cell: str, others: Mapping[int, str] | None
) -> tuple[str, str]:
    """Returns what happened, in one line, and with the place where a rank was interrupted.

    ``cell``: which cell of this notebook comes before it, as `cell_before` has it.
    """
    if not result.ready():
        end = _how_to_end(result._client, filter(None, (others or {}).values()))
        if first := cell or _first(others or {}):
            line = (
                f"{call} was interrupted. {first} first; it goes on, and the call is left out "
                f"after it. To end it, {end}"
            )
        elif others and not {*(late := _ranks_of(result))} - others.keys():
            has = "has" if len(late) == 1 else "have"
            line = (
                f"{call} was interrupted. {label(late)} {has} yet to begin it, and will leave it "
                "out"
            )
        elif others is None:
            has = "has" if len(left := _ranks_of(result)) == 1 else "have"
            line = (
                f"{call} on {label(ranks)} was interrupted, and the wait for its end, too: "
                f"{label(left)} {has} not ended it yet. To interrupt again, {end}"
            )
        else:
            line = _not_ended(result, call, ranks, others)
        return line, line
    line = f"{call} on {label(ranks)} was interrupted; the ranks keep their variables"
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


def _not_ended(result: Any, call: str, ranks: Collection[int], others: Collection[int]) -> str:
    """Returns which ranks have not reacted to an interrupt, and how to go on. The ``others`` have:
    they have yet to begin the call, or have ended their part of it.
    """
    left = [rank for rank in _ranks_of(result) if rank not in others]
    it, its = ("it", "its") if len(left) == 1 else ("they", "their")
    react = "does" if len(left) == 1 else "do"
    line = (
        f"{call} on {label(ranks)} was interrupted, and {label(left)} {react} not react: {it} may "
        "be in a call that does not return to Python."
    )
    if not _own_engines(result._client):
        # A command that is typed there waits for the end of a cell.
        return (
            f"{line} To see what {it} {react}, look at the sidebar of the notebook that has the "
            "ranks, or, while no cell runs there, type there: %distributed status"
        )
    return (
        f"{line} To end {label(left)} with {its} variables, type: "
        f'ranks.client().send_signal("SIGKILL", targets={left})'
    )


def _first(others: Mapping[int, str]) -> str:
    """Returns what ranks do first, as ``rank 0 runs cell In[3]``; "" for nothing."""
    does: dict[str, list[int]] = {}
    for rank, what in others.items():
        does.setdefault(what, []).append(rank)
    does.pop("", None)
    runs = (f"{label(ranks)} run{'s' * (len(ranks) == 1)} {what}" for what, ranks in does.items())
    return ", ".join(runs)


def _error_of_rank(error: Any) -> tuple[str, str, str, dict[str, Any]]:
    """Returns the error of a view of one rank as that of several has it; empty if there is none."""
    names = ("ename", "evalue", "traceback")
    name, text, trace = (getattr(error, one, "") for one in names)
    return name, text, trace, getattr(error, "engine_info", {})
