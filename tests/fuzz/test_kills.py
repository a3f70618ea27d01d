"""A kernel that is killed leaves nothing, whenever that is; `make soak` does it fifty times."""

import pytest

from tests.fuzz import kills

TIMES = 1
"""In each phase: a kernel and its ranks take five seconds, and the soak does it often."""


@pytest.mark.parametrize("phase", kills.PHASES)
@pytest.mark.parametrize("time", range(TIMES))
def test_a_kernel_killed_at_a_random_moment_leaves_nothing(phase, time):
    kills.kill(str(time), phase)
