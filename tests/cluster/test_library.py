"""`allranks.Cluster` in programs: futures, threads, exceptions, output, types."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any

import pytest

import allranks
from allranks.cluster.cell_run import HiddenView
from allranks.errors import CellFailed, CellInterrupted, UsageError


class OutOfData(Exception):
    """An exception of the program's own."""


def double(x: int) -> int:
    return 2 * x


def fails_on_rank_1(rank_of_failure: int = 1) -> int:
    from allranks.collectives import rank

    if rank() == rank_of_failure:
        raise OutOfData("no more rows", 3)
    return rank()


def sleeps(seconds: float) -> float:
    time.sleep(seconds)
    return time.monotonic()


UNPICKLABLE = """
import threading
class LocalError(Exception): ...
raise LocalError(threading.Lock())
"""


@pytest.fixture(scope="module")
def cluster():
    with allranks.Cluster(2) as started:
        yield started


def test_the_length_of_a_cluster_is_the_number_of_its_ranks(cluster):
    assert len(cluster) == 2


def test_submitted_calls_run_in_their_order(cluster):
    futures = [cluster.submit(sleeps, 0.05) for _ in range(3)]
    assert all(isinstance(future, Future) for future in futures)
    wait(futures)
    ends = [max(future.result()) for future in futures]
    assert ends == sorted(ends)
    assert cluster.submit(double, 21).result() == [42, 42]
    assert isinstance(cluster.submit(fails_on_rank_1).exception(), CellFailed)


def test_a_submitted_call_can_be_cancelled_before_it_begins_and_interrupted_after(cluster):
    first = cluster.submit("while True: pass")
    second = cluster.submit(double, 1)
    assert second.cancel()
    while not cluster.roster.busy:
        time.sleep(0.01)
    assert cluster.interrupt()
    assert isinstance(first.exception(), CellFailed)
    assert second.cancelled()


UNTIL = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.01)"


def test_an_interrupt_ends_the_requests_that_a_submitted_call_waits_for(cluster):
    told = threading.Event()
    cluster.client()[:].execute("while True: pass", block=False)
    call = cluster.submit(double, 1, view=HiddenView(lambda batch: None, lambda line: told.set()))
    told.wait(60)
    assert cluster.interrupt()
    assert isinstance(call.exception(), CellInterrupted)
    assert cluster.run(double, 2) == [4, 4]


def test_submit_returns_while_another_call_runs(cluster, tmp_path):
    go, running = tmp_path / "go", threading.Event()

    def call() -> None:
        with suppress(CellFailed):
            cluster.run(UNTIL.format(str(go)), timeout=60)
        running.clear()

    thread = threading.Thread(target=call)
    running.set()
    thread.start()
    while not cluster.roster.busy:
        time.sleep(0.01)
    future = cluster.submit(double, 5)
    assert running.is_set()
    go.touch()
    assert future.result() == [10, 10]
    thread.join()


def test_calls_from_a_thread_whose_cell_is_awaited_do_not_wait_for_it(cluster, tmp_path):
    """As those of a widget's callback, which runs while the kernel awaits the cell."""
    go = tmp_path / "go"

    async def notebook() -> list[Any]:
        run = cluster.cells.begin(UNTIL.format(str(go)), timeout=60)
        awaited = asyncio.create_task(cluster.cells.wait_awaited(run))
        await asyncio.sleep(0)
        first = cluster.submit(double, 1)
        while not first.running():  # it has its turn then, and waits for the cell
            await asyncio.sleep(0)
        second = cluster.submit(double, 2)
        with pytest.raises(UsageError, match="expected idle ranks"):
            cluster.run("3")
        assert not awaited.done()
        go.touch()
        await awaited
        return [await asyncio.wrap_future(future) for future in (first, second)]

    assert asyncio.run(notebook()) == [[2, 2], [4, 4]]


def test_calls_of_several_threads_wait_for_each_other(cluster):
    results: dict[int, list[int]] = {}

    def call(number: int) -> None:
        results[number] = cluster.run(double, number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [2 * number] * 2 for number in range(8)}


