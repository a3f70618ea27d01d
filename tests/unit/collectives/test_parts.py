import gc
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from allranks.collectives.calls import call
from allranks.collectives.calls.call import (
    LONGEST_SLEEP,
    NOTHING,
    Call,
    Cut,
    Members,
    Pause,
    cut,
)
from allranks.collectives.calls.deadlocks import OtherTag
from allranks.collectives.calls.rank_state import (
    ANSWERED,
    BROKE,
    BROKEN,
    ENTERED,
    FAILED,
    PID,
    REQUEST,
    TICKET,
    WAITING,
    Board,
    RankState,
    Scope,
)
from allranks.collectives.calls.sites import Site
from allranks.collectives.calls.specs import JOIN, Spec, of_request, pack, pack_text, unpack_text
from allranks.collectives.calls.watch import LineReporter, Watch
from allranks.collectives.host import memory
from allranks.collectives.host.memory import Borrowed, Segment, Window
from allranks.collectives.host.shared_memory import Channel
from allranks.collectives.ops import operations
from allranks.collectives.timings import trace
from allranks.errors import CollectiveMismatch
from allranks.records.ranks import Activity, ActivityState
from allranks.records.telemetry import CallRecord

linux = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


def record(rank: int = 0, **more: object) -> CallRecord:
    fields = {
        "op": "allreduce", "name": "g", "rank": rank, "sequence": 1, "epoch": 0, "process_set": 0,
        "ranks": 4, "transport": "shared", "dtype": "float32", "nbytes": 8_000_000,
        "arrived": 1.0, "last_arrived": 1.5, "last_rank": 3, "ended": 1.504,
    }  # fmt: skip
    return CallRecord(**{**fields, **more})


def test_a_record_tells_the_bandwidths_of_nccl_tests_and_waiting_from_transfer():
    assert record().algbw_gbps == pytest.approx(2.0)
    assert record().busbw_gbps == pytest.approx(2.0 * 2 * 3 / 4)
    assert record(op="allgather").busbw_gbps == pytest.approx(2.0 * 3 / 4)
    assert record(op="broadcast").busbw_gbps == pytest.approx(2.0)
    assert record(ranks=1).busbw_gbps is None
    assert record().wait_seconds == pytest.approx(0.5)
    assert record().transfer_seconds == pytest.approx(0.004)


def test_who_waits_for_a_second_sleeps_nearly_all_of_it(monkeypatch):
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(call, "perf_counter", lambda: now[0])
    monkeypatch.setattr(call, "sleep", sleep)
    pause = Pause()
    while pause() < 1.0:
        now[0] += 20e-6  # a look at the others
    assert sum(slept) > 0.95 * now[0]
    assert max(slept) == LONGEST_SLEEP


def test_a_trace_has_a_row_a_rank_and_two_slices_a_call():
    found = trace([[record(0)], [record(1, arrived=1.5)]], (0, 0))
    events = json.loads(json.dumps(found))["traceEvents"]
    rows = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    slices = [(e["tid"], e["cat"], e["ts"]) for e in events if e["ph"] == "X"]
    assert rows == ["rank 0", "rank 1"]
    assert slices == [(0, "waiting", 0.0), (0, "transfer", 5e5), (1, "transfer", 5e5)]


def test_what_was_laid_out_is_read_back():
    spec, site = Spec("broadcast", "", "int8", ((2, None), (3,)), 1), Site("a.py", 7)
    assert unpack_text(pack_text(pack(spec).text, site) + b"rest of an older text") == (spec, site)


@linux
def test_a_named_segment_is_swept_when_its_owner_is_gone():
    # A name that no other process makes or looks for.
    left = f"/dev/shm/allranks-{2**22 + 1}-test-{os.getpid()}"
    open(left, "w").close()
    kept = memory.Segment(10, named=True)
    memory.sweep()
    assert not os.path.exists(left)
    assert os.path.exists(kept.address)
    kept.close()
    assert not os.path.exists(f"/dev/shm/{os.path.basename(kept.address)}")


