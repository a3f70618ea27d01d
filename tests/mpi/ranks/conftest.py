"""Each test is a scope, as a notebook's cell is: a rank that fails does not strand the others."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import allranks
import allranks.collectives as c
from allranks.features.pytest.records import ON_RANK

pytest.register_assert_rewrite("libraries")

ODD = 1
"""The rank that errs where one does."""

TRACE = "ALLRANKS_TEST_TRACE" in os.environ
"""Says which test each rank runs: what hangs is named last."""

_STDERR = int(os.environ.get("ALLRANKS_TEST_STDERR", "2"))
_STUCK_SECONDS = 100
"""After so long in one test a rank says where it is: the others give up soon."""

PATIENCE_SECONDS = 60
"""For what comes soon, unless it never does."""

_number = 0


def pytest_report_header() -> str:
    if not c.is_initialized():
        return ""  # of pytest's own process, which starts the ranks
    library = MPI.Get_library_version().splitlines()[0][:40]
    return f"rank {c.rank()} of {c.size()}, {library}"


def pytest_exception_interact(node: pytest.Item, report: pytest.TestReport) -> None:
    """Tells of a failure at once: the other ranks may wait for this one, and give up."""
    os.write(_STDERR, f"rank {c.rank()}: {node.name} failed\n{report.longreprtext}\n".encode())


_ROOMS = Path(allranks.__file__).parent / "collectives"


def shortest_way(call: Callable[[], object], calls: int = 1000) -> list[tuple[Path, str]]:
    """The functions of ours that a call passes here, in their order, where it waits least."""
    ways: list[list[tuple[Path, str]]] = []

    def note(frame, event, _):
        code, file = frame.f_code, Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(_ROOMS):
            ways[-1].append((file.relative_to(_ROOMS), code.co_name))

    for _ in range(calls):
        ways.append([])
        sys.setprofile(note)
        call()
        sys.setprofile(None)
    return min(ways, key=len)


def everybody(flag: bool, seconds: float = 120) -> bool:
    """True where the flag is set on any rank; what an engine does between two cells."""
    mine, total = np.array([flag], np.uint8), np.zeros(1, np.uint8)
    communicators = c.world.current().mpi
    assert communicators is not None
    request = communicators.pristine.Iallreduce(mine, total, MPI.MAX)
    end = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > end:
            os.write(_STDERR, f"rank {c.rank()} gave up: another did not end its test\n".encode())
            time.sleep(1)  # What is written in the moment of an abort is lost.
            MPI.COMM_WORLD.Abort(3)
        time.sleep(1e-4)
    return bool(total[0])


def enter() -> None:
    global _number
    _number += 1
    c.scope.enter("this cell", None, _number)


def settle() -> None:
    """Ends a cell as an engine does: where a rank needs a new epoch, all get one."""
    if everybody(c.dirty()):
        c.renew()


def in_a_cell(do: Callable[[], object]) -> BaseException | None:
    """What a cell raised; afterwards every rank has left it, as an engine would have it."""
    enter()
    try:
        do()
    except BaseException as error:
        c.scope.leave(f"{type(error).__name__}: {error}", failed=True, where="cell:1")
        return error
    else:
        c.scope.leave("it ended")
        return None
    finally:
        settle()


def next_cell_works() -> None:
    enter()
    assert c.allreduce(np.ones(3), c.Sum)[0] == c.size()
    assert c.comm.allreduce(1) == c.size()
    c.scope.leave("it ended")
    settle()


def odd() -> bool:
    """True on the rank that errs."""
    return c.rank() == ODD


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < end, "what this rank waits for does not happen"
        time.sleep(0.01)


@contextmanager
def interrupted_after(seconds: float, true: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Sends this process a SIGINT, as a notebook's interrupt does, so long after ``true`` is."""
    over = threading.Event()

    def send() -> None:
        while not true():
            if over.wait(0.01):
                return
        if not over.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=send)
    # Python drops an interrupt that comes in a finalizer; an engine has it come again.
    gc.disable()
    try:
        sender.start()
        yield
    finally:
        over.set()
        sender.join()
        gc.enable()
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def cell(request: pytest.FixtureRequest) -> Iterator[None]:
    if TRACE:
        os.write(_STDERR, f"rank {c.rank()}: {request.node.name}\n".encode())
    if request.config.pluginmanager.has_plugin(ON_RANK):
        yield  # each test is a cell
        return
    faulthandler.dump_traceback_later(_STUCK_SECONDS, file=_STDERR)
    enter()
    yield
    c.scope.leave("it ended")
    settle()
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def sets() -> dict[str, c.ProcessSet | None]:
    """The whole world, and from two ranks on its even and odd halves."""
    if c.size() < 2:
        return {"all": None}
    evens, odds = range(0, c.size(), 2), range(1, c.size(), 2)
    return {"all": None, "half": [c.add_process_set(evens), c.add_process_set(odds)][c.rank() % 2]}
