"""Interrupts of the main thread, in which cells and clients' requests run one after the other."""

import signal
from collections.abc import Iterator

import pytest

from allranks.engine.interrupts import Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = signal.getsignal(signal.SIGINT)
    yield Interrupts(lambda: None)
    signal.signal(signal.SIGINT, before)


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
