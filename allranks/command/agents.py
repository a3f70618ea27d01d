"""``allranks mcp``: tools with which an agent runs cells on ranks, over standard input and output.

Every tool returns a text within two seconds (`in_time`), also while ranks hang, and of at most
about 2,000 tokens; the rest of a longer one is read from an offset. The Model Context Protocol
itself is the package mcp's.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from allranks.cluster.cell_run import CapturedOutput
from allranks.cluster.cluster import Cluster
from allranks.cluster.failures import RankStatus, plain, read_statuses
from allranks.cluster.options import ClusterOptions
from allranks.errors import (
    AllranksError,
    CellFailed,
    CellInterrupted,
    MissingDependency,
    UsageError,
)
from allranks.notebook import load_features
from allranks.records import ranks as rank_lists
from allranks.records import requests
from allranks.records.config import MAX_RANKS
from allranks.records.ranks import label
from allranks.records.wire import Answer, Hello
from allranks.widgets.dashboard.tables import call_table, rank_table
from allranks.widgets.dashboard.view import TerminalDashboard

#: A token is about four characters of English, and fewer of code.
_LONGEST = 6000
#: The longest time until a tool replies. Its own waits are shorter: usually its own reply comes.
REPLY_SECONDS = 1.8
_WAIT_SECONDS, _STATUS_SECONDS = 1.5, 0.8
_LEAST_SECONDS = 1.0
_KEPT_CELLS = 50
_VALUE_LENGTH, _HEADLINE_LENGTH = 400, 300
_NO_RANKS = "No ranks run: the next cell starts them."
_INSTRUCTIONS = """Runs Python cells on every rank of an MPI cluster, each with rank, size, comm,
allreduce, broadcast, barrier and so on. `run` returns soon; ask `state` while a cell runs: it says
which rank waits for which, and where. The rank that caused an error comes first in its text.
Variables stay on the ranks from cell to cell."""


class _Transcript(TerminalDashboard):
    """Keeps the folded output of a cell, and its timings, instead of printing them."""

    def __init__(self, hellos: list[Hello], log_dir: str) -> None:
        super().__init__("auto", hellos, log_dir, fold=True)
        self.parts: list[str] = []

    def write(self, text: str) -> None:
        self.parts.append(plain(text) + "\n")

    def finish(self) -> None:
        # Without the tables that a terminal gets: `timings` returns them on request.
        self._print()
        if self.figures is not None:
            self.figures.end()


@dataclass
class _CellRecord:
    number: int
    source: str
    view: _Transcript | None = None
    began: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    error: str = ""
    #: The error in a line.
    headline: str = ""
    #: Whether it was interrupted, also before its ranks had started.
    interrupted: bool = False

    def title(self) -> str:
        if self.seconds is None:
            return f"cell {self.number} has run for {time.monotonic() - self.began:.1f} s"
        how = f"failed: {self.headline}" if self.error else "ended well"
        return f"cell {self.number} {how}, after {self.seconds:.1f} s"

    def output(self) -> str:
        return "" if self.view is None else "".join(self.view.parts)


class AgentTools:
    """The tools. Ranks start with the first cell, and end with the tools.

    Args:
        options: of the ranks; their number is the largest that the agent gets.
        seconds: how long cells may run, and values may be read, all together. Then the ranks end,
            with the threads and the processes that cells have left.
    """

    def __init__(self, options: ClusterOptions, seconds: float) -> None:
        load_features()
        # Made, not started: a client lists the tools long before it needs ranks, if ever.
        self._cluster: Cluster = options.make(_limited)
        self._budget = seconds
        self._cells: dict[int, _CellRecord] = {}
        self._count = 0
        self._used = 0.0
        # The cluster is used by one thread at a time; questions and interrupts may come from any.
        self._thread = ThreadPoolExecutor(1, "allranks-cells")
        self._running: Future[Any] | None = None
        # Calls come from several threads: one of them begins something.
        self._lock = threading.Lock()

    def tools(self) -> list[Callable[..., str]]:
        own = (self.run, self.state, self.output, self.error, self.values, self.timings,
               self.interrupt, self.restart)  # fmt: skip
        return [in_time(tool) for tool in own]

    def run(self, source: str, ranks: str = "all", timeout: float = 0.0) -> str:
        """Runs a cell on ranks, as "all" or "0,2-3". Returns its report, or after 1.5 s that it
        still runs. A timeout in seconds ends the cell on all ranks.
        """
        with self._lock:
            if spent := self._spent():  # first, because the ranks may still be ending
                return spent
            if self._is_busy():
                return f"{self._latest().title()}. Wait for its end, or call interrupt."
            left = self._left
            self._count += 1
            cell = self._cells[self._count] = _CellRecord(self._count, source)
            # The transcripts of a day would fill the memory; the logs have all of them.
            self._cells.pop(self._count - _KEPT_CELLS, None)
            limit = min(timeout, left) if timeout > 0 else left
            self._running = self._thread.submit(self._run, cell, ranks, limit)
        self._wait()
        return self._report(cell)

    def _run(self, cell: _CellRecord, ranks: str, limit: float) -> None:
        cluster = self._cluster
        try:
            cluster.start()
            if cell.interrupted:
                raise CellInterrupted("The cell was interrupted before it began.")
            cell.began = time.monotonic()
            chosen = rank_lists.parse(ranks, cluster.size)
            hellos = [cluster.hellos[rank] for rank in chosen]
            cell.view = _Transcript(hellos, cluster.log_dir)
            run = cluster.cells.begin(
                cell.source,
                name=f"cell In[{cell.number}]",
                number=cell.number,
                ranks=chosen,
                timeout=limit,
                view=cell.view,
            )
            cluster.cells.wait(run)
        except Exception as error:
            text = plain(str(error)) or type(error).__name__
            cell.headline = text.splitlines()[0].rstrip(".")[:_HEADLINE_LENGTH]
            cell.error = plain(error.text) if isinstance(error, CellFailed) else text
        finally:
            cell.seconds = time.monotonic() - cell.began
            self._use(cell.seconds)

    @property
    def _left(self) -> float:
        return self._budget - self._used

    def _use(self, seconds: float) -> None:
        """Counts seconds of the budget; ends the ranks if that was the last of it."""
        self._used += seconds
        if self._spent():
            self._cluster.stop()

    def _spent(self) -> str:
        """Returns that the budget is used up; "" if it is not."""
        if self._left >= _LEAST_SECONDS:
            return ""
        return (
            f"The cells have run for {self._used:.0f} s, and may run for {self._budget:.0f} s, so "
            "the ranks have ended. Ask the user to start allranks mcp with more --seconds."
        )

    def state(self) -> str:
        """Returns what every rank does: computes at a line, or waits for which rank."""
        if self._cluster.state != "running":
            ranks = self._spent() or ("The ranks start." if self._is_busy() else _NO_RANKS)
            return f"{ranks} {self._latest().title()}." if self._cells else ranks
        title = f"{self._latest().title()}.\n" if self._cells else ""
        groups = _by_text(
            (one.rank, f"{one.state} {one.line}".rstrip()) for one in self._statuses()
        )
        text = "\n".join(f"{label(ranks)}: {what}" for what, ranks in groups.items())
        return _cut(f"{title}{text}")

    def _statuses(self) -> list[RankStatus]:
        cluster, answers, came = self._cluster, dict[int, Answer](), threading.Event()
        # Without a cell nothing reads the events, so that `ask_soon` would have no answer.
        if not self._is_busy():
            with suppress(AllranksError, TimeoutError):
                return self._thread.submit(cluster.status).result(_STATUS_SECONDS)

        def take(answer: Answer) -> None:
            answers[answer.rank] = answer
            if len(answers) == cluster.size:
                came.set()

        # The thread that waits for the cell delivers them.
        cluster.cells.ask_soon(requests.STATUS, {}, take)
        came.wait(_STATUS_SECONDS)
        found = {rank: answer.content for rank, answer in answers.items()}
        return read_statuses(cluster.hellos, found, left=cluster.roster.have_left)

    def output(self, cell: int = 0, offset: int = 0) -> str:
        """Returns what the ranks of a cell have printed so far, equal lines once, each with its
        ranks. 0 is the latest cell; continue a longer text at its next offset.
        """
        found = self._find(cell)
        return found if isinstance(found, str) else _part("output", found, found.output(), offset)

    def error(self, cell: int = 0, offset: int = 0) -> str:
        """Returns the whole report of a failed cell: the culprit first, with its traceback, then
        the ranks that waited for it. 0 is the latest cell.
        """
        found = self._find(cell)
        if isinstance(found, str):
            return found
        return _part("error", found, found.error or f"{found.title()}.", offset)

    def values(self, names: str) -> str:
        """Compares variables, as "x, loss", over the ranks: ranks with the same value stand
        together. Needs idle ranks.
        """
        words = re.split(r"[,\s]+", names.strip())
        # Names only: an expression could change the ranks' state, and its line would be unknown.
        unfit = [word for word in words if not word.isidentifier()]
        if unfit:
            return f"expected names of variables, such as 'x, loss', found {unfit[0]!r:.60}."
        if spent := self._spent():
            return spent
        if self._is_busy() or self._cluster.state != "running":
            return "Variables can be read between cells of running ranks. Call state or run."
        with self._lock:
            reading = self._running = self._thread.submit(self._read, words)
        try:
            found = reading.result(_WAIT_SECONDS)
        except TimeoutError:
            return "The ranks have not answered yet. Call state; interrupt ends a long repr()."
        except AllranksError as error:
            return plain(str(error))
        lines = []
        for index, word in enumerate(words):
            # By the text, as a person compares them: two NaN are equal here.
            groups = _by_text((rank, row[index]) for rank, row in enumerate(found))
            lines += [f"{word} on {label(ranks)}: {text}" for text, ranks in groups.items()]
        return _cut("\n".join(lines), more="ask for fewer names")

    def _read(self, words: list[str]) -> list[list[str]]:
        # A repr() is code of the ranks, too.
        began = time.monotonic()
        try:
            return self._cluster.call(
                _reader(), (words,), timeout=self._left, view=CapturedOutput()
            )
        finally:
            self._use(time.monotonic() - began)

    def timings(self, cell: int = 0) -> str:
        """Returns why a cell is slow, if a cause stands out, how long each rank waited and
        transferred data in its collectives, and the costliest calls with their lines.
        """
        found = self._find(cell)
        if isinstance(found, str):
            return found
        figures = None if found.view is None else found.view.figures
        timings = None if figures is None else figures.timings
        if timings is None or not timings.by_rank():
            return f"Cell {found.number} has no timings: no collective call of it has ended."
        hooks = self._cluster.cells.hooks
        why = hooks.command("verdict", found.number) if "verdict" in hooks.commands else ""
        tables = [rank_table(timings).text(), call_table(timings).text()]
        return _cut("\n".join([*filter(None, [why]), *tables]))

    def interrupt(self) -> str:
        """Interrupts the running cell; the ranks and their variables stay. A second interrupt of
        the same cell ends the ranks that do not react.
        """
        if not self._is_busy() or not self._cells:
            return "No cell is running."
        self._interrupt()
        self._wait()
        return self._report(self._latest())

    def restart(self) -> str:
        """Ends the ranks, also those that hang. The next cell starts new ones without variables."""
        self._end_cell(_WAIT_SECONDS / 3)
        with self._lock:
            self._running = self._thread.submit(self._cluster.stop)
        self._wait(_WAIT_SECONDS / 3)
        return "The ranks end." if self._is_busy() else f"The ranks have ended. {_NO_RANKS}"

    def close(self) -> None:
        self._end_cell(_WAIT_SECONDS)
        self._thread.submit(self._cluster.stop)
        self._thread.shutdown()

    def _end_cell(self, seconds: float) -> None:
        # The second interrupt of a cell ends the ranks that do not react to the first.
        for _ in range(2):
            if self._is_busy():
                self._interrupt()
                self._wait(seconds)

    def _interrupt(self) -> None:
        if self._cells:
            self._latest().interrupted = True
        self._cluster.interrupt()

    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def _wait(self, seconds: float = _WAIT_SECONDS) -> None:
        if self._running is not None:
            with suppress(TimeoutError, AllranksError):
                self._running.result(seconds)

    def _latest(self) -> _CellRecord:
        return self._cells[self._count]

    def _find(self, number: int) -> _CellRecord | str:
        found = self._cells.get(number or self._count)
        if found is None:
            known = label(self._cells, "cell") if self._cells else "none"
            return f"expected one of the last {_KEPT_CELLS} cells, found {number}; there: {known}."
        return found

    def _report(self, cell: _CellRecord) -> str:
        if cell.seconds is None:
            return f"{cell.title()}. Call state, output or interrupt."
        parts = [f"{cell.title()}."]
        if cell.error:
            parts.append(_part("error", cell, cell.error, longest=_LONGEST * 2 // 3))
        output = cell.output().rstrip()
        if output:
            longest = _LONGEST - sum(map(len, parts))
            parts.insert(1, _part("output", cell, output, longest=longest))
        return "\n".join(parts)


def _limited(*given: Any, settings: dict[str, str], **named: Any) -> Cluster:
    """Returns a cluster whose cells cannot start larger ones by mistake."""
    size = Cluster(*given, settings=settings, **named).size
    return Cluster(*given, settings={**settings, MAX_RANKS: str(size)}, **named)


def in_time(tool: Callable[..., str]) -> Callable[..., str]:
    """Returns the tool with a deadline: what takes longer goes on in a thread without it."""

    @functools.wraps(tool)
    def reply(*arguments: Any, **named: Any) -> str:
        replied: Future[str] = Future()

        def work() -> None:
            try:
                replied.set_result(tool(*arguments, **named))
            except Exception as error:
                replied.set_exception(error)

        # Not in a pool, whose threads could all be waiting.
        threading.Thread(target=work, name=f"allranks-{tool.__name__}", daemon=True).start()
        wait_for([replied], REPLY_SECONDS)
        if replied.done():
            return replied.result()
        return (
            f"expected {tool.__name__} to end within {REPLY_SECONDS:g} s, found that it goes on. "
            "Call state; if that does not end either, call restart."
        )

    return reply


def _by_text(texts: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """The ranks of each text, in the order in which the texts come."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts:
        groups.setdefault(text, []).append(rank)
    return groups


