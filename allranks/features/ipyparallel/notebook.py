"""Which ranks ``ipyparallel.Client()`` finds in a notebook, and ipyparallel's magics."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.paths import get_ipython_dir

from allranks.cluster import cluster
from allranks.cluster.cluster import Cluster
from allranks.cluster.features import CellContext, ClusterContext, NotebookFeature, ProcessChange
from allranks.cluster.function_sources import add_sources
from allranks.cluster.ipython_profile import profile_folder
from allranks.cluster.state import ClusterState
from allranks.countdown import Countdown
from allranks.errors import Report, UsageError
from allranks.features.ipyparallel import client_requests, held_cells
from allranks.features.ipyparallel.blocking_calls import end_by_interrupt
from allranks.features.ipyparallel.clients import RankClients
from allranks.features.ipyparallel.connection_files import (
    a_cluster_may_start,
    check_file,
    client_file,
    connection_files,
    how_to_connect,
    may_answer,
)
from allranks.features.ipyparallel.late_notices import (
    keep_notices,
    show_in_results,
    show_in_waits,
)
from allranks.features.ipyparallel.metadata import NOTEBOOK, TASK_RETRIES
from allranks.features.ipyparallel.px_results import PxResult, in_background
from allranks.post_import import PostImportHook
from allranks.records import requests
from allranks.records.ranks import label
from allranks.records.wire import Answer, Output, Record

#: Arguments of ipyparallel's ``Client`` that name the file of one cluster.
_NAMES_FILE = ("url_file", "url_or_file", "cluster_id")
#: Arguments that choose the folder with the files.
_CHOOSES_FOLDER = ("profile", "profile_dir", "ipython_dir")
#: A cell that has not begun by then is asked for.
_HELD_SECONDS = 2.0
_INTERRUPT, _KILL = ("SIGINT", signal.SIGINT), ("SIGKILL", signal.SIGKILL)


class ClientPatch:
    """Makes ipyparallel's ``Client`` find the ranks of this notebook."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        # Not from the one to the other: the magics need the whole of ipyparallel.
        for name, patch in (("client", self._patch), ("magics", self._patch_magics)):
            hook = PostImportHook((f"ipyparallel.client.{name}",), patch)
            hook.install()
            undo.callback(hook.uninstall)

    def _patch(self, module: ModuleType) -> None:
        kind: Any = module.Client
        plain = kind.__init__
        self._undo.callback(setattr, kind, "__init__", plain)

        @wraps(plain)
        def init(client: Any, connection_info: Any = None, **options: Any) -> None:
            read, chosen = connection_info, any(map(options.get, _NAMES_FILE))
            # ``Cluster.from_file()`` has read the file although its user has named none.
            if not chosen and (read is None or options.get("cluster") is not None):
                waits = read is None and options.get("timeout") is None
                connection_info = self._own(options, waits) or read
            else:
                chosen = True
            file = _file(connection_info, options)
            if isinstance(connection_info, str | Path):
                check_file(Path(connection_info))
            plain(client, connection_info, **options)
            if whose := _whose(client, read, chosen):
                print(whose, file=sys.stderr)
            NotebookClients.holds_cells = True  # from the first client on
            client_requests.follow(client)
            if file is not None and NOTEBOOK in client._config:
                client_requests.visit(client, file)

        kind.__init__ = init
        for name, change in _CHANGED.items():
            self._change(kind, name, change)
        from ipyparallel.client.asyncresult import AsyncResult
        from ipyparallel.client.remotefunction import ParallelFunction
        from ipyparallel.client.view import BroadcastView, DirectView

        self._undo.callback(show_in_results(AsyncResult))
        self._undo.callback(end_by_interrupt(AsyncResult))
        for view in (DirectView, BroadcastView):
            for name in ("_really_apply", "execute"):
                self._change(view, name, _numbering_call)
        self._change(ParallelFunction, "__call__", _numbering_map)

    def _patch_magics(self, module: ModuleType) -> None:
        self._change(module.ParallelMagics, "parallel_execute", _numbering_call)

    def _change(self, kind: Any, name: str, change: Callable[[Any], Any]) -> None:
        self._undo.callback(setattr, kind, name, getattr(kind, name))
        setattr(kind, name, change(getattr(kind, name)))

    def _own(self, options: dict[str, Any], waits: bool) -> dict[str, Any] | None:
        """Returns how to reach this notebook's ranks; None if ipyparallel is to search.

        Raises UsageError if it would find the ranks of another notebook, or if nothing is there and
        it ``waits`` although its user has given no time.
        """
        running = cluster.running()
        chosen = any(map(options.get, _CHOOSES_FOLDER))
        if running is not None and not chosen:
            return running.connection_information()
        profile = _profile(options) if chosen else profile_folder()
        files = connection_files(profile)
        # Courses connect by the profile of a cluster that was started in a shell.
        found = client_file(profile) if profile is not None else None
        if found is not None and found not in files and may_answer(found):
            return None
        if running is not None:
            return running.connection_information()
        if options.get("cluster") is not None:
            return None  # the one whose file was read
        if not files:
            if not waits or a_cluster_may_start():
                return None
            raise UsageError(
                "ipp.Client() expected ranks of this notebook, or a cluster of ipyparallel, found "
                "neither. Type: %distributed start   To wait until a cluster has started "
                "elsewhere, give a time: ipp.Client(timeout=60)"
            )
        raise UsageError(
            "ipp.Client() expected ranks of this notebook, found none. Type: %distributed start\n"
            + "\n".join(how_to_connect(files))
        )


