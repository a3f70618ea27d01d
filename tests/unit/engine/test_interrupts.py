"""Interrupts of the main thread, in which cells and clients' requests run one after the other."""

import signal
from collections.abc import Iterator

import pytest

from allranks.engine.interrupts import Interrupts, ignore_interrupt


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = signal.getsignal(signal.SIGINT)
    yield Interrupts(lambda: None)
    signal.signal(signal.SIGINT, before)


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
