"""The front end's debugger: it sees the ranks as threads of the kernel, and shows one at a time.

All methods but those that say otherwise run in the kernel's control thread, which answers the front
end while a cell runs. Requests about the kernel itself go to ipykernel's debugger, the others to
ranks. Frames and variables of ranks have numbers of their own (`Numbers`), by which requests find
their rank.

Ranks step together: a step or ``continue`` goes to every paused rank, or after ``%distributed debug
-r 2 --only`` to that rank. The front end hears of a pause once the other ranks have paused too,
wait for a rank, or have left the cell, so that the next step finds them at the same line.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable
from itertools import count
from typing import Any, Protocol

from allranks.errors import (
    AllranksError,
    CellFailed,
    CellInterrupted,
    CellTimeout,
    RankDied,
    UsageError,
)
from allranks.features.debugger.records import CELL_FOLDER, WAITING, Dap, DebugMessage, DebugSource
from allranks.records.ranks import label, parse
from allranks.records.wire import Record

Send = Callable[[Iterable[int], Record], object]
Request = tuple[str, Dap]

#: Thread ids of ranks begin here; those of the kernel's threads are small.
_THREADS = 1_000_000
#: So do numbers of frames and variables; those of the kernel are addresses.
_NUMBERS = 1_000
#: Longest time between the pause of a first rank and the front end's news of it.
_TOGETHER_SECONDS = 2.0
#: The news that a rank waits no longer comes later than its end of the wait.
_SETTLE_SECONDS = 0.3
#: Loading debugpy takes seconds.
_ATTACH_SECONDS = 120.0
#: The kernel answers no other request meanwhile.
_ANSWER_SECONDS = 10.0
#: A list of pauses is short of the ranks that evaluate an expression.
_PLACES_SECONDS = 1.0
_STEPS = ("continue", "next", "stepIn", "stepOut")
#: The arguments that name a frame or a variable of a rank.
_REFERENCES = ("frameId", "variablesReference", "srcFrameId")
#: With these a cell of ranks fails in the notebook.
_OF_RANKS = [[kind.__name__] for kind in (CellFailed, RankDied, CellInterrupted, CellTimeout)]
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
COMMAND = "%distributed debug"
_CHOICE = re.compile(COMMAND + r"(?:\s+(?:-r|--ranks)[ =]*(\S+))?(\s+--only)?")
_CONDITION = re.compile(r"#\s*break\s+if\s+(.+?)\s*$")


def _cell_file(raw: str) -> str:
    # Here, because the start of ranks imports this module, also where no kernel runs.
    from ipykernel.compiler import get_file_name

    path: str = get_file_name(raw)
    return path


class Numbers:
    """Numbers for the frames and variables of all ranks, until they go on."""

    def __init__(self) -> None:
        self._next = count(_NUMBERS)
        self._owners: dict[int, tuple[int, int]] = {}

    def clear(self) -> None:
        # The numbers themselves are not used again: a late request must not find another rank's.
        self._owners.clear()

    def of(self, rank: int, reference: int) -> int:
        if not reference:
            return 0  # a variable without parts
        number = next(self._next)
        self._owners[number] = rank, reference
        return number

    def owner(self, number: Any) -> tuple[int, int] | None:
        """Returns a rank and its own number, None if it is none of a rank."""
        return self._owners.get(number)


class DebuggedRanks:
    """The ranks of one start, as the debugger sees them.

    ``pending`` returns the ranks that are in the cell.
    """

    def __init__(self, size: int, send: Send) -> None:
        self.size = size
        self.send = send
        self.pending: Callable[[], Iterable[int]] = tuple
        #: Those that have been sent ``attach``.
        self.attached: set[int] = set()
        #: The thread of each paused rank.
        self.paused: dict[int, int] = {}
        self.reasons: dict[int, Dap] = {}
        #: Those that begin the cell once they have loaded debugpy.
        self.loading: set[int] = set()
        #: Those that wait in a collective.
        self.waiting: set[int] = set()
        #: Those that make a step, with further steps that the other ranks have begun meanwhile.
        self.stepping: dict[int, list[Request]] = {}


class DebuggedCells(Protocol):
    """Knows which cells run on the ranks; ``every`` if the others are the exception."""

    @property
    def every(self) -> bool: ...

    def for_ranks(self, code: str) -> bool: ...


class DebugSession:
    """Answers the debug requests of one kernel; ``find_ranks`` returns the ranks that run.
    ``set_attached`` is called when a front end begins to debug, and when it ends that.
    """

    def __init__(
        self,
        kernel: Any,
        cells: DebuggedCells,
        find_ranks: Callable[[], DebuggedRanks | None],
        set_attached: Callable[[bool], object],
    ) -> None:
        self._kernel = kernel
        self._local: Callable[[Dap], Any] = kernel.do_debug_request
        self._cells, self._find_ranks, self._set_attached = cells, find_ranks, set_attached
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = Numbers()
        self._requests = count(1)
        self._answers: dict[int, asyncio.Future[Dap]] = {}
        self._tasks = set[asyncio.Future[Dap]]()
        self._events = count(1)
        #: What every rank that attaches later is sent: by command, and by the file of breakpoints.
        self._initialize: Dap = {}
        self._attach: Dap | None = None
        self._lock = threading.Lock()
        self._breakpoints: dict[str, Dap] = {}
        self._exceptions: Dap | None = None
        self._sources: dict[str, str] = {}
        #: The rank that the user has chosen, and the one that the front end shows.
        self._chosen: int | None = None
        self._only = False
        #: Why another rank than the one that steps alone is shown.
        self._notice = ""
        self._shown: int | None = None
        self._last: int | None = None
        self._show_later: asyncio.TimerHandle | None = None
        self._awaits_slow = False
        kernel.do_debug_request = self.request
        _leave_processes_alone()
        # A step into a cell's magic goes on below it.
        kernel.debugger.kernel_modules.append(os.path.join(_PACKAGE, "**"))
        self._publish_local = kernel.debugger.event_callback
        kernel.debugger.event_callback = self._take_local

    @property
    def ranks(self) -> DebuggedRanks | None:
        return self._find_ranks()

    async def request(self, message: Dap) -> Dap:
        """Answers a request of the front end."""
        self._loop = asyncio.get_running_loop()
        command, arguments = message["command"], message.get("arguments") or {}
        try:
            own = getattr(self, f"_on_{command.lower()}", None)
            if own is not None:
                reply: Dap | None = await own(message, arguments)
            else:
                reply = await self._of_rank(message, arguments)
            if reply is None:
                reply = await self._local(message)
        except AllranksError as error:
            reply = {"success": False, "message": str(error), "body": {}}
        assert reply is not None
        seq = message.get("seq", 0)
        return {"type": "response", "command": command, "success": True, **reply} | {
            "request_seq": seq,
            "seq": reply.get("seq", seq),
        }

    async def _on_initialize(self, message: Dap, arguments: Dap) -> Dap:
        self._initialize = arguments
        reply: Dap = await self._local(message)
        return reply

    async def _on_attach(self, message: Dap, arguments: Dap) -> Dap:
        from ipykernel.compiler import get_tmp_directory

        attach = {
            **arguments,
            CELL_FOLDER: f"{get_tmp_directory()}/",
            "justMyCode": bool(self._kernel.debug_just_my_code),
        }
        reply: Dap = await self._local(message)
        self._attach = attach
        self._set_attached(True)
        ranks = self.ranks
        if ranks is not None:
            new, requests = self._to_attach(ranks, range(ranks.size))
            asked = [self._ask(new, command, more, _ATTACH_SECONDS) for command, more in requests]
            await asyncio.gather(*asked)
        return reply

    async def _on_disconnect(self, message: Dap, arguments: Dap) -> None:
        ranks, self._attach = self.ranks, None
        self._set_attached(False)
        self._breakpoints.clear()
        self._exceptions = None
        if ranks is not None:
            attached, ranks.attached = ranks.attached, set()
            await self._ask(attached, "disconnect", arguments)
            self.cell_ended()

    def _to_attach(
        self, ranks: DebuggedRanks, chosen: Iterable[int]
    ) -> tuple[set[int], list[Request]]:
        """Returns which of these ranks have no debugger yet, and the requests that start it."""
        if self._attach is None:
            return set(), []
        with self._lock:
            new = set(chosen) - ranks.attached
            ranks.attached |= new
        if not new:
            return new, []
        for file, source in self._sources.items():
            ranks.send(new, DebugSource(file, source, "", 0))
        history: list[str] = self._kernel.shell.history_manager.input_hist_raw
        for number, raw in enumerate(history):
            if raw and self._cells.for_ranks(raw):
                ranks.send(new, DebugSource(_cell_file(raw), as_sent(raw), f"In[{number}]", 0))
        requests = [("initialize", self._initialize), ("attach", self._attach)]
        requests += [("setBreakpoints", one) for one in self._breakpoints.values()]
        if self._exceptions is not None:
            requests.append(("setExceptionBreakpoints", self._exceptions))
        return new, requests

    def cell_started(self, ranks: DebuggedRanks, cell: int, chosen: Collection[int]) -> None:
        """Prepares a cell that is sent to these ranks next; for the main thread."""
        new, requests = self._to_attach(ranks, chosen)
        ranks.loading = set(new)
        for command, arguments in requests:
            for rank in new:
                # The rank begins the cell when it has processed them.
                ranks.send((rank,), self._message(rank, command, arguments))
        raw = (self._kernel.get_parent("shell") or {}).get("content", {}).get("code", "")
        if self._cells.for_ranks(raw):
            ranks.send(chosen, DebugSource(_cell_file(raw), as_sent(raw), "", cell))

    async def _on_dumpcell(self, message: Dap, arguments: Dap) -> Dap:
        reply: Dap = await self._local(message)
        code, path = arguments["code"], reply["body"]["sourcePath"]
        if self._cells.for_ranks(code):
            self._sources[path] = as_sent(code)
            if self.ranks is not None:
                self.ranks.send(self.ranks.attached, DebugSource(path, as_sent(code), "", 0))
        else:
            self._sources.pop(path, None)
        return reply

    async def _on_setbreakpoints(self, message: Dap, arguments: Dap) -> Dap:
        path = arguments["source"]["path"]
        source = self._sources.get(path)
        points = arguments.get("breakpoints", [])
        if source is not None:
            arguments["breakpoints"] = [with_condition(point, source) for point in points]
        self._breakpoints[path] = arguments
        ranks = self.ranks
        asked = self._ask(ranks.attached if ranks else (), "setBreakpoints", arguments)
        if source is None:
            await asked
            reply: Dap = await self._local(message)
            return reply
        # The kernel would stop at the cell's first line, and not in the cell.
        replies = await asked
        reply = next(iter(replies.values()), {})
        if not reply.get("body"):
            where = {"verified": True, "source": arguments["source"]}
            reply = {"body": {"breakpoints": [{**where, "line": one["line"]} for one in points]}}
        lines = [{"line": one["line"]} for one in reply["body"]["breakpoints"]]
        self._kernel.debugger.breakpoint_list[path] = lines
        return reply

    async def _on_setexceptionbreakpoints(self, message: Dap, arguments: Dap) -> None:
        self._exceptions = arguments
        if self.ranks is not None:
            await self._ask(self.ranks.attached, "setExceptionBreakpoints", arguments)

    async def _on_debuginfo(self, message: Dap, arguments: Dap) -> Dap:
        reply: Dap = await self._local(message)
        if self._shown is not None:
            threads = reply["body"]["stoppedThreads"]
            reply["body"]["stoppedThreads"] = [_THREADS + self._shown, *threads]
        return reply

    async def _on_threads(self, message: Dap, arguments: Dap) -> Dap | None:
        ranks = self.ranks
        if ranks is None or not ranks.paused:
            return None
        found = [
            {"id": _THREADS + rank, "name": f"rank {rank}" + " (paused)" * (rank in ranks.paused)}
            for rank in range(ranks.size)
        ]
        return {"body": {"threads": found}}

    async def _on_allrankspauses(self, message: Dap, arguments: Dap) -> Dap:
        """Returns where each rank is paused, for the sidebar's list; no request of DAP."""
        ranks, found = self.ranks, []
        paused = {} if ranks is None else dict(sorted(ranks.paused.items()))
        asked = [
            self._ask((rank,), "stackTrace", {"threadId": thread, "levels": 1}, _PLACES_SECONDS)
            for rank, thread in paused.items()
        ]
        for rank, replies in zip(paused, await asyncio.gather(*asked), strict=True):
            frames = replies.get(rank, {}).get("body", {}).get("stackFrames", [])
            found.append({"rank": rank, "place": self._place(frames[0]) if frames else ""})
        state = {"shown": self._shown, "only": self._only, "notice": self._notice}
        return {"body": {"pauses": found, **state}}

    def _place(self, frame: Dap) -> str:
        path = frame.get("source", {}).get("path", "")
        # The front end's name of a cell is a file's with a number.
        history: list[str] = self._kernel.shell.history_manager.input_hist_raw
        cells = [n for n, raw in enumerate(history) if raw and _cell_file(raw) == path]
        file = f"In[{cells[-1]}]" if cells else os.path.basename(path)
        name = frame["name"]
        return f"{file}:{frame['line']}" + (f"  {name}" if name != "<module>" else "")

    async def _on_inspectvariables(self, message: Dap, arguments: Dap) -> Dap | None:
        ranks, rank = self.ranks, self._shown
        if rank is None and self._cells.every and ranks is not None and not set(ranks.pending()):
            rank = self._chosen or 0
        if rank is None or ranks is None or rank not in ranks.attached:
            return None
        return await self._answer(rank, "inspectVariables", arguments)

    async def _on_source(self, message: Dap, arguments: Dap) -> Dap:
        reply: Dap = await self._local(message)
        if not reply.get("success") and self._shown is not None:
            # A file of another host.
            reply = await self._answer(self._shown, "source", arguments)
        return reply

    async def _on_evaluate(self, message: Dap, arguments: Dap) -> Dap | None:
        expression = arguments["expression"].strip()
        if not expression.startswith(COMMAND):
            return await self._of_rank(message, arguments)
        return {"body": {"result": self._choose(expression), "variablesReference": 0}}

    async def _on_richinspectvariables(self, message: Dap, arguments: Dap) -> Dap | None:
        if "frameId" in arguments or not self._cells.every or self.ranks is None:
            return await self._of_rank(message, arguments)
        if not self.ranks.attached or set(self.ranks.pending()):
            return None
        return await self._answer(self._chosen or 0, "richInspectVariables", arguments)

    def _take_local(self, event: Dap) -> None:
        body = event.get("body", {})
        raised = str(body.get("text", "")).split()[:1]
        if event["event"] != "stopped" or raised not in _OF_RANKS:
            self._publish_local(event)
            return
        # It has paused the rank, where it was raised.
        onward = {"type": "request", "command": "continue", "seq": event["seq"], "arguments": body}
        task = asyncio.ensure_future(self._local(onward))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _of_rank(self, message: Dap, arguments: Dap) -> Dap | None:
        """Answers a request about a thread, a frame or a variable of a rank; else returns None."""
        command = message["command"]
        thread = arguments.get("threadId", 0)
        if command in _STEPS and self._shown is not None:
            # JupyterLab sends "continue" for thread 1, whichever it shows.
            return await self._step(self._shown, command, arguments)
        if isinstance(thread, int) and thread >= _THREADS:
            rank = thread - _THREADS
            return await self._answer(rank, command, arguments)
        for name in _REFERENCES:
            owner = self._numbers.owner(arguments.get(name))
            if owner is not None:
                rank, reference = owner
                return await self._answer(rank, command, {**arguments, name: reference})
        return None

    async def _answer(self, rank: int, command: str, arguments: Dap) -> Dap:
        """Returns the answer of one rank, with its frames and variables renumbered."""
        ranks = self.ranks
        if ranks is not None and "threadId" in arguments:
            if rank not in ranks.paused:
                raise UsageError(f"rank {rank} is not paused. Choose from {self._list_paused()}")
            arguments = {**arguments, "threadId": ranks.paused[rank]}
        replies = await self._ask((rank,), command, arguments)
        if rank not in replies:
            raise UsageError(
                f"expected an answer of rank {rank} to {command} within {_ANSWER_SECONDS:g} s, "
                "found none. Interrupt the kernel to end the pause"
            )
        reply = replies[rank]
        for frame in reply.get("body", {}).get("stackFrames", []):
            frame["id"] = self._numbers.of(rank, frame["id"])
            frame["name"] = f"rank {rank}: {frame['name']}"
        self._renumber(rank, reply.get("body", {}))
        return reply

    def _renumber(self, rank: int, body: Dap) -> None:
        for one in (body, *body.get("scopes", []), *body.get("variables", [])):
            if "variablesReference" in one:
                one["variablesReference"] = self._numbers.of(rank, one["variablesReference"])

    async def _step(self, rank: int, command: str, arguments: Dap) -> Dap:
        ranks = self.ranks
        assert ranks is not None
        self._notice = ""
        request = command, arguments
        if not self._only:
            for one in set(ranks.stepping) - set(ranks.paused) - ranks.waiting:
                ranks.stepping[one].append(request)  # it is slow, and follows
        for one in [rank] if self._only else list(ranks.paused):
            self._resume(ranks, one, request)
        self._hide()
        self._show_soon()
        return {"body": {"allThreadsContinued": not self._only}}

    def _resume(self, ranks: DebuggedRanks, rank: int, request: Request) -> None:
        command, arguments = request
        thread = ranks.paused.pop(rank, None)
        if thread is None:
            return
        ranks.stepping.pop(rank, None)
        if command != "continue":
            ranks.stepping[rank] = []
        ranks.send((rank,), self._message(rank, command, {**arguments, "threadId": thread}))

    def _choose(self, expression: str) -> str:
        """Chooses the rank that is shown, and whether it steps alone: `COMMAND`."""
        found, ranks = _CHOICE.fullmatch(expression), self.ranks
        if found is None or ranks is None:
            raise UsageError(f"expected a rank, found {expression!r}. Type: {COMMAND} -r 2")
        (chosen, *more) = (self._shown,) if found[1] is None else parse(found[1], ranks.size)
        if more or chosen not in ranks.paused:
            raise UsageError(
                f"expected a rank that is paused ({self._list_paused()}), found "
                f"{found[1] or 'none'}. Type: {COMMAND} -r {min(ranks.paused, default=0)}"
            )
        self._chosen, self._only, self._notice = chosen, bool(found[2]), ""
        if self._shown != chosen:
            self._show(chosen)
        how = "steps alone" if self._only else f"is shown; {self._list_paused()} step together"
        return f"rank {chosen} {how}"

    def _list_paused(self) -> str:
        return label(self.ranks.paused) if self.ranks and self.ranks.paused else "none"

    def take(self, ranks: DebuggedRanks, record: DebugMessage) -> None:
        """Takes a message of a rank, in the thread that receives it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._take, ranks, record)

    def _take(self, ranks: DebuggedRanks, record: DebugMessage) -> None:
        if record.request:
            if record.content["command"] == "attach":
                ranks.loading.discard(record.rank)
            answer = self._answers.pop(record.request, None)
            if answer is not None and not answer.done():
                answer.set_result(record.content)
        elif ranks is self.ranks:
            self._take_event(ranks, record.rank, record.content)

    def _take_event(self, ranks: DebuggedRanks, rank: int, event: Dap) -> None:
        name, body = event["event"], event.get("body", {})
        if name == "stopped":
            ranks.paused[rank], ranks.reasons[rank] = body["threadId"], body
            follows = ranks.stepping.get(rank)
            if follows:
                first, *rest = follows
                self._resume(ranks, rank, first)
                ranks.stepping[rank] = rest
            # A rank that waits may have been waiting for this one.
            self._forget_timer()
            if rank == self._chosen and rank in ranks.paused and self._shown not in (None, rank):
                self._show(rank)  # in place of another one, which came first
        elif name == WAITING:
            (ranks.waiting.add if body["waits"] else ranks.waiting.discard)(rank)
        elif name == "continued":
            # After a step it is no longer among the paused: this is an interrupt, or a death.
            self._forget(rank)
        self._show_soon()

    def rank_died(self, rank: int) -> None:
        """Ends the pause of a rank that has died; for any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._forget, rank)

    def _forget(self, rank: int) -> None:
        gone = self.ranks is not None and self.ranks.paused.pop(rank, None) is not None
        if gone and rank == self._shown:
            self._hide()

    def cell_ended(self) -> None:
        """Ends all pauses: no rank is in the cell any longer. For any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self.ranks is not None:
            self.ranks.paused.clear()
            self.ranks.waiting.clear()
            self.ranks.stepping.clear()
        self._hide()
        self._last, self._only, self._notice = None, False, ""

    def look(self) -> None:
        """Shows a pause if no rank is awaited any longer; for any thread."""
        if self._loop is not None and self._shown is None:
            self._loop.call_soon_threadsafe(self._show_soon)

    def _show_soon(self) -> None:
        """Shows a paused rank, once the others have paused too or cannot pause."""
        ranks = self.ranks
        if ranks is None or not ranks.paused or self._shown in ranks.paused:
            return
        awaited = set(ranks.pending()) - set(ranks.paused)
        if not awaited:
            self._show_now()
            return
        if self._only and self._chosen in awaited - ranks.waiting:
            self._forget_timer()
            return  # the others are where they were
        if awaited & ranks.loading:
            return
        slow = bool(awaited - ranks.waiting)
        if self._show_later is not None and slow != self._awaits_slow:
            self._forget_timer()
        if self._show_later is None and self._loop is not None:
            seconds = _TOGETHER_SECONDS if slow else _SETTLE_SECONDS
            self._show_later = self._loop.call_later(seconds, self._show_now)
            self._awaits_slow = slow

    def _show_now(self) -> None:
        self._forget_timer()
        ranks = self.ranks
        if ranks is not None and ranks.paused and self._shown is None:
            if self._only and self._chosen not in ranks.paused:
                self._end_steps_alone(ranks)
            wanted = (self._chosen, self._last, min(ranks.paused))
            self._show(next(rank for rank in wanted if rank in ranks.paused))

    def _end_steps_alone(self, ranks: DebuggedRanks) -> None:
        # Another rank is shown next, which would go on alone, and the user has not chosen it.
        waits = self._chosen in set(ranks.pending())
        verb = "is" if len(ranks.paused) == 1 else "are"
        why = f"waits while {self._list_paused()} {verb} paused" if waits else "has left the cell"
        self._notice = f"rank {self._chosen} {why}: all paused ranks step together again"
        self._only = False

    def _show(self, rank: int) -> None:
        assert self.ranks is not None
        self._shown = self._last = rank
        body = {**self.ranks.reasons[rank], "threadId": _THREADS + rank, "allThreadsStopped": True}
        self._publish("stopped", body)

    def _hide(self) -> None:
        self._forget_timer()
        self._numbers.clear()
        if self._shown is not None:
            thread, self._shown = _THREADS + self._shown, None
            self._publish("continued", {"threadId": thread, "allThreadsContinued": True})

    def _forget_timer(self) -> None:
        if self._show_later is not None:
            self._show_later.cancel()
            self._show_later = None

    def _publish(self, name: str, body: Dap) -> None:
        event = {"type": "event", "event": name, "seq": next(self._events), "body": body}
        self._kernel._publish_debug_event(event)

    def _message(self, rank: int, command: str, arguments: Dap) -> DebugMessage:
        number = next(self._requests)
        content = {"type": "request", "seq": number, "command": command, "arguments": arguments}
        return DebugMessage(rank, number, content)

    def _ask(
        self,
        chosen: Iterable[int],
        command: str,
        arguments: Dap,
        seconds: float = _ANSWER_SECONDS,
    ) -> Awaitable[dict[int, Dap]]:
        """Sends a request at once; returns the answers that come in time."""
        assert self._loop is not None
        answers: dict[int, asyncio.Future[Dap]] = {}
        for rank in chosen:
            message = self._message(rank, command, arguments)
            answers[rank] = self._answers[message.request] = self._loop.create_future()
            if self.ranks is not None:
                self.ranks.send((rank,), message)

        async def wait() -> dict[int, Dap]:
            if answers:
                await asyncio.wait(answers.values(), timeout=seconds)
            return {rank: one.result() for rank, one in answers.items() if one.done()}

        return wait()


def _leave_processes_alone() -> None:
    # debugpy adds its server to the command of each Python that the kernel starts, and the host
    # agent would wait for it. A front end may have started debugpy before this extension.
    from _pydev_bundle import pydev_monkey  # type: ignore[import-not-found]

    pydev_monkey._get_apply_arg_patching = lambda: False


def as_sent(raw: str) -> str:
    """Returns a cell with its magic as a comment, as ranks compile it."""
    return f"# {raw}" if raw.startswith("%%") else raw


def with_condition(point: Dap, source: str) -> Dap:
    """Returns a breakpoint with the condition of its line: ``# break if rank == 2``."""
    lines = source.splitlines()
    line = lines[point["line"] - 1] if point["line"] <= len(lines) else ""
    found = _CONDITION.search(line)
    return {**point, "condition": found[1]} if found and "condition" not in point else point
