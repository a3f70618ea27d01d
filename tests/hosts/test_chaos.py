"""A training on two hosts, with one fault of each kind that `tests.simulated` cannot play."""

import pytest

from tests.hosts.chaos import FAULTS, Chaos
from tests.hosts.conftest import folder_in


@pytest.fixture(scope="module")
def chaos(hosts):
    # Without pauses the training would take both cores from the tests beside it.
    options = {"ranks_each": 4, "seed": 1, "every_seconds": 8, "pause": 0.01}
    with Chaos(hosts, folder_in(hosts.shared), **options) as chaos:
        yield chaos
        chaos.notebook.shutdown()
        chaos.notebook.check_nothing_left()


@pytest.mark.leases
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_no_sum_is_wrong_and_a_fault_is_named_and_healed(chaos, fault):
    played = chaos.play(fault)
    assert played.problems == [], played
    assert played.healed is not None
