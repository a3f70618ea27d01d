"""ipyparallel on a rank: its engine, and the output, signals and errors of clients' requests."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import signal
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from allranks.collectives import world
from allranks.collectives.calls.frames import frames_of_threads, no_collection
from allranks.collectives.calls.rank_state import RankState
from allranks.collectives.calls.sites import OURS, USER, has_user_line, kind_of
from allranks.engine.epochs import other_ranks
from allranks.engine.exceptions import interrupted_wait
from allranks.engine.features import RankContext, RankFeature
from allranks.engine.interrupts import Interrupts
from allranks.engine.kernel import LAST_ANSWER_SECONDS, KernelStart
from allranks.engine.transcript import Entry
from allranks.features.ipyparallel.engine import RankEngine
from allranks.features.ipyparallel.metadata import (
    BLOCKS,
    CALL,
    CELL,
    CLIENT,
    NOTEBOOK,
    NOTICE_OF,
    REQUESTS,
    RUNS,
    TASK_RETRIES,
)
from allranks.records.wire import Ends

_ERROR = ("ename", "evalue", "traceback")
#: A request of a client, in place of the number of a cell.
_CLIENT = -1
#: An interrupt is answered when the request has ended, or after this time. ipyparallel's client
#: waits for the answer, so that its next request on all ranks meets none that has yet to fail.
INTERRUPTED_SECONDS = 2.0

#: The file name of the line by which ipyparallel calls a function.
_CALL = "<string>"

#: How interrupted requests fail: those that await are cancelled.
_INTERRUPTED = (KeyboardInterrupt.__name__, asyncio.CancelledError.__name__)


class _NoShellThread:
    """Stands for the thread that ipykernel has for its shell channel, and engines have not."""

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


class ClientRequests(RankFeature):
    """Runs requests in the engine's kernel as cells run.

    A request that fails ends the epoch if messages of MPI may be on their way, as a cell does. The
    next request of a direct view begins another one. Tasks do not: they belong to one rank, and
    need not wait for others.

    Requests that wait behind a failed one are not run. Other ranks may run them: there, a wait for
    this rank ends. So does a wait in a collective that this rank has left out of its part of a
    blocking call of a view. A request waits for a cell that came earlier, which may await.
    """

    def kernel(self, start: KernelStart) -> RankEngine:
        engine = RankEngine(start)
        engine.initialize([])
        return engine

    def started(self, rank: RankContext) -> None:
        warnings.filterwarnings("ignore", module=r"ipyparallel(\.|$)")  # it runs beside the cells
        kernel = self._kernel = rank.shell.kernel  # type: ignore[attr-defined]
        self._wire, self._interrupts, self._epochs = rank.wire, rank.interrupts, rank.epochs
        self._cell_ends = rank.cell_ends
        self._loop = asyncio.get_running_loop()
        #: The error of the request.
        self._failed: list[Entry] = []
        #: Whether a request runs, and no cell: an awaited cell lets requests run.
        self._alone = False
        self._is_task = self._was_interrupted = False
        #: The id of the request that runs, and of those that are to end before they begin.
        self._ids, self._left_out = frozenset[str](), set[str]()
        #: Whether the main thread has looked whether that request is to end before it begins.
        self._has_begun = False
        #: The last cell that this rank had begun, or left out, when it began that request.
        self._after_cell = 0
        #: The error whose traceback was the last before the request.
        self._shown_before: BaseException | None = None
        self._execute, self._apply = kernel.do_execute, kernel.do_apply
        self._abort_queues, self._abort = kernel._abort_queues, kernel._send_abort_reply
        # ipykernel looks there for the main thread before it awaits.
        kernel.shell_channel_thread = _NoShellThread()
        type(kernel)._supports_kernel_subshells = False  # there, any thread would mean yes
        kernel.do_execute, kernel.do_apply = self._do_execute, self._do_apply
        kernel._abort_queues, kernel._send_abort_reply = self._drop_all, self._drop
        for name in ("execute_request", "apply_request"):
            kernel.shell_handlers[name] = partial(self._answer, kernel.shell_handlers[name])
        # In the control channel's thread.
        kernel.control_handlers["signal_request"] = self._signal
        shut_down = kernel.control_handlers["shutdown_request"]
        kernel.control_handlers["shutdown_request"] = partial(self._shut_down, shut_down)

    async def _answer(
        self, handle: Callable[..., Any], stream: Any, ident: Any, parent: dict[str, Any]
    ) -> None:
        await self._cell_ends()
        self._failed.clear()
        self._shown_before = _last_shown()
        publish = partial(_publish, self._kernel, parent)
        with self._wire.output_for_client(publish) as alone, _like_a_cell(self._interrupts, alone):
            this, threads = world.current(), {*threading.enumerate()}
            try:  # from here on an interrupt may be for this request
                self._after_cell, self._has_begun = self._wire.cell, False
                self._alone, self._epochs.in_request = alone, _about(parent)
                self._ids = _ids_of(parent)
                self._is_task = TASK_RETRIES in parent["metadata"]
                this.serve(_client_of(parent) if alone else 0)
                this.request = 0 if self._is_task or not alone else _number_of(parent, this.rank)
                this.part = this.request if parent["metadata"].get(BLOCKS) else 0
                done = handle(stream, ident, parent)
                if inspect.isawaitable(done):
                    await done
            finally:
                self._ids, self._epochs.in_request = frozenset(), None
                this.serve(0)
                part, this.request, this.part = this.part, 0, 0
                self._shown_before = None  # it has the variables of its frames
                if part and not _goes_on(this, threads):
                    this.end_part(part)
        publish(self._failed)

    async def _do_execute(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        reply = self._prepare("execute")
        if reply is None:
            reply = await self._execute(*arguments, **options)
        self._note(reply)
        if reply["status"] == "error":
            self._failed.append(["error", {name: reply[name] for name in _ERROR}])
        return reply

    def _do_apply(self, *arguments: Any) -> tuple[dict[str, Any], list[Any]]:
        reply, result = self._prepare("apply"), list[Any]()
        if reply is None:
            with _from_function(self._kernel.shell):
                reply, result = self._apply(*arguments)
        self._note(reply)
        return reply, result

    def _prepare(self, method: str) -> dict[str, Any] | None:
        """Begins another epoch if a request needs one; returns the error that ends the request."""
        try:
            # First: from now on a signal ends it, in here or in its code, and it is answered.
            self._has_begun = True
            if self._has_taken():
                raise KeyboardInterrupt("the request was interrupted before this rank began it")
            if self._alone and not self._is_task:
                self._epochs.enter()
        except BaseException as error:
            shell = self._kernel.shell
            shell.showtraceback()
            told = {"ename": type(error).__name__, "evalue": str(error)}
            told["engine_info"] = self._kernel.get_engine_info(method=method)
            return {"status": "error", "traceback": shell._last_traceback or [], **told}
        return None

    def _note(self, reply: dict[str, Any]) -> None:
        """Ends the epoch if a rank has failed in this request and messages may be on their way.

        Called before the client has the reply, so its next request finds the epoch ended.
        """
        self._ids = frozenset()  # from now on a signal would end the reply
        if not self._alone:
            return
        this = world.current()
        self._epochs.note_use()
        if reply["status"] == "error":
            shown = _last_shown()
            if shown is not self._shown_before and (waited := interrupted_wait(shown, "request")):
                reply["evalue"] = waited
            self._was_interrupted = reply["ename"] in _INTERRUPTED
            self._epochs.fail_request(
                this.request, f"has failed in a request of a client ({reply['ename']})"
            )
        elif this.traffic and this.shared_by_all and any(map(this.has_failed, other_ranks(this))):
            this.spoil("has sent messages in a request of a client that has failed elsewhere")

    def _drop_all(self, *arguments: Any) -> None:
        # The next request of a client may overtake the end of an interrupted one.
        if not self._was_interrupted:
            self._abort_queues(*arguments)

    def _drop(self, stream: Any, parent: dict[str, Any], ident: Any) -> None:
        number = _number_of(parent, world.current().rank)
        self._epochs.fail_request(
            number, "has not run a request of a client, because an earlier one had failed"
        )
        self._abort(stream, parent, ident)

    async def _shut_down(
        self, handle: Callable[..., Any], stream: Any, ident: Any, parent: dict[str, Any]
    ) -> None:
        self._wire.send(Ends(self._kernel.int_id, "an ipyparallel client has shut it down"))
        await handle(stream, ident, parent)

    def _signal(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        asked, interrupts = parent["content"]["sig"], self._interrupts
        content: dict[str, Any] = {"status": "ok"}
        try:
            number = signal.Signals[asked] if isinstance(asked, str) else asked
            if number:
                number = signal.Signals(number)
        except (KeyError, ValueError):
            found = f"expected 0 or a signal such as SIGINT or SIGKILL, found {asked!r}"
            content = {"status": "error", "ename": "UsageError", "evalue": found}
            content |= {"traceback": [f"UsageError: {found}"]}
        else:
            if number not in (0, signal.SIGINT):
                kill = threading.Timer(LAST_ANSWER_SECONDS, os.kill, (os.getpid(), number))
                kill.daemon = True
                kill.start()
            elif (runs := self._runs_other(parent, number != 0)) is not None:
                content[RUNS] = runs
            elif number:
                interrupts.send(_CLIENT, early=False)
                # ipykernel's handler, for requests that await, does not wake the loop.
                self._loop.call_soon_threadsafe(int)
                interrupts.wait_for_end(INTERRUPTED_SECONDS)
        self._kernel.session.send(stream, "signal_reply", content, parent=parent, ident=ident)

    def _runs_other(self, signal: dict[str, Any], interrupts: bool) -> str | None:
        """Returns what runs here that a signal is not for, in words, "" for nothing; None if it is
        for what runs. One that does not interrupt only asks this.
        """
        content, runs = signal["content"], self._epochs.in_request
        asked = content.get(REQUESTS, ())
        is_for_running = (
            self._is_for_running(content) if interrupts else not self._ids.isdisjoint(asked)
        )
        if not self._interrupts.heard:
            return ""
        if self._interrupts.number != _CLIENT:
            return world.current().scope.name
        if is_for_running:
            return None
        is_over = bool(self._ids.intersection(asked)) or not self._left_out.isdisjoint(self._ids)
        if runs is None or is_over or not self._ids:  # it ends by itself, or has
            return ""
        if runs["client"] == signal["header"]["session"]:
            return "an earlier request of this client"
        notebook = f" ({runs['notebook']})" if runs["notebook"] else ""
        return f"a request of another client{notebook}"

    def _is_for_running(self, interrupt: dict[str, Any]) -> bool:
        """Whether an interrupt is for the request that runs; notes those that have yet to begin."""
        asked, client = interrupt.get(REQUESTS, ()), interrupt.get(CLIENT)
        self._left_out.update(asked)
        ids, runs = self._ids, self._epochs.in_request
        if ids.isdisjoint(asked):
            came_after = self._after_cell >= interrupt.get(CELL, math.inf)
            is_of_client = runs is not None and runs["client"] == client and not came_after
            is_for_any = client is None and not asked
            if not ids or not self._alone or not (is_of_client or is_for_any):
                return False
            self._left_out.add(min(ids))
        # Before, a signal would end the request without an answer.
        return self._has_begun and self._has_taken()

    def _has_taken(self) -> bool:
        """Whether the caller is to end the request: the main thread before it begins, or a signal;
        not both.
        """
        for one in self._ids:
            with suppress(KeyError):
                self._left_out.remove(one)
                return True
        return False


def _last_shown() -> BaseException | None:
    """Returns the error whose traceback IPython has shown last."""
    return getattr(sys, "last_value", None)


def _number_of(parent: dict[str, Any], rank: int) -> int:
    """Returns a request's `RankState.request`.

    Clients in a notebook with allranks number the calls of views. Others count their messages, and
    a view of all ranks sends one to each, in their order. That to a broadcast view is a single one.
    """
    broadcast = parent["metadata"].get("original_msg_id")
    _, _, count = _id_of(parent).rpartition("_")
    if not count.isdecimal():
        return 0
    number = parent["metadata"].get(CALL) or max(1, int(count) - (0 if broadcast else rank))
    return _client_of(parent) << 32 | number


def _client_of(parent: dict[str, Any]) -> int:
    """Returns the number of a request's client, as `RankState.client` has it."""
    return zlib.crc32(parent["header"]["session"].encode()) or 1


