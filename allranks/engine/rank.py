"""A rank's life: take its place in MPI, open the wire, join ipyparallel's cluster, run cells."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
import types
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from allranks import collectives, launched
from allranks.collectives import world
from allranks.collectives.start import healing, runtime, under_mpi
from allranks.collectives.start.stand_in import stand_in
from allranks.collectives.timings.totals import Totals
from allranks.collectives.world.kept import Kept
from allranks.engine import filters, processes, scratch
from allranks.engine.attaching import Attaching
from allranks.engine.cells import forks, metrics, namespace
from allranks.engine.cells.cell import CellRunner
from allranks.engine.cells.interrupts import ignore_interrupt
from allranks.engine.cells.member import MemberRunner
from allranks.engine.cells.mending import Mender
from allranks.engine.devices import pinning
from allranks.engine.ipengine import RankEngine
from allranks.engine.keyboard import Keyboard
from allranks.engine.libraries.waits import Waits
from allranks.engine.output import progress
from allranks.engine.output.display import RankDisplayHook, RankDisplayPublisher
from allranks.engine.output.noise import QUIET, QUIET_TORCH, held_back
from allranks.engine.output.transcript import Transcript
from allranks.engine.report import text_of
from allranks.engine.requests import Requests
from allranks.engine.sampling import Sampler
from allranks.engine.telemetry import Teller
from allranks.engine.widgets import Widgets
from allranks.engine.wire import Wire, give_up
from allranks.errors import UsageError
from allranks.horovod import alias, tensorflow1
from allranks.launched import doors
from allranks.records import settings
from allranks.records.config import SLOW_START_SECONDS, NurseryConfig
from allranks.records.requests import ABOUT_NOTEBOOKS, ANSWERED_WHILE_BUSY
from allranks.records.wire import (
    Answer,
    Ask,
    Died,
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

_TRANSPORTS = "OMPI_MCA_btl"
LOG_LIMIT = "ALLRANKS_LOG_LIMIT"
_LOG_NBYTES = 10**9
_LEAST_LOG_NBYTES = 10**6
#: Twenty times a second; the notebook's server passes on a thousand messages a second.
_STATES_AT_A_TIME = 24
_LIVES_ON = "the rank keeps running, with its variables."


class Rank:
    """One rank of a notebook's cluster, from start to end of its process.

    Args:
        config: what the nursery was told.
        connection: ipyparallel's connection information for engines.
        rank: the rank that the launcher gave this process.
        dead: the ranks that have died, where it takes the place of the first of them.
        running: of each rank, the number of the cell that it runs, for the nursery; 0 for none.
        stays: whether it waits for another notebook when its own goes.
    """

    def __init__(
        self,
        config: NurseryConfig,
        connection: dict[str, Any],
        rank: int,
        *,
        dead: Sequence[int] = (),
        running: memoryview[int] | None = None,
        stays: bool = False,
    ) -> None:
        self._config = config
        self._running: memoryview[int] | list[int] = running or [0] * config.size
        self._stays = stays
        self._dead = dead
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
        self._log = os.dup(2)  # a start that does not end tells where, and no thread is needed
        faulthandler.dump_traceback_later(SLOW_START_SECONDS, file=self._log)
        self.transcript.streams.capture()
        faulthandler.enable(all_threads=False)
        _fresh_main_module()
        scratch.keep_in(self._config.session_dir)
        alias.install()
        tensorflow1.install()
        progress.install()
        with processes.sleeping_longer(self._config.ranks_here):
            if self._config.heals:
                # Nobody needs to reach it but who takes a dead rank's place, and they it.
                under_mpi.load_mpi()
                doors.close_own(but_to_this_host=bool(self._dead))
                # What a cell starts, or spawns, is none of them.
                os.environ[_TRANSPORTS] = "self,sm"
            if self._dead:
                healing.join(self._dead)
            else:
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
        self._teller = Teller(self.rank, metrics.process, Totals(), self.device)
        self.wire = Wire(
            self.rank,
            self._config.commands_url,
            self._config.events_url,
            self._config.wire_key,
            self.transcript,
            self._teller,
            self._receive,
        )
        engine = RankEngine(
            self._connection,
            self.rank,
            self._config.size,
            self._config.session_dir,
            self._ready,
            replaces=bool(self._dead),
        )
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
            except RuntimeError:
                # The engine's start takes it for a failure of its own that the loop was stopped.
                ended = self._loop is None or engine.kernel._shutdown_message is not None
                if ended or run != engine.start:
                    raise
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
        fresh = shell.init_user_ns

        def init_user_ns() -> None:
            """Has ``%reset`` leave what every rank has."""
            fresh()
            shell.user_ns.update(namespace.names(self.device))

        setattr(shell, "init_user_ns", init_user_ns)  # noqa: B010
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
            lambda: self._runner.interrupts.count,
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
        # The loops of the rank's threads ask time.monotonic, which a cell may replace.
        setattr(asyncio.BaseEventLoop, "time", staticmethod(monotonic))  # noqa: B010
        kept_dirs = tuple(filter(os.path.isdir, self._config.kept_dirs))
        if kept_dirs:
            this = world.current()
            this.keeps = Kept(kept_dirs, self.rank, this.size, shell.user_ns)
        self._members = MemberRunner(shell, self._runner, self.rank, self._notice)
        self._sampler = Sampler(self.rank, CellRunner._call.__code__)
        self._requests = Requests(
            shell,
            self.rank,
            self._members.make_ready,
            self._waits.renew,
            self._heal,
            self.wire.send_output,
            self._sampler,
            self._teller.watch,
        )
        signal.signal(signal.SIGINT, ignore_interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        filters.restore()
        faulthandler.cancel_dump_traceback_later()
        os.close(self._log)
        hello = Hello(
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
        self._attaching = Attaching(self.wire, hello)
        if self._stays:
            self.wire.stay(self._config.session_dir)
        self.wire.start()
        self.wire.send(hello)

    def _who_shares(self) -> dict[int, int]:
        """The other ranks on this rank's GPU, by their pids. Collective, where GPUs are shared."""
        devices, size = self._config.devices, self._config.size
        # On several hosts not all ranks may be on hosts with GPUs, and all would have to ask.
        alone = not devices or size <= len(devices) or self._config.several_hosts
        if alone or self._config.heals:  # which is so where no rank has a GPU
            return {}
        from mpi4py import MPI

        pids = MPI.COMM_WORLD.allgather((socket.gethostname(), self.device, os.getpid()))
        return {
            pid: rank
            for rank, (*where, pid) in enumerate(pids)
            if where == [socket.gethostname(), self.device] and rank != self.rank
        }

    def _heal(self, dead: list[int], epoch: int) -> str:
        """Takes in new processes for ranks that have died, together with all others.

        Returns:
            What is to be known of this rank from now on; "" for nothing.
        """
        address = os.path.join(self._config.session_dir, "nursery")
        doors.close_own(but_to_this_host=True)
        healing.heal(dead, processes.stub(address), epoch)
        self._members.healed()
        return self._waits.after_death()

    def _notice(self, text: str) -> None:
        self.transcript.place(["notice", text])

    def _ask_person(self, prompt: Prompt) -> None:
        self.wire.send_output()
        self.wire.send(prompt)

    def _receive(self, record: Record, payloads: list[bytes]) -> None:
        """Takes a command in the wire's thread; what needs the main thread goes there."""
        assert self._loop is not None
        if isinstance(record, RunCell | RunMember):
            self._attaching.sent(record)
            self._loop.call_soon_threadsafe(self._start_cell, record, payloads)
        elif isinstance(record, Interrupt):
            self._runner.interrupts.send(record.cell)
        elif isinstance(record, Died):
            runtime.died(record.rank, record.how)
        elif isinstance(record, Typed):
            if self.wire.unseen is not None:
                self.wire.unseen.answered()
            self._keyboard.take(record)
        elif isinstance(record, Widget):
            self._widgets.take(record, payloads)
        elif isinstance(record, Ask):
            if record.name in ABOUT_NOTEBOOKS:
                self._attaching.answer(record)
            elif record.name in ANSWERED_WHILE_BUSY:
                self._answer(record, payloads)
            elif self.wire.busy:
                self._refuse(record, f"rank {self.rank} is running a cell")
            else:
                self._attaching.heard(record)
                self._loop.call_soon_threadsafe(self._answer, record, payloads)

    def _start_cell(self, cell: RunCell | RunMember, payloads: list[bytes]) -> None:
        self._task = asyncio.ensure_future(self._run_cell(cell, payloads))

    async def _run_cell(self, cell: RunCell | RunMember, payloads: list[bytes]) -> None:
        self._running[self.rank] = cell.number
        try:
            self.wire.begin_cell(cell.cell, cell.limit_nbytes)
            self._requests.busy = True
            self._sampler.begin_cell()
            if isinstance(cell, RunMember):
                reply, result, value = await self._members.run(cell, payloads)
                self._end_cell((result, value), (reply, []))
            else:
                self._end_cell(await self._runner.run(cell, payloads))
        except BaseException as error:
            self._tell_failure(cell.cell, error)
        finally:
            self._running[self.rank] = 0
            self._attaching.ended()

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
            give_up(self.rank, "cannot report the end of its cell to the notebook")

    def _end_cell(self, *told: tuple[Reply | Result, list[bytes]]) -> None:
        self.wire.end_where_closed()
        for said in self._mender.rest():
            self._notice(said)
        self._requests.busy = False
        self._sampler.end_cell()
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
    processes.share_cores(config.ranks_here)
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
