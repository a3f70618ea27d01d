"""When the line of a cell's cause is shown, by the records that come of the cell."""

from __future__ import annotations

import queue
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Thread
from time import sleep, thread_time
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.cluster.features import CellContext, ClusterContext
from allranks.collectives import arrays, world
from allranks.collectives.arrays import reductions
from allranks.errors import Report, UsageError
from allranks.features import torch_jax
from allranks.features.verdict import notebook, stack, threads
from allranks.features.verdict.notebook import NotebookVerdict
from allranks.features.verdict.rank import ThreadTimes, _grown, _thinned, read_counters
from allranks.features.verdict.records import CellParts, Doing, LastNotFinite, Sample
from allranks.features.verdict.threads import ReadingThreads
from allranks.records.telemetry import Points, Timings
from allranks.records.wire import Reply
from tests.unit.features.recorded_cells import cell, each_rank

#: The number of the cell on the ranks; the notebook shows another one, 3.
CELL = 7


class Shown:
    """A cell of some ranks; ``lines`` are those that are shown below it."""

    def __init__(self, parts: CellParts, shown: bool = True) -> None:
        self.lines: list[str] = []
        self.asked: list[tuple[int, ...]] = []
        self._parts = parts
        self.replies: dict[int, Reply] = {}
        self.ranks = tuple(part.rank for part in parts.ranks)
        self.context = CellContext(
            number=CELL,
            ranks=self.ranks,
            shown=shown,
            kernel=None,
            front_end="notebook",
            pending=lambda: self.ranks,
            interrupts=lambda: 0,
            notice=self.lines.append,
            show_output=lambda: None,
            ask=self.ask,
            ask_soon=lambda *_: None,
            poll=lambda _: None,
            replies=lambda: self.replies,
        )

    def ask(self, name: str, arguments: dict[str, Any], ranks: Sequence[int], _: float) -> Any:
        assert arguments == {"cell": CELL}
        self.asked.append(tuple(ranks))
        return {part.rank: part.message() for part in self._parts.ranks}


@pytest.fixture
def feature(monkeypatch: pytest.MonkeyPatch) -> NotebookVerdict:
    monkeypatch.setattr(notebook, "_LEAST_SECONDS", 0.0)
    found = NotebookVerdict()
    started(found)
    return found


def started(feature: NotebookVerdict, size: int = 3, **settings: str) -> None:
    feature.started(ClusterContext(size, lambda *_: None, True, settings))


def run(feature: NotebookVerdict, shown: Shown, *records: Any) -> list[str]:
    feature.cell = shown.context
    if feature.in_cells:
        feature.cell_started()
    for record, *payloads in records:
        if isinstance(record, feature.arriving):
            assert feature.message_arriving(record, payloads) is record
        if isinstance(record, Reply):
            shown.replies[record.rank] = record
    if feature.in_cells:
        feature.cell_finished()
    return shown.lines


def timings(calls: int) -> tuple[Timings]:
    row = ["allreduce", "In[3]:9", "f4", 8, 3, "shared", calls, 1.0, 1.0, 1.0, 0.1, []]
    return (Timings(0, CELL, (row,)),)


def points(rank: int, pairs: Sequence[tuple[float, float]]) -> tuple[Points, bytes]:
    values = array("d", [number for pair in pairs for number in pair])
    return Points(rank, CELL, (["loss", "", len(pairs)],), 0), values.tobytes()


def reply(rank: int, status: str, report: Report | None = None) -> tuple[Reply]:
    return (Reply(rank, CELL, status, 1.0, False, False, "", report),)


SLOW = cell([0.01, 0.01, 0.025])


def test_the_line_of_a_slow_rank_is_shown(feature):
    (line,) = run(feature, Shown(SLOW), timings(300))
    assert line.startswith("rank 2 is the slow one: ")
    assert line.endswith("or give rank 2 less work")
    assert feature.command("verdict", 3) == line
    assert feature.command("why", []).startswith("In[3]: rank 2 is the slow one: ")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("of a mean")])
def test_advice_fails_no_cell(feature, monkeypatch, error):
    def fails(_):
        raise error

    monkeypatch.setattr(notebook, "verdicts", fails)
    lines = run(feature, Shown(SLOW), timings(300))
    said = ["why this cell is slow cannot be said: ZeroDivisionError: of a mean. To leave"]
    found = [line.partition(" the line out")[0] for line in lines]
    assert found == (said if isinstance(error, Exception) else [])


def test_nothing_is_asked_after_a_cell_without_a_loop(feature):
    shown = Shown(SLOW)
    assert run(feature, shown, timings(19)) == []
    assert run(feature, shown, reply(0, "ok")) == []
    assert shown.asked == []


def test_a_cell_that_the_user_does_not_see_is_not_judged(feature):
    shown = Shown(SLOW, shown=False)
    assert run(feature, shown, timings(300)) == []
    assert shown.asked == []


