"""The life of a rank: it joins MPI, opens the wire, starts its kernel, and runs cells."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import types
from asyncio import ensure_future, wait
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import Context, copy_context
from functools import partial
from operator import itemgetter
from time import monotonic
from typing import Any, TypeVar

import cloudpickle

# The shells and event loops of ranks would import these: here it is once, before ranks are forked.
import IPython.core.completerlib
import IPython.core.oinspect
import IPython.extensions.storemagic  # noqa: F401
import tornado.platform.asyncio  # noqa: F401

from allranks import collectives, launched, own_files, port_filter, python_path
from allranks.collectives import world
from allranks.collectives.calls import frames, sites
from allranks.collectives.calls.rank_state import DIED
from allranks.collectives.start import runtime, under_mpi
from allranks.engine import libraries, namespace, processes
from allranks.engine.cell import CellRunner, watch_forks
from allranks.engine.display import RankDisplayHook, RankDisplayPublisher
from allranks.engine.epochs import RankEpochs
from allranks.engine.exceptions import text_of
from allranks.engine.features import Answered, RankContext, RankFeature, RankHooks, Replies
from allranks.engine.interrupts import ignore_interrupt, waits_for_events
from allranks.engine.kernel import (
    LAST_ANSWER_SECONDS,
    KernelStart,
    PlainKernel,
    RankKernel,
    use_ipython_folder,
)
from allranks.engine.telemetry import TelemetrySender, current_line, process_metrics
from allranks.engine.transcript import Transcript
from allranks.engine.wire import RankWire, give_up
from allranks.errors import UsageError
from allranks.records import code_names, limits, requests
from allranks.records.config import HostAgentConfig, variable_nbytes
from allranks.records.ranks import BETWEEN, IDLE, MEETS, RUNNING, Activity
from allranks.records.requests import ANSWERED_WHILE_BUSY
from allranks.records.wire import (
    BETWEEN_CELLS,
    Answer,
    Died,
    Hello,
    Interrupt,
    Query,
    Record,
    RunCell,
)

T = TypeVar("T")

_TRANSPORTS = "OMPI_MCA_btl"
LOG_LIMIT = "ALLRANKS_LOG_LIMIT"
_LOG_NBYTES = 10**9
_LEAST_LOG_NBYTES = 10**6
#: How often an idle rank with windows calls MPI: while another rank runs a cell, and otherwise.
_SERVING_SECONDS, _IDLE_SECONDS = 0.001, 0.05
_MOMENT_SECONDS = 0.5
_OF_THE_NOTEBOOK = ("distributed", "rank", "local")
_LIVES_ON = "the rank keeps running, with its variables."


class Rank:
    """One rank of a notebook's cluster, from start to end of its process.

    ``dead`` are the ranks that have died, if it replaces one of them: the first one, or on several
    hosts, where it was the process ``spare``, any of them. ``running`` has, for each rank, the
    number of the cell that it runs, or 0; the host agent reads it. A rank that ``stays`` waits for
    another notebook when its own ends. The end of the file ``last`` asks an idle rank to end.
    """

    def __init__(
        self,
        config: HostAgentConfig,
        connection: dict[str, Any],
        rank: int,
        features: Iterable[type[RankFeature]],
        dead: Sequence[int],
        running: memoryview[int],
        stays: bool,
        last: int,
        spare: Any = None,
    ) -> None:
        self._config = config
        self._running = running
        self._stays = stays
        self._last = last
        self._serves_windows = False
        self._dead = dead
        self._spare = spare
        self._connection = connection
        self.rank = rank
        self._features = RankHooks(features)
        self.device = _pin(config, rank)
        limit = variable_nbytes(LOG_LIMIT, _LOG_NBYTES, _LEAST_LOG_NBYTES)
        self.transcript = Transcript(log_path(config, rank), limit)
        self._loop: asyncio.AbstractEventLoop | None = None
        #: The last cell.
        self._task: asyncio.Task[None] | None = None
        #: The context variables as the last cell has left them, as numpy's options.
        self._context = Context()
        #: The cells that have come and not begun.
        self._not_begun: set[int] = set()
        self._mpi_ports: list[int] = []
        self._meets = False
        """Whether this rank is in a step that all ranks do together, between two cells."""

    def run(self) -> None:
        signal.signal(signal.SIGINT, ignore_interrupt)
        launched.in_cells_of_ranks = True
        self._log = os.dup(2)  # a start that hangs writes its stack here, without a thread of ours
        faulthandler.dump_traceback_later(limits.SLOW_START_SECONDS, file=self._log)
        self.transcript.streams.capture()
        faulthandler.enable(all_threads=False)
        # The cells' own: that of this process is the agent's.
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = [""]
        sys.path[:] = python_path.with_current_folder(
            sys.path, os.environ.get(python_path.NAME, "")
        )
        libraries.keep_temporary_files_in(self._config.session_dir)
        use_ipython_folder(self._config.session_dir)
        code_names.name_folder(self._connection["key"])
        self._features.starting()
        with (
            processes.sleeping_longer(self._config.ranks_here),
            libraries.mpi_files_in(self._config.session_dir),
        ):
            if self._config.can_replace and not self._config.several_hosts:
                # Only replacement ranks connect to these ports.
                under_mpi.load_mpi()
                self._mpi_ports = port_filter.restrict_own_ports(allow_this_host=bool(self._dead))
                # MPI of processes that a cell starts or spawns opens no ports.
                os.environ[_TRANSPORTS] = "self,sm"
            if not self._features.join(self._config, self.rank, self._dead, self._spare):
                collectives.init()
        if collectives.size() != self._config.size or collectives.rank() != self.rank:
            raise SystemExit(
                f"expected to be rank {self.rank} of {self._config.size}, but MPI says rank "
                f"{collectives.rank()} of {collectives.size()}: the launcher and the MPI library "
                "do not belong together. Check which mpiexec and which libmpi are in use."
            )
        under_mpi.guard_mpi4py(world.current())
        runtime.announce()
        collectives.on_notice(self._notice)
        self._telemetry = TelemetrySender(
            self.rank, process_metrics, world.current().journal, self._features.pulse_fields
        )
        self.wire = RankWire(
            self.rank,
            self._config.commands_url,
            self._config.events_url,
            self.transcript,
            self._telemetry,
            self._receive,
        )
        start = KernelStart(
            self._connection,
            self.rank,
            self._config.size,
            os.path.join(self._config.session_dir, f"engine-{self.rank}"),
            self._ready,
            replaces=bool(self._dead),
        )
        self._serve(self._features.kernel(start) or PlainKernel(start))
        processes.end_process()

    def _serve(self, kernel: RankKernel) -> None:
        """Runs the event loop until a client ends the kernel.

        A callback that a cell has left in the loop may stop it, or raise an exception out of it.
        So may the function that a cell has set for a signal.
        """
        run: Callable[[], object] = kernel.start
        while True:
            try:
                run()
            except BaseException as end:
                if self._loop is None:
                    raise
                if isinstance(end, SystemExit | KeyboardInterrupt) or not _is_of_the_loop(end):
                    print(f"{type(end).__name__} in the event loop: {_LIVES_ON}", file=sys.stderr)
                elif not isinstance(end, RuntimeError) or (
                    # Stopping the loop counts as a failure in the kernel's start.
                    run != kernel.start and not kernel.is_shut_down
                ):
                    raise
            if self._loop is None:
                return
            if kernel.is_shut_down:
                # ZeroMQ says when it has sent all only to a thread that closes all sockets of the
                # context, and other threads use them.
                time.sleep(LAST_ANSWER_SECONDS)
                return
            run = self._loop.run_forever

    def _ready(self, kernel: RankKernel) -> None:
        shell = kernel.kernel.shell
        for prompt in ("ps1", "ps2", "ps3"):
            # Lightning takes these for a sign of an interactive session, and refuses to use ranks.
            vars(sys).pop(prompt, None)
        shell.displayhook = RankDisplayHook(shell, self.transcript)
        shell.display_trap.hook = shell.displayhook
        shell.display_pub = RankDisplayPublisher(shell, self.transcript)
        shell.set_hook("show_in_pager", _print_page, 1)
        refuse = partial(_for_the_notebook, "distributed")
        shell.register_magic_function(refuse, "line", "distributed")
        of_features = (name for one in self._features.features for name in one.notebook_magics)
        for name in (*_OF_THE_NOTEBOOK, *of_features):
            refuse = partial(_for_the_notebook, name)
            # No lines: a cell that consists of ``rank`` would be one, by IPython's automagic.
            shell.register_magic_function(refuse, "cell", name)
        _refuse_own_extensions(shell)
        setattr(shell, "enable_gui", _no_windows)  # noqa: B010  a method, to mypy
        setattr(shell, "set_next_input", _no_next_input)  # noqa: B010
        shell.user_ns.update(namespace.names(self.device))
        fresh = shell.init_user_ns

        def init_user_ns() -> None:
            # ``%reset`` leaves the names that each rank has.
            fresh()
            shell.user_ns.update(namespace.names(self.device))

        setattr(shell, "init_user_ns", init_user_ns)  # noqa: B010
        self._loop = asyncio.get_running_loop()
        watch_forks(self.transcript, self._loop.call_soon)
        self._runner = CellRunner(
            shell, self.rank, self.device, self._features, self.transcript.streams
        )
        self._shell = shell
        hello = Hello(
            rank=self.rank,
            size=collectives.size(),
            local_rank=collectives.local_rank(),
            local_size=collectives.local_size(),
            host=socket.gethostname(),
            pid=os.getpid(),
            device=self.device,
            engine=kernel.ident,
            mpi=_library(),
            log=self.transcript.path,
        )
        self._epochs = RankEpochs(self.wire, self._begin_epoch, self._loop.call_soon_threadsafe)
        self._features.call(
            RankFeature.started,
            RankContext(
                rank=self.rank,
                size=collectives.size(),
                device=self.device,
                hello=hello,
                stays=self._stays,
                config=self._config,
                shell=shell,
                transcript=self.transcript,
                wire=self.wire,
                activate=self._features.activate,
                notice=self._notice,
                submit=self._submit,
                execute=self._runner.run,
                begin_epoch=self._begin_epoch,
                rank_replaced=self._features.rank_replaced,
                handover_fields=self._features.handover_fields,
                cell=lambda: self.wire.cell if self.wire.busy else 0,
                interrupts=self._runner.interrupts,
                epochs=self._epochs,
                cell_ends=self._cell_ends,
                ends=self._runner.end_rank,
                mpi_ports=tuple(self._mpi_ports),
            ),
        )
        self.wire.before_output = self._before_output
        self.wire.without_notebook = self._find_dead
        # A widget for output reads this id, and then takes the output.
        kernel.kernel.set_parent([], {"header": {"msg_id": f"rank-{self.rank}"}})
        # The event loops of the rank's threads call time.monotonic, which a cell may replace.
        setattr(asyncio.BaseEventLoop, "time", staticmethod(monotonic))  # noqa: B010
        signal.signal(signal.SIGINT, ignore_interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libraries.restore_warnings()
        # Those of the host agent, and of the kernel, whose sockets would wait.
        processes.forget_exit_functions()
        self._loop.add_reader(self._last, self._end)
        faulthandler.cancel_dump_traceback_later()
        os.close(self._log)
        self.wire.start()
        self.wire.send(hello)

    def _end(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._last)
        if not self.wire.busy:  # a cell may wait in the loop: then the host agent kills this rank
            processes.end_process()

    def _before_output(self) -> None:
        if self.wire.busy:
            self._features.call(RankFeature.cell_running)
        self._features.call(RankFeature.output_sending, False)

    def _find_dead(self) -> None:
        # Only a notebook reports deaths. The main thread may enter or leave a world meanwhile.
        this = world.current()
        for rank in this.find_dead():
            self._note_death(rank, DIED, this)

    def _note_death(self, rank: int, how: str, of: world.World | None = None) -> None:
        runtime.died(rank, how, of)
        self._features.call(RankFeature.rank_died, rank, how)

    def _notice(self, text: str) -> None:
        self.transcript.place(["notice", text])

    def _receive(self, record: Record, payloads: list[bytes]) -> None:
        assert self._loop is not None
        self._features.message_received(record, payloads)
        if isinstance(record, RunCell):
            # Not those of features, whose notebooks wait for other records, too.
            self._not_begun.add(record.cell)
            run = partial(self._run_of_all, record, payloads)
            self._loop.call_soon_threadsafe(self._start_unless_left_out, record, run)
        elif isinstance(record, Interrupt):
            if record.cell != BETWEEN_CELLS:
                self._interrupt(record.cell)
            elif not self._meets and (record.requests_too or not self._epochs.in_request):
                self._runner.interrupts.end_between_cells()
        elif isinstance(record, Died):
            self._note_death(record.rank, record.how)
        elif isinstance(record, Query):
            if record.name in ANSWERED_WHILE_BUSY | self._features.requests_while_busy:
                self._answer(record, payloads)
            elif self.wire.busy:
                self._refuse(record, f"rank {self.rank} is running a cell")
            elif self._features.request_received(record.name, record.arguments):
                self._answer(record, payloads)
            else:
                self._loop.call_soon_threadsafe(self._answer, record, payloads)

    def _interrupt(self, cell: int) -> None:
        # The request may be another notebook's: it goes on.
        if self._epochs.in_request and self._has_taken(cell):
            self.wire.leave_out(self._runner.interrupted_before(cell))
        else:
            self._runner.interrupts.send(cell)

    def _has_taken(self, cell: int) -> bool:
        """Whether a cell that has come is the caller's: to begin it, or to leave it out."""
        try:
            self._not_begun.remove(cell)
        except KeyError:
            return False
        return True

    def _submit(self, cell: RunCell, run: Callable[[], Awaitable[Replies]]) -> None:
        assert self._loop is not None
        # This is the thread of the wire; cells run in the main thread.
        self._loop.call_soon_threadsafe(self._start_cell, cell, run)

    def _start_unless_left_out(self, cell: RunCell, run: Callable[[], Awaitable[Replies]]) -> None:
        if self._has_taken(cell.cell):
            self._start_cell(cell, run)

    def _start_cell(self, cell: RunCell, run: Callable[[], Awaitable[Replies]]) -> None:
        running = self._run_cell(cell, run)
        try:
            self._task = self._context.run(ensure_future, running)
        except BaseException as error:  # a cell may have replaced what asyncio itself needs
            running.close()
            self._reply_failure(cell.cell, error)

    async def _cell_ends(self) -> None:
        while self._task is not None and not self._task.done():
            await wait({self._task})

    async def _run_of_all(self, cell: RunCell, payloads: list[bytes]) -> Replies:
        if world.current().epoch_ends:
            self._epochs.enter()
        try:
            return await self._runner.run(cell, payloads)
        finally:
            self._context = copy_context()

    async def _run_cell(self, cell: RunCell, run: Callable[[], Awaitable[Replies]]) -> None:
        self._running[self.rank] = cell.number
        self._runner.has_begun = False  # what comes first may fail
        try:
            self.wire.begin_cell(cell.cell, cell.limit_nbytes)
            self._end_cell(*await run())
        except BaseException as error:
            self._reply_failure(cell.cell, error)
        finally:
            this = world.current()
            if this.traffic:
                self._epochs.note_use()
            self._running[self.rank] = 0
            if this.windows and not self._serves_windows:
                self._serve_windows()

    def _serve_windows(self) -> None:
        """Lets MPI progress while no cell runs here: a rank that locks this one's window waits."""
        this = world.current()
        self._serves_windows = this.windows > 0 and this.mpi is not None
        if self._serves_windows:
            assert this.mpi is not None
            assert self._loop is not None
            this.mpi.nudge()
            seconds = _SERVING_SECONDS if this.others_run() else _IDLE_SECONDS
            self._loop.call_later(seconds, self._serve_windows)

    def _reply_failure(self, cell: int, error: BaseException) -> None:
        """Replies to a cell whose end has failed: the notebook waits for each rank's reply."""
        try:
            reply = self._runner.reply_after(cell, error)
            try:
                self._end_cell((reply, []))
            except BaseException:
                # The output cannot be sent: the reply is sent without it.
                self.wire.busy = False
                self.wire.send(reply)
        except BaseException:
            # The notebook notices the end of the rank.
            give_up(self.rank, "cannot report the end of its cell to the notebook")

    def _end_cell(self, *replies: tuple[Record, list[bytes]]) -> None:
        lost = self.transcript.lost()  # first: all that follows writes to the log
        if lost:
            self.wire.end_without_log(lost)
        closed = self.transcript.streams.mend()
        for line in self._runner.notices():
            self._notice(line)
        if closed:
            self._notice(f"this cell closed or redirected {', '.join(closed)}: restored.")
        if self._features.in_cells:
            self._features.call(RankFeature.output_sending, True)
        self.wire.send_output(replies)

    def _answer(self, ask: Query, payloads: list[bytes]) -> None:
        try:
            content, values = self._content(ask.name, ask.arguments, payloads)
        except UsageError as error:
            self._refuse(ask, str(error))
        except BaseException as error:  # an object's own way to be unpickled may do anything
            self._refuse(ask, f"rank {self.rank}: {type(error).__name__}: {text_of(error)}")
        else:
            self.wire.send(Answer(ask.request, self.rank, content, ""), *values)

    def _content(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        """Returns the answer to a request, and its payloads (see `allranks.records.requests`)."""
        names = self._shell.user_ns
        if name == requests.STATUS:
            return self._status(), []
        if name == requests.SEND:
            self.wire.send_output()
        elif name == requests.STACK:
            return {"text": _stack()}, []
        elif name == requests.LOG:
            return {"text": own_files.end_of(arguments["path"], arguments["nbytes"])}, []
        elif name == requests.STRIPS:
            self._telemetry.watch(arguments["bins"])
        elif name == requests.PUSH:
            names.update(pickle.loads(payloads[0]))
        elif name == requests.PULL:
            return {}, [self._pulled(arguments["names"])]
        elif name == requests.RENEW:
            if arguments["epoch"] > collectives.epoch():  # else a client's request has begun it
                self._begin_epoch(lambda: collectives.renew(arguments["epoch"]))
            return {"needs": world.current().needs}, []
        else:
            return self._features.answer(name, arguments, payloads)
        return {}, []

    def _begin_epoch(self, begin: Callable[[], T]) -> T:
        ended = world.current().epoch
        self._meets = True
        try:
            found = begin()
        finally:
            self._meets = False
        self._features.call(RankFeature.epoch_ended, ended)
        return found

    def _stays_away(self) -> bool:
        """Whether the main thread does not come back to its event loop in a moment.

        It may just be sending what a cell has left.
        """
        assert self._loop is not None
        back = threading.Event()
        self._loop.call_soon_threadsafe(back.set)
        return not back.wait(_MOMENT_SECONDS)

    def _status(self) -> dict[str, Any]:
        busy, doing, request = self.wire.busy, world.current().doing, self._epochs.in_request
        if not busy and (waits_for_events() or not (request or self._stays_away())):
            doing = IDLE
        elif not busy and self._meets:
            doing = MEETS
        elif not busy and doing == RUNNING:
            # A hook of a feature, a request of a client, or a finalizer.
            place = sites.of_frame(frames.frame_of_main_thread()).place
            what = "in a request of a client, at" if request else "at"
            doing = Activity(BETWEEN, f"{what} {sites.with_source(place)}")
        return {
            "pid": os.getpid(),
            "rss_nbytes": self._telemetry.rss_nbytes(),
            "doing": doing,
            "line": current_line() if busy else "",
            "request": None if busy else request,
        }

    def _pulled(self, names: list[str]) -> bytes:
        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            raise UsageError(
                f"rank {self.rank} has no variable named {', '.join(missing)}. Set it in a cell, "
                f"or name the ranks that have it: %distributed pull {', '.join(names)} -r RANKS"
            )
        values = {name: self._shell.user_ns[name] for name in names}
        packed, problem = _pickled(values)
        if packed is None:
            alone = {name: _pickled({name: value})[1] for name, value in values.items()}
            name, problem = next(filter(itemgetter(1), alone.items()), (", ".join(names), problem))
            raise UsageError(f"rank {self.rank} cannot send {name}: {problem}")
        return packed

    def _refuse(self, ask: Query, problem: str) -> None:
        self.wire.send(Answer(ask.request, self.rank, {}, problem))


def _pickled(values: dict[str, Any]) -> tuple[bytes | None, str]:
    try:
        return cloudpickle.dumps(values, protocol=5), ""
    except BaseException as error:  # an object's own way to be pickled may do anything
        return None, text_of(error) or type(error).__name__


def _stack() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in frames.frames_of_threads().items():
        parts.append(f"thread {names.get(ident, ident)}\n")
        try:
            parts.extend(traceback.format_stack(frame))
        except UnicodeError:
            parts.append("  in a file whose name is no text\n")
    return "".join(parts)


def log_path(config: HostAgentConfig, rank: int) -> str:
    return os.path.join(config.log_dir, f"rank-{rank}.log")


def _pin(config: HostAgentConfig, rank: int) -> str:
    # Before anything can open CUDA.
    libraries.share_cores(config.ranks_here)
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    libraries.set_quiet(config.devices)
    local, local_size = launched.local_place(os.environ, rank, config.size, config.rank_variables)
    device, settings = libraries.pinning(config.devices, local, local_size)
    libraries.set_variables(os.environ, settings)
    return device


def _is_of_the_loop(error: BaseException) -> bool:
    """Whether the event loop has raised it, which would do so again, and no function of a cell."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("asyncio", "selectors", "tornado")


def _library() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version().split(",")[0].split("\n")[0].strip()


def _no_windows(gui: str | None = None) -> None:
    # Accepts ``%matplotlib inline``. ipykernel's own looks for an application that a rank lacks.
    if gui not in (None, "", "inline"):
        raise UsageError(
            f"expected figures in the notebook, found %gui {gui}: a rank opens no windows. "
            "Type: %matplotlib inline"
        )


def _no_next_input(*_: Any, **__: Any) -> None:
    # ``%load`` and ``%recall`` would do nothing.
    raise UsageError(
        "expected code that a rank can run, found a magic that fills a cell of the notebook. "
        "Type it in a cell of its own, or for a script: %run FILE"
    )


def _for_the_notebook(name: str, line: str, cell: str | None = None) -> None:
    magic = f"%{name}" if cell is None else f"%%{name}"
    raise UsageError(
        f"expected code for the ranks, found {magic}, which is a magic of the notebook. "
        "Type it in a cell of its own"
    )


def _refuse_own_extensions(shell: Any) -> None:
    manager = shell.extension_manager
    load = manager.load_extension

    def load_extension(name: str) -> str | None:
        if name.partition(".")[0] == "allranks":
            _for_the_notebook(f"load_ext {name}", "")
        found: str | None = load(name)
        return found

    manager.load_extension = load_extension


def _print_page(_shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
    # A rank has no pager for the text of ``name?``.
    print(data["text/plain"] if isinstance(data, dict) else data)
