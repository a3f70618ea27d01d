"""Interrupts of the main thread, in which cells and clients' requests run one after the other."""

import asyncio
import signal
from collections.abc import Iterator

import pytest
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell

from allranks.engine.interrupts import Interrupts, ignore_interrupt


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
