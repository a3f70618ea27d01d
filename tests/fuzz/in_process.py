"""A session through ``allranks.Cluster``, in the process of the suite itself."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

import allranks
from allranks.errors import AllranksError, CellFailed
from tests.faults.notebook import GONE_SECONDS
from tests.fuzz.grammar import Fault
from tests.fuzz.sessions import (
    ENVIRONMENT,
    HANG_SECONDS,
    SHARED,
    Ended,
    Session,
    Signals,
    more,
    segments,
)
from tests.kernel import ANSI

_LARGE = 1_000_000


class _Hang(BaseException):
    """Raised in the main thread, wherever it waits."""


class InProcess(Session):
    """Ranks of an ``allranks.Cluster`` of this process."""

    kind = "cluster"

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size, folder)
        self._others = set(psutil.Process().children(recursive=True))
        self._segments: set[str] = set()
        (temporary := folder / "tmp").mkdir()
        self._patch = patch.dict(
            os.environ,
            {**ENVIRONMENT, "ALLRANKS_LOG_DIR": str(folder / "logs"), "TMPDIR": str(temporary)},
        )
        self._patch.start()
        tempfile.tempdir = None
        try:
            # What is made once, with the first ranks, the first array (numpy's threads) and the
            # first large message (pyzmq's thread for its memory), is made before all is counted.
            with allranks.Cluster(1) as first:
                first.push({"large": np.zeros(_LARGE, np.uint8)})
            self._idle = self._held()
            self.cluster = self._started(size)
            self.set_up()
        except BaseException:
            self.abandon()
            raise

    def cell(self, source, ranks=None, timeout=None, presses=(), signals=(), wants_values=False):
        return self.do(
            lambda: self.cluster.run(source, ranks=ranks, timeout=timeout), presses, signals
        )

    def do(self, call: Any, presses: Sequence[float] = (), signals: Signals = ()) -> Ended:
        """Calls something of the cluster's; returns how that ended, and what was printed."""
        shown, ended = StringIO(), Ended("ok")
        try:
            with self._attended(presses, signals), redirect_stdout(shown):
                ended.values = call()
        except (AllranksError, SyntaxError, KeyboardInterrupt) as error:
            ended.how, ended.message = type(error).__name__, str(error)
            if isinstance(error, CellFailed):
                ended.reports = [(r.rank, r.etype, r.waiting) for r in error.reports]
                ended.text = error.text
        except _Hang as hang:
            raise Fault("hang", f"it has not ended\n{shown.getvalue()}") from hang
        finally:
            self._segments |= segments(
                set(psutil.Process().children(recursive=True)) - self._others
            )
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

    def revive(self) -> None:
        if not self.cluster.is_up():
            self.cluster.start()

    def leader(self) -> psutil.Process:
        return psutil.Process()

    def close(self) -> None:
        try:
            self.cluster.stop()
            deadline = time.monotonic() + GONE_SECONDS
            while (left := self._left()) and time.monotonic() < deadline:
                time.sleep(0.05)
            if left:
                raise Fault("left", ", ".join(left))
        finally:
            self.abandon()

    def abandon(self) -> None:
        with suppress(AttributeError, Exception):
            self.cluster.stop()
        for process in set(psutil.Process().children(recursive=True)) - self._others:
            with suppress(psutil.Error):
                process.kill()
        self._patch.stop()
        tempfile.tempdir = None

    def _started(self, size: int) -> allranks.Cluster:
        cluster = allranks.Cluster(size)
        cluster.heal_when("on" if self.heals else "off")
        return cluster.start()

    def _held(self) -> tuple[int, int]:
        """How many descriptors and threads this process holds without ranks."""
        gc.collect()
        this = psutil.Process()
        return this.num_fds(), this.num_threads()

    def _left(self) -> list[str]:
        """What the cluster had and that is still there, logs apart."""
        children = set(psutil.Process().children(recursive=True)) - self._others
        left = [" ".join(process.cmdline())[:100] for process in children if process.is_running()]
        left += [name for name in sorted(self._segments) if (SHARED / name).exists()]
        left += [str(path) for path in Path(tempfile.gettempdir()).rglob("*")]
        if not left and more(self._held(), self._idle):
            names = ", ".join(str(thread) for thread in threading.enumerate())
            left = [f"descriptors, threads: {self._idle} before, {self._held()} after: {names}"]
        return left

    @contextmanager
    def _attended(self, presses: Sequence[float], signals: Signals) -> Iterator[None]:
        """Within, interrupts and signals are sent at their moments, and a hang is ended."""
        done = threading.Event()
        moments = [(moment, -1, 0) for moment in presses] + list(signals)
        main = threading.main_thread().ident or 0

        def send() -> None:
            started = time.monotonic()
            for moment, rank, number in sorted(moments):
                if done.wait(started + moment - time.monotonic()) and rank < 0:
                    continue
                if rank >= 0:
                    with suppress(ProcessLookupError):
                        os.kill(self.pids[rank], number)
                else:
                    signal.pthread_kill(main, signal.SIGINT)
            if not done.wait(HANG_SECONDS):
                signal.pthread_kill(main, signal.SIGUSR1)

        def hang(_signal: int, _frame: FrameType | None) -> None:
            raise _Hang

        def pressed(_signal: int, _frame: FrameType | None) -> None:
            if not done.is_set():
                raise KeyboardInterrupt

        sender = threading.Thread(target=send, daemon=True)
        before = [signal.signal(signal.SIGUSR1, hang), signal.signal(signal.SIGINT, pressed)]
        try:
            try:
                sender.start()  # in here: the first interrupt may come before it returns
                yield
            finally:
                done.set()
        finally:
            sender.join()
            signal.signal(signal.SIGUSR1, before[0])
            signal.signal(signal.SIGINT, before[1])


class Healing(InProcess):
    """Ranks of an ``allranks.Cluster`` of this process that are replaced where they die."""

    kind = "healing"
    heals = True
