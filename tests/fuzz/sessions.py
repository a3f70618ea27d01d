"""Sessions to play steps in: ranks of a notebook's kernel, and of a cluster of this process."""

from __future__ import annotations

import ast
import base64
import gc
import importlib
import os
import pickle
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

import allranks
from allranks.errors import AllranksError, CellFailed
from tests.faults.notebook import GONE_SECONDS, HEARS_OF_A_DEATH, Notebook
from tests.fuzz.grammar import Fault, check
from tests.fuzz.ranks import SETUP, Witness
from tests.kernel import ANSI, Cell, KernelDied

SHARED = Path("/dev/shm")
_HANG_SECONDS = 60.0
"""A cell that has not ended by then is called a hang. It is no promise of speed: it only has to be
far above what any cell here takes on a busy machine."""
_ENVIRONMENT = {"ALLRANKS_LATE_SECONDS": "0.5"}
"""Some ranks here are late for longer than that, and are named."""
_REPORTS = "import sys as _s; print([(r.rank, r.etype, r.waiting) for r in _s.last_value.reports])"
_REPORTED = ("CellFailed", "CellInterrupted", "CellTimeout")
_ONCE = "import numpy\nfrom IPython.display import HTML\nHTML('x' * 200_000)"
"""numpy has threads, and pyzmq starts one when something large is shown; these never end."""
_FORGET = "import gc, sys; sys.last_value = sys.last_traceback = sys.last_exc = None; gc.collect();"
"""IPython keeps the last error, and with it all that was at hand."""
_NBYTES = 3_000_000
"""Far more than the text of a cell may be, whose every change is sent whole."""

Signals = Sequence[tuple[float, int, int]]


@dataclass
class Ended:
    """How a cell ended, as its reader sees it.

    Attributes:
        how: ``ok``, or the error's name.
        reports: rank, exception and whether it only waited, of each rank that did not finish.
        bundles: rich displays, each with the label above it.
    """

    how: str
    message: str = ""
    text: str = ""
    reports: list[tuple[int, str, bool]] = field(default_factory=list)
    values: Any = field(default_factory=list)
    bundles: list[tuple[str, str]] = field(default_factory=list)


class Session:
    """Ranks that steps are played on. Each kind defines:

    ``cell``: runs a cell and returns how it ended. ``push``, ``pull``, ``status``: return how they
    ended, with one value a rank. ``restart(size)`` and ``stop``: of the ranks. ``revive``: what a
    user does before the next cell where ranks were lost. ``hear_of_death``: returns once the leader
    knows that a rank has died. ``press``: interrupts. ``leader``: the
    process that leads the ranks. ``close``: ends everything; a `Fault` where something is left.
    ``abandon``: ends everything after a fault, whatever it takes. In ``folder`` the session may
    leave files, until it is closed.

    Attributes:
        steps: how many probes the ranks have run since their variables were set.
        starts: how often ranks were started.
        heals: whether ranks that die are replaced.
    """

    kind: str
    heals = False

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.witness = Witness(folder / "witness")
        self.steps = self.starts = 0
        self.pids: dict[int, int] = {}
        try:
            self.begin()
            self.set_up()
        except BaseException:
            self.abandon()
            raise

    def set_up(self) -> None:
        """Gives the ranks their variables: they are fresh, or have forgotten them."""
        ended = self.cell(SETUP.format(folder=str(self.witness.folder)))
        check(ended.how == "ok", "set up", f"{ended.how}: {ended.message}\n{ended.text}")
        pids = dict(enumerate(self.cell("os.getpid()", wants_values=True).values))
        self.starts += pids != self.pids
        self.pids, self.steps = pids, 0

    def figures(self) -> str:
        """Returns what the session holds now."""
        leader = self.leader()
        ranks = ", ".join(_figures(psutil.Process(pid)) for pid in self.pids.values())
        shared = len(_segments(leader.children(recursive=True)))
        return f"leader {_figures(leader)}; ranks {ranks}; {shared} segments"

    @contextmanager
    def attended(
        self, presses: Sequence[float], signals: Signals, done: threading.Event | None = None
    ) -> Iterator[None]:
        """Within, interrupts and signals are sent at their moments; then ``done`` is set."""
        done = done or threading.Event()

        def send() -> None:
            started = time.monotonic()
            for moment, rank, number in sorted([*((at, -1, 0) for at in presses), *signals]):
                # A signal goes out even where the cell has ended: another one has to follow it.
                ended = done.wait(max(0, started + moment - time.monotonic()))
                if rank >= 0:
                    time.sleep(max(0, started + moment - time.monotonic()))
                    with suppress(ProcessLookupError):
                        os.kill(self.pids[rank], number)
                elif not ended:
                    self.press()

        sender = threading.Thread(target=send, daemon=True)
        try:
            try:
                sender.start()  # in here: the first interrupt may come before it returns
                yield
            finally:
                done.set()
        finally:
            sender.join()


