"""A rank's life: take its place in MPI, open the wire, join ipyparallel's cluster, run cells."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import types
from collections.abc import Callable
from time import monotonic
from typing import Any

from allranks import collectives, launched
from allranks.collectives import world
from allranks.collectives.start import runtime
from allranks.collectives.start.stand_in import stand_in
from allranks.collectives.timings.totals import Totals
from allranks.engine import filters, forks, metrics, namespace, pinning, processes, progress
from allranks.engine.cell import CellRunner, ignore_interrupt
from allranks.engine.display import RankDisplayHook, RankDisplayPublisher
from allranks.engine.ipengine import RankEngine
from allranks.engine.keyboard import Keyboard
from allranks.engine.member import MemberRunner
from allranks.engine.mending import Mender
from allranks.engine.noise import held_back
from allranks.engine.report import text_of
from allranks.engine.requests import Requests
from allranks.engine.telemetry import Teller
from allranks.engine.transcript import Transcript
from allranks.engine.waits import Waits
from allranks.engine.widgets import Widgets
from allranks.engine.wire import Wire, give_up
from allranks.errors import UsageError
from allranks.horovod import alias, tensorflow1
from allranks.records import settings
from allranks.records.config import NurseryConfig
from allranks.records.requests import ANSWERED_WHILE_BUSY
from allranks.records.wire import (
    Answer,
    Ask,
    Hello,
    Interrupt,
    Prompt,
    Record,
    Reply,
    Result,
    RunCell,
    RunMember,
    Typed,
    Widget,
)

LOG_LIMIT = "ALLRANKS_LOG_LIMIT"
_LOG_NBYTES = 10**9
_LEAST_LOG_NBYTES = 10**6
#: Twenty times a second; the notebook's server passes on a thousand messages a second.
_STATES_AT_A_TIME = 24
_LIVES_ON = "the rank lives on with its variables."

QUIET = "3"
"""TensorFlow looks for CUDA where there is none, and says so at length: only fatal errors show."""
QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torch warns of each connection that ends, with a stack of C++: what it means is told by us."""