def _about(parent: dict[str, Any]) -> dict[str, str]:
    """Returns `RankEpochs.in_request` for a request."""
    _, _, process = _id_of(parent).rpartition("_")[0].partition("_")
    notebook = parent["metadata"].get(NOTEBOOK) or (process and f"process {process}")
    return {"client": parent["header"]["session"], "notebook": notebook}


def _id_of(parent: dict[str, Any]) -> str:
    """Returns the id that a client has given to a request, or to all those of a broadcast."""
    found: str = parent["metadata"].get("original_msg_id") or parent["header"]["msg_id"]
    return found


def _ids_of(parent: dict[str, Any]) -> frozenset[str]:
    """Returns the ids by which a client may mean this rank's part of a request: a broadcast view
    has one for all ranks, and may have one for each.
    """
    return frozenset((_id_of(parent), parent["header"]["msg_id"]))


def _goes_on(this: RankState, threads: set[threading.Thread]) -> bool:
    """Whether a rank may make collective calls after a request that began with these threads."""
    if this.pending or not threads.issuperset(threading.enumerate()):
        return True  # a new one may not have come to a line of the user yet
    with no_collection():
        running = frames_of_threads()
        del running[threading.get_ident()]
        if any(map(has_user_line, running.values())):
            return True
    codes = (getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks())
    return any(code is not None and kind_of(code.co_filename) == USER for code in codes)