def _figures(process: psutil.Process) -> str:
    with process.oneshot():
        nbytes, descriptors = process.memory_info().rss, process.num_fds()
        return f"{nbytes >> 20} MiB {descriptors} fd {process.num_threads()} thr"


def _more(held: tuple[int, int], before: tuple[int, int]) -> bool:
    """Whether there are more descriptors, or more threads, than before.

    Fewer is no leak: pyzmq ends the thread of its large messages when the last one is gone.
    """
    return any(now > then for now, then in zip(held, before, strict=True))


def _segments(processes: Iterable[psutil.Process]) -> set[str]:
    """Returns the files in shared memory that processes have mapped."""
    found: set[str] = set()
    for process in processes:
        with suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found |= set(re.findall(rf"{SHARED}/(\S+)$", maps, re.MULTILINE))
    return found


class InNotebook(Session):
    """Ranks of ``%%distributed`` cells in a real notebook's kernel."""

    kind = "notebook"

    def begin(self) -> None:
        (cwd := self.folder / "notebook").mkdir()
        self.notebook = Notebook(cwd, dict(_ENVIRONMENT))
        self.notebook.__enter__()
        # What is made once, with the first ranks, is made before anything is counted.
        # What a cell here breaks is all lost, so that one seed gives the same session.
        for line in ("heal off", "start -n 1"):
            self._must(f"%distributed {line}")
        self._must(_ONCE)
        self._must("%distributed stop")
        self._idle = self._held()
        self._must(f"%distributed start -n {self.size}")

    def cell(self, source, ranks=None, timeout=None, presses=(), signals=(), wants_values=False):
        options = " -o _values" if wants_values else ""
        options += f" -r {','.join(map(str, ranks))}" if ranks is not None else ""
        options += f" --timeout {timeout:g}" if timeout is not None else ""
        cell = self.notebook.start(f"%%distributed{options}\n{source}")
        # An interrupt that comes before the kernel has begun interrupts nothing.
        self._pump(cell, lambda: cell.begun or cell.done)
        with self.attended(presses, signals):
            self._pump(cell, lambda: cell.done)
        ended = self._ended(cell)
        if wants_values and ended.how == "ok":
            ended.values = self._value("_values")
        if ended.how in _REPORTED:
            ended.reports = ast.literal_eval(self._must(_REPORTS).stdout)
        return ended

    def push(self, name: str, expression: str) -> Ended:
        return self._ended(self._run(f"{name} = {expression}\n%distributed push {name}"))

    def pull(self, name: str) -> Ended:
        ended = self._ended(self._run(f"_pulled = %distributed pull {name}"))
        if ended.how == "ok":
            ended.values = list(self._value("_pulled").values())
        return ended

    def status(self) -> Ended:
        ended = self._ended(self._run("%distributed status"))
        rows = re.findall(r"rank (\d+)  pid (\d+)  .*?  (\w+)(?:  .*)?$", ended.text, re.MULTILINE)
        ended.values = [(int(pid), state) for _, pid, state in sorted(rows)]
        return ended

    def restart(self, size: int) -> None:
        self._must(f"%distributed restart -n {size}")
        self.size = size

    def stop(self) -> None:
        self._must("%distributed stop")
        # A number of ranks that was asked for is forgotten with them.
        self._must(f"%distributed start -n {self.size}")

    def revive(self) -> None:
        """The next cell starts ranks by itself."""

    def hear_of_death(self, rank: int) -> None:
        self._must(HEARS_OF_A_DEATH.format(rank))

    def press(self) -> None:
        # As the front end's button does; its own function would make an event loop in this thread.
        os.killpg(os.getpgid(self.notebook.pid), signal.SIGINT)

    def leader(self) -> psutil.Process:
        return psutil.Process(self.notebook.pid)

    def close(self) -> None:
        try:
            self.notebook.note_files()
            self._must("%distributed stop")
            deadline = time.monotonic() + GONE_SECONDS
            while _more(held := self._held(), self._idle):
                text = f"descriptors, threads: {self._idle} before, {held} after"
                check(time.monotonic() < deadline, "left", text)
            try:
                self.notebook.wait_for_no_children(GONE_SECONDS)
                self.notebook.shutdown()
                self.notebook.check_nothing_left()
            except (TimeoutError, AssertionError) as error:
                raise Fault("left", f"{error}{self.notebook.files_left()}") from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        self.notebook.stop()

    def _held(self) -> tuple[int, int]:
        """How many descriptors and threads the kernel holds without ranks."""
        self._must(_FORGET)
        self.notebook.drain(0.3)
        links = []
        for link in Path(f"/proc/{self.notebook.pid}/fd").iterdir():
            with suppress(OSError):
                links.append(os.readlink(link))
        # IPython opens its history as it pleases.
        mine = [link for link in links if ".ipython" not in link]
        return len(mine), self.leader().num_threads()

    def _pump(self, cell: Cell, over: Callable[[], bool]) -> None:
        try:
            self.notebook.pump(over, _HANG_SECONDS, "the end", cell)
        except TimeoutError as error:
            doing = [
                f"{process.pid} {process.status()} {' '.join(process.cmdline())[:100]}"
                for process in [self.leader(), *self.notebook.children()]
            ]
            raise Fault("hang", "\n".join([str(error), *doing])) from error
        except KernelDied as error:
            raise Fault("kernel died", str(error)) from error

    def _run(self, source: str) -> Cell:
        cell = self.notebook.start(source)
        self._pump(cell, lambda: cell.done)
        return cell

    def _must(self, source: str) -> Cell:
        cell = self._run(source)
        check(cell.status == "ok", "refused", f"{source}\n{cell.text}")
        return cell

    def _value(self, name: str) -> Any:
        dumped = f"_b.b64encode(_p.dumps({name})).decode()"
        pickled = f"import base64 as _b, pickle as _p; print({dumped})"
        return pickle.loads(base64.b64decode(self._must(pickled).stdout))

    def _ended(self, cell: Cell) -> Ended:
        nbytes = cell.iopub_nbytes
        check(nbytes <= _NBYTES, "flood", f"{nbytes:,} bytes went to the front end")
        bundles, label = [], ""
        for data in cell.displays:
            if rich := data.get("text/html", ""):
                bundles.append((rich, label))
            else:
                label = data.get("text/plain", "").strip().split("\n")[-1]
        how = "ok" if cell.status == "ok" else cell.error_name or cell.status
        text = cell.text + ANSI.sub("", cell.error_value)
        return Ended(how, cell.error_value, text, bundles=bundles)