def test_a_call_within_a_cell_of_the_same_thread_is_refused(cluster, tmp_path):
    go = tmp_path / "go"
    run = cluster.cells.begin(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)"
    )
    with pytest.raises(UsageError, match="expected idle ranks"):
        cluster.run(double, 1)
    go.touch()
    cluster.cells.wait(run)


def test_calls_can_be_awaited(cluster):
    async def both() -> list[list[int]]:
        return await asyncio.gather(
            cluster.run_async(double, 1), cluster.map_async(double, range(3))
        )

    assert asyncio.run(both()) == [[2, 2], [0, 2, 4]]


def test_starmap_passes_the_parts_of_each_item(cluster):
    assert cluster.starmap(pow, [(2, 3), (3, 2), (5, 1)]) == [8, 9, 5]


def test_the_cause_of_a_failure_is_the_ranks_own_exception(cluster):
    with pytest.raises(CellFailed, match="rank 1") as raised:
        cluster.run(fails_on_rank_1)
    assert isinstance(raised.value.__cause__, OutOfData)
    assert raised.value.__cause__.args == ("no more rows", 3)
    # One that cannot be pickled is described all the same.
    with pytest.raises(CellFailed, match="LocalError") as raised:
        cluster.run(
            "class LocalError(Exception): ...\nraise LocalError(__import__('threading').Lock())"
        )
    assert raised.value.__cause__ is None


def test_output_is_captured_or_turned_off(cluster, capsys, monkeypatch):
    monkeypatch.setattr("allranks.widgets.text._LINE_HOLD_SECONDS", 60.0)
    captured = allranks.CapturedOutput()
    assert cluster.run("print('on', rank); rank", view=captured) == [0, 1]
    assert (captured[0], captured[1]) == ("on 0\n0\n", "on 1\n1\n")
    assert capsys.readouterr().out == ""
    cluster.show_output = False
    try:
        cluster.run("print('hidden')")
    finally:
        cluster.show_output = True
    assert capsys.readouterr().out == ""
    cluster.run("print('shown')")
    assert capsys.readouterr().out == "ranks 0–1 │ shown\n"


def test_a_block_waits_for_its_submitted_calls_and_a_stop_cancels_them():
    with allranks.Cluster(1, raises_own=True, show_output=False) as own:
        future = own.submit(double, 4)
        with pytest.raises(OutOfData, match="no more rows"):
            own.run(fails_on_rank_1, 0)
    assert future.result() == [8]
    own.start()
    running, waiting = own.submit("while True: pass"), own.submit(double, 4)
    while not own.roster.busy:
        time.sleep(0.01)
    own.stop()
    assert isinstance(running.exception(), CellFailed)
    with pytest.raises(CancelledError):
        waiting.result()


TYPED = '''
from __future__ import annotations

import asyncio
from concurrent.futures import Future

import allranks


class Named(allranks.Cluster):
    """A cluster of the program's own."""

    name = "mine"


def double(x: int) -> int:
    return 2 * x


def area(width: float, height: float) -> float:
    return width * height


async def awaited(cluster: allranks.Cluster) -> list[int]:
    return await cluster.run_async(double, 3)


def main() -> None:
    with Named(n=2) as cluster:
        name: str = cluster.name
        values: list[int] = cluster.run(double, 3)
        mapped: list[int] = cluster.map(double, range(4))
        areas: list[float] = cluster.starmap(area, [(1.0, 2.0)])
        future: Future[list[int]] = cluster.submit(double, 3)
        restarted: Named = cluster.restart()
        captured = allranks.CapturedOutput()
        anything = cluster.run("rank", view=captured)
        text: str = captured[0]
        print(name, values, mapped, areas, future.result(), restarted, anything, text)
        print(len(cluster), asyncio.run(awaited(cluster)))


main()
'''
WRONG = TYPED.replace("list[float] = cluster.starmap", "list[str] = cluster.starmap")


def test_a_typed_program_passes_mypy_and_a_wrong_one_does_not(tmp_path):
    for name, program in (("typed.py", TYPED), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(program)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-version=3.11", "typed.py", "wrong.py"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    mistake, *_, found = checked.stdout.splitlines()
    assert mistake.startswith("wrong.py:"), checked.stdout
    assert '"starmap"' in mistake
    assert found.startswith("Found 1 error in 1 file")
