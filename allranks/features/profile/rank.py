"""Where this rank spends its time: a thread samples its main thread, fifty times a second.

It reads the frames of the thread that runs the cells, from within the process. A profiler outside
of it, as py-spy, would need the right to trace other processes, which containers do not give. The
signal of a timer (`setitimer`) would break into waits of the cell, MPI and NCCL, and Python handles
signals between two of its own steps only.
"""

from __future__ import annotations

import linecache
import sys
import threading
from contextlib import suppress
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from allranks.collectives.calls import frames, sites
from allranks.engine.cell import CellRunner
from allranks.engine.exceptions import PACKAGE
from allranks.engine.features import Answered, RankContext, RankFeature
from allranks.features.profile import PROFILE, PROFILED, SAMPLES_A_SECOND
from allranks.records.code_names import is_cell
from allranks.records.wire import RunCell

#: The longest of them are sent; the others are summed up.
_MOST_STACKS = 1000
_KEPT_STACKS = 20_000
_DEEPEST = 300
_SWITCH_SECONDS = 0.0005
_SOURCE_CHARACTERS = 60
_OUTSIDE = ("(before and after the cell's lines)",)
_OTHERS = ("(others)",)
_CELL, _OWN, _IMPORT, _OTHER = range(4)

#: Seconds by stack, the outermost frame first.
Stacks = dict[tuple[str, ...], float]
#: A frame's code by its address, with its line where that counts.
_Key = tuple[int | tuple[int, int] | str, ...]


class Sampler:
    """Sums up the seconds that the main thread spends in each stack of frames.

    ``calls`` is the code that calls a function which the notebook has sent.
    """

    def __init__(self, calls: CodeType) -> None:
        self._calls = id(calls)
        self._known: dict[int, tuple[int, str, CodeType]] = {}
        self._sums: dict[_Key, float] = {}
        self._armed: float | None = None
        self._busy = False
        self._over = _closed()
        self._thread: threading.Thread | None = None
        # Requests come in the wire's thread, cells begin and end in the main one.
        self._lock = threading.RLock()

    def start(self, seconds: float) -> None:
        """Begins now, or with the next cell, and ends after the seconds; with 0, with the cell."""
        with self._lock:
            self.stop()
            self._armed = seconds
            if self._busy:
                self._go()

    def begin_cell(self) -> None:
        with self._lock:
            self._busy = True
            if self._armed is not None:
                self._go()

    def end_cell(self) -> None:
        # The rank waits for others, or for the next cell.
        with self._lock:
            self._busy = False
            if self._thread is not None:
                self.stop()

    def stop(self) -> None:
        with self._lock:
            self._armed = None
            if self._thread is not None:
                self._over.release()
                self._thread.join()
                self._thread = None

    def take(self) -> Stacks:
        with self._lock:
            self.stop()
            sums, self._sums = self._sums, {}
        stacks: Stacks = {}
        for key, seconds in sorted(sums.items(), key=lambda pair: -pair[1]):
            names = self._named(key)
            if names not in stacks and len(stacks) >= _MOST_STACKS:
                names = _OTHERS
            stacks[names] = stacks.get(names, 0.0) + seconds
        self._known.clear()
        return stacks

    def _go(self) -> None:
        seconds, self._armed = self._armed or float("inf"), None
        self._sums, self._over = {}, _closed()
        thread = threading.Thread(
            target=self._run, args=(seconds, self._over), name="allranks-sampler", daemon=True
        )
        with suppress(RuntimeError):  # no thread can start: the cell runs, without a profile
            thread.start()
            self._thread = thread

    def _run(self, seconds: float, over: threading.Lock) -> None:
        # Python lets another thread in after 5 ms: by then short work would have ended, and the
        # time would be counted for the next call that lets go of the interpreter by itself.
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            self._sample(seconds, over)
        finally:
            sys.setswitchinterval(before)

    def _sample(self, seconds: float, over: threading.Lock) -> None:
        began = before = perf_counter()
        while not over.acquire(timeout=1 / SAMPLES_A_SECOND) and before - began < seconds:
            with frames.no_collection():
                key = self._look()
            # A late sample, as after C code that held the interpreter, stands for all that time.
            now = perf_counter()
            if key not in self._sums and len(self._sums) >= _KEPT_STACKS:
                key = _OTHERS
            self._sums[key] = self._sums.get(key, 0.0) + now - before
            before = now

    def _look(self) -> _Key:
        """Returns the stack, the innermost frame first, up to the cell's own first line."""
        frame = frames.frame_of_main_thread()
        found: list[int | tuple[int, int] | str] = []
        outermost = 0
        while frame is not None and len(found) < _DEEPEST:
            code = frame.f_code
            key = id(code)
            if key == self._calls:
                outermost = len(found)
                break
            known = self._known.get(key) or self._learn(key, frame)
            if known[0] == _CELL:
                found.append((key, frame.f_lineno or 0))
                outermost = len(found)
            else:
                found.append(key)
            frame = frame.f_back
        if not outermost:
            return _OUTSIDE
        if frame is not None and len(found) == _DEEPEST:
            found.append("…")
            outermost = len(found)
        return tuple(found[:outermost])

    def _learn(self, key: int, frame: FrameType) -> tuple[int, str, CodeType]:
        code = frame.f_code
        file, module = code.co_filename, str(frame.f_globals.get("__name__", ""))
        called = code.co_qualname.replace("<locals>.", "")
        if is_cell(file):
            kind, name = _CELL, "" if code.co_name == "<module>" else f"{called} "
        elif file.startswith(PACKAGE):
            kind, name = _OWN, f"{code.co_name} (allranks)"
        elif file.startswith("<frozen importlib"):
            kind, name = _IMPORT, ""
        elif code.co_name == "<module>":
            kind, name = _OTHER, f"import {module}"
        else:
            kind, name = _OTHER, f"{called} ({module or file})"
        # The code is kept, so that no other object gets its address.
        known = self._known[key] = kind, name, code
        return known

    def _named(self, key: _Key) -> tuple[str, ...]:
        if key in (_OUTSIDE, _OTHERS):
            return tuple(map(str, key))
        names: list[str] = []
        within_own = False
        for part in reversed(key):
            if isinstance(part, str):
                names.append(part)
                continue
            kind, name, code = self._known[part[0] if isinstance(part, tuple) else part]
            # Of our own frames only the first matters, of importlib's none.
            hidden = kind == _IMPORT or (kind == _OWN and within_own)
            within_own = kind == _OWN
            if isinstance(part, tuple):
                name += _line(code.co_filename, part[1])
            if not hidden:
                names.append(name)
        return tuple(names)


