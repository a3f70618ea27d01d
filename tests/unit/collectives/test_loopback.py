import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _worker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import allranks.collectives as c
from allranks.collectives import loopback
from allranks.collectives import world as worlds
from allranks.collectives.world import world
from allranks.errors import CollectiveMismatch, NotInitialized, UsageError
from tests.kernel import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


def test_a_rank_that_raised_comes_before_those_that_waited():
    def one_fails() -> None:
        if c.rank() == 1:
            raise ValueError("bad batch")
        c.barrier()

    with pytest.raises(ValueError, match="bad batch"):
        loopback.run(3, one_fails)


def test_what_a_rank_waits_for_can_be_asked_from_outside():
    seen: list[str] = []
    waiting: list[worlds.World] = []

    def one_looks() -> None:
        if c.rank() == 0:
            waiting.append(worlds.current())
        else:
            wait_until(lambda: waiting and waiting[0].doing.waits_for)
            seen.append(str(waiting[0].doing))
        c.barrier()

    loopback.run(2, one_looks)
    assert seen == ["waiting in barrier for rank 1"]


def test_a_mismatch_of_different_lines_advises_to_look_for_an_if():
    def value() -> None:
        c.allreduce(1.0)

    def gradients() -> None:
        c.allreduce(np.ones(3))

    def call_all() -> str:
        with pytest.raises(CollectiveMismatch) as raised:
            (value if c.rank() else gradients)()
        with pytest.raises(CollectiveMismatch, match=r"\. Check the last batch"):
            c.allreduce(np.ones(3 + c.rank()))
        return str(raised.value)

    text, *_ = loopback.run(2, call_all)
    assert "rank 0 has (3,), rank 1 has (). These are calls of different lines. Make" in text
    assert "look for an `if` on the rank." in text


def test_queries_before_init_say_what_to_call():
    with pytest.raises(NotInitialized, match=r"Call allranks\.collectives\.init\(\)"):
        c.rank()


#: As where the end of MPI hangs, and the process ends without it.
NO_END = "\nimport os\nfrom mpi4py import MPI\nMPI.Finalize = lambda: os._exit(0)"