def _file(connection_info: Any, options: dict[str, Any]) -> Path | None:
    """Returns the file by which a client finds its cluster; None if it can have none."""
    named = options.get("url_file") or connection_info
    if isinstance(named, str | Path):
        return Path(named).expanduser().absolute()
    folder = _profile(options) if any(map(options.get, _CHOOSES_FOLDER)) else profile_folder()
    return None if folder is None else client_file(folder, options.get("cluster_id") or "")


def _whose(client: Any, read: Any, chosen: bool) -> str:
    """Returns whose ranks a client has, if its user may expect others; else "".

    A file that the user has ``chosen`` may be of other ranks by now: it has the first free name.
    Else ``read`` may be what was in another notebook's file.
    """
    key, whose = client._config.get("key"), client._config.get(NOTEBOOK)
    running = cluster.running()
    if running is not None and key == _key(running):
        if isinstance(read, dict) and NOTEBOOK in read and read.get("key") != key:
            return f"The client has the ranks of this notebook, not those of {read[NOTEBOOK]}"
        return "The client has the ranks of this notebook" if whose and chosen else ""
    if not whose:
        return ""
    advice = "For ranks of this notebook, type: %distributed start   and make the client again"
    return f"The client has the ranks of {whose}" + ("" if chosen else f". {advice}")


def _ranks_of(client: Any) -> Cluster | None:
    """Returns this notebook's ranks if they are the engines of a client."""
    running = cluster.running()
    if running is None:
        return None
    return running if client in client_requests.of_ranks(_key(running)) else None


def _key(ranks: Cluster) -> str | None:
    information: dict[str, Any] = ranks.cells.hooks.command("connection_information")
    return information.get("key")


def _stopping_ranks(plain: Callable[..., None]) -> Callable[..., None]:
    """Lets a client that is to end all engines stop the ranks, as ``%distributed stop`` does.

    ipyparallel ends each engine, which looks like the death of a rank.
    """

    @wraps(plain)
    def shutdown(
        client: Any, targets: Any = "all", restart: bool = False, hub: bool = False, **options: Any
    ) -> None:
        ranks = None if restart else _ranks_of(client)
        if ranks is not None and (hub or len(client._build_targets(targets)[1]) == ranks.size):
            ranks.stop()
        else:
            plain(client, targets, restart, hub, **options)

    return shutdown