@linux
@pytest.mark.parametrize("how", ["made by another user", "a link"])
def test_memory_that_is_not_of_this_user_is_not_mapped(tmp_path, how):
    segment = memory.Segment(10, named=True)
    address = segment.address
    if how == "a link":
        address = str(tmp_path / "link")
        os.symlink(segment.address, address)
    elif os.getuid():
        pytest.skip("only root can give a file away")
    else:
        os.chown(segment.fd, 65534, 65534)
    assert memory.attempt(address, 10) is None
    segment.close()


def board_of(ranks: int, rank: int, memory_of: memory.Segment | None = None) -> Board:
    segment = memory_of or memory.Segment(Board.nbytes(ranks))
    return Board(segment.memory, tuple(range(ranks)), rank)


@linux
def test_memory_of_another_library_is_in_the_window_until_it_ends():
    pages = mmap.mmap(-1, Board.nbytes(2))
    mine, other = (Window(Board(pages, (0, 1), rank)) for rank in (0, 1))
    assert mine.borrow(Borrowed(0, 0, 0, lambda: True))
    for value in range(2 * Board.BORROWED):
        segment, users = Segment(8192), ["a tensor"]
        array = np.frombuffer(segment.memory, np.float64)
        array[3:] = value
        start = array.__array_interface__["data"][0]
        lent = Borrowed(start, 8192, segment.fd, lambda users=users: bool(users))
        assert mine.borrow(lent)
        assert (other.at(0, *mine.place_of(array[3:]), 64).view(np.float64) == value).all()
        users.clear()
        assert mine.place_of(array) == (0, 0)
        mine.drop_ended()
        assert other.drop_ended()
        assert not other.drop_ended()
        segment.close()


@linux
def test_freed_neighbours_become_one_piece_again():
    window = Window(board_of(1, 0))
    pieces = [window.empty((1 << 20,), np.dtype("uint8"), 1 << 20) for _ in range(16)]
    del pieces
    assert window.place_of(window.empty((16 << 20,), np.dtype("uint8"), 16 << 20)) == (1, 0)


@linux
def test_the_end_of_an_array_runs_no_python_that_could_swallow_an_interrupt():
    window = Window(board_of(1, 0))
    arrays = [window.empty((8,), np.dtype("uint8"), 8) for _ in range(3)]
    places = [window.place_of(array) for array in arrays]
    called = []
    before = sys.getprofile()
    gc.disable()  # a collection would run finalizers of other tests
    try:
        sys.setprofile(lambda frame, event, _argument: called.append(event))
        arrays.clear()
    finally:
        sys.setprofile(before)
        gc.enable()
    assert "c_call" in called
    assert "call" not in called
    assert window.place_of(window.empty((8,), np.dtype("uint8"), 8)) in places


@linux
@pytest.mark.parametrize("step", ["segment", "publish"])
def test_an_interrupt_while_the_window_grows_leaves_it_whole(step, monkeypatch):
    window = Window(board_of(1, 0))
    pressed, real = [], {"segment": memory.segment, "publish": window.board.publish}[step]

    def interrupted(*args, **options):
        if not pressed:
            pressed.append(signal.raise_signal(signal.SIGINT))
        return real(*args, **options)

    target = (memory, "segment") if step == "segment" else (window.board, "publish")
    monkeypatch.setattr(*target, interrupted)
    with pytest.raises(KeyboardInterrupt):
        window.empty((1000,), np.dtype("float64"), 8000)
    array = window.empty((1000,), np.dtype("float64"), 8000)
    array[:] = 7.0
    index, offset = window.place_of(array)
    assert window.board.segment(0, index - 1)[1] > 0
    assert (window.at(0, index, offset, 8000).view("float64") == 7.0).all()


