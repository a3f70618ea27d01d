"""A kernel that is killed while its ranks stop leaves nothing; `make soak` does it in all phases.

For the other phases see tests/faults/test_leaks.py.
"""

from tests.fuzz import kills


def test_a_kernel_killed_at_a_random_moment_while_its_ranks_stop_leaves_nothing():
    kills.kill("0", "stopping")
