"""Which nodes of Dask and Ray are chosen, and which have ended, without either."""

import io
import json
import sys
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from allranks import __version__
from allranks.cluster import launchers
from allranks.cluster.launchers import actors, ray_dask
from allranks.cluster.launchers.actors import ActorNode, DaskActors, Order
from allranks.cluster.launchers.ray_dask import ActorJob
from allranks.errors import UsageError

NODES = [ActorNode("h1", "10.0.0.1", 4, 2), ActorNode("h2", "10.0.0.2", 2)]


@pytest.fixture
def size(monkeypatch):
    """Returns how many ranks a launcher has on the nodes, for the words after ``--on``."""
    monkeypatch.setattr(ray_dask.importlib.util, "find_spec", lambda package: package)
    connection = SimpleNamespace(nodes=NODES)
    monkeypatch.setattr(ray_dask, "ActorConnection", lambda *_: connection)
    return lambda on, n=None: launchers.named(on).size(n)


@pytest.mark.parametrize(
    ("on", "n", "ranks"),
    [
        ("dask:tcp://h1:8786", None, 6),
        ("ray", None, 6),
        ("ray --nodes 1", None, 4),
        ("ray --nodes 1 --gpus-per-node 2", None, 4),
        ("dask:tcp://h1:8786 --nodes 2", 4, 4),
        # Dask may have more ranks on a node than it counts CPUs there.
        ("dask:tcp://h1:8786 --nodes 2 --ntasks-per-node 8", None, 16),
    ],
)
def test_there_are_as_many_ranks_as_asked_or_one_for_each_cpu(size, on, n, ranks):
    assert size(on, n) == ranks


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("dask:tcp://h1:8786 --nodes 3", "expected 3 nodes of Dask, found h1 (4 CPUs, 2 GPUs)"),
        ("ray --gpus-per-node 1", "expected 2 nodes of Ray with 1 GPUs each, found h1"),
        ("ray --nodes 2 --ntasks-per-node 4", "expected 2 nodes of Ray with 4 CPUs each"),
        ("ray --gpus-per-node all", "expected a number of GPUs, found argument --gpus-per-node"),
        ("ray --gpus-per-node all", "Type for example: --gpus-per-node 2"),
        ("dask:tcp://h1:8786 --gpus-per-node 1", "found --gpus-per-node"),
        ("ray --account me", "expected --nodes and --ntasks-per-node, found --account"),
    ],
)
def test_what_the_nodes_lack_is_said(size, on, said):
    with pytest.raises(UsageError) as raised:
        size(on)
    assert said in str(raised.value)


def test_a_node_whose_allranks_has_another_relay_is_named_with_what_to_install():
    ended = {"ended": ["h1", "exit code 1\n/bin/python: No module named allranks.relay"]}
    connection = SimpleNamespace(
        lines=lambda: iter([ended]), send=lambda order: None, last_lines=str
    )
    ends = SimpleQueue()
    ActorJob(connection, Order((2,), 0, (), {}), lambda *end: ends.put(end), "Dask")
    host, why = ends.get(timeout=60)
    assert (host, why.splitlines()[-1]) == (
        "h1",
        f"It has another allranks; the notebook has {__version__}. Install this there",
    )


class LostActor:
    """As Dask's, once its worker is lost: also to ask it for a method raises."""

    def __getattr__(self, name):
        raise RuntimeError("Worker holding Actor was lost")


def test_a_lost_node_of_dask_says_nothing_of_the_others():
    running = SimpleNamespace(ended=lambda: SimpleNamespace(result=lambda: ""))
    first, lost, last = DaskActors.call(object(), [running, LostActor(), running], "ended")
    assert (first, str(lost), last) == ("", "Worker holding Actor was lost", "")


def test_a_node_of_dask_that_is_lost_before_its_relay_has_answered_fails_the_start(monkeypatch):
    running = SimpleNamespace(host=lambda: SimpleNamespace(result=lambda: "h1"))
    system = DaskActors.__new__(DaskActors)
    monkeypatch.setattr(system, "nodes", lambda: NODES)
    monkeypatch.setattr(system, "place", lambda order: None)
    monkeypatch.setattr(system, "started", lambda: [running, LostActor()])
    order = {"ranks": [1, 1], "gpus": 0, "relay": [], "invitation": {}}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order) + "\n"))
    with pytest.raises(RuntimeError, match="Worker holding Actor was lost"):
        actors._serve(system, lambda **fields: json.dumps(fields))