def test_a_deadlock_told_while_a_rank_leaves_is_no_departure():
    pages = mmap.mmap(-1, Board.nbytes(2))
    other = Board(pages, (0, 1), 1)

    class Watching(RankState):
        """Rank 0; after its look at rank 1 that rank finds that ranks wait for each other."""

        def departure(self, rank):
            found = super().departure(rank)
            other.write(BROKE, "ranks 0–1 wait for each other")
            other.put(BROKEN, 3)
            return found

    class Waiting:
        deadlock = ""

        def missing(self):
            return (1,)

    world = Watching(0, (0, 0), Board(pages, (0, 1), 0))
    world.scope = Scope("this cell", 5, None)
    with pytest.raises(CollectiveMismatch, match=r"^ranks 0–1 wait"):
        Watch(world)._left(Waiting(), (1,))


def asks(word: str, text: str = "") -> Activity:
    """The activity of a rank that a feature has wait for a person."""
    return Activity(ActivityState(word, is_busy=True, waits=True, asks=True), text)


ASKS, PAUSED = asks("waiting for input"), asks("paused", "paused in the debugger")


@pytest.mark.parametrize(
    ("asking", "doing"),
    [
        ((ASKS,), "rank 1, which is waiting for input:"),
        ((PAUSED,), "rank 1, which is paused in the debugger:"),
        ((PAUSED, ASKS), "ranks 1–2, which are paused in the debugger or waiting for input:"),
    ],
)
def test_ranks_that_wait_for_a_person_are_reported_with_what_they_do(asking, doing):
    pages, said = mmap.mmap(-1, Board.nbytes(3)), []
    state = RankState(0, (0, 0, 0), Board(pages, (0, 1, 2), 0))
    state.notice = said.append
    for rank, activity in enumerate(asking, 1):
        RankState(rank, (0, 0, 0), Board(pages, (0, 1, 2), rank)).asks(activity)
    call = SimpleNamespace(
        moving=False,
        reports_late=lambda: True,
        spec=SimpleNamespace(title="barrier"),
        site="f.py:2",
    )
    missing = tuple(range(1, 1 + len(asking)))
    Watch(state)._report_late(call, missing, waited=1.0)
    assert said[0].startswith(f"barrier at f.py:2 waits for {doing}")


def test_a_call_that_lacks_an_idle_rank_says_how_to_make_it(monkeypatch):
    state, said = RankState(0, (0, 0), Board(mmap.mmap(-1, Board.nbytes(2)), (0, 1), 0)), []
    state.notice = said.append
    spec = SimpleNamespace(title="barrier")
    call = SimpleNamespace(moving=False, reports_late=lambda: True, spec=spec, site="f.py:2")
    idles = "has nothing to run: no cell, and no request of a client"
    for place, every, size in (
        ("is at f.py:7", True, 2),
        (idles, False, 2),  # a receive
        (idles, True, 1),  # a call of some ranks
        (idles, True, 2),
    ):
        monkeypatch.setattr(Watch, "_location", lambda *_, place=place: place)
        call.every, call.members = every, SimpleNamespace(size=size)
        Watch(state)._report_late(call, (1,), waited=1e6)
    busy, *others, idle = said
    assert [one.splitlines()[1:] for one in others] == [[f"  rank 1 {idles}"]] * 2
    assert busy.endswith("  rank 1 is at f.py:7")
    assert idle.splitlines()[2].startswith("  This call needs all ranks: make it on all, as with")


def in_a_call(rank, title, **fields):
    """One of two ranks, and a call in which it waits."""
    state = RankState(rank, (0, 0), Board(mmap.mmap(-1, Board.nbytes(2)), (0, 1), rank))
    call = SimpleNamespace(
        spec=SimpleNamespace(title=title),
        site=SimpleNamespace(place="f.py:2"),
        **{"started": 0.0, "stage": 0, "late": None, "moving": False},
        **{"patience": lambda: 0.0, **fields},
    )
    return state, call


def test_a_rank_whose_data_move_waits_for_no_other():
    state, call = in_a_call(0, "allreduce", ordered=True)
    watch = Watch(state)
    watch._publish(call, (1,), 0.1, 1)
    assert state.doing.waits_for == "rank 1"
    watch._publish(call, (), 0.2, 2)
    assert (str(state.doing), state.waits) == ("running", None)


