"""A seed decides everything."""

from __future__ import annotations

from tests.simulated.scenarios import Simulator

_SCENARIO = "test_lost_hosts_are_named_and_every_cell_ends"


def test_a_seed_does_the_same_in_another_process(simulator: Simulator) -> None:
    other = Simulator()
    try:
        assert simulator.results(_SCENARIO, 7, 3) == other.results(_SCENARIO, 7, 3)
    finally:
        other.close()


def test_seeds_differ(simulator: Simulator) -> None:
    first, second = simulator.results(_SCENARIO, 7, 2)
    assert first["faults"] != second["faults"]