def _waiting_for_cell(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Includes the cell of ``%%px --noblock``, which is a request of a view in ipyparallel."""

    @wraps(plain)
    def wait(client: Any, jobs: Any = None, timeout: float = -1) -> bool:
        if isinstance(jobs, PxResult):  # whose iterator would wait for the values
            jobs = [jobs]
        elif jobs is None and (ranks := _ranks_of(client)) is not None:
            jobs = [*client.outstanding, *in_background(ranks)]
        return plain(client, jobs, timeout)

    return wait


def _reaching_ranks(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Has SIGINT interrupt the cell of ``%%px --noblock``, too: on all its ranks, as the stop
    button does. SIGKILL goes by way of the host agents: a rank in a call that does not return to
    Python reads no request.
    """

    @wraps(plain)
    def send_signal(client: Any, sig: Any, targets: Any = None, block: bool | None = None) -> Any:
        ranks = _ranks_of(client) if sig in (*_INTERRUPT, *_KILL) else None
        if ranks is not None and sig in _KILL:
            return _kill(ranks, client, targets, client.block if block is None else block)
        for cell in in_background(ranks) if ranks is not None else ():
            cell.interrupt()
        return plain(client, sig, targets=targets, block=block)

    return send_signal


def _kill(ranks: Cluster, client: Any, targets: Any, block: bool) -> Future[list[Any]] | None:
    """Returns what ipyparallel's ``send_signal`` does, once the host agents have the command."""
    engines = {engine.decode() for engine in client._build_targets(targets)[0]}
    for rank, hello in ranks.hellos.items():
        if hello.engine in engines:
            ranks.cells.connection.end_rank(rank, "an ipyparallel client sent it this signal")
    told = Future[list[Any]]()
    told.set_result([])
    return None if block else told


def _explaining_errors(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Adds to an error of a rank what the error of a cell has: the sources of the notebook's
    functions, and where a name is that the rank has not found.
    """

    @wraps(plain)
    def unwrap(client: Any, content: dict[str, Any]) -> Any:
        error = plain(client, content)
        # In the client's thread: an exception would leave the request without an answer.
        with suppress(Exception):
            lines = [add_sources(error.traceback)]
            if error.ename == NameError.__name__:
                lines += _where_names_are(client, error)
            error.traceback = "\n\n".join(lines)
        return error

    return unwrap


#: All ranks of a call lack the same name: to count the bytes of its value may take a second.
_SAME_SECONDS = 3.0
_hint: tuple[Any, list[str], float] = (None, [], 0.0)


def _where_names_are(client: Any, error: Any) -> list[str]:
    # Here: scripts need no magics.
    from allranks.magics.hints import OF_VIEW, variables_of, where_names_are

    global _hint
    ranks, rank, shell = _ranks_of(client), error.engine_info["engine_id"], get_ipython()
    if ranks is None:
        return []
    name, text = error.ename, error.evalue
    report = Report(rank, "", "", name, text, (), None, source_line=text, waiting=False)
    names, replaced = {} if shell is None else variables_of(shell), ranks.roster.replaced
    value = names.get(text.partition("'")[2].partition("'")[0])
    which = (id(client), text, id(value), rank if rank in replaced else None)
    known, lines, until = _hint
    if known != which or time.monotonic() > until:
        lines = where_names_are([report], (rank,), names, OF_VIEW, replaced)
        _hint = which, lines, time.monotonic() + _SAME_SECONDS
    return lines


def _numbering_call(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the requests of a view, or of the magics of one, those of a call with a number.

    Where it blocks and a rank has ended its part, no other rank need wait for it. If it does not,
    the next call may contain the rest of its collectives.
    """
    signature = inspect.signature(plain)

    @wraps(plain)
    def call(caller: Any, *arguments: Any, **options: Any) -> Any:
        block = signature.bind_partial(caller, *arguments, **options).arguments.get("block")
        view = getattr(caller, "view", caller)
        with client_requests.in_call(view.client, bool(view.block if block is None else block)):
            return plain(caller, *arguments, **options)

    return call


def _numbering_map(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the calls for each rank of which a view's ``map`` consists the number of one call."""

    @wraps(plain)
    def call(function: Any, *sequences: Any, **options: Any) -> Any:
        with client_requests.in_call(function.view.client, blocks=False):
            return plain(function, *sequences, **options)

    return call


def _numbering_requests(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the ranks know of which call a request is, and of which notebook."""

    @wraps(plain)
    def send(client: Any, socket: Any, kind: str, *arguments: Any, **options: Any) -> Any:
        if kind != "signal_request":  # not where a wait, or a cell, asks ranks
            client_requests.end_visits()
            client_requests.refuse_ended(client)
        if kind in ("apply_request", "execute_request"):
            more = client_requests.call_metadata()
            if notebook := os.path.basename(os.environ.get("JPY_SESSION_NAME", "")):
                more = {**more, NOTEBOOK: notebook}
            options["metadata"] = {**(options.get("metadata") or {}), **more}
        request = plain(client, socket, kind, *arguments, **options)
        if TASK_RETRIES in (about := options.get("metadata") or {}):
            client_requests.note_task(request, about["targets"])
        return request

    return send


def _noticing_end(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Has a client of another notebook's ranks look whether these run before it looks for engines:
    without any, ipyparallel advises to wait for them.
    """

    @wraps(plain)
    def build_targets(client: Any, targets: Any) -> Any:
        client_requests.end_visits()
        client_requests.refuse_ended(client)
        return plain(client, targets)

    return build_targets


_CHANGED: dict[str, Callable[[Any], Any]] = {
    "_build_targets": _noticing_end,
    "shutdown": _stopping_ranks,
    "wait": _waiting_for_cell,
    "send_signal": _reaching_ranks,
    "_unwrap_exception": _explaining_errors,
    "_send": _numbering_requests,
    "create_message_futures": keep_notices,
    "_await_futures": show_in_waits,
}


def _profile(options: dict[str, Any]) -> Path:
    """Returns the folder of the profile that ipyparallel would choose."""
    if options.get("profile_dir"):
        return Path(options["profile_dir"]).expanduser()
    place = options.get("ipython_dir") or get_ipython_dir()
    return Path(place, f"profile_{options.get('profile') or 'default'}")


class _HeldCell:
    """Says, once, which ranks cannot begin a cell because a client of another notebook holds them,
    or a task or an interrupted request of this one. Others of this one are awaited before the cell
    is sent. An interrupt of the cell ends those of this one.
    """

    def __init__(self, cell: CellContext, roster: ClusterState) -> None:
        self._cell, self._roster = cell, roster
        self._asks_within: Countdown | None = Countdown(_HELD_SECONDS)
        #: The requests that ranks have named in their answers, now and at the look before.
        self._held, self._known = dict[int, dict[str, str]](), dict[int, dict[str, str]]()
        self._has_said = self._is_left = False
        #: The ranks that had not left the cell at the look before.
        self._pending = cell.ranks

    def look(self) -> bool:
        before, self._pending = self._pending, self._cell.pending()
        if self._cell.interrupts() and not self._is_left:
            self._is_left = True
            # A rank that an interrupt has reached may have left the cell, and not its request.
            self._leave({*before, *self._pending})
        elif self._asks_within is not None and self._asks_within.left() <= 0:
            self._asks_within = None
            self._cell.ask_soon(requests.STATUS, {}, self._take_status, self._pending)
        elif self._held != self._known:  # others may be about to answer
            self._known = {**self._held}
        elif self._held and not self._has_said:
            self._has_said = True
            self._cell.notice(held_cells.held_text(self._held))
        return False

    def _leave(self, ranks: Collection[int]) -> None:
        hellos = self._roster.hellos
        engines = [hellos[rank].engine for rank in ranks if rank in hellos]
        # Not what was queued behind the cell, which a rank begins as soon as it has left the cell.
        client_requests.interrupt_running(engines, self._cell.number)
        if self._has_said:
            self._cell.notice(held_cells.ended_text(self._held))

    def _take_status(self, answer: Answer) -> None:
        if (request := answer.content.get("request")) and answer.rank in self._cell.pending():
            self._held[answer.rank] = request


#: The commands of a feature that `holds_cells`.
_HELD_CELLS: dict[str, Callable[..., Any]] = {
    "await_clients": held_cells.await_clients,
    "held_text": held_cells.held_text,
    "interrupt_clients": held_cells.interrupt_clients,
    "leave_held_cell": held_cells.leave_held_cell,
    "unanswered": held_cells.unanswered,
}


class NotebookClients(NotebookFeature):
    """Patches ``Client`` as long as the extension is loaded, and names its magics in hints."""

    commands = frozenset({"client", "connection_information", "keep_output", *_HELD_CELLS})
    arriving: tuple[type[Record], ...] = ()
    _patch = ProcessChange(ClientPatch)
    _keep_output: Callable[[Record], object]

    def started(self, cluster: ClusterContext) -> None:
        self._clients, self._roster = RankClients(cluster), cluster.roster

    def command(self, name: str, *arguments: Any) -> Any:
        if name in _HELD_CELLS:
            return _HELD_CELLS[name](*arguments)
        if name == "connection_information":
            return self._clients.information
        if name == "keep_output":
            return self._keep(*arguments)
        self.holds_cells = True
        return self._clients.client()

    @contextmanager
    def _keep(self, keep: Callable[[Record], object]) -> Iterator[None]:
        """Within, what the ranks print is also kept."""
        self._keep_output, self.arriving = keep, (Output,)
        try:
            yield
        finally:
            self.arriving = ()

    def message_arriving(self, record: Record, payloads: list[bytes]) -> Record:
        self._keep_output(record)
        return record

    def cell_lasts(self) -> None:
        if (cell := self.cell) is not None and cell.shown:
            cell.poll(_HeldCell(cell, self._roster).look)

    @classmethod
    def loaded(cls, shell: InteractiveShell, undo: ExitStack) -> None:
        # Here: scripts need no magics.
        from allranks.features.ipyparallel import px_magics

        px_magics.hint(shell)
        undo.callback(px_magics.unload, shell)
        undo.enter_context(cls._patch)
        shell.events.register("post_run_cell", _replace_dead)
        undo.callback(shell.events.unregister, "post_run_cell", _replace_dead)


def _replace_dead(_result: object) -> None:
    """Replaces ranks that have died in a request of a view, or says how the user does it.

    Else only the next cell for the ranks would, and further requests of views would fail. The next
    cell may begin with one, so the clients know all new engines first.
    """
    running = cluster.running()
    if running is None or running.roster.caller or not client_requests.are_followed(_key(running)):
        return
    cells, roster = running.cells, running.roster
    with cells.turns.taken_if_free() as free:
        if not free:
            return  # a submitted call begins: it replaces them itself
        known = cells.connection.deaths
        try:
            up = cells.is_up(print)
        except KeyboardInterrupt:  # IPython would show the code of this function
            dead = roster.dead
            then = f"; {label(dead)} will be replaced with the next cell" if dead else ""
            print(f"the wait was interrupted{then}")
            return
        if not up:
            print(running.lost_because)
            return
        if roster.dead and cells.connection.deaths > known:
            print(f"{cells.connection.words.deaths_text()}. Type: {cells.hooks.replaces_ranks}")
    new = {*roster.replaced} - roster.dead.keys()
    with suppress(KeyboardInterrupt):
        client_requests.await_engines(_key(running), {r: roster.hellos[r].engine for r in new})


FEATURE = NotebookClients