def test_a_rank_that_has_given_up_a_wait_still_shows_the_tag_of_the_message_that_had_come():
    # Another rank that finds the same deadlock may read it then.
    other_tag = OtherTag(1, 0, sent=1, wanted=2)
    state, call = in_a_call(1, "comm.recv", ordered=False, peers=(0,), other_tag=lambda: other_tag)
    watch = Watch(state)
    watch._publish(call, (0,), 0.1, 1)
    watch._publish_other_tag(call)
    watch.rest()
    assert watch._other_tags([0, 1]) == [OtherTag(1, 0, sent=1, wanted=2)]
    watch._publish_other_tag(SimpleNamespace(other_tag=None))  # the message has come
    assert watch._other_tags([0, 1]) == []
    watch._publish_other_tag(call)
    watch._publish(SimpleNamespace(**vars(call)), (0,), 0.1, 2)
    assert watch._other_tags([0, 1]) == []


def test_a_rank_that_does_not_answer_may_be_on_a_host_that_cannot_be_reached():
    pages = mmap.mmap(-1, Board.nbytes(3))
    state = RankState(0, (0, 0, 1), Board(pages, (0, 1, 2), 0))
    state.host_names = ("h1", "h1", "h2")
    for rank in (1, 2):
        Board(pages, (0, 1, 2), rank).put(ENTERED, 1)
    here, there = (Watch(state)._location(rank, asked=7) for rank in (1, 2))
    assert here == (
        "does not answer: it is stopped, inside a call that does not return to Python, or gets no "
        "core because the machine is busy"
    )
    assert there == f"{here}, or its host h2 cannot be reached"
    waits = Board(pages, (0, 1, 2), 1)
    waits.write(WAITING, "barrier at cell.py:3")
    waits.put(TICKET, 1)
    said = "it waits in barrier at cell.py:3, and is stopped or gets no processor time"
    assert Watch(state)._location(1, 7) == f"does not answer: {said}"
    waits.put(ANSWERED, 7)
    assert Watch(state)._location(1, 7) == "waits in barrier at cell.py:3"


def test_a_wait_in_a_clients_request_ends_if_it_or_an_earlier_one_has_failed_elsewhere():
    pages = mmap.mmap(-1, Board.nbytes(2))
    state, other = RankState(0, (0, 0), Board(pages, (0, 1), 0)), Board(pages, (0, 1), 1)
    client = 7 << 32
    state.request = client | 12
    for last in (0, client | 11, 8 << 32 | 99):
        other.put(REQUEST, last)
        assert state.departure(1) is None
    for last in (client | 12, client | 16):
        other.put(REQUEST, last)
        assert state.departure(1) == (0, "has failed in this request, or in one before it")
    state.request = 0  # a cell
    assert state.departure(1) is None


def test_a_collective_in_a_clients_call_ends_where_a_rank_has_ended_its_part_of_it():
    pages = mmap.mmap(-1, Board.nbytes(2))
    state, other = (RankState(rank, (0, 0), Board(pages, (0, 1), rank)) for rank in (0, 1))
    state.refusal = lambda *_: None
    fields = {"every": True, "missing": lambda: (1,)}
    collective = SimpleNamespace(**fields)
    watch, left = Watch(state), (1, 1, "finished the request")
    state.request = state.part = 1 << 32 | 7
    other.board.put(FAILED, 1)  # in a cell before
    for ended, found in ((0, []), (1 << 32 | 6, []), (1 << 32 | 7, [left])):
        other.end_part(ended)
        assert watch._left(collective, (1,)) == found
    assert state.advice(1, left[-1]) == ""
    for may_end in (
        {"missing": tuple},  # it has posted its part
        {"every": False},  # a message
    ):
        assert watch._left(SimpleNamespace(**{**fields, **may_end}), (1,)) == []
    with ThreadPoolExecutor() as pool:  # it may wait for what an earlier request has begun
        assert pool.submit(watch._left, collective, (1,)).result() == []
    # Their calls are not taken for those of this one.
    other.enter("cell In[3]", None, 3)
    for client in range(2, 9):
        other.end_part(client << 32 | 1)
    assert watch._left(collective, (1,)) == [left]
    state.part = 0  # a call that does not block
    assert watch._left(collective, (1,)) == []


