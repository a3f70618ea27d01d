"""Interrupts of the main thread, in which cells and clients' requests run one after the other."""

import asyncio
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell

from allranks.engine.interrupts import Interrupts, ignore_interrupt
from allranks.engine.rank import Rank
from allranks.records.wire import BETWEEN_CELLS, Interrupt


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    used = (signal.SIGINT, signal.SIGURG)
    before = [signal.getsignal(number) for number in used]
    signal.signal(signal.SIGURG, signal.SIG_DFL)
    yield Interrupts(lambda: None)
    for number, handler in zip(used, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("requested", [False, True], ids=["a hook", "a request of a client"])
def test_what_a_rank_does_between_two_cells_is_interrupted_once(
    interrupts: Interrupts, requested: bool
) -> None:
    signal.signal(signal.SIGINT, ignore_interrupt)
    if requested:
        interrupts.number = -1
        interrupts.hear()
    with pytest.raises(KeyboardInterrupt):
        interrupts.end_between_cells()
    interrupts.hear_no_more()
    signal.raise_signal(signal.SIGINT)  # that of a cell, which comes late


@pytest.mark.parametrize("requests_too", [False, True])
@pytest.mark.parametrize("runs", [None, {"client": "one", "notebook": ""}])
def test_a_request_of_a_client_is_interrupted_between_two_cells_only_if_it_is_meant(
    requests_too: bool, runs: dict[str, str] | None
) -> None:
    ended: list[str] = []
    interrupts = SimpleNamespace(end_between_cells=lambda: ended.append("once"))
    rank: Any = SimpleNamespace(
        _loop=object(),
        _features=SimpleNamespace(message_received=lambda *_: None),
        _meets=False,
        _epochs=SimpleNamespace(in_request=runs),
        _runner=SimpleNamespace(interrupts=interrupts),
    )
    Rank._receive(rank, Interrupt(BETWEEN_CELLS, requests_too), [])
    assert bool(ended) == (requests_too or runs is None)


def test_an_interrupt_that_comes_early_ends_one_request_and_not_all_with_its_number(
    interrupts: Interrupts,
) -> None:
    interrupts.number = -1
    interrupts.send(-1)
    with pytest.raises(KeyboardInterrupt):
        interrupts.hear()
    interrupts.hear_no_more()
    interrupts.hear()
    assert interrupts.heard


BLOCKS = "import threading\nthreading.Event().wait(60)\nimport asyncio\nawait asyncio.sleep(0)"
POSTPONES = """
import asyncio, signal
before = signal.signal(signal.SIGINT, lambda *_: None)
signal.raise_signal(signal.SIGURG)
signal.signal(signal.SIGINT, before)
end = "of what postpones"
signal.raise_signal(signal.SIGURG)
end = await asyncio.sleep(0)
"""


@pytest.mark.parametrize("cell", [BLOCKS, POSTPONES], ids=["a call", "what postpones interrupts"])
def test_a_cell_that_awaits_hears_of_an_interrupt_that_came_before_its_code_began(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch, cell: str
) -> None:
    monkeypatch.setattr(HistoryManager, "enabled", False)
    shell = InteractiveShell()
    interrupts.number = 1
    # Not yet in the cell's own code, and the event loop has no turn before the call.
    shell.events.register("pre_execute", lambda: interrupts.send(1))

    async def run() -> BaseException | None:
        task = asyncio.ensure_future(shell.run_cell_async(cell, transformed_cell=cell))
        interrupts.hear(task)
        return (await task).error_in_exec

    assert isinstance(asyncio.run(run()), KeyboardInterrupt)
    assert shell.user_ns.get("end", "of what postpones") == "of what postpones"
    interrupts.hear_no_more()
