"""A cluster that a program leads, without magics."""

import pytest

import allranks
from allranks.errors import UsageError

CALLS = {
    "run": lambda cluster, ranks: cluster.run("kept", ranks=ranks),
    "call": lambda cluster, ranks: cluster.run(int, ranks=ranks),
    "push": lambda cluster, ranks: cluster.push({"kept": 1}, ranks),
    "pull": lambda cluster, ranks: cluster.pull("kept", ranks),
}


@pytest.fixture(scope="module")
def cluster():
    with allranks.Cluster(2) as started:
        started.run("kept = 10 * rank")
        yield started


@pytest.mark.parametrize("ranks", [[2], [-1], [0, 7], [], 1, ["0"]])
@pytest.mark.parametrize("call", CALLS)
def test_ranks_that_are_not_there_are_refused_and_nothing_is_sent(cluster, call, ranks):
    with pytest.raises(UsageError, match=r"^expected .*found .*Type for example: ranks=\[0\]$"):
        CALLS[call](cluster, ranks)
    assert cluster.run("kept", ranks=[1, 0, 1]) == [0, 10]


def test_one_of_the_ranks_runs_alone(cluster):
    assert cluster.run("kept", ranks=[1]) == [10]
    assert cluster.pull("kept", range(1, 2)) == {1: 10}
