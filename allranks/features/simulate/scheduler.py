"""Ranks as tasks of one process: exactly one of them runs, and a schedule chooses the next one.

A task runs until it has to wait in a call; then the scheduler continues another one. Where nothing
can run, it first continues the one whose computing ends first, if ranks share cores. Then it
matches a receive from any source, then continues tasks that poll. If that is not possible either,
no rank can ever go on: all get the error that explains it.

Tasks are greenlets: a switch takes 0.6 µs and a task 6 KB. Threads that pass a baton take 35 µs
and 16 KB, and Python interrupts only the main one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any, Protocol

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from allranks.collectives.calls import deadlocks
from allranks.collectives.calls.call import Call
from allranks.engine.cell import in_rank
from allranks.errors import CollectiveError, RankLeft, UsageError
from allranks.features.simulate.cores import SharedCores
from allranks.features.simulate.events import PostedReceive, RankEvent, SimulatedMessage
from allranks.features.simulate.network import Network
from allranks.records.ranks import label

_NAMED = 4
"""The most ranks of a deadlock that are listed one by one."""


class Schedule(Protocol):
    """Decides everything that MPI leaves open. The same decisions give the same run."""

    def next_rank(self, ready: Sequence[int]) -> int:
        """Returns which of the ranks that can go on runs next, as an index of ``ready``."""

    tries_orders: bool
    """Whether a rank that waits for one of several requests first lets all others run."""

    def choose_match(
        self,
        matches: Iterator[tuple[PostedReceive, list[SimulatedMessage]]],
        polling: Sequence[int],
    ) -> tuple[PostedReceive, SimulatedMessage] | int:
        """Returns which receive from any source gets which message, or which rank's test ends.

        It is asked when no rank can run, except those that poll. ``matches`` are the receives, one
        at least, each with the first message of each source.
        """

    def choose_message(self, receive: PostedReceive, found: Sequence[SimulatedMessage]) -> int:
        """Returns which message a probe of any source finds, as an index of ``found``."""

    def choose_completed(self, rank: int, count: int) -> int:
        """Returns which of the completed requests a wait for any of them gets."""

    def has_completed(self, rank: int, title: str) -> bool:
        """Whether a test or a probe of a rank finds what has happened already."""

    def is_buffered(self, message: SimulatedMessage) -> bool:
        """Whether a standard send ends at once (eager), or when it is received (rendezvous)."""


class SeededSchedule:
    """Decides by a seed; messages are buffered up to a number of bytes, as MPI libraries do."""

    tries_orders = False

    def __init__(self, seed: int, eager_nbytes: int) -> None:
        self._random = random.Random(seed)
        self._eager_nbytes = eager_nbytes

    def next_rank(self, ready: Sequence[int]) -> int:
        """A random one."""
        return int(self._random.random() * len(ready))

    def choose_match(
        self,
        matches: Iterator[tuple[PostedReceive, list[SimulatedMessage]]],
        polling: Sequence[int],
    ) -> tuple[PostedReceive, SimulatedMessage] | int:
        """A random message of the first receive."""
        receive, found = next(matches)
        return receive, found[self.choose_message(receive, found) if len(found) > 1 else 0]

    def choose_completed(self, rank: int, count: int) -> int:
        """The first one."""
        return 0

    def choose_message(self, receive: PostedReceive, found: Sequence[SimulatedMessage]) -> int:
        """A random one."""
        return int(self._random.random() * len(found))

    def has_completed(self, rank: int, title: str) -> bool:
        """Always."""
        return True

    def is_buffered(self, message: SimulatedMessage) -> bool:
        """By its size."""
        return message.nbytes <= self._eager_nbytes


@dataclass
class Wait:
    """What a task waits for: it can go on when one of the ``missing`` acts, or all of them do."""

    call: Call
    missing: Callable[[], Iterable[int]]
    every: bool


class Task:
    """One rank: its world, its clock, and the state of libraries that it has for itself."""

    def __init__(self, rank: int, world: Any) -> None:
        self.rank, self.world = rank, world
        self.greenlet: greenlet | None = None
        self.place: greenlet | None = None
        """Where it goes on: its own greenlet, or one that the cell has made."""
        self.clock = 0.0
        """Seconds of simulated time since the cell began."""
        self.wait: Wait | None = None
        self.error: BaseException | None = None
        """Raised where the task waits, once it runs again."""
        self.began_computing = 0.0
        self.in_call = False
        """Whether it is in a call, whose time is that of the network, not of the processor."""


_READING_SECONDS = min(-(thread_time() - thread_time()) for _ in range(99))
"""The CPU time that it takes to read the CPU time."""
EVENTS = 1_000_000
"""The most events that are kept of a cell."""


class Scheduler:
    """Runs the tasks of one cell.

    ``switched`` is called whenever another task runs from now on, or none.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        schedule: Schedule,
        network: Network,
        switched: Callable[[Task | None], object] = lambda task: None,
    ) -> None:
        self.tasks, self.schedule, self.network = tasks, schedule, network
        self.mail: Any = None
        """The `Mail` of the cell."""
        self.events: list[RankEvent] = []
        self.current: Task | None = None
        self.measures = True
        """Whether the CPU time of a rank between two calls counts as simulated time."""
        self.cores: SharedCores | None = None
        if network.slowdowns and not schedule.tries_orders:
            self.cores = SharedCores(network.machines(len(tasks)), network.slowdown)
        self.interrupted = False
        self.stalled: dict[int, tuple[float, tuple[int, ...]]] = {}
        """The ranks that could not go on: since when, and the ranks that they waited for."""
        self._switched = switched
        self._ready: list[int] = []
        self._polling: list[int] = []
        self._living: set[int] = set()
        self._hub = getcurrent()

    @property
    def task(self) -> Task:
        """The task that runs."""
        assert self.current is not None
        return self.current

    def run(self, body: Callable[[Task], None]) -> None:
        """Calls ``body``, which never raises, for each task; returns when all calls have ended."""
        self._hub = getcurrent()
        for task in self.tasks:
            task.greenlet = greenlet(partial(body, task))
            task.clock, task.wait, task.error = 0.0, None, None
        self._living = set(range(len(self.tasks)))
        self._ready = sorted(self._living)
        try:
            while self._living and not self.interrupted:
                self._continue(self.tasks[self._next()])
        except KeyboardInterrupt:  # it came between two tasks
            self.interrupted = True
        for rank in sorted(self._living):
            self._interrupt(self.tasks[rank])

    def _continue(self, task: Task) -> None:
        assert task.greenlet is not None
        self.current = task
        self._switched(task)
        task.began_computing = thread_time()
        try:
            (task.place or task.greenlet).switch()
        finally:
            self.current = None
            self._switched(None)
            if task.greenlet.dead:
                self._living.discard(task.rank)
                task.greenlet = None

    def _interrupt(self, task: Task) -> None:
        """Has a task that waits raise KeyboardInterrupt, until it ends."""
        while task.greenlet is not None:
            task.error = KeyboardInterrupt()
            self._continue(task)

    def _next(self) -> int:
        while not self._ready:
            if self.cores:
                rank, clock = self.cores.next_end()
                self.tasks[rank].clock = clock
                return rank
            if self.mail.match_any_source(self._polling):
                continue
            if self._polling:
                self._ready, self._polling = self._polling, []
                break
            self._end_stall()
        at = self.schedule.next_rank(self._ready) if len(self._ready) > 1 else 0
        # Its place is filled by the last one: the order does not matter, and nothing moves.
        last = self._ready.pop()
        if at == len(self._ready):
            return last
        chosen, self._ready[at] = self._ready[at], last
        return chosen

    def block(self, wait: Wait) -> None:
        """Waits until `wake` is called for this rank; raises the error that ends the wait."""
        self._check()
        task = self.task
        task.wait = wait
        self._leave(task)

    def poll(self) -> None:
        """Lets the other ranks run; this one goes on once none of them can."""
        self._check()
        task = self.task
        self._polling.append(task.rank)
        self._leave(task)

    def end_poll(self, rank: int) -> None:
        """Lets a rank that polls go on before the others."""
        self._polling.remove(rank)
        self._ready.append(rank)

    def _check(self) -> None:
        # An interrupted rank may make a call on its way out, in which it would wait for others.
        if self.interrupted or isinstance(sys.exc_info()[1], KeyboardInterrupt):
            self.interrupted = True
            raise KeyboardInterrupt
        if not in_rank():
            raise UsageError(
                "expected a call in the process of the simulated ranks, found one in a process "
                "that a rank has forked. Return the value to the rank, and make the call there"
            )

    def _leave(self, task: Task) -> None:
        self.computed()
        self._switch(task)
        task.wait = None

    def _switch(self, task: Task) -> None:
        task.place = getcurrent()
        self._hub.switch()
        task.place = None
        error, task.error = task.error, None
        if error is not None:
            task.wait = None
            raise error

    def wake(self, rank: int) -> None:
        task = self.tasks[rank]
        if task.wait is not None:
            task.wait = None
            self._ready.append(rank)

    def computed(self, seconds: float = 0.0, until: float | None = None) -> None:
        """Advances the running rank's clock by the time that it has computed since this call.

        ``until`` is the CPU time at which it has ended computing: now, if None.
        """
        task, now = self.task, thread_time() if until is None else until
        if self.measures and not task.in_call:
            seconds += max(0.0, now - task.began_computing - _READING_SECONDS)
        task.began_computing = now
        if self.cores is None or not seconds or self.interrupted:
            task.clock += seconds
            return
        self.cores.add(task.rank, task.clock, seconds)
        self._switch(task)

    def slept(self, seconds: float) -> None:
        """Advances the running rank's clock by seconds in which it needs no core."""
        self.computed()
        self.task.clock += seconds

    def begin_call(self, now: float) -> bool:
        """From this CPU time on, the running rank does work of the simulator, which takes no
        simulated time. Returns what `end_call` needs: whether it did so before.
        """
        self.computed(until=now)
        task = self.task
        outer, task.in_call = task.in_call, True
        return outer

    def end_call(self, outer: bool) -> None:
        task = self.task
        task.in_call = outer
        task.began_computing = thread_time()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within, as between `begin_call` and `end_call`."""
        outer = self.begin_call(thread_time())
        try:
            yield
        finally:
            self.end_call(outer)

    def record(self, event: RankEvent) -> None:
        if len(self.events) < EVENTS:
            self.events.append(event)

    def _end_stall(self) -> None:
        """No rank can go on: those that wait for a rank that has left get an error, or else all."""
        waiting = [task for task in self.tasks if task.wait is not None]
        if not waiting:  # a cell has switched to the scheduler's greenlet
            self._ready = sorted(self._living)
            return
        left: dict[int, tuple[int, str]] = {}
        for task in self.tasks:
            if task.greenlet is None and (why := waiting[0].world.departure(task.rank)):
                left[task.rank] = why
        stranded = []
        known: dict[int, set[int]] = {}
        for task in waiting:
            wait = task.wait
            assert wait is not None
            key = id(wait.call.carry) if wait.call.carry is not None else id(wait)
            if key not in known:
                known[key] = set(wait.missing())
            missing = known[key]
            gone = missing & left.keys()
            if gone and (wait.every or gone == missing):
                _, rank, why = min((left[rank][0], rank, left[rank][1]) for rank in gone)
                stranded.append((task, _left_text(task, wait, rank, why)))
        error: Callable[[str], CollectiveError] = RankLeft
        if not stranded:
            waits = {(task.rank, task.wait.call.site) for task in waiting if task.wait is not None}
            text = _deadlock_text(waiting, self.mail.other_tags(waits))
            stranded, error = [(task, text) for task in waiting], deadlocks.error
        for task, text in stranded:
            task.error = error(text)
            assert task.wait is not None
            self.stalled.setdefault(task.rank, (task.clock, tuple(sorted(task.wait.missing()))))
            if error is deadlocks.error:
                assert task.wait is not None
                task.wait.call.deadlock = text
            self.wake(task.rank)


def _left_text(task: Task, wait: Wait, rank: int, why: str) -> str:
    # The text of a wait of real ranks.
    text: str = task.world.watch._left_text(wait.call, rank, why)
    return text


def _names(ranks: Iterable[int]) -> str:
    return label(found) if (found := sorted(ranks)) else "no rank"


def _deadlock_text(waiting: Sequence[Task], tags: Sequence[deadlocks.OtherTag]) -> str:
    ranks = [task.rank for task in waiting]
    found: dict[tuple[str, str], list[Task]] = {}
    for task in waiting:
        assert task.wait is not None
        call = task.wait.call
        found.setdefault((call.spec.title, str(call.site)), []).append(task)
    lines = []
    for (title, site), tasks in found.items():
        for_whom = [
            f"rank {task.rank} for {_names(task.wait.missing())}"
            for task in tasks[:_NAMED]
            if task.wait is not None
        ]
        more = ", …" if len(tasks) > _NAMED else ""
        who = label([task.rank for task in tasks])
        verb = "waits" if len(tasks) == 1 else "wait"
        lines.append(f"  {who} {verb} in {title} at {site}: {', '.join(for_whom)}{more}")
    first = deadlocks.text(ranks, [title for title, _ in found], tags)
    return "\n".join([first, *lines])