@contextmanager
def _like_a_cell(interrupts: Interrupts, alone: bool) -> Iterator[None]:
    """Lets interrupts end a request, and lets it call collectives without a notice."""
    if not alone:  # a cell does this
        yield
        return
    this = world.current()
    this.notebook = True  # it may come before the first cell of this process
    reported, this.strays_reported = this.strays_reported, True
    interrupts.number, interrupts.count = _CLIENT, 0
    interrupts.hear()
    try:
        yield
    finally:
        interrupts.hear_no_more()
        this.strays_reported = reported


@contextmanager
def _from_function(shell: Any) -> Iterator[None]:
    """Lets tracebacks begin with the function of a request, not with the lines that call it."""
    show = shell.showtraceback

    def show_function(*raised: Any, **options: Any) -> None:
        if raised or options:  # IPython shows another error than that of the request
            show(*raised, **options)
            return
        error = sys.exc_info()[1]
        assert error is not None
        called = error.__traceback__
        while called is not None and called.tb_frame.f_code.co_filename != _CALL:
            called = called.tb_next
        below = called and called.tb_next
        if below is not None and kind_of(below.tb_frame.f_code.co_filename) == OURS:
            below = called  # else the traceback of a function of allranks would have its frames
        if below is None:
            show((type(error), error, error.__traceback__))
        else:  # older versions of IPython leave the first frame out
            show((type(error), error, below), tb_offset=0)

    shell.showtraceback = show_function
    try:
        yield
    finally:
        if shell.showtraceback is show_function:  # the function may replace it, as rich does
            shell.showtraceback = show