def _closed() -> threading.Lock:
    # A lock that is held: a wait for it runs no Python code, unlike a wait for an event.
    lock = threading.Lock()
    lock.acquire()
    return lock


def _line(file: str, number: int) -> str:
    source = linecache.getline(file, number).strip()
    if len(source) > _SOURCE_CHARACTERS:
        source = source[: _SOURCE_CHARACTERS - 1] + "…"
    return f"{sites.shown_name(file)}:{number}  {source}".rstrip()


def packed(stacks: Stacks) -> dict[str, Any]:
    # For JSON, with each frame's name once.
    numbers: dict[str, int] = {}
    rows = [
        [seconds, [numbers.setdefault(name, len(numbers)) for name in stack]]
        for stack, seconds in stacks.items()
    ]
    return {"frames": list(numbers), "stacks": rows}


class RankProfile(RankFeature):
    """Samples cells on request of the notebook."""

    dormant = True  # until a profile is requested
    requests_while_busy = frozenset({PROFILE, PROFILED})

    def started(self, rank: RankContext) -> None:
        self._rank = rank
        self._sampler = Sampler(CellRunner._call.__code__)

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        if name == PROFILE:
            self._rank.activate(self)
            if self._rank.cell():  # it may have begun before the hooks were active
                self._sampler.begin_cell()
            self._sampler.start(arguments["seconds"])
            return {}, []
        return packed(self._sampler.take()), []

    def cell_started(self, cell: RunCell) -> None:
        self._sampler.begin_cell()

    def cell_left(self, error: BaseException | None) -> None:
        self._sampler.end_cell()


FEATURE = RankProfile