@pytest.mark.parametrize("clients", [(5, 5), (0, 0), (5, 0), (0, 5), (5, 6)])
def test_a_rank_that_has_joined_goes_with_calls_of_requests_as_with_those_of_cells(clients):
    shared, board = (mmap.mmap(-1, one.nbytes(2)) for one in (Channel, Board))
    ranks = (0, 1)
    states = [RankState(rank, (0, 0), Board(board, ranks, rank)) for rank in ranks]
    channels = [Channel(states[rank], Members(0, ranks, rank), shared) for rank in ranks]
    sums = Spec("allreduce", reduction="Sum", dtype="float32", shape=(3,), elements=3)
    packed = [
        of_request(pack(spec), client) if client else pack(spec)
        for spec, client in zip((JOIN, sums), clients, strict=True)
    ]
    calls = [Call(channel, one) for channel, one in zip(channels, packed, strict=True)]
    assert not channels[0].arrive(calls[0], NOTHING)
    if len(set(clients)) == 1:
        assert channels[1].arrive(calls[1], NOTHING)
        assert channels[0]._compare(calls[0])
        return
    first, other = (0, 1) if clients[0] else (1, 0)
    where = "one of another client" if all(clients) else "a cell"
    said = f"rank {first} is in a request of a client, rank {other} in {where}: "
    with pytest.raises(CollectiveMismatch, match=said):
        channels[1].arrive(calls[1], NOTHING)
    with pytest.raises(CollectiveMismatch, match=said):
        channels[0]._compare(calls[0])


def test_a_rank_that_leaves_out_a_cell_is_not_waited_for_there():
    pages = mmap.mmap(-1, Board.nbytes(2))
    state, other = (RankState(rank, (0, 0), Board(pages, (0, 1), rank)) for rank in (0, 1))
    state.enter("cell In[3]", None, 3)
    assert state.departure(1) is None
    other.leave_out(3, "was interrupted")
    assert state.departure(1) == (0, "has left cell In[3] (was interrupted)")
    state.enter("cell In[4]", None, 4)
    assert state.departure(1) is None


def test_an_idle_rank_is_reported_as_one_that_has_nothing_to_run():
    state, _ = in_a_call(0, "allreduce")
    reporter = LineReporter(state.board, 0, threading.get_ident())
    state.board.put(ENTERED, 1)
    for idle, said in ((False, "is at "), (True, "has nothing to run: no cell, and no request")):
        reporter.is_idle = lambda idle=idle: idle
        state.board.ask(0, 1 + idle)
        reporter.answer()
        assert Watch(state)._location(0, 1 + idle).startswith(said)


