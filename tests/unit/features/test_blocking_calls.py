"""An interrupt of a view's blocking call, with a result of ipyparallel that never comes."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

from allranks.cluster import cluster
from allranks.errors import CellInterrupted
from allranks.features.ipyparallel.blocking_calls import end_by_interrupt
from allranks.features.ipyparallel.metadata import OF_RANKS, REQUESTS


class Result:
    """What is used of ipyparallel's AsyncResult; the user interrupts the wait for it."""

    _fname = "f"
    msg_ids = ("request-0", "request-1")
    errors = (("KeyboardInterrupt", "", "f() at line 3", {"engine_id": 1}),)

    def __init__(self, targets=None, reacts=True):
        self._client, self._targets, self._reacts = Client(), targets, reacts
        if targets is None:
            self._client._outstanding_dict["engine-1"].add("request-1")

    def get(self):
        raise KeyboardInterrupt

    def wait(self, seconds):
        if self._reacts:
            self._client._outstanding_dict.clear()

    def ready(self):
        return self._reacts

    def exception(self):
        return SimpleNamespace(elist=self.errors)


class Client:
    def __init__(self):
        self._engines = {0: "engine-0", 1: "engine-1"}
        self._outstanding_dict = defaultdict(set)
        self._config = {OF_RANKS: True}
        self.signals = []

    def _send_control_request(self, targets, kind, content, block):
        assert (kind, content["sig"], block) == ("signal_request", "SIGINT", False)
        self.signals.append((targets, content[REQUESTS]))


@pytest.fixture
def get(monkeypatch):
    """``get(result)``, called by the module of this name."""
    hellos = {}
    for rank in range(2):
        hellos[rank] = SimpleNamespace(engine=f"engine-{rank}")
    monkeypatch.setattr(cluster, "running", lambda: SimpleNamespace(hellos=hellos))
    undo = end_by_interrupt(Result)

    def get(result, by="ipyparallel.client.view"):
        return eval("result.get()", {"__name__": by, "result": result})

    yield get
    undo()
    with pytest.raises(KeyboardInterrupt):
        get(Result())


def test_the_ranks_that_have_not_answered_are_interrupted_and_the_cell_ends(get):
    result = Result()
    with pytest.raises(
        CellInterrupted, match=r"^the call of f on rank 1 was interrupted; "
    ) as told:
        get(result)
    assert result._client.signals == [([1], ["request-0", "request-1"])]
    assert told.value.text.startswith("f() at line 3\n")


def test_it_says_for_whom_the_ranks_waited(get):
    result, waited = Result(targets=[0, 1]), "allreduce waited for rank 2"
    result.errors = [
        ("KeyboardInterrupt", waited, "allreduce(1) at line 2", {"engine_id": 0}),
        *Result.errors,
    ]
    with pytest.raises(CellInterrupted) as told:
        get(result)
    assert told.value.text.startswith(f"f() at line 3\n\nrank 0: {waited}\n\nCellInterrupted: ")
    of_one = SimpleNamespace(evalue=waited, traceback="at line 2", engine_info={"engine_id": 0})
    of_one.ename = "KeyboardInterrupt"
    result.exception = lambda: of_one
    with pytest.raises(CellInterrupted) as told:
        get(result)
    assert told.value.text.startswith(f"at line 2\n\nrank 0: {waited}\n\nCellInterrupted: ")


def test_a_broadcast_view_has_one_request_for_all_of_its_ranks(get):
    result = Result(targets=[0, 1])
    with pytest.raises(CellInterrupted, match="on ranks 0–1 was interrupted"):
        get(result)


def test_an_earlier_request_that_still_runs_is_left_alone(get):
    result = Result()
    result._client._outstanding_dict["engine-1"].add("training")
    with pytest.raises(CellInterrupted, match="rank 1 has an earlier request to answer first"):
        get(result)
    assert result._client.signals == []


def test_ranks_that_do_not_react_are_named_with_the_command_that_ends_them(get):
    with pytest.raises(CellInterrupted, match="rank 1 does not react") as told:
        get(Result(reacts=False))
    assert str(told.value).endswith('ranks.client().send_signal("SIGKILL", targets=[1])')


@pytest.mark.parametrize("targets", [None, []])
def test_other_waits_end_as_with_ipyparallel(get, targets):
    # A cell's own `ar.get()`, and the task of a load-balanced view.
    by, result = ("__main__", Result()) if targets is None else ("ipyparallel.client.view", None)
    result = result or Result(targets=targets)
    with pytest.raises(KeyboardInterrupt):
        get(result, by)
    assert result._client.signals == []


def test_a_notebook_without_ranks_ends_its_call_on_those_of_another_one(get, monkeypatch):
    monkeypatch.setattr(cluster, "running", lambda: None)
    result = Result(reacts=False)
    with pytest.raises(CellInterrupted, match=r'rc\.send_signal\("SIGKILL", targets=\[1\]\)$'):
        get(result)
    assert result._client.signals == [([1], ["request-0", "request-1"])]
    result._client._outstanding_dict["engine-1"].add("training")
    with pytest.raises(CellInterrupted, match=r'To end both, type: rc\.send_signal\("SIGINT"\)$'):
        get(result)


def test_a_call_on_engines_of_ipyparallel_is_left_to_it(get):
    result = Result()
    result._client._config = {}
    with pytest.raises(KeyboardInterrupt):
        get(result)
