"""An interrupt of a view's blocking call, with a result of ipyparallel that never comes."""

from collections import defaultdict
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from allranks.cluster import cluster
from allranks.errors import CellInterrupted
from allranks.features.ipyparallel import blocking_calls, client_requests, px_results
from allranks.features.ipyparallel.blocking_calls import end_by_interrupt
from allranks.features.ipyparallel.metadata import NOTEBOOK, OF_RANKS, REQUESTS, RUNS


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
        return self._reacts

    def ready(self):
        return self._reacts

    def exception(self):
        return SimpleNamespace(elist=self.errors)


class Client:
    _closed = False

    def __init__(self):
        self._engines = {0: "engine-0", 1: "engine-1"}
        self._outstanding_dict = defaultdict(set)
        self._config = {OF_RANKS: "yes"}
        #: The ranks that were to interrupt the requests, and what those run that have yet to begin
        #: them; None if they do not answer.
        self.interrupted, self.runs = [], {}
        client_requests.follow(self)

    def _send_control_request(self, targets, kind, content, block):
        assert (kind, content["sig"], block) == ("signal_request", "SIGINT", False)
        assert content[REQUESTS] == [*Result.msg_ids]
        (rank,) = targets
        self.interrupted.append(rank)
        answer = Future()
        if self.runs is not None:
            content = {RUNS: self.runs[rank]} if rank in self.runs else {}
            answer.set_result([{"content": content}])
        return answer


@pytest.fixture
def get(monkeypatch):
    """``get(result)``, called by the module of this name."""
    monkeypatch.setattr(client_requests, "_clients", [])
    hellos = {}
    for rank in range(2):
        hellos[rank] = SimpleNamespace(engine=f"engine-{rank}")
    running = SimpleNamespace(
        size=2, hellos=hellos, roster=SimpleNamespace(running=None, reserved="")
    )
    monkeypatch.setattr(cluster, "running", lambda: running)
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
    assert result._client.interrupted == [1]
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


def test_ranks_that_do_not_react_are_named_with_the_command_that_ends_them(get):
    with pytest.raises(CellInterrupted, match="rank 1 does not react") as told:
        get(Result(reacts=False))
    assert str(told.value).endswith('ranks.client().send_signal("SIGKILL", targets=[1])')


@pytest.mark.parametrize("name", ["In[5] (%%px --noblock)", "another call of this notebook"])
def test_a_cell_that_the_ranks_run_first_goes_on_and_is_named(get, monkeypatch, name):
    result, roster = Result(reacts=False), cluster.running().roster
    result._client.runs = {1: "cell In[5]"}
    roster.running = SimpleNamespace(pending=(0, 1))
    cell = [SimpleNamespace(name=name)] if name.startswith("In") else []
    monkeypatch.setattr(px_results, "in_background", lambda _: cell)
    with pytest.raises(CellInterrupted) as told:
        get(result)
    assert str(told.value) == (
        f"the call of f was interrupted. rank 1 runs {name} first; it goes on, and the call is "
        "left out after it. To end it, type: ranks.interrupt()"
    )
    assert result._client.interrupted == [1]


def test_ranks_that_run_members_say_themselves_whether_these_come_first(get):
    # Between two members, a rank may have begun the call.
    cluster.running().roster.reserved = "running an ensemble"
    for runs, told in (
        ({}, "the call of f on rank 1 was"),
        ({1: "member 3"}, "rank 1 runs member 3 first"),
    ):
        result = Result(reacts=not runs)
        result._client.runs = runs
        with pytest.raises(CellInterrupted, match=told):
            get(result)
        assert result._client.interrupted == [1]


def test_a_cell_of_other_ranks_does_not_come_first(get):
    cluster.running().roster.running = SimpleNamespace(pending=(0,))
    with pytest.raises(CellInterrupted, match="the call of f on rank 1 was interrupted; "):
        get(Result())


def test_a_read_is_named_as_it_was_typed(get):
    result = Result()
    result._fname = "_pull"
    module = {"__name__": "ipyparallel.client.view", "result": result}
    exec("class View:\n  def __getitem__(self, name): return result.get()", module)
    dv = module["View"]()
    with pytest.raises(CellInterrupted, match=r'^dv\["x"\] on rank 1 was interrupted; '):
        dv["x"]


def test_a_call_that_is_on_its_way_to_a_rank_ends_when_it_comes(get):
    result = Result()
    result._client.runs = {1: ""}
    with pytest.raises(CellInterrupted, match="the call of f on rank 1 was interrupted; "):
        get(result)
    assert result._client.interrupted == [1]


def test_a_rank_that_has_yet_to_begin_a_call_is_not_to_be_killed(get):
    result = Result(reacts=False)
    result._client.runs = {1: ""}
    with pytest.raises(CellInterrupted) as told:
        get(result)
    assert str(told.value) == (
        "the call of f was interrupted. rank 1 has yet to begin it, and will leave it out"
    )


def test_a_rank_that_does_not_react_is_named_beside_one_that_has_ended_its_part(get):
    result = Result(reacts=False, targets=[0, 1])  # a broadcast view: one request for both
    result._client._outstanding_dict.clear()
    result._client.runs = {0: ""}
    with pytest.raises(CellInterrupted, match="rank 1 does not react") as told:
        get(result)
    assert str(told.value).endswith('ranks.client().send_signal("SIGKILL", targets=[1])')