def test_a_wait_in_a_clients_request_ends_if_the_process_of_a_rank_of_this_host_has_ended():
    pages = mmap.mmap(-1, Board.nbytes(2))
    state, other = RankState(0, (0, 0), Board(pages, (0, 1), 0)), Board(pages, (0, 1), 1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    other.put(PID, ended.pid)
    assert state.departure(1) is None  # in a cell the notebook tells
    state.request = 1
    assert state.departure(1) == (-1, "has died")
    state.died.clear()
    state.shares = (0, 1)  # another host, with processes of the same numbers
    assert state.departure(1) is None


def test_a_rank_finds_who_has_died_on_its_host_and_shows_it_to_other_hosts():
    pages, hosts = mmap.mmap(-1, Board.nbytes(3)), (0, 0, 1)
    near, far = (RankState(n, hosts, Board(pages, (0, 1, 2), n)) for n in (0, 2))
    near.shares = far.shares = (0, 0, 2)  # the exchange between hosts copies pages
    dying = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    Board(pages, (0, 1, 2), 1).put(PID, dying.pid)
    assert near.find_dead() == far.find_dead() == []
    dying.communicate()
    assert far.departure(1) is None  # its host has processes of the same numbers
    assert near.find_dead() == far.find_dead() == [1]
    for state in (near, far):
        assert state.departure(1) == (-1, "has died")
        assert state.is_lost(1)
        state.died[1] = "was killed by signal 9"  # a notebook has come
        assert state.departure(1) == (-1, "was killed by signal 9")
        assert state.find_dead() == []


def _report(state):
    state.died[1] = "was killed by signal 9"


def _find_in_a_request(state):
    state.request = 1 << 32 | 1
    assert state.departure(1) == (-1, "has died")


@pytest.mark.parametrize("learn", [_report, _find_in_a_request])
def test_other_hosts_learn_of_a_death_that_the_ranks_of_its_host_know_already(learn):
    pages, hosts = mmap.mmap(-1, Board.nbytes(3)), (0, 0, 1)
    near, far = (RankState(n, hosts, Board(pages, (0, 1, 2), n)) for n in (0, 2))
    near.shares = far.shares = (0, 0, 2)  # the exchange between hosts copies pages
    dead = subprocess.Popen([sys.executable, "-c", ""])
    Board(pages, (0, 1, 2), 1).put(PID, dead.pid)
    dead.wait()
    learn(near)
    assert near.find_dead() == []
    assert far.find_dead() == [1]
    assert far.departure(1) == (-1, "has died")


def test_a_mark_of_a_death_never_comes_to_the_board_to_which_a_rank_moves(monkeypatch):
    old, new = (mmap.mmap(-1, Board.nbytes(2)) for _ in range(2))
    state = RankState(0, (0, 0), Board(old, (0, 1), 0))

    def kill(pid, _):
        if pid == 1 << 30:
            state.board.move(new)  # in the main thread, where a rank is replaced
            raise ProcessLookupError

    Board(old, (0, 1), 1).put(PID, 1 << 30)
    Board(new, (0, 1), 1)  # the new process
    monkeypatch.setattr(os, "kill", kill)
    assert state.find_dead() == []
    assert not state.has_died(1)


def test_pieces_of_one_array_are_joined_without_a_copy():
    whole = np.arange(24, dtype=np.uint8)
    like = np.empty((0, 2), np.int16)
    for parts in (cut(whole, [8, 0, 16]), cut(whole, [24]), [whole[:8], whole[8:]]):
        found = operations._join(parts, like, 6)
        assert np.shares_memory(found, whole) == isinstance(parts, Cut)
        np.testing.assert_array_equal(found, whole.view(np.int16).reshape(6, 2))


def test_the_advice_about_a_dead_rank_is_true_before_and_after_another_one_takes_its_place():
    # The notebook shows it below "rank 1 was replaced", and a cell that handles the error before.
    pages = mmap.mmap(-1, Board.nbytes(2))
    state = RankState(0, (0, 0), Board(pages, (0, 1), 0))
    state.died[1] = "has died"
    assert state.advice(1, "has died") == "Run the cell again once the dead rank has been replaced."


def test_a_rank_that_does_not_run_the_cell_has_no_error_to_correct():
    pages = mmap.mmap(-1, Board.nbytes(3))
    state = RankState(1, (0, 0, 0), Board(pages, (0, 1, 2), 1))
    Board(pages, (0, 1, 2), 0).put(FAILED, 1)  # in an earlier cell
    state.enter("cell In[26]", (1,), 26)
    _, why = state.departure(0)
    assert why == "does not run cell In[26] (-r 1)"
    assert state.advice(0, why) == (
        "The cell runs on rank 1 only, the other ranks take no part. Run it on all ranks "
        "(%%distributed without -r), or leave out this call."
    )
    state.enter("cell In[27]", (1, 2), 27)
    assert "runs on ranks 1–2 only" in state.advice(0, why)
    assert state.advice(0, why).endswith("use a process set of the ranks that run it.")