class _Hang(BaseException):
    """Raised in the main thread, wherever it waits."""


class InProcess(Session):
    """Ranks of an ``allranks.Cluster`` in the process of the suite itself."""

    kind = "cluster"

    def begin(self) -> None:
        self._others = set(psutil.Process().children(recursive=True))
        self._segments: set[str] = set()
        (temporary := self.folder / "tmp").mkdir()
        folders = {"ALLRANKS_LOG_DIR": str(self.folder / "logs"), "TMPDIR": str(temporary)}
        self._patch = patch.dict(os.environ, {**_ENVIRONMENT, **folders})
        self._patch.start()
        tempfile.tempdir = None
        # What is made once, with the first ranks, the first array (numpy's threads) and the
        # first large message (pyzmq's thread for its memory), is made before all is counted.
        with allranks.Cluster(1) as first:
            first.push({"large": np.zeros(1_000_000, np.uint8)})
        self._idle = self._held()
        self.cluster = self._started(self.size)

    def cell(self, source, ranks=None, timeout=None, presses=(), signals=(), wants_values=False):
        return self.do(
            lambda: self.cluster.run(source, ranks=ranks, timeout=timeout), presses, signals
        )

    def do(self, call: Any, presses: Sequence[float] = (), signals: Signals = ()) -> Ended:
        """Calls something of the cluster's; returns how that ended, and what was printed."""
        shown, ended = StringIO(), Ended("ok")
        try:
            with self._heard(presses, signals), redirect_stdout(shown):
                ended.values = call()
        except (AllranksError, SyntaxError, KeyboardInterrupt) as error:
            ended.how, ended.message = type(error).__name__, str(error)
            if isinstance(error, CellFailed):
                ended.reports = [(r.rank, r.etype, r.waiting) for r in error.reports]
                ended.text = error.text
        except _Hang as hang:
            raise Fault("hang", f"it has not ended\n{shown.getvalue()}") from hang
        finally:
            self._segments |= _segments(self._children())
        ended.text = ANSI.sub("", f"{shown.getvalue()}\n{ended.text}\n{ended.message}")
        return ended

    def push(self, name: str, expression: str) -> Ended:
        return self.do(lambda: self.cluster.push({name: eval(expression)}))

    def pull(self, name: str) -> Ended:
        return self.do(lambda: list(self.cluster.pull(name).values()))

    def status(self) -> Ended:
        return self.do(lambda: [(each.pid, each.state) for each in self.cluster.status()])

    def restart(self, size: int) -> None:
        if size == self.size:
            self.cluster.restart()
        else:
            self.cluster.stop()
            self.cluster = self._started(size)
        self.size = size

    def stop(self) -> None:
        self.cluster.stop()
        self.cluster.start()

    def hear_of_death(self, rank: int) -> None:
        ranks, deadline = self.cluster.cells.connection, time.monotonic() + GONE_SECONDS
        while not ranks.roster.ends and rank not in ranks.roster.dead:
            check(time.monotonic() < deadline, "talk", "expected to hear of a death")
            ranks.step(0.05)

    def revive(self) -> None:
        if not self.cluster.cells.is_up():
            self.cluster.start()

    def press(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def leader(self) -> psutil.Process:
        return psutil.Process()

    def close(self) -> None:
        try:
            self.cluster.stop()
            deadline = time.monotonic() + GONE_SECONDS
            while (left := self._left()) and time.monotonic() < deadline:
                time.sleep(0.05)
            check(not left, "left", ", ".join(left))
        finally:
            self.abandon()

    def abandon(self) -> None:
        with suppress(AttributeError, Exception):
            self.cluster.stop()
        for process in self._children():
            with suppress(psutil.Error):
                process.kill()
        self._patch.stop()
        tempfile.tempdir = None

    def _started(self, size: int) -> allranks.Cluster:
        cluster = allranks.Cluster(size)
        cluster.heal_when("on" if self.heals else "off")
        return cluster.start()

    def _children(self) -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - self._others

    def import_here(self, module: str) -> None:
        """Imports a module whose threads never end, and counts them as there without ranks."""
        process = psutil.Process()
        before = process.num_fds(), process.num_threads()
        importlib.import_module(module)
        descriptors, threads = self._idle
        descriptors += process.num_fds() - before[0]
        self._idle = descriptors, threads + process.num_threads() - before[1]

    def _held(self) -> tuple[int, int]:
        """How many descriptors and threads this process holds without ranks."""
        gc.collect()
        this = psutil.Process()
        return this.num_fds(), this.num_threads()

    def _left(self) -> list[str]:
        """What the cluster had and that is still there, logs apart."""
        children = [process for process in self._children() if process.is_running()]
        left = [" ".join(process.cmdline())[:100] for process in children]
        left += [name for name in sorted(self._segments) if (SHARED / name).exists()]
        left += [str(path) for path in Path(tempfile.gettempdir()).rglob("*")]
        if not left and _more(self._held(), self._idle):
            names = ", ".join(str(thread) for thread in threading.enumerate())
            left = [f"descriptors, threads: {self._idle} before, {self._held()} after: {names}"]
        return left

    @contextmanager
    def _heard(self, presses: Sequence[float], signals: Signals) -> Iterator[None]:
        """`attended`, where interrupts end with the call, and a hang is ended."""
        done = threading.Event()
        main = threading.main_thread().ident or 0
        late = threading.Timer(_HANG_SECONDS, signal.pthread_kill, (main, signal.SIGUSR1))

        def hang(*_: object) -> None:
            raise _Hang

        def pressed(*_: object) -> None:
            if not done.is_set():
                raise KeyboardInterrupt

        before = [signal.signal(signal.SIGUSR1, hang), signal.signal(signal.SIGINT, pressed)]
        late.start()
        try:
            with self.attended(presses, signals, done):
                yield
        finally:
            late.cancel()
            late.join()
            signal.signal(signal.SIGUSR1, before[0])
            signal.signal(signal.SIGINT, before[1])


class Healing(InProcess):
    """Ranks of an ``allranks.Cluster`` of this process that are replaced where they die."""

    kind = "healing"
    heals = True
