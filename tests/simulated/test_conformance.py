"""The models of the simulation are held against what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.simulated.stages import real_zeromq, run_on_model
from tests.simulated.zeromq_scripts import SCRIPTS, Script


@pytest.fixture(scope="module")
def run_on_zeromq() -> Iterator[Callable[[Script], Any]]:
    with real_zeromq() as run:
        yield run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_model_of_zeromq_ends_as_zeromq_does(
    script: Script, run_on_zeromq: Callable[[Script], Any]
) -> None:
    found = run_on_zeromq(script)
    # The seed of a world decides about the delays in it.
    assert {seed: run_on_model(script, seed) for seed in range(3)} == dict.fromkeys(range(3), found)
