"""One thread applies what ranks and host agents send; others handle what follows from it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.cluster import connection, last_words
from allranks.cluster.calls import Turns
from allranks.cluster.cell_run import CellRun, HiddenView
from allranks.cluster.connection import Connection
from allranks.cluster.driver import Driver
from allranks.cluster.failures import ProcessExit
from allranks.cluster.features import NotebookHooks
from allranks.cluster.sockets import (
    DeathsKnown,
    EventQueue,
    FromHostAgent,
    FromRank,
    InterruptRequested,
    RankSockets,
)
from allranks.cluster.state import ClusterState, TookPlaces
from allranks.errors import StartFailed, WireError
from allranks.records.agent import Exit, FolderMade, HostLeft, Notice
from allranks.records.wire import Answer, Died, Hello, Output, Query, Record, Reply


def hello(rank: int, pid: int = 1) -> Hello:
    return Hello(rank, 2, 0, 1, "here", pid, "cpu", "e", "m", "/none/log")


def output(rank: int, text: str, cell: int = 1) -> Output:
    return Output(rank, cell, (["out", text],), 0, 0, 0)


def reply(rank: int, cell: int = 1) -> Reply:
    return Reply(rank, cell, "ok", 0.1, False, False, "", None)


class Ranks:
    """Two ranks that are up, and the connection to them. ``sent`` has what they are sent."""

    ask, asking, step, wait_until = (
        Connection.ask,
        Connection.asking,
        Connection.step,
        Connection.wait_until,
    )
    is_left, begin_cell, end_cell = (
        Connection.is_left,
        Connection.begin_cell,
        Connection.end_cell,
    )
    _put_back = Connection._put_back
    note_deaths, _next, _handle, _take, _show_deaths = (
        Connection.note_deaths,
        Connection._next,
        Connection._handle,
        Connection._take,
        Connection._show_deaths,
    )
    over, closed = Connection.over, Connection.closed
    size, intercept, _has_ended, deaths = 2, None, False, 0

    def __init__(self, wire: RankSockets, driver: Driver, roster: ClusterState) -> None:
        self._wire, self.driver, self.roster = wire, driver, roster
        self.words, self.inbox, self.hooks = driver.words, driver.inbox, NotebookHooks(())
        self.turns = Turns(roster, lambda: None)
        self.run: CellRun | None = None
        self.late: list[Output] = []
        self._unhandled, self._delivers = deque[Any](), dict[int, Any]()
        self._numbers = iter(range(1, 1000))
        self.sent: list[tuple[tuple[int, ...], Record]] = []
        self.ask_soon: Any = None

    def send(self, ranks: Any, record: Record, *payloads: bytes) -> bool:
        self.sent.append((tuple(ranks), record))
        return True

    def come(self, *records: Record) -> None:
        """These come from ranks, in the thread that receives."""
        for record in records:
            self._wire.post(partial(self.driver.put, FromRank(record, [])))
        self.have_come()

    def die(self, rank: int, pid: int = 1) -> None:
        end = FromHostAgent(Exit(rank, pid, -9, by_launcher=False))
        self._wire.post(partial(self.driver.put, end))
        self.have_come()

    def have_come(self) -> None:
        """Returns once what was posted has been applied."""
        done = threading.Event()
        assert self._wire.post(done.set)
        assert done.wait(60)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    roster = ClusterState(2)
    driver = Driver(roster)
    urls = f"ipc://{tmp_path}/commands", f"ipc://{tmp_path}/events"
    driver.wire = wire = RankSockets(driver, NotebookHooks(()), urls)
    made = Ranks(wire, driver, roster)
    monkeypatch.setattr(wire, "send", made.send)
    roster.connect(can_replace=True)
    driver.begin()
    wire.start()
    made.come(hello(0), hello(1))
    roster.set_phase("running")
    yield made
    wire.close()


def test_events_are_applied_by_one_thread_in_their_order_whether_or_not_another_waits(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied, threads = list[tuple[int, int]](), set[int | None]()

    def note(event: Hello) -> tuple[()]:
        threads.add(threading.get_ident())
        applied.append((event.rank, event.pid))
        return ()

    monkeypatch.setattr(ranks.roster, "apply", note)
    over = threading.Event()

    def send(rank: int) -> None:
        for number in range(2000):
            event = FromRank(hello(rank, number), [])
            ranks._wire.post(partial(ranks.driver.put, event))

    def step() -> None:
        while not over.is_set():
            ranks.step(0)

    with ThreadPoolExecutor(4) as others:
        steps = [others.submit(step) for _ in range(2)]
        for sending in [others.submit(send, rank) for rank in range(2)]:
            sending.result()
        ranks.have_come()
        over.set()
        for one in steps:
            one.result()
    for rank in range(2):
        assert [number for one, number in applied if one == rank] == list(range(2000))
    assert threads == {ranks._wire._thread.ident}


def test_a_death_is_known_and_told_to_the_ranks_while_no_thread_waits(ranks: Ranks) -> None:
    ranks.die(1)
    assert list(ranks.roster.dead) == [1]
    ((told, record),) = ranks.sent
    assert (told, type(record)) == ((0,), Died)


def test_ranks_hear_of_a_death_before_the_commands_of_a_thread_that_knows_of_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells, goes_on = threading.Event(), threading.Event()
    told = list[str]()
    wire = ranks._wire

    def death_text(end: ProcessExit) -> str:
        tells.set()
        assert goes_on.wait(60)
        told.append("the death")
        return "was killed"

    def recover() -> None:
        with ranks.driver.wire.lock:  # as each message to ranks
            told.append("the recovery")

    monkeypatch.setattr(ranks.words, "death_text", death_text)
    with ThreadPoolExecutor(2) as others:
        dying = others.submit(ranks.die, 1)
        assert tells.wait(60)
        assert list(ranks.roster.dead) == [1]
        assert not wire.lock.acquire(blocking=False)
        recovering = others.submit(recover)
        goes_on.set()
        dying.result()
        recovering.result()
    assert told == ["the death", "the recovery"]


def test_other_threads_can_send_while_logs_are_read(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = list[bool]()

    def note() -> None:
        with ThreadPoolExecutor(1) as others:
            # The thread of the test has the lock for a moment as well.
            free.append(others.submit(ranks._wire.lock.acquire, timeout=20).result())
            if free[-1]:
                others.submit(ranks._wire.lock.release).result()

    monkeypatch.setattr(last_words, "log_length", lambda path: note() or 7)
    monkeypatch.setattr(last_words, "log_tail", lambda path, offset: note() or f"from {offset}")
    ranks.come(hello(1, 2))
    ranks.die(1, 2)
    assert free == [True, True]
    ((_, record),) = ranks.sent
    assert isinstance(record, Died)
    assert record.how == "was killed by signal 9 (SIGKILL); its last lines: from 7"


def test_a_rank_whose_log_cannot_be_read_has_died_all_the_same(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, offset: int) -> str:
        raise MemoryError("no memory for it")

    monkeypatch.setattr(last_words, "log_tail", fail)
    ranks.come(hello(1, 2))
    ranks.die(1, 2)
    assert ranks.roster.dead.keys() == {1}
    with pytest.raises(WireError, match="no memory for it"):
        ranks.step(0)


def test_events_before_the_state_is_that_of_these_ranks_are_applied_afterwards() -> None:
    roster = ClusterState(2)
    driver = Driver(roster)
    driver.wire = wire = SimpleNamespace(lock=threading.RLock(), host_of={0: "a", 1: "b"})  # type: ignore[assignment]
    for event in (hello(0), hello(1)):
        driver.put(FromRank(event, []))
    driver.put(FromHostAgent(HostLeft("is cut off"), "b"))
    assert not roster.hellos
    roster.connect(can_replace=True, can_relocate=True)
    roster.set_phase("running")
    wire.send = lambda *_: True
    driver.begin()
    assert (list(roster.hellos), list(roster.dead)) == ([0, 1], [1])
    assert [type(one) for one in driver.inbox.wait(0)] == [
        FromRank, FromRank, DeathsKnown, FromHostAgent,
    ]  # fmt: skip


def test_sockets_that_cannot_listen_fail_the_start_in_the_thread_that_waits(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise StartFailed("no place")

    monkeypatch.setattr(ranks._wire, "listen", refuse)
    ranks._wire.post(partial(ranks.driver.put, FromHostAgent(FolderMade())))
    ranks.have_come()
    with pytest.raises(StartFailed, match="no place"):
        ranks.step(0)


def test_calls_are_made_in_their_order_also_one_that_a_call_posts_and_after_one_that_raises(
    ranks: Ranks,
) -> None:
    made = list[str]()

    def outer() -> None:
        made.append("outer")
        ranks._wire.post(partial(made.append, "other"))  # before: another thread's would wait
        ranks._wire.post(refuse)
        ranks._wire.post(partial(made.append, "inner"))
        made.append("end of outer")

    def refuse() -> None:
        raise ValueError("refused")

    ranks._wire.post(outer)
    ranks._wire.settle()
    assert made == ["outer", "other", "inner", "end of outer"]
    with pytest.raises(WireError, match="refused"):
        ranks.step(0)


def test_the_last_calls_are_made_before_the_sockets_close(ranks: Ranks) -> None:
    begun, goes_on, made = threading.Event(), threading.Event(), list[int]()

    def wait() -> None:
        begun.set()
        assert goes_on.wait(60)

    ranks._wire.post(wait)
    assert begun.wait(60)
    for number in range(3):
        ranks._wire.post(partial(made.append, number))
    with ThreadPoolExecutor(1) as others:
        closing = others.submit(ranks._wire.close)
        goes_on.set()
        closing.result()
    assert made == [0, 1, 2]
    assert not ranks._wire.post(lambda: made.append(3))


# Cells.


def begin(ranks: Ranks, shown: list[str]) -> CellRun:
    view = HiddenView(lambda batch: shown.append(batch.entries[0][1]), shown.append)
    run = CellRun(1, (0, 1), ranks, view, None)  # type: ignore[arg-type]
    assert ranks.run is run
    return run


def test_a_cell_has_ended_once_what_came_before_the_last_reply_is_shown(ranks: Ranks) -> None:
    shown = list[str]()
    run = begin(ranks, shown)
    ranks.come(output(0, "a"), reply(0), output(1, "b"), reply(1))
    assert ranks.roster.cell is not None
    assert ranks.roster.cell.pending == ()
    assert (run.settled(), shown) == (False, [])
    run.step(0)
    assert (run.settled(), shown) == (True, ["a", "b"])


def test_the_output_of_an_abandoned_cell_that_all_have_left_is_late(ranks: Ranks) -> None:
    shown = list[str]()
    begin(ranks, shown)
    ranks.roster.abandoned = True
    ranks.come(output(0, "a"), reply(0), output(1, "b"), reply(1))
    cell = ranks.roster.cell
    assert cell is not None
    ranks.wait_until(lambda: ranks.is_left(cell), 60)
    assert [one.entries[0][1] for one in ranks.late] == ["a", "b"]


def test_while_a_thread_waits_for_its_cell_another_one_shows_nothing_of_it(ranks: Ranks) -> None:
    shown = list[str]()
    run = begin(ranks, shown)
    ranks.come(output(0, "a"))
    ranks.inbox.put(InterruptRequested())
    with ThreadPoolExecutor(1) as others:
        assert others.submit(ranks.step, 0).result() == []
        assert not others.submit(lambda: not ranks.turns.is_of_another).result()
        assert shown == []
        assert ranks.step(0) == [InterruptRequested()]
    assert shown == ["a"]
    # The thread ends without a wait for the cell.
    ranks.roster.thread = -1
    ranks.come(output(0, "b"), reply(0), reply(1))
    with ThreadPoolExecutor(1) as others:
        others.submit(ranks.step, 0).result()
    assert (shown, run.settled()) == (["a", "b"], True)


def test_a_thread_waits_for_the_end_of_anothers_cell_before_it_handles_what_comes(
    ranks: Ranks,
) -> None:
    begin(ranks, [])
    waits = list[float]()
    ranks.turns.await_own = waits.append  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as others:
        for seconds in (0, 0.01):
            others.submit(ranks.step, seconds).result()
    assert waits == [0.01]


def test_a_request_of_another_thread_is_answered_while_a_cell_runs(ranks: Ranks) -> None:
    shown, sent = list[str](), threading.Event()
    begin(ranks, shown)
    note = ranks.send

    def send(chosen: Any, record: Record, *payloads: bytes) -> bool:
        note(chosen, record)
        sent.set()
        return True

    ranks.send = send  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as others:
        asked = others.submit(partial(ranks.ask, "status", {}, seconds=60))  # type: ignore[call-arg]
        assert sent.wait(60)
        (_, query) = ranks.sent[-1]
        assert isinstance(query, Query)
        ranks.come(output(0, "a"))
        ranks.come(*(Answer(query.request, rank, {"is": rank}, "") for rank in range(2)))
        assert asked.result() == {0: ({"is": 0}, []), 1: ({"is": 1}, [])}
    assert shown == []


def test_an_answer_before_the_death_of_its_rank_counts(ranks: Ranks) -> None:
    def send(chosen: Any, record: Record, *payloads: bytes) -> bool:
        if isinstance(record, Query):
            ranks.come(Answer(record.request, 1, {"is": 1}, ""))
            ranks.die(1)
        return True

    ranks.send = send  # type: ignore[method-assign]
    assert ranks.ask("status", {}, ranks=(1,)) == {1: ({"is": 1}, [])}  # type: ignore[call-arg]


def test_a_death_before_a_cell_begins_is_shown_in_it_once(ranks: Ranks) -> None:
    shown = list[str]()
    ranks.die(1)
    run = begin(ranks, shown)
    ranks.note_deaths((0, 1))
    assert ranks.roster.cell is not None
    assert (run.pending, ranks.roster.cell.pending) == ((0,), (0,))
    run.step(0)
    ((line,)) = shown
    assert line.startswith("rank 1 was killed by signal 9")
    assert line.endswith("; rank 0 keeps running")


def test_a_death_that_changes_the_state_is_among_the_next_events(ranks: Ranks) -> None:
    run = begin(ranks, [])
    tells, goes_on = threading.Event(), threading.Event()

    def death_text(end: ProcessExit) -> str:
        tells.set()
        assert goes_on.wait(60)
        return "was killed"

    ranks.words.death_text = death_text  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as others:
        dying = others.submit(ranks.die, 1)
        assert tells.wait(60)
        assert list(ranks.roster.dead) == [1]  # and the event is not in the queue yet
        others.submit(goes_on.set)
        run.step(0)
        dying.result()
    assert run.pending == (0,)


def test_an_error_in_a_hook_leaves_the_other_events_to_the_next_step(ranks: Ranks) -> None:
    shown = list[str]()
    run = begin(ranks, shown)

    def interrupted(batch: Output) -> None:
        shown.append(batch.entries[0][1])
        if len(shown) == 1:
            raise KeyboardInterrupt

    run.view.output = interrupted  # type: ignore[method-assign]
    ranks.come(output(0, "a"), output(0, "b"), reply(0), reply(1))
    with pytest.raises(KeyboardInterrupt):
        ranks.step(0)
    ranks.step(0)
    assert (shown, run.settled()) == (["a", "b"], True)


def test_a_place_that_was_taken_is_free_of_the_death_that_is_shown_afterwards(
    ranks: Ranks,
) -> None:
    ranks.die(1)
    ranks.driver.apply(TookPlaces([1]))
    ranks.step(0)
    assert not ranks.roster.dead
    ranks.come(hello(1, 2))
    ranks.driver.put(FromHostAgent(Notice("text")))
    assert ranks.driver.notices == ["text"]


def test_features_hear_once_of_the_end_that_two_threads_find() -> None:
    roster, stops = ClusterState(2), list[str]()
    roster.set_phase("running")

    class Features:
        def stopped(self) -> None:
            stops.append(roster.phase)
            if len(stops) == 1:
                with ThreadPoolExecutor(1) as others:
                    others.submit(Connection.close, ranks, "lost").result()

    ranks: Any = SimpleNamespace(
        roster=roster, hooks=Features(), _has_ended=False, _agents=[], step=lambda seconds: [],
        _wire=SimpleNamespace(lock=threading.RLock()), inbox=EventQueue(),
        _finalizer=SimpleNamespace(detach=lambda: None),
    )  # fmt: skip
    Connection.close(ranks, "lost")
    assert stops == ["lost"]


def test_an_end_that_is_interrupted_before_it_counts_is_made_by_the_next_call() -> None:
    class State(ClusterState):
        presses = 1

        def set_phase(self, phase: str, why: str = "") -> None:
            if phase == "stopped" and self.presses:
                self.presses = 0
                raise KeyboardInterrupt
            super().set_phase(phase, why)

    roster, stops = State(2), list[str]()
    roster.set_phase("running")
    hooks = SimpleNamespace(stopped=lambda: stops.append(roster.phase))
    ranks: Any = SimpleNamespace(
        roster=roster, hooks=hooks, _has_ended=False, _agents=[], step=lambda seconds: [],
        _wire=SimpleNamespace(lock=threading.RLock()), inbox=EventQueue(),
        _finalizer=SimpleNamespace(detach=lambda: None),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        Connection.close(ranks)
    Connection.close(ranks)
    assert (roster.phase, stops) == ("stopped", ["stopped"])


def test_a_forked_process_waits_for_no_lock_that_a_thread_of_its_parent_has() -> None:
    wire = SimpleNamespace(lock=threading.RLock())
    with ThreadPoolExecutor(1) as parents:
        parents.submit(wire.lock.acquire).result()
        forked: Any = SimpleNamespace(_wire=wire, _finalizer=SimpleNamespace(detach=lambda: None))
        Connection.leave_to_parent(forked)
        assert wire.lock.acquire(blocking=False)


@pytest.mark.parametrize("has_lock", ["", "sockets", "threads"])
def test_garbage_is_ended_in_another_thread_while_this_one_has_a_lock(
    tmp_path: Path, has_lock: str
) -> None:
    ends = SimpleQueue[int]()
    lock = threading.RLock()
    locks: Any = {"": nullcontext(), "sockets": lock, "threads": threading._active_limbo_lock}  # type: ignore[attr-defined]
    wire = SimpleNamespace(lock=lock, close=lambda: ends.put(threading.get_ident()))

    class Held:
        """What nothing refers to in the end."""

    held = Held()
    folder = str(tmp_path / "session")
    weakref.finalize(held, connection._end_anywhere, ExitStack(), [], wire, folder)
    with locks[has_lock]:
        del held
    assert (ends.get(timeout=60) != threading.get_ident()) == bool(has_lock)