def _publish(kernel: Any, parent: dict[str, Any], entries: list[Entry]) -> None:
    for kind, *rest in entries:
        content: dict[str, Any]
        metadata = {}
        if kind in ("display", "update", "result"):
            name = {"display": "display_data", "update": "update_display_data"}.get(kind)
            content = {"data": rest[0], "metadata": rest[1], "transient": {}}
            if name is None:
                name = "execute_result"
                content["execution_count"] = kernel.shell.execution_count
            elif rest[2] is not None:
                content["transient"]["display_id"] = rest[2]
        elif kind == "error":
            name, content = "error", rest[0]
        elif kind == "clear":
            name, content = "clear_output", {"wait": rest[0]}
        elif kind == "hidden":
            name = "stream"
            lines, nbytes = rest
            what = f"{lines:,} lines ({nbytes:,} bytes)" if lines else f"{nbytes:,} bytes"
            text = f"{what} are only in the rank's log\n"
            content = {"name": "stderr", "text": text}
        elif kind in ("out", "err", "notice"):
            name = "stream"
            content = {"name": "stdout" if kind == "out" else "stderr", "text": rest[0]}
            if kind == "notice":
                content["text"] += "\n"
                metadata[NOTICE_OF] = kernel.int_id
        else:
            continue
        topic = kernel._topic(name)
        kernel.session.send(
            kernel.iopub_socket, name, content, parent=parent, ident=topic, metadata=metadata
        )


FEATURE = ClientRequests
