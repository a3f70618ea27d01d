"""The debugger in a rank: debugpy runs its requests in a thread, while the cell runs or is paused.

A paused rank is busy and waits for a person, as at a prompt. An interrupt, or the death of a rank,
ends the pause; until the end of the cell nothing pauses it again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from allranks import collectives
from allranks.collectives import scope
from allranks.collectives.calls.sites import CELLS
from allranks.engine.features import RankContext, RankFeature
from allranks.engine.interrupts import MAIN_THREAD
from allranks.errors import RankLeft
from allranks.features.debugger.records import WAITING, Dap, DebugMessage, DebugSource
from allranks.records.ranks import Activity, ActivityState
from allranks.records.wire import Record, RunCell

if TYPE_CHECKING:
    from allranks.features.debugger.debugpy_client import CellDebugger

#: These change the debugger's state: they are processed in their order, and before the next cell.
_IN_ORDER = {
    *("initialize", "attach", "disconnect", "configurationDone"),
    *("setBreakpoints", "setExceptionBreakpoints"),
}
PAUSED = Activity(
    ActivityState("paused", "‖", is_busy=True, waits=True, asks=True, is_named=True),
    "paused in the debugger",
)
#: Loading debugpy takes seconds, on a busy machine more.
_READY_SECONDS = 120.0
#: An expression that the user evaluates can keep a rank from leaving its pause.
_RESUME_SECONDS = 2.0
_WATCH_SECONDS = 0.05


class RankDebugger(RankFeature):
    """Runs the requests of the front end's debugger."""

    dormant = True
    records = (DebugMessage, DebugSource)

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._debugger: CellDebugger | None = None
        self._next_cell: dict[int, str] = {}
        self._cell_file = ""
        self._paused = 0
        self._resumed = threading.Event()
        self._runs_on = self._again = False

    def started(self, rank: RankContext) -> None:
        self._rank = rank
        self._folder = os.path.join(rank.config.session_dir, f"debugger-{rank.rank}", "")

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        if self._loop is None:
            self._loop = self._start()
        if isinstance(record, DebugSource):
            self._take_source(record)
        elif isinstance(record, DebugMessage):
            self._loop.call_soon_threadsafe(self._begin, record)

    def _start(self) -> asyncio.AbstractEventLoop:
        self._rank.activate(self)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        loop = asyncio.new_event_loop()
        self._lock = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()
        threading.Thread(target=loop.run_forever, name="allranks-debugger", daemon=True).start()
        os.register_at_fork(after_in_child=self._leave_child)
        compiler: Any = self._rank.shell.compile
        named = compiler.get_code_name

        def name_code(raw: str, transformed: str, number: int) -> str:
            name: str = named(raw, transformed, number)
            if self._cell_file and self._debugger is not None:
                self._debugger.name_file(name, self._cell_file)
            return name

        compiler.get_code_name = name_code
        return loop

    def _take_source(self, record: DebugSource) -> None:
        file = os.path.join(self._folder, os.path.basename(record.file))
        with open(file, "w", encoding="utf-8", errors="surrogateescape") as to:
            to.write(record.source)
        if record.cell:
            self._next_cell = {record.cell: file}
        elif record.code_name:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._name_file, record.code_name, file)

    def _name_file(self, code_name: str, file: str) -> None:
        # A copy: a cell may begin meanwhile, in the main thread.
        for name, shown in list(CELLS.items()):
            if shown == code_name:
                self._loaded().name_file(name, file)

    def _loaded(self) -> CellDebugger:
        if self._debugger is None:
            from allranks.features.debugger.debugpy_client import CellDebugger

            self._debugger = CellDebugger(self._folder, self._take_event)
            self._watch = asyncio.ensure_future(self._watch_waits())
        return self._debugger

    def _begin(self, record: DebugMessage) -> None:
        task = asyncio.ensure_future(self._process(record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _process(self, record: DebugMessage) -> None:
        message = record.content
        try:
            if message["command"] in _IN_ORDER:
                async with self._lock:
                    reply = await self._loaded().process_request(message)
            else:
                reply = await self._loaded().process_request(message)
        except Exception as error:
            reply = {"success": False, "message": f"{type(error).__name__}: {error}"}
        answer = {"type": "response", "command": message["command"], **reply}
        self._rank.wire.send(DebugMessage(self._rank.rank, record.request, answer))

    def _take_event(self, event: Dap) -> None:
        if event["event"] == "stopped":
            thread = event["body"]["threadId"]
            if self._runs_on or _is_consequence(event["body"]):
                self._continue(thread)
                return
            self._paused = thread
            self._resumed.clear()
            scope.asks(PAUSED)
            self._rank.wire.send_output()
            self._send_event(event)
        elif event["event"] == "continued":
            self._resume()
            self._send_event(event)

    def _send_event(self, event: Dap) -> None:
        self._rank.wire.send(DebugMessage(self._rank.rank, 0, event))

    def _resume(self) -> None:
        self._paused = 0
        scope.asks()
        self._resumed.set()
        if self._again:
            self._again = False
            # The first one has ended the expression that was evaluated.
            signal.pthread_kill(MAIN_THREAD, signal.SIGINT)

    def _continue(self, thread: int) -> None:
        assert self._debugger is not None
        self._debugger.debugpy.send({"command": "continue", "arguments": {"threadId": thread}})

    def _run_on(self) -> bool:
        """Ends the pause, and those to come in this cell; returns whether the rank runs again."""
        self._runs_on = True
        if self._paused and self._loop is not None:
            self._loop.call_soon_threadsafe(self._continue, self._paused)
            return self._resumed.wait(_RESUME_SECONDS)
        return True

    async def _watch_waits(self) -> None:
        """Informs the notebook when this rank begins and ends to wait for others."""
        waits = False
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            now = bool(self._rank.cell() and not self._paused and collectives.activity())
            if now != waits:
                waits = now
                self._send_event({"type": "event", "event": WAITING, "body": {"waits": now}})

    def cell_started(self, cell: RunCell) -> None:
        assert self._loop is not None
        try:
            asyncio.run_coroutine_threadsafe(self._in_turn(), self._loop).result(_READY_SECONDS)
        except TimeoutError:
            self._rank.notice(
                f"expected debugpy to load within {_READY_SECONDS:g} s, found it still loading: "
                "this cell runs without breakpoints. Run it again."
            )
        self._runs_on = self._again = False
        self._cell_file = self._next_cell.pop(cell.cell, "")
        if self._debugger is not None:
            self._debugger.trace()

    async def _in_turn(self) -> None:
        async with self._lock:  # after all requests that came before the cell
            pass

    def interrupted(self) -> None:
        self._again = not self._run_on()

    def rank_died(self, rank: int, how: str) -> None:
        if self._debugger is not None:
            self._run_on()

    def cell_finished(self, error: BaseException | None) -> None:
        self._untrace()
        self._cell_file = ""

    def hidden_frames(self) -> tuple[str, ...]:
        # An interrupt may be raised in debugpy's trace function.
        return (f"{os.sep}debugpy{os.sep}",)

    def _untrace(self) -> None:
        if self._debugger is not None:
            self._debugger.untrace()

    def _leave_child(self) -> None:
        # A forked process has none of debugpy's threads, which would end its pause.
        with suppress(Exception):
            self._untrace()
        threading.settrace(None)


def _is_consequence(stop: Dap) -> bool:
    # Of an exception on another rank, which has paused that one.
    raised = str(stop.get("text", "")).split()[:1]
    return stop["reason"] == "exception" and raised == [RankLeft.__name__]


FEATURE = RankDebugger
