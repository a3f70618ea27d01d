"""All that stands between the notebook and one set of ranks, from their start to their end."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from allranks.cluster import deaths, folders
from allranks.cluster.announced import Announced
from allranks.cluster.hosts import Hosts
from allranks.cluster.inbox import Event, FromNursery, FromRank, Inbox, Pressed, Unread
from allranks.cluster.launchers.launcher import Launcher, OnSeveralHosts
from allranks.cluster.launchers.spread import ANY_PORTS, LOOPBACK, ports
from allranks.cluster.nursery import Nursery
from allranks.cluster.wire import Wire
from allranks.errors import ClusterLost, StartFailed, UsageError, WireError
from allranks.records.config import NurseryConfig
from allranks.records.ranks import label
from allranks.records.telemetry import Points, Pulse, Telemetry, Timings
from allranks.records.wire import Answer, Ask, Hello, Output, Prompt, Record, Reply, Result
from allranks.widgets.mirrors import Mirrors

if TYPE_CHECKING:
    import ipyparallel

_START_SECONDS = 60.0
_PRELOAD_SECONDS = 120.0
_ASK_SECONDS = 30.0
_CLIENT_SECONDS = 30.0
_CLIENT_TRY_SECONDS = 3.0
_POLL_SECONDS = 0.1

Answers = dict[int, tuple[dict[str, Any], list[bytes]]]
CellRecord = Output | Prompt | Reply | Result | Telemetry
OfCell = Callable[[CellRecord, list[bytes]], None]
Deliver = Callable[[Answer], None]


class Connection:
    """A set of ranks, up and reachable once :meth:`start` has returned.

    Whether they are up, have died or were ended, everybody asks here: ``state`` is ``starting``,
    ``running``, ``stopped`` or ``lost``, and ``ends`` has what ended by itself.

    Args:
        size: how many ranks.
        gpus: ``CUDA_VISIBLE_DEVICES`` values to pin them to, or none.
        launcher: what starts them.
        preload: modules that they begin with.
        of_cell: called with what ranks write, and with their replies.
    """

    def __init__(
        self,
        size: int,
        gpus: tuple[str, ...],
        launcher: Launcher,
        preload: tuple[str, ...],
        of_cell: OfCell,
    ) -> None:
        self.size = size
        inbox = self.inbox = Inbox()
        self.hellos: dict[int, Hello] = {}
        self.ends: list[deaths.End] = []
        self.state = "starting"
        self.lost_because = ""
        self._clients: list[ipyparallel.Client] = []
        self.launcher_text = ""
        self._preloading = ""
        self._cause = ""
        self._ipyparallel: dict[str, Any] = {}
        files = self._files = Announced(size)
        self._of_cell = of_cell
        self._offsets: dict[int, int] = {}
        self._requests = 0
        self._answers: dict[int, dict[int, tuple[Answer, list[bytes]]]] = {}
        self._awaited: dict[int, Deliver] = {}
        self._launcher = launcher
        command: list[str] = []
        address, allowed, place = LOOPBACK, ANY_PORTS, ""
        if isinstance(launcher, OnSeveralHosts):
            address, allowed, place = launcher.address(), ports(), "/tmp"
        else:
            command = launcher.command(size)
        environment = launcher.environment()
        work_dir = _work_folder()
        self.log_dir = folders.make_log_folder()
        self._session_dir = folders.name_session_folder(place)
        # The threads behind these must not hold the connection: it ends when nobody else does.
        mirrors = self.mirrors = Mirrors()

        def deliver(record: Record, payloads: list[bytes]) -> None:
            left = mirrors.sift(record, payloads)
            if left is not None:
                inbox.put(FromRank(left, payloads))

        self._wire = Wire(deliver, lambda problem: inbox.put(Unread(problem)), address, allowed)
        mirrors.send = self._wire.send
        self._config = NurseryConfig(
            size=size,
            launch=tuple(command),
            environment=environment,
            session_dir=self._session_dir,
            log_dir=self.log_dir,
            work_dir=work_dir,
            devices=gpus,
            commands_url=self._wire.commands_url,
            events_url=self._wire.events_url,
            wire_key=self._wire.key,
            preload=preload,
        )
        self._nurseries: list[Nursery | Hosts] = []
        # Runs when nobody holds the connection any longer, and when the kernel exits.
        self._finalizer = weakref.finalize(
            self,
            _end_anywhere,
            self._clients,
            self._nurseries,
            self._wire,
            files,
            self._session_dir,
        )

    # ── start and stop ───────────────────────────────────────────────────────────────────────

    def start(self, tell: Callable[[str], None], progress: Callable[[int, str], None]) -> None:
        """Brings up the ranks.

        Args:
            tell: called, again and again, with what is waited for where hosts are to be had later.
            progress: called several times a second with how many are up, and with the module that
                is preloaded, if one is.

        Raises:
            StartFailed: they did not come up; nothing of them is left but logs.
        """
        patience = _START_SECONDS + self.size + bool(self._config.preload) * _PRELOAD_SECONDS
        deadline = time.monotonic() + patience
        try:
            with self.inbox.hearing_interrupts():
                # An interrupt waits until this is known, and can be ended: a job, for example.
                nursery = self._nursery()
                while len(self.hellos) < self.size:
                    if isinstance(nursery, Hosts) and (waits := nursery.begin()):
                        deadline = time.monotonic() + patience
                        tell(waits)
                    if Pressed() in self.step(_POLL_SECONDS):
                        raise KeyboardInterrupt
                    progress(len(self.hellos), self._preloading)
                    if self.ends or time.monotonic() > deadline:
                        raise StartFailed(self._start_problem())
        except BaseException:
            self.close()
            raise
        nursery.all_up()
        self.state = "running"

    def _nursery(self) -> Nursery | Hosts:
        # The threads behind this must not hold the connection: it ends when nobody else does.
        inbox, files, nurseries = self.inbox, self._files, self._nurseries

        def deliver(name: str, told: dict[str, Any]) -> None:
            if name == "registered":
                pids = (each.pid for each in nurseries if isinstance(each, Nursery))
                with suppress(OSError):  # a home may be read-only; client() needs no files
                    files.write(told["client"], told["engine"], next(pids, None))
                return
            inbox.put(FromNursery(name, told))
            if name == "nursery_exit":  # known first: to remove the files may take a while
                files.close()

        try:
            made: Nursery | Hosts
            if isinstance(self._launcher, OnSeveralHosts):
                made = Hosts(self._launcher, self._config, self._wire, deliver)
            else:
                made = Nursery(self._config, deliver)
        except PermissionError as error:
            raise StartFailed(
                f"expected to start {sys.executable} for the ranks, found {error}: this user may "
                "not run it. Start the notebook's kernel with a Python that this user may run: "
                "python -m ipykernel install --user"
            ) from error
        except OSError as error:
            raise StartFailed(
                f"expected to start a process for the ranks, found {error}. "
                "End other processes, and type: %distributed start"
            ) from error
        self._nurseries.append(made)
        return made

    def _start_problem(self) -> str:
        settle = time.monotonic() + _POLL_SECONDS
        while time.monotonic() < settle:
            self.step(_POLL_SECONDS / 4)
        missing = set(range(self.size)) - set(self.hellos)
        on = "".join(each.where(missing) for each in self._nurseries if isinstance(each, Hosts))
        told = deaths.last_lines(self.log_dir, self.ends, self.launcher_text)
        return (
            f"expected {self.size} ranks, found {len(self.hellos)}: {label(missing)} did not come "
            f"up{on}. {deaths.describe(self.ends)}\n{told}\nThe logs are in {self.log_dir}"
        )

    def close(self, state: str = "stopped", why: str = "") -> None:
        """Ends the ranks; returns when every process of theirs is gone.

        Args:
            state: what they are from now on, ``stopped`` or ``lost``.
            why: why they are lost.
        """
        self.state, self.lost_because = state, why
        self.mirrors.close()
        for nursery in self._nurseries if self.ends else ():
            # As long as it is not ended from here.
            self._cause = self._cause or nursery.why_ended()
        with self.inbox.hearing_interrupts():  # it ends by itself, and soon
            self._finalizer()
            self.step(0)

    # ── talk ─────────────────────────────────────────────────────────────────────────────────

    def send(self, ranks: Iterable[int], record: Record, *payloads: bytes) -> None:
        """Sends a record to ranks."""
        self._wire.send(ranks, record, *payloads)

    def step(self, seconds: float) -> list[Pressed]:
        """Handles what comes within ``seconds``; returns the interrupts among it.

        Raises:
            WireError: something of it could not be read.
            Exception: something of it could not be shown. All that came with it is handled first,
                so that no reply is lost, and the interrupts are returned by the next call.
        """
        pressed: list[Pressed] = []
        failed: Exception | None = None
        for event in self.inbox.wait(seconds):
            if isinstance(event, Pressed):
                pressed.append(event)
                continue
            try:
                self._handle(event)
            except Exception as error:
                failed = failed or error
        if failed is None:
            return pressed
        for press in pressed:
            self.inbox.put(press)
        raise failed

    def wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Handles what comes until ``done``, or so long; interrupts stay for who waits next."""
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            for pressed in self.step(min(_POLL_SECONDS, seconds)):
                self.inbox.put(pressed)

    def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        *payloads: bytes,
        ranks: Iterable[int],
        seconds: float = _ASK_SECONDS,
        strict: bool = True,
    ) -> Answers:
        """Returns the ranks' answers to a request (see ``allranks.records.requests``).

        Raises:
            UsageError: a rank refused, or did not answer in time (unless not ``strict``).
            ClusterLost: a rank died meanwhile.
        """
        chosen = tuple(ranks)
        self._requests += 1
        request = self._requests
        got = self._answers[request] = {}
        self.send(chosen, Ask(request, name, arguments), *payloads)
        self.wait_until(lambda: len(got) == len(chosen) or bool(self.ends), seconds)
        del self._answers[request]
        if strict and self.ends:
            raise ClusterLost(self.loss())
        problems = [answer.problem for _, (answer, _) in sorted(got.items()) if answer.problem]
        silent = set(chosen) - set(got)
        if silent:
            problems.append(f"{label(silent)} did not answer within {seconds:g} s")
        if strict and problems:
            raise UsageError(problems[0])
        return {r: (a.content, bufs) for r, (a, bufs) in sorted(got.items()) if not a.problem}

    def ask_soon(
        self, name: str, arguments: dict[str, Any], deliver: Deliver, ranks: Iterable[int]
    ) -> None:
        """Makes a request; ``deliver`` is called with each answer, whenever it comes."""
        self._requests += 1
        self._awaited[self._requests] = deliver
        self.send(ranks, Ask(self._requests, name, arguments))

    def client(self) -> ipyparallel.Client:
        """Returns an ipyparallel client of the ranks, which closes with this connection."""
        import ipyparallel

        deadline = time.monotonic() + _CLIENT_SECONDS
        while not self._clients:
            made = ipyparallel.Client(self._ipyparallel["client"])
            try:
                made.wait_for_engines(self.size, timeout=_CLIENT_TRY_SECONDS, interactive=False)
            except TimeoutError:
                # It misses an engine that registers just while it connects: another one may not.
                made.close()
                if time.monotonic() > deadline:
                    raise
            except BaseException:
                made.close()
                raise
            else:
                self._clients.append(made)
        return self._clients[0]

    def _handle(self, event: Event) -> None:
        if isinstance(event, Unread):
            raise WireError(
                f"expected a message of a rank, found what cannot be read ({event.problem}): what "
                "it said is lost. The ranks and their variables are there: run the cell again"
            ) from event.problem
        if isinstance(event, FromRank):
            record = event.record
            if isinstance(record, Hello):
                self.hellos[record.rank] = record
            elif isinstance(record, Answer):
                if record.request in self._answers:
                    self._answers[record.request][record.rank] = (record, event.payloads)
                elif record.request in self._awaited:
                    self._awaited[record.request](record)
            elif isinstance(record, Output | Prompt | Reply | Result | Points | Timings | Pulse):
                if isinstance(record, Output) and record.log_nbytes:
                    self._offsets[record.rank] = record.log_nbytes
                self._of_cell(record, event.payloads)
        elif isinstance(event, FromNursery):
            if event.name == "connection":
                self._ipyparallel = event.fields
            elif event.name == "preloading":
                self._preloading = event.fields["module"]
            elif event.name == "launcher":
                self.launcher_text = (self.launcher_text + event.fields["text"])[-20_000:]
            elif event.name == "opened_cuda":
                raise StartFailed(
                    f"--preload {event.fields['module']} needs a module that leaves CUDA closed: "
                    "importing this one opens it, and no rank that is forked afterwards could use "
                    "a GPU. Leave it out and import it in a cell, or have it use the GPU in "
                    "functions only."
                )
            elif event.name in ("exit", "launcher_exit", "nursery_exit", "host_left"):
                self.ends.append(deaths.End.of(event.name, event.fields))

    # ── death ────────────────────────────────────────────────────────────────────────────────

    @property
    def up(self) -> bool:
        """Whether every rank is there."""
        return self.state == "running" and not self.ends

    @property
    def closed(self) -> bool:
        """Whether the ranks were ended."""
        return self.state in ("stopped", "lost")

    @property
    def over(self) -> bool:
        """Whether nothing more is to be expected: they were ended, or have died."""
        return self.closed or deaths.all_over(self.ends, self.size)

    def lose(self, shown: bool = False) -> str:
        """Ranks died: takes the rest down, and returns what :meth:`loss` says."""
        self.close("lost")
        self.lost_because = self.loss(shown)
        return self.lost_because

    def unseen(self, rank: int) -> str:
        """Returns the text that a rank wrote and did not get to send."""
        return deaths.unseen(self.hellos[rank].log, self._offsets.get(rank, 0))

    def loss(self, shown: bool = False) -> str:
        """Returns which rank died, how, and what is lost with it.

        Args:
            shown: the last lines of the ranks have been shown already.
        """
        return deaths.loss(
            self.ends, self.hellos, self.launcher_text, self.size, shown, self._cause
        )


def _work_folder() -> str:
    """Returns the folder in which the ranks run: the notebook's own.

    Raises:
        StartFailed: it has been removed.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise StartFailed(
            f"expected a working folder, found that it has been removed: {error}. Type: %cd ~"
        ) from error


def _end_anywhere(*held: Any) -> None:
    """Ends what a connection holds; a collection of garbage may ask for it in any thread."""
    if threading.current_thread() is threading.main_thread():
        _end(*held)
        return
    try:
        # The thread may be one of those that it waits for.
        threading.Thread(target=_end, args=held, name="allranks-end").start()
    except RuntimeError:
        pass  # the process ends: so does the nursery, which hears of it


def _end(
    clients: list[ipyparallel.Client],
    nurseries: list[Nursery | Hosts],
    wire: Wire,
    files: Announced,
    session_dir: str,
) -> None:
    """Ends what a connection holds; it must not hold the connection itself."""
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, session_dir, ignore_errors=True)
        ends.callback(files.close)  # once no thread writes them any longer
        ends.callback(wire.close)
        for held in (*nurseries, *clients):
            ends.callback(held.stop if isinstance(held, Nursery | Hosts) else held.close)