def test_a_cell_that_was_interrupted_is_not_judged_at_the_end_of_a_later_one(feature):
    feature.cell = Shown(SLOW).context
    feature.cell_started()
    feature.message_arriving(*timings(300), [])
    hidden = Shown(SLOW, shown=False)
    feature.cell = hidden.context
    feature.cell_started()
    feature.cell_finished()
    assert (hidden.asked, hidden.lines) == ([], [])


def test_a_rank_that_was_replaced_has_nothing_to_compare(feature):
    replaced = [replace(part, number=-1) for part in SLOW.ranks[:1]]
    parts = replace(SLOW, ranks=[*replaced, *SLOW.ranks[1:]])
    assert run(feature, Shown(parts), timings(300)) == []


def test_one_rank_and_a_cluster_without_verdicts_are_not_watched(feature):
    started(feature, size=1)
    assert not feature.arriving
    started(feature, ALLRANKS_VERDICT="off")
    assert not feature.arriving
    started(feature)
    assert Timings in feature.arriving


def test_a_value_that_is_measured_in_few_steps_only_is_no_mistake(feature):
    measured = [(step, 1.0 if step % 20 == 0 else float("nan")) for step in range(50)]
    shown = Shown(each_rank(SLOW, calls=[]))
    assert run(feature, shown, points(0, measured[:30]), points(0, measured[30:])) == []
    assert shown.asked == []


def test_a_value_that_is_nan_to_the_end_is_named_with_its_first_step(feature):
    nan = float("nan")
    lost = [(step, nan if step in (5, 30) or step > 40 else 1.0) for step in range(50)]
    shown = Shown(each_rank(SLOW, calls=[]))
    both = (
        points(0, [(step, 1.0) for step in range(50)]),
        points(1, lost[:45]),
        points(1, lost[45:]),
    )
    (line,) = run(feature, shown, *both)
    assert line.startswith("loss is NaN since step 41 on rank 1. ")


def test_a_value_of_each_epoch_that_is_nan_to_the_end_is_named(feature):
    lost = [(step, float("nan") if step > 5 else 1.0) for step in range(12)]
    shown = Shown(each_rank(SLOW, calls=[]))
    (line,) = run(feature, shown, points(0, lost))
    assert line.startswith("loss is NaN since step 6 on rank 0. ")
    assert run(feature, Shown(each_rank(SLOW, calls=[])), points(0, lost[:9])) == []


def test_a_value_that_never_is_a_number_is_noted_after_other_causes(feature):
    never = [(step, float("nan")) for step in range(30)]
    (line,) = run(feature, Shown(SLOW), points(1, never), timings(300))
    assert line.startswith("rank 2 is the slow one: ")
    (_, note) = feature.command("verdict", 3).splitlines()
    assert note.startswith("loss is NaN in all steps on rank 1. ")
    wrong = LastNotFinite(0, 1, 0.0, 300, "allreduce", "In[3]:9", 100_000)
    (line,) = run(
        feature, Shown(each_rank(SLOW, not_finite=[wrong])), points(1, never), timings(300)
    )
    assert line.startswith("loss is NaN in all steps on rank 1. ")


def test_a_value_that_stays_nan_is_named_while_the_cell_runs_and_once(feature):
    polls: list[Any] = []
    shown = Shown(SLOW)
    feature.cell = shown.context = replace(shown.context, poll=polls.append)
    feature.cell_started()
    nan = float("nan")
    numbers = [(step, 1.0) for step in range(30)]
    for rank, pairs, lines in [
        (0, numbers, 0),
        (1, numbers, 0),
        (1, [(step, nan) for step in range(30, 49)], 0),  # it may be a number again
        (1, [(49, nan)], 0),  # rank 0 may have been the first
        (0, [(30, 1.0)], 1),
        (0, [(step, nan) for step in range(31, 50)], 1),
    ]:
        record, payload = points(rank, pairs)
        feature.message_arriving(record, [payload])
        (poll,) = polls  # from the first value on
        assert poll() is False
        assert len(shown.lines) == lines
    feature.cell_finished()
    assert [line.partition(". ")[0] for line in shown.lines] == [
        "loss is NaN since step 30 on rank 1"
    ]
    assert "step 30 on rank 1, later on rank 0" in feature.command("verdict", 3)


def test_a_value_that_was_never_measured_or_has_recovered_is_no_cause(feature):
    never = [(step, float("nan")) for step in range(50)]
    recovered = [*never[:40], *((step, 1.0) for step in range(40, 50))]
    opposite = [(step, float("inf") if step % 2 else -float("inf")) for step in range(50)]
    once = [(0, 1.0), *never[1:]]
    for pairs in (never, recovered, opposite, once):
        assert run(feature, Shown(SLOW), points(0, pairs)) == []