def _part(tool: str, cell: _CellRecord, text: str, offset: int = 0, longest: int = _LONGEST) -> str:
    more = f"call {tool} with cell={cell.number} and offset={{end}}"
    return _cut(text, offset, more, longest)


def _cut(text: str, offset: int = 0, more: str = "", longest: int = _LONGEST) -> str:
    """Returns a part of a text. If there is more, its last line has the call that returns it."""
    offset = max(0, offset)
    end = offset + longest
    if end >= len(text):
        return text[offset:] or ("(nothing more)" if offset else "(nothing)")
    advice = f": {more.format(end=end)}" if more else ""
    return f"{text[offset:end]}\n… {len(text) - end:,} more characters{advice}"


def _reader() -> Callable[[list[str]], list[str]]:
    # Inside of another function, because cloudpickle sends it by its code then.
    longest = _VALUE_LENGTH

    def read(names: list[str]) -> list[str]:
        from IPython.core.getipython import get_ipython

        shell: Any = get_ipython()
        found = shell.user_ns
        lines = []
        for name in names:
            if name not in found:
                lines.append("not defined")
                continue
            text = type(found[name]).__name__
            try:
                shape = getattr(found[name], "shape", None)
                text += "" if shape is None else f" of shape {tuple(shape)}"
                text += f" {found[name]!r:.{longest}}"
            except Exception as error:
                text += f", of which repr() or shape raises {type(error).__name__}"
            lines.append(text)
        return lines

    return read


def add_options(parser: argparse.ArgumentParser) -> None:
    ClusterOptions.add_to(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="how long cells may run, all of them together; default: one hour",
    )
    parser.set_defaults(act=serve)


def serve(typed: argparse.Namespace) -> int:
    """Serves the tools over standard input and output until the agent has gone."""
    try:
        server_type: Any = importlib.import_module("mcp.server.mcpserver").MCPServer
    except ImportError:
        raise MissingDependency(
            "allranks mcp needs the package mcp, 2 or newer. Type: pip install 'allranks[mcp]'"
        ) from None
    if not typed.seconds > 0:
        raise UsageError(
            f"expected --seconds above 0, found {typed.seconds:g}. Type for example: --seconds 60"
        )
    tools = AgentTools(ClusterOptions.take_from(vars(typed)), typed.seconds)
    server = server_type("allranks", instructions=_INSTRUCTIONS)
    for tool in tools.tools():
        server.tool(structured_output=False)(tool)
    # It puts standard error in place of standard output, so that prints spoil no message.
    try:
        server.run("stdio")
    finally:
        tools.close()
    return 0