def test_who_presses_again_at_once_is_not_advised_to_kill_ranks(get):
    result = Result(reacts=False)

    def press(seconds):
        raise KeyboardInterrupt

    result.wait = press
    with pytest.raises(CellInterrupted) as told:
        get(result)
    assert str(told.value) == (
        "the call of f on rank 1 was interrupted, and the wait for its end, too: rank 1 has not "
        "ended it yet. To interrupt again, type: ranks.interrupt()"
    )


def test_a_rank_that_dies_meanwhile_is_not_asked(get):
    result = Result()
    result._client._send_control_request = lambda targets, *_, **__: {}[targets[0]]
    with pytest.raises(CellInterrupted, match="the call of f on rank 1 was interrupted; "):
        get(result)


def test_an_earlier_request_goes_on(get):
    result = Result(reacts=False)
    result._client.runs = {1: "an earlier request of this client"}
    with pytest.raises(CellInterrupted) as told:
        get(result)
    assert str(told.value) == (
        "the call of f was interrupted. rank 1 runs an earlier request of this client first; it "
        "goes on, and the call is left out after it. To end it, type: ranks.interrupt()"
    )


@pytest.fixture
def others(monkeypatch):
    """A call on ranks of another notebook."""
    monkeypatch.setattr(cluster, "running", lambda: None)
    return Result()


def test_a_call_on_ranks_of_another_notebook_ends_as_one_on_its_own(get, others):
    with pytest.raises(CellInterrupted, match="the call of f on rank 1 was interrupted; "):
        get(others)
    assert others._client.interrupted == [1]


OF_ANOTHER = {
    "cell In[3]": (
        "cell In[3] of /course/lab.ipynb",
        "use the stop button of the notebook that has the ranks; for a cell in the background, "
        "type there: ranks.interrupt()",
    ),
    "a request of another client": (
        "a request of another client",
        'type with your client: rc.send_signal("SIGINT")',
    ),
}


@pytest.mark.parametrize("runs", OF_ANOTHER)
def test_what_another_notebooks_ranks_run_first_is_named_with_what_ends_it(get, others, runs):
    others._reacts, others._client.runs = False, {1: runs}
    others._client._config[NOTEBOOK] = "/course/lab.ipynb"
    with pytest.raises(CellInterrupted) as told:
        get(others)
    first, end = OF_ANOTHER[runs]
    assert str(told.value) == (
        f"the call of f was interrupted. rank 1 runs {first} first; it goes on, and the call is "
        f"left out after it. To end it, {end}"
    )


def test_tasks_on_ranks_of_another_notebook_end_by_the_client(get, others):
    others._targets = []
    others._client._outstanding_dict.clear()
    others._reacts = False
    with pytest.raises(CellInterrupted, match=r'rc\.abort\(\) .*: rc\.send_signal\("SIGINT"\)$'):
        get(others)


def test_no_notebook_is_advised_to_kill_ranks_of_another_one(get, others, monkeypatch):
    monkeypatch.setattr(blocking_calls, "_END_SECONDS", 0)
    others._reacts, others._client.runs = False, None
    with pytest.raises(CellInterrupted, match="rank 1 does not react") as told:
        get(others)
    # A command that is typed there waits for the end of a cell.
    assert str(told.value).endswith(
        "To see what it does, look at the sidebar of the notebook that has the ranks, or, while no "
        "cell runs there, type there: %distributed status"
    )


def test_the_wait_of_a_cell_itself_ends_as_with_ipyparallel(get):
    result = Result()
    with pytest.raises(KeyboardInterrupt):
        get(result, "__main__")
    assert result._client.interrupted == []


def test_a_result_that_is_there_by_the_interrupt_is_not_said_to_go_on(get):
    # That of a map has no targets.
    with pytest.raises(CellInterrupted, match=r"^the call of f was interrupted; the ranks have"):
        get(Result(targets=()))


def test_a_stop_of_scatter_ends_it_too(get):
    def press(result, seconds=None):
        if seconds is None:
            raise KeyboardInterrupt
        return Result.wait(result, seconds)

    class Scattered(Result):
        wait = press

    undo, result = end_by_interrupt(Scattered), Scattered()
    with pytest.raises(CellInterrupted, match=r"^the call of f on rank 1 was interrupted; "):
        eval("result.wait()", {"__name__": "ipyparallel.client.view", "result": result})
    undo()
    assert result._client.interrupted == [1]


def test_the_wait_of_a_load_balanced_view_fails_and_the_task_goes_on(get):
    result = Result(targets=[], reacts=False)
    with pytest.raises(
        CellInterrupted, match=r"tasks go on\. .*rc\.abort\(\) .*: ranks\.interrupt\(\)$"
    ):
        get(result)
    assert result._client.interrupted == []


def test_a_call_on_engines_of_ipyparallel_is_left_to_it(get):
    result = Result()
    result._client._config = {}
    with pytest.raises(KeyboardInterrupt):
        get(result)