def test_a_loss_that_is_nan_in_a_few_steps_of_some_ranks_is_named(feature):
    nan = float("nan")
    numbers = [(step, 1.0) for step in range(100)]
    lost = [(step, nan if step in (8, 70) else 1.0) for step in range(102)]
    shown = Shown(each_rank(SLOW, calls=[]))
    (line,) = run(feature, shown, points(0, numbers), points(1, lost))
    assert line == (
        "loss was NaN in 2 steps on rank 1, first in step 8, and a number in all others. Look at "
        "the batch of step 8 there, and at divisions and logarithms"
    )
    # It may be one that is not measured in each step.
    often = [(step, nan if step % 3 == 0 else 1.0) for step in range(100)]
    assert run(feature, Shown(SLOW), points(0, numbers), points(1, often)) == []
    assert run(feature, Shown(SLOW), points(0, lost), points(1, lost)) == []
    # Both are not measured at the beginning: on one it takes too long.
    begins = [[(step, nan if step < late else 1.0) for step in range(50)] for late in (8, 12)]
    assert run(feature, Shown(SLOW), *map(points, (0, 1), begins)) == []
    # Each rank is named, and what is NaN at the end counts, too.
    more = [(step, nan if step in (20, 30, 99) else 1.0) for step in range(100)]
    shown = Shown(each_rank(SLOW, calls=[]))
    (line,) = run(feature, shown, points(0, numbers), points(1, lost), points(2, more))
    assert line.startswith(
        "loss was NaN in up to 3 steps on ranks 1–2, first in step 8 on rank 1, and a number in all"
    )


def test_members_of_an_ensemble_that_log_nan_are_named(feature):
    logged = feature.command("members")
    nan = float("nan")
    for member in range(4):
        lost = [(step, nan if step > 30 and member in (1, 3) else 1.0) for step in range(50)]
        logged.take(*points(member, lost))
    assert logged.cause_in_members().startswith(
        "loss is NaN in member 1 since step 31, in member 3 since step 31. Look"
    )
    logged.forget(1)  # it runs again
    assert "member 1" not in logged.cause_in_members()
    logged.forget(3)
    assert logged.cause_in_members() == ""


def test_members_are_not_looked_at_where_nothing_is_judged(feature):
    started(feature, ALLRANKS_VERDICT="off")
    assert feature.command("members") is None


def test_ranks_with_fewer_steps_are_those_that_have_ended_well(feature):
    waited = Report(0, "", "", "RankLeft", "", (), 9, "", True)
    shown = Shown(cell([0.01] * 3, steps=50))
    replies = reply(1, "ok"), reply(0, "waiting", waited), reply(2, "waiting", waited)
    (line,) = run(feature, shown, timings(50), *replies)
    assert "rank 1 ended after 50 calls of allreduce at In[3]:9" in line


def test_why_lists_the_cells_that_it_has(feature):
    with pytest.raises(UsageError, match="found none so far"):
        feature.command("why", [])
    run(feature, Shown(SLOW), timings(300))
    with pytest.raises(UsageError, match="found 3, and 'x' is none of them"):
        feature.command("why", ["x"])
    with pytest.raises(UsageError, match="one or two cells, found 3"):
        feature.command("why", ["1", "2", "3"])
    assert "is as fast as" in feature.command("why", ["3", "3"])


def test_why_says_if_the_last_cell_has_no_records(feature):
    run(feature, Shown(SLOW), timings(300))
    run(feature, Shown(SLOW, shown=False), timings(300))
    assert feature.command("why", []).startswith("In[3]: rank 2 is the slow one: ")
    run(feature, Shown(each_rank(SLOW, number=5)), timings(1))
    first, second, *_ = feature.command("why", []).splitlines()
    assert first == (
        "the last cell on ranks has no records to explain. Needed is one that ran for 1 s or "
        "longer on several ranks, with 20 or more collectives of one line, as this earlier one:"
    )
    assert second.startswith("In[3]: rank 2 is the slow one: ")
    assert feature.command("why", ["3"]).startswith("In[3]: ")
    run(feature, Shown(each_rank(SLOW, number=6)), timings(300))
    assert feature.command("why", []).startswith("In[6]: rank 2 is the slow one: ")


def test_samples_are_thinned_with_both_ends():
    samples = [Sample(float(at), 0, 0, 0, 0) for at in range(1000)]
    kept = _thinned(samples)
    assert len(kept) <= 258
    assert (kept[0], kept[-1]) == (samples[0], samples[-1])
    assert _thinned(samples[:3]) == samples[:3]
    assert _thinned([]) == []


def test_containers_that_grow_in_most_seconds_are_named():
    rows = [{"history": at, "fixed": 4, "late": at} for at in range(6)]
    del rows[0]["late"]
    assert _grown(rows) == {"history": (0, 5)}
    assert _grown([]) == {}


