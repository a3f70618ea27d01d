"""Random cells, each followed by one whose result is known; `make soak` plays fresh ones."""

from __future__ import annotations

import pytest

from tests.fuzz import kills
from tests.fuzz.grammar import Seed
from tests.fuzz.play import play, report, shorten

SESSIONS = (
    ("notebook-4-1", range(50)),
    ("notebook-2-1", range(50, 100)),
    ("cluster-3-1", range(50)),
    ("healing-4-1", range(25)),
)
"""Two halves of a deck in notebooks, one through a cluster in this process, and one healing.

``make soak`` plays whole decks of all kinds.
"""


# A session is some twenty seconds; one that fails is played again until it is short.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("seed", "steps"), SESSIONS, ids=[seed for seed, _ in SESSIONS])
def test_random_steps_never_hang_lie_or_leak(seed, steps):
    played = play(Seed.parse(seed), steps)
    if played.fault is not None:
        pytest.fail(report(played, shorten(played)), pytrace=False)


def test_a_kernel_killed_at_a_random_moment_while_its_ranks_stop_leaves_nothing():
    """For the other phases see tests/faults/test_leaks.py; `make soak` does all of them."""
    kills.kill("0", "stopping")