@pytest.mark.parametrize("end", ["", NO_END], ids=["finalizes", "does not finalize"])
def test_a_process_that_no_launcher_has_started_leaves_nothing_in_shared_memory(end):
    code = (
        "import allranks.collectives as c\nc.init()\n"
        f"print(open('/proc/self/maps').read(), flush=True){end}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    segments = re.findall(r"/\S*/sm_segment\.\S+", done.stdout)
    if not segments:
        pytest.skip("this MPI has no files in shared memory")
    assert [path for path in segments if Path(path).exists()] == []


MISTAKES = {
    "ranks of a set": (
        lambda x: c.add_process_set([0, 7]),
        "add_process_set needs ranks from 0 to 1: found [0, 7]. "
        "Name at least one rank, and none that does not exist.",
    ),
    "a name for op": (
        lambda x: c.allreduce(x, op="sum"),
        "allreduce expected op Sum, Average, Min, Max or Product, found 'sum'. "
        "Type: allreduce(x, op=Sum)",
    ),
    "a function for op": (
        lambda x: c.reduce(x, op=np.prod),
        f"reduce expected op Sum, Average, Min, Max or Product, found {np.prod!r:.60}. "
        "Type: reduce(x, op=Product)",
    ),
    "an array for op": (
        lambda x: c.allreduce(x, x),
        "allreduce expected op Sum, Average, Min, Max or Product, found array([1., 1.]). "
        "Type: allreduce(x, op=Sum)",
    ),
    "compression": (
        lambda x: c.allreduce(x, compression=5),
        "allreduce expected compression Compression.none or Compression.fp16, found 5. "
        "Type: allreduce(x, compression=Compression.fp16)",
    ),
    "a factor of numpy's": (
        lambda x: c.allreduce(x, prescale_factor="half"),
        "allreduce expected a number for prescale_factor and postscale_factor, found 'half'. "
        "Type for example: allreduce(x, prescale_factor=0.5)",
    ),
    "a factor": (
        lambda x: c.grouped_allreduce([x], postscale_factor=None),
        "grouped_allreduce expected a number for prescale_factor and postscale_factor, found "
        "None. Type for example: grouped_allreduce(x, prescale_factor=0.5)",
    ),
    "synchronize": (
        lambda x: c.synchronize(5),
        "synchronize expected the handle of one call, as allreduce_async returns it, found 5. "
        "Type: synchronize(allreduce_async(x))",
    ),
    "poll": (
        lambda x: c.poll([]),
        "poll expected the handle of one call, as allreduce_async returns it, found []. "
        "Type: poll(allreduce_async(x))",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_an_argument_of_another_kind_is_refused_in_plain_words(what):
    call, said = MISTAKES[what]

    def refused() -> str:
        with pytest.raises(UsageError) as error:
            call(np.ones(2))
        assert c.allreduce(1, op=c.Sum) == c.size()
        return str(error.value)

    assert loopback.run(2, refused) == [said] * 2


def told_of_threads(*in_threads: Callable[[c.ProcessSet], object], at_most_seconds: float = 20):
    """What rank 0 is told that comes to a barrier while threads of its own wait in calls.

    The other ranks come when it is told, or after ``at_most_seconds``.
    """
    told: list[str] = []
    come = threading.Event()

    def notice(text: str) -> None:
        told.append(text)
        come.set()

    def call_all() -> None:
        this, some = worlds.current(), c.add_process_set([0, 1])

        def in_thread(call: Callable[[c.ProcessSet], object]) -> None:
            worlds.set_thread(this)
            call(some)

        if c.rank() == 0:
            this.late_seconds = math.inf  # of which it is told too
            c.on_notice(notice)
            threads = [threading.Thread(target=in_thread, args=(call,)) for call in in_threads]
            for thread in threads:
                thread.start()
            wait_until(lambda: this.waits or told)
            c.barrier()
            for thread in threads:
                thread.join()
        else:
            come.wait(at_most_seconds)
            for call in in_threads:
                call(some)
            c.barrier()

    loopback.run(3, call_all)
    return told


def test_a_thread_that_waits_for_another_group_or_for_a_handle_is_not_told_of():
    def among_some(some: c.ProcessSet) -> None:
        if some.included():
            c.barrier(some)

    assert told_of_threads(among_some, at_most_seconds=0.3) == []

    def with_a_handle(some: c.ProcessSet) -> None:
        assert c.synchronize(c.allreduce_async(1, c.Sum)) == 3

    assert told_of_threads(with_a_handle, at_most_seconds=0.3) == []


def reduced(value: int, some: c.ProcessSet) -> Any:
    return c.allreduce(value, c.Sum, process_set=some)


def posted(value: int, some: c.ProcessSet) -> Any:
    return c.allreduce_async(value, c.Sum, process_set=some).synchronize()


def polled(value: int, some: c.ProcessSet) -> Any:
    handle = c.allreduce_async(value, c.Sum, process_set=some)
    while not handle.poll():
        time.sleep(0.001)
    return handle.synchronize()


def reduced_in_shared_memory(value: int, some: c.ProcessSet) -> Any:
    array = c.empty((), int)
    array[...] = value
    return c.allreduce(array, c.Sum, process_set=some)


@pytest.mark.parametrize("call", [reduced, posted, polled, reduced_in_shared_memory])
def test_calls_of_two_groups_in_two_threads_of_a_rank_overlap(
    call: Callable[[int, c.ProcessSet], Any],
) -> None:
    """On rank 0 the main thread waits first, on rank 1 the other thread.

    It does wait: the other thread of rank 0 begins once it is seen to.
    """

    def call_all() -> tuple[object, object]:
        this, some, waits = worlds.current(), c.add_process_set([0, 1]), all_wait[c.rank()]
        attend, poll, found = this.watch.attend, this.poll, list[object]()

        def noted(call: Any, waited: float) -> None:
            waits.set()
            attend(call, waited)

        def noted_poll(call: Any) -> None:
            if all_wait[0].is_set():
                waits.set()
            poll(call)

        this.watch.attend, this.poll = noted, noted_poll  # type: ignore[method-assign]

        def in_thread() -> None:
            worlds.set_thread(this)
            if c.rank() == 0:
                assert all_wait[0].wait(60)
                assert all_wait[1].wait(60)
            if some.included():
                found.extend(call(step, some) for step in range(3))

        thread = threading.Thread(target=in_thread)
        thread.start()
        if c.rank() == 1:
            assert waits.wait(60)
            # However late rank 0 begins, it waits for this one.
            assert all_wait[0].wait(60)
        every = [c.allreduce(10 * step, c.Sum) for step in range(3)]
        thread.join()
        return every, found

    every, some, all_wait = [0, 30, 60], [0, 2, 4], [threading.Event() for _ in range(3)]
    assert loopback.run(3, call_all) == [(every, some), (every, some), (every, [])]


@pytest.mark.parametrize(
    ("started", "beside", "total"),
    [
        ((0, 0), (5, 0), 1),
        ((0, 0), (5, 6), 1),
        ((5, 5), (5, 6), 1),
        ((5, 5), (5, 0), 1),
        ((5, 0), (5, 5), "mismatch"),
        ((5, 6), (0, 0), "mismatch"),
    ],
)
def test_a_call_of_a_thread_is_of_the_request_that_started_it_whatever_runs_beside_it(
    started: tuple[int, int], beside: tuple[int, int], total: object
) -> None:
    """Of both ranks: the client whose request starts the thread, and that of the request which runs
    when the thread makes its call; 0 for a cell.
    """

    def call_all() -> list[object]:
        this, begin, found = worlds.current(), threading.Event(), list[object]()
        this.notebook = this.strays_reported = True

        def in_thread() -> None:
            worlds.set_thread(this)
            begin.wait()
            try:
                found.append(c.allreduce(c.rank(), c.Sum))
            except CollectiveMismatch:
                found.append("mismatch")

        this.serve(started[c.rank()])
        thread = threading.Thread(target=in_thread)
        thread.start()
        this.serve(0)
        this.serve(beside[c.rank()])
        begin.set()
        thread.join()
        return found

    assert loopback.run(2, call_all) == [[total]] * 2


def test_a_call_of_a_pool_is_of_the_request_that_gives_it_whether_a_thread_was_idle_or_is_started():
    def call_all() -> int:
        this, ends = worlds.current(), threading.Event()
        this.notebook = this.strays_reported = True

        def tops() -> set[Any]:
            frames = sys._current_frames()
            return {frames[one.ident].f_code for one in pool._threads if one.ident in frames}

        def in_thread() -> int:
            worlds.set_thread(this)
            total: int = c.allreduce(c.rank(), c.Sum)
            return total

        with ThreadPoolExecutor(2) as pool:
            busy = pool.submit(ends.wait)  # in a cell
            if c.rank():
                ends.set()
                busy.result()
                wait_until(lambda: pool._idle_semaphore._value and tops() & {_worker.__code__})
            this.serve(5)
            try:
                return pool.submit(in_thread).result()
            finally:
                this.serve(0)
                ends.set()

    assert loopback.run(2, call_all) == [1, 1]


def test_a_call_that_was_interrupted_as_it_waited_for_its_turn_is_no_longer_queued():
    class Interrupted:
        """The lock, which another thread has."""

        def acquire(self, blocking: bool) -> bool:
            return False

        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *raised: object) -> None: ...

    def interrupted() -> list[Any]:
        this = worlds.current()
        lock, this.lock = this.lock, Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            c.allreduce(1, c.Sum)
        this.lock = lock
        return this._queued

    assert loopback.run(1, interrupted) == [[]]


def test_calls_of_two_groups_on_a_gpu_keep_one_order():
    def call(group: int, device: str = "", *, ordered: bool = True) -> Any:
        members, spec = SimpleNamespace(number=group), SimpleNamespace(device=device)
        return SimpleNamespace(members=members, spec=spec, ordered=ordered)

    assert world._excludes(call(0, "gpu"), call(1, "gpu"))
    assert not world._excludes(call(0, "gpu"), call(1))
    assert world._excludes(call(1), call(1))
    assert not world._excludes(call(1), call(1, ordered=False))