def test_the_times_of_threads_that_have_ended_are_kept():
    times = ThreadTimes()
    assert times.add_up({"1": (10, 1), "2": (5, 2)}) == (15, 3)
    assert times.add_up({"1": (20, 1)}) == (25, 3)
    # Another thread has the number of the one that has ended.
    assert times.add_up({"1": (30, 2), "2": (1, 0)}) == (36, 4)
    assert times.add_up({"1": (30, 2), "2": (0, 0)}) == (36, 4)


def test_a_collective_that_converts_its_input_is_not_in_the_collective_yet():
    assert stack._known(arrays.__file__, "converted")[1] is Doing.AWAIT
    assert stack._known(reductions.__file__, "combine")[1] is Doing.COLLECTIVE
    assert stack._known(world.__file__, "run")[1] is Doing.COLLECTIVE


@pytest.mark.parametrize(
    ("file", "doing"),
    [
        (torch_jax.__file__, Doing.CALL),
        ("/site-packages/torch/distributed/distributed_c10d.py", Doing.CALL),
        ("/site-packages/numpy/linalg/_linalg.py", Doing.COMPUTE),
        ("/home/user/own.py", Doing.COMPUTE),
    ],
)
def test_a_line_is_in_a_call_only_in_functions_that_make_it(file, doing):
    def frame_in(name: str, call: Callable[[], Any]) -> Any:
        return eval(compile("call()", name, "eval"), {"call": call})

    assert stack._walked(frame_in(file, sys._getframe))[1] is doing
    # A library that calls the user's function, which computes.
    inner = frame_in(file, lambda: frame_in("/home/user/own.py", sys._getframe))
    assert stack._walked(inner)[1] is Doing.COMPUTE


def test_a_line_that_gets_from_a_queue_waits_for_data():
    def frame_of_get(file: str) -> Any:
        names = {"get_frame": sys._getframe}
        exec(compile("def get():\n    return get_frame()", file, "exec"), names)
        return names["get"]()

    assert stack._waits_in_a_queue(frame_of_get(queue.__file__))
    # This test is the user's code, and what it calls is not a queue of Python.
    assert not stack._waits_in_a_queue(frame_of_get("/home/user/queue.py"))
    assert not stack._waits_in_a_queue(frame_of_get(threading.__file__))
    assert not stack._waits_in_a_queue(sys._getframe())
    assert not stack._waits_in_a_queue(None)


def test_what_fills_a_queue_may_compute(monkeypatch):
    monkeypatch.setattr(world, "current", lambda: SimpleNamespace(makes_call=False))
    items: queue.Queue[Doing] = queue.Queue()

    def put() -> None:
        # Until the main thread waits.
        while (doing := stack.look(False)[1]) is Doing.COMPUTE:
            sleep(1e-3)
        items.put(doing)

    Thread(target=put, daemon=True).start()
    assert items.get(timeout=60) is Doing.FEED


@pytest.mark.skipif(not threads._HAS_CLOCKS, reason="threads have no clocks here")
def test_the_time_of_threads_that_read_is_counted_while_these_live():
    ends, readers = threading.Event(), ReadingThreads()
    spinning = Thread(target=lambda: [None for _ in iter(ends.is_set, True)])
    waiting = Thread(target=ends.wait)
    try:
        for thread in (spinning, waiting):
            thread.start()
        # Once it has had a core, and once the other one needs none.
        while not readers.count([spinning.ident])[1]:
            pass
        while readers.count([waiting.ident])[1]:
            pass
    finally:
        ends.set()
    for thread in (spinning, waiting):
        thread.join()
    while readers.are_found:  # in C, a thread goes on for a moment after it was joined
        before, _ = readers.count([])
    assert before > 0
    assert readers.count([spinning.ident, waiting.ident]) == (before, 0.0)


def test_the_counters_of_a_process_are_those_of_its_threads():
    times = ThreadTimes()  # threads of other tests may end meanwhile
    try:
        first = read_counters(1.0, times)
    except OSError:
        pytest.skip("this system has no /proc/self/schedstat")
    second = read_counters(2.0, times)
    assert second.run >= first.run > 0
    assert second.ready >= second.main_ready >= 0
    assert second.rss_nbytes > 1e6


def test_the_time_of_threads_that_begin_and_end_between_two_samples_counts():
    # As those that read the data of one epoch: else other programs seem to use their cores.
    def work() -> None:
        sum(range(1_000_000))
        used.append(thread_time())

    used: list[float] = []
    times = ThreadTimes()
    try:
        first = read_counters(1.0, times)
    except OSError:
        pytest.skip("this system has no /proc/self/schedstat")
    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert read_counters(2.0, times).run - first.run >= used[0]