class Rank:
    """One rank of a notebook's cluster, from start to end of its process.

    Args:
        config: what the nursery was told.
        connection: ipyparallel's connection information for engines.
        rank: the rank that the launcher gave this process.
    """

    def __init__(self, config: NurseryConfig, connection: dict[str, Any], rank: int) -> None:
        self._config = config
        self._connection = connection
        self.rank = rank
        self.device = _pin(config, rank)
        limit = settings.nbytes(LOG_LIMIT, _LOG_NBYTES, _LEAST_LOG_NBYTES)
        quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == QUIET
        self.transcript = Transcript(log_path(config, rank), limit, held_back if quiet else str)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Serves cells until the process is ended."""
        signal.signal(signal.SIGINT, ignore_interrupt)
        self.transcript.capture()
        faulthandler.enable(all_threads=False)
        _fresh_main_module()
        # What multiprocessing makes when first asked outlives a rank, which nothing can tidy up.
        multiprocessing.current_process()._config["tempdir"] = self._config.session_dir  # type: ignore[attr-defined]
        alias.install()
        tensorflow1.install()
        progress.install()
        with processes.sleeping_longer(self._config.ranks_here):
            collectives.init()
        if collectives.size() != self._config.size or collectives.rank() != self.rank:
            raise SystemExit(
                f"expected to be rank {self.rank} of {self._config.size}, but MPI says rank "
                f"{collectives.rank()} of {collectives.size()}: the launcher and the MPI library "
                "do not belong together. Check which mpiexec and which libmpi are in use."
            )
        stand_in(world.current())
        runtime.announce()
        collectives.on_notice(self._notice)
        self._sharers = self._who_shares()
        self.wire = Wire(
            self.rank,
            self._config.commands_url,
            self._config.events_url,
            self._config.wire_key,
            self.transcript,
            Teller(self.rank, metrics.process, Totals(), self.device),
            self._receive,
        )
        engine = RankEngine(self._connection, self.rank, self._config.session_dir, self._ready)
        engine.initialize([])
        self._serve(engine)

    def _serve(self, engine: RankEngine) -> None:
        """Runs the event loop until ipyparallel ends the engine.

        What a cell has left in the loop may stop it, or raise what leaves it.
        """
        run: Callable[[], object] = engine.start
        while True:
            try:
                run()
            except (SystemExit, KeyboardInterrupt) as end:
                if self._loop is None:
                    raise
                print(f"{type(end).__name__} in the event loop: {_LIVES_ON}", file=sys.stderr)
            if self._loop is None or engine.kernel._shutdown_message is not None:
                return
            run = self._loop.run_forever

    def _ready(self, engine: RankEngine) -> None:
        """The engine's shell is there: take it over, and say hello."""
        shell = engine.kernel.shell
        shell.displayhook = RankDisplayHook(shell, self.transcript)
        shell.display_trap.hook = shell.displayhook
        shell.display_pub = RankDisplayPublisher(shell, self.transcript)
        shell.set_hook("show_in_pager", _print_page, 1)
        setattr(shell, "enable_gui", _no_windows)  # noqa: B010  a method, to mypy
        shell.user_ns.update(namespace.names(self.device))
        self._loop = asyncio.get_running_loop()
        forks.watch(self.transcript, self._loop.call_soon)
        self._mender = Mender(self.transcript)
        self._waits = Waits()
        self._runner = CellRunner(
            shell, self.rank, self.device, self._sharers, self._mender.builtins, self._waits
        )
        self._keyboard = Keyboard(
            self.rank,
            self._ask_person,
            lambda: self.wire.cell if self.wire.busy else 0,
            lambda: self._runner.interrupts,
        )
        self._keyboard.install(shell)
        self._widgets = Widgets(
            self.rank,
            self.wire.send,
            self.transcript,
            lambda: self.wire.busy,
            max(1, _STATES_AT_A_TIME // collectives.size()),
        )
        self._widgets.install()
        self.wire.before_output = self._widgets.flush
        # What a widget for output asks for, which takes what is written meanwhile.
        engine.kernel.set_parent([], {"header": {"msg_id": f"rank-{self.rank}"}})
        self._waits.start()
        # Its own asks time.monotonic, which a cell may replace.
        setattr(self._loop, "time", monotonic)  # noqa: B010  a method, to mypy
        self._members = MemberRunner(shell, self._runner, self.rank)
        self._requests = Requests(
            shell, self.rank, self._members.make_ready, self._waits.renew, self.wire.send_output
        )
        signal.signal(signal.SIGINT, ignore_interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        filters.restore()
        self.wire.start()
        self.wire.send(
            Hello(
                rank=self.rank,
                size=collectives.size(),
                local_rank=collectives.local_rank(),
                local_size=collectives.local_size(),
                host=socket.gethostname(),
                pid=os.getpid(),
                device=self.device,
                engine=engine.ident,
                mpi=_library(),
                log=self.transcript.path,
            )
        )

    def _who_shares(self) -> dict[int, int]:
        """The other ranks on this rank's GPU, by their pids. Collective, where GPUs are shared."""
        devices, size = self._config.devices, self._config.size
        # On several hosts not all ranks may be on hosts with GPUs, and all would have to ask.
        if not devices or size <= len(devices) or self._config.several_hosts:
            return {}
        from mpi4py import MPI

        pids = MPI.COMM_WORLD.allgather((socket.gethostname(), self.device, os.getpid()))
        return {
            pid: rank
            for rank, (*where, pid) in enumerate(pids)
            if where == [socket.gethostname(), self.device] and rank != self.rank
        }

    def _notice(self, text: str) -> None:
        self.transcript.place(["notice", text])

    def _ask_person(self, prompt: Prompt) -> None:
        self.wire.send_output()
        self.wire.send(prompt)

    def _receive(self, record: Record, payloads: list[bytes]) -> None:
        """Takes a command in the wire's thread; what needs the main thread goes there."""
        assert self._loop is not None
        if isinstance(record, RunCell | RunMember):
            self._loop.call_soon_threadsafe(self._start_cell, record, payloads)
        elif isinstance(record, Interrupt):
            self._runner.interrupt(record.cell)
        elif isinstance(record, Typed):
            self._keyboard.take(record)
        elif isinstance(record, Widget):
            self._widgets.take(record, payloads)
        elif isinstance(record, Ask):
            if record.name in ANSWERED_WHILE_BUSY:
                self._answer(record, payloads)
            elif self.wire.busy:
                self._refuse(record, f"rank {self.rank} is running a cell")
            else:
                self._loop.call_soon_threadsafe(self._answer, record, payloads)

    def _start_cell(self, cell: RunCell | RunMember, payloads: list[bytes]) -> None:
        self._task = asyncio.ensure_future(self._run_cell(cell, payloads))

    async def _run_cell(self, cell: RunCell | RunMember, payloads: list[bytes]) -> None:
        try:
            self.wire.begin_cell(cell.cell, cell.limit_nbytes)
            self._requests.busy = True
            if isinstance(cell, RunMember):
                reply, result, value = await self._members.run(cell, payloads)
                self._end_cell((result, value), (reply, []))
            else:
                self._end_cell(await self._runner.run(cell, payloads))
        except BaseException as error:
            self._tell_failure(cell.cell, error)

    def _tell_failure(self, cell: int, error: BaseException) -> None:
        """Replies to a cell whose end went wrong: a rank that did not would hang it."""
        try:
            told = self._runner.not_told(cell, error)
            try:
                self._end_cell((told, []))
            except BaseException:
                self._requests.busy = self.wire.busy = False
                self.wire.send(told)
        except BaseException:
            give_up(self.rank, "cannot tell the notebook how its cell has ended")

    def _end_cell(self, *told: tuple[Reply | Result, list[bytes]]) -> None:
        for said in self._mender.rest():
            self._notice(said)
        self._requests.busy = False
        self.wire.send_output(final=True)
        self.wire.busy = False
        for record, values in told:
            self.wire.send(record, *values)

    def _answer(self, ask: Ask, payloads: list[bytes]) -> None:
        try:
            content, values = self._requests.answer(ask.name, ask.arguments, payloads)
        except UsageError as error:
            self._refuse(ask, str(error))
        except BaseException as error:  # an object's own way to be unpickled may do anything
            self._refuse(ask, f"rank {self.rank}: {type(error).__name__}: {text_of(error)}")
        else:
            self.wire.send(Answer(ask.request, self.rank, content, ""), *values)

    def _refuse(self, ask: Ask, problem: str) -> None:
        self.wire.send(Answer(ask.request, self.rank, {}, problem))


def log_path(config: NurseryConfig, rank: int) -> str:
    """Returns the path of a rank's log file."""
    return os.path.join(config.log_dir, f"rank-{rank}.log")


def _pin(config: NurseryConfig, rank: int) -> str:
    """Shows this process its own GPU only, before anything can open CUDA; returns its name."""
    share = processes.share_cores(config.ranks_here)
    # TensorFlow's own threads: without these every rank makes one a core, twice.
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", share)
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
    for name, value in QUIET_TORCH.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    if not config.devices:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", QUIET)
    local, local_size = launched.local_place(os.environ, rank, config.size)
    device, settings = pinning.pinning(config.devices, local, local_size)
    pinning.apply(os.environ, settings)
    return device


def _library() -> str:
    """Returns the MPI library's name and version, as ``Open MPI v5.0.11``."""
    from mpi4py import MPI

    return MPI.Get_library_version().split(",")[0].split("\n")[0].strip()


def _fresh_main_module() -> None:
    """Gives cells a ``__main__`` of their own, as in a new Python."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [""]


def _no_windows(gui: str | None = None) -> None:
    """Has ``%matplotlib inline`` draw into the notebook, as it does by itself, and no window open.

    ipykernel's own looks for an application that a rank is not.
    """
    if gui not in (None, "", "inline"):
        raise UsageError(
            f"expected figures in the notebook, found %gui {gui}: a rank opens no windows. "
            "Type: %matplotlib inline"
        )


def _print_page(_shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
    """Prints what ``name?`` shows: a rank has no pager."""
    print(data["text/plain"] if isinstance(data, dict) else data)
