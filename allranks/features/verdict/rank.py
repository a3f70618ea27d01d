"""Gathers what the notebook needs to judge a cell: calls, and ranks that had no core to run on.

The calls are those of the journal. Sums and averages of floats look at some of their numbers
(`InputNumbers`), and optimizers at some of their weights (`weights.py`). The thread that receives
records reads the counters of the process with the pulse, about once a second, and looks at the
lines of the threads 20 times a second, and later 7 times, at random moments.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from math import inf, nan
from random import Random
from time import monotonic, process_time, sleep
from typing import Any

from allranks.collectives import world
from allranks.collectives.calls.journal import named
from allranks.collectives.calls.numbers import InputNumbers
from allranks.collectives.calls.sites import Site, shown_name, source_line
from allranks.engine.features import Answered, RankContext, RankFeature
from allranks.features.verdict import CHECK, MEASURED, VARIABLE, weights
from allranks.features.verdict.cores import IdleCores, usable_cores
from allranks.features.verdict.gradients import computes_gradients, updated_models
from allranks.features.verdict.records import (
    BroughtNumbers,
    CodeLine,
    Doing,
    EndedCall,
    Kind,
    LastNotFinite,
    Look,
    RankPart,
    Sample,
)
from allranks.features.verdict.stack import Path, look
from allranks.features.verdict.threads import ReadingThreads
from allranks.features.verdict.weights import Weights
from allranks.post_import import PostImportHook
from allranks.records.wire import Record, RunCell

#: Of a longer cell, only the last samples are kept, and only a part of these is sent.
_KEPT_SAMPLES, _SENT_SAMPLES = 4096, 256
#: A shorter cell is not looked at: the next one must not wait. Nor is a member of an ensemble.
_LONG_SECONDS = 0.25
_KEPT_LOOKS = 1200
#: A look takes 0.2 ms of a core that is busy. So after this time there are fewer of them: one in
#: so many moments, at random, because a step may be as long as any interval.
_OFTEN_SECONDS, _ONE_OF = 5.0, 3
#: Looks come up to this much after the thread has been let in: at once it would find the main
#: thread where that has let go of the interpreter. At a fixed interval they would beat with steps.
_APART_SECONDS = 0.02
#: All ranks together send about this number of calls, and each rank at least a few.
_CALLS, _LEAST_CALLS = 20_000, 1000
#: Between a cell and the request for it, allranks may run others, as to keep variables.
_KEPT_CELLS = 4
_SOURCE_CHARACTERS = 60
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_SHORT_NBYTES = 99
_pread = ctypes.PyDLL(None).pread
_pread.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_longlong
_pread.restype = ctypes.c_ssize_t
#: More names of a cell's variables are not looked at.
_MOST_NAMES = 1000


class RankVerdict(RankFeature):
    """Keeps the beginnings of cells, and samples of this process."""

    records = (RunCell,)
    requests_while_busy = frozenset({CHECK, MEASURED})

    def __init__(self) -> None:
        #: When each of the last cells came, by the journal's clock, and its number in the notebook.
        self._cells: dict[int, tuple[float, int]] = {}
        self._found: dict[int, tuple[InputNumbers, Weights]] = {}
        self._sources: dict[int, str] = {}
        self._weights: Weights | None = None
        #: What the next cell checks.
        self._check = ""
        self._samples: deque[tuple[Sample, dict[str, int]]] = deque(maxlen=_KEPT_SAMPLES)
        self._times, self._idle = ThreadTimes(), IdleCores()
        self._readers = ReadingThreads()
        self._looks: deque[tuple[float, Path, Doing, *tuple[float, ...]]]
        self._looks = deque(maxlen=_KEPT_LOOKS)
        #: One of its own: the cell's random numbers stay the same.
        self._random = Random()

    def started(self, rank: RankContext) -> None:
        self._rank = rank
        self._main_counters: int | None = None
        self._memory: int | None = None
        self._has_counters = os.environ.get(VARIABLE) != "off"
        # One rank has no other to compare with.
        self._looks_at_lines = self._compares = self._has_counters and rank.size > 1
        if self._looks_at_lines:
            with suppress(OSError):  # not Linux
                path = f"/proc/self/task/{os.getpid()}/schedstat"
                self._main_counters = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._memory = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

        PostImportHook(
            weights.MODULES, lambda module: weights.install(module, lambda: self._weights)
        ).install()

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        if isinstance(record, RunCell):
            this = world.current()
            self._cells[record.cell] = this.journal.now(), record.number
            self._sources[record.cell] = record.source
            if len(self._cells) > _KEPT_CELLS:
                old = next(iter(self._cells))
                del self._cells[old]
                del self._sources[old]
                self._found.pop(old, None)
            check, self._check = self._check, ""
            before: InputNumbers | None = this.numbers
            if self._compares or check:
                this.numbers = InputNumbers(every=check == "nan")
                self._weights = Weights(compares=check == "weights")
                self._found[record.cell] = this.numbers, self._weights
            else:
                this.numbers = self._weights = None
            if check == "nan" or (before is not None and before.every):
                # What is looked at is decided once for each kind of calls.
                for group in list(this.groups.values()):
                    group.plans.clear()

    # A cell may have replaced functions of Python until it ends. It must not fail for these hooks.

    def cell_running(self) -> None:
        with suppress(Exception):
            began, _ = self._cells.get(self._rank.cell(), (inf, -1))
            seconds = world.current().journal.now() - began
            often = seconds < _OFTEN_SECONDS or self._random.random() < 1 / _ONE_OF
            if self._looks_at_lines and seconds >= _LONG_SECONDS and often:
                late = self._wait_for_look()
                path, doing, reading = look(self._readers.are_found)
                now = world.current().journal.now()
                used = self._main_used(), process_time()
                counted = *used, late, self._rss_nbytes(), *self._readers.count(reading)
                self._looks.append((now, path, doing, *counted))

    def _wait_for_look(self) -> float:
        """Returns by how many seconds it has ended too late: the main thread may hold the lock of
        the interpreter. Its switch interval stays, because it is the cell's, and its forks' too.
        """
        due = monotonic() + _APART_SECONDS * self._random.random()
        sleep(max(0.0, due - monotonic()))
        return monotonic() - due

    def _main_used(self) -> float:
        """Returns the seconds in which the main thread has run, or could have."""
        if self._main_counters is None:
            return nan
        ran, waited, _ = map(int, _read(self._main_counters).split())
        return (ran + waited) / 1e9 if ran else nan

    def _rss_nbytes(self) -> float:
        return _resident_nbytes(_read(self._memory)) if self._memory is not None else 0.0

    def pulse_fields(self) -> dict[str, Any]:
        """Takes a sample as well."""
        with suppress(Exception):
            self._sample()
        steps = self._weights.steps if self._weights is not None else 0
        return {"optimizer_steps": steps} if steps else {}

    def _sample(self) -> None:
        if self._has_counters:
            try:
                sample = read_counters(world.current().journal.now(), self._times, self._idle)
            except (OSError, ValueError):  # not Linux, or a kernel without these counters
                self._has_counters = False
            else:
                self._samples.append((sample, self._lengths()))

    def _lengths(self) -> dict[str, int]:
        names = self._rank.shell.user_ns
        if len(names) > _MOST_NAMES:
            return {}
        # A copy, because the cell may add names meanwhile.
        return {
            name: len(value)
            for name, value in names.copy().items()
            if type(value) in (list, dict, set) and type(name) is str and name[:1] != "_"
        }

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        """Returns this rank's part of a cell; one that it has not run has the number -1."""
        if name == CHECK:
            self._check = arguments["what"]
            return {}, []
        began, number = self._cells.get(arguments["cell"], (inf, -1))
        ended = min((at for at, _ in self._cells.values() if at > began), default=inf)
        self._sample()
        most = max(_LEAST_CALLS, _CALLS // max(1, self._rank.size))
        records, count = world.current().journal.since(began, most)
        kinds: dict[tuple[str, str, int, int, str], int] = {}
        calls = []
        for call in records:
            if call.ended > ended:
                break
            key = call.op, call.name, call.nbytes, call.ranks, call.dtype
            kind = kinds.setdefault(key, len(kinds))
            wait, transfer = call.wait_seconds, call.transfer_seconds
            calls.append(EndedCall(kind, call.ended, wait, transfer, call.last_rank))
        samples = [one for one in list(self._samples) if began <= one[0].at]
        looks = [one for one in list(self._looks) if began <= one[0] <= ended]
        paths = {path: at for at, path in enumerate({one[1] for one in looks if one[1]})}
        part = RankPart(
            rank=self._rank.rank,
            number=number,
            host=socket.gethostname(),
            cores=usable_cores(),
            kinds=[
                Kind(op, name, nbytes, ranks, _source(name, op), dtype)
                for op, name, nbytes, ranks, dtype in kinds
            ],
            calls=calls,
            samples=_thinned([sample for sample, _ in samples]),
            grown=_grown([lengths for _, lengths in samples]),
            looks=[Look(at, paths.get(path, -1), doing, *rest) for at, path, doing, *rest in looks],
            paths=[tuple(_line(*line) for line in path) for path in paths],
            left_out=count - len(records),
            gpu=self._rank.device != "cpu",
            **self._compared(arguments["cell"]),
        )
        return part.message()

    def _compared(self, cell: int) -> dict[str, Any]:
        """Returns what the notebook compares between ranks."""
        if cell not in self._found:
            return {}
        numbers, followed = self._found[cell]
        offset = world.current().offset_seconds
        not_finite = [
            LastNotFinite(
                one.group, one.call, one.at + offset, one.count, one.op,
                one.name or named(one.site), one.nbytes,
            )
            for one in numbers.not_finite.copy().values()
        ]  # fmt: skip
        variables = self._rank.shell.user_ns.copy()
        models = followed.ended(variables)
        source = self._sources[cell]
        gradients = not models and computes_gradients(source, variables)
        brought = [BroughtNumbers(*one) for one in numbers.brought]
        return {
            "brought": brought,
            "not_finite": not_finite,
            "models": models,
            "gradients": gradients,
            "updated": updated_models(source, variables) if gradients else [],
        }


class ThreadTimes:
    """Adds up the times of a process's threads, also of those that have ended since the last time.

    A thread's times are how long it ran, and could have run.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        self._ended = [0, 0]

    def add_up(self, threads: dict[str, tuple[int, int]]) -> tuple[int, int]:
        for thread, times in self._last.items():
            # A new thread may have the number of one that has ended.
            if thread not in threads or threads[thread][0] < times[0]:
                self._ended = [a + b for a, b in zip(self._ended, times, strict=True)]
        self._last = threads
        run, ready = (sum(column) for column in zip(*threads.values(), self._ended, strict=True))
        return run, ready


def read_counters(
    at: float, times: ThreadTimes | None = None, idle: IdleCores | None = None
) -> Sample:
    """Returns the counters of this process. Raises OSError where the system has none."""
    threads: dict[str, tuple[int, int]] = {}
    main = str(os.getpid())
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
                ran, waited, _ = map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            if thread == main:
                raise
            continue  # a thread that has ended meanwhile
        threads[thread] = ran, waited
    counted, ready = (times or ThreadTimes()).add_up(threads)
    main_ready = threads[main][1]
    if not counted:
        raise OSError("this kernel does not count the time of threads")
    with open("/proc/self/statm", "rb") as file:
        nbytes = _resident_nbytes(file.read())
    # Also of threads that have begun and ended since the last sample, as those of an epoch.
    run = process_time()
    idle_seconds = (idle or IdleCores()).seconds_at(at)
    return Sample(at, run, ready / 1e9, main_ready / 1e9, nbytes, idle_seconds)


def _read(descriptor: int) -> bytes:
    """Returns a short file from its beginning, without giving the interpreter's lock away.

    After `os.pread` the look would wait for the lock once more, and so would the main thread: 1 %
    of a step of torch's DistributedDataParallel that takes 2 ms.
    """
    buffer = ctypes.create_string_buffer(_SHORT_NBYTES)
    count = _pread(descriptor, buffer, _SHORT_NBYTES, 0)
    if count < 0:
        raise OSError("expected a readable file of /proc")
    return buffer.raw[:count]


def _resident_nbytes(counters: bytes) -> int:
    # Without shared memory, and mapped files, as those of data: the system takes these back.
    _, resident, shared, *_ = map(int, counters.split())
    return (resident - shared) * _PAGE_NBYTES


def _source(name: str, op: str) -> str:
    site = Site.of(name)
    if site is None:
        return ""
    source = source_line(*site)
    # The notebook looks for the call in it.
    return source[: max(_SOURCE_CHARACTERS, source.find(op) + len(op))]


def _line(file: str, number: int, function: str) -> CodeLine:
    name = shown_name(file)
    place = f"{name.rpartition('/')[2]}:{number}"
    return CodeLine(place, function, source_line(file, number)[:_SOURCE_CHARACTERS])


def _thinned(samples: list[Sample]) -> list[Sample]:
    stride = 1 + len(samples) // _SENT_SAMPLES
    kept = samples[::-stride]
    if samples and kept[-1] is not samples[0]:
        kept.append(samples[0])
    return kept[::-1]


def _grown(lengths: list[dict[str, int]]) -> dict[str, tuple[int, int]]:
    """Returns the names whose lengths have grown between nearly all samples."""
    found = {}
    for name in _in_all(lengths):
        row = [one[name] for one in lengths]
        steps = [after > before for before, after in pairwise(row)]
        if len(steps) >= 3 and sum(steps) >= 0.7 * len(steps):
            found[name] = row[0], row[-1]
    return found


def _in_all(lengths: list[dict[str, int]]) -> Iterable[str]:
    return [name for name in lengths[-1] if all(name in one for one in lengths)] if lengths else []


FEATURE = RankVerdict
