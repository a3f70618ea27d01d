"""What a wait for a client's request shows of what ranks say, without ranks."""

import io
import sys
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from allranks.cluster import cluster
from allranks.features.ipyparallel import client_requests, late_notices, px_results
from allranks.features.ipyparallel.late_notices import late_lines
from allranks.features.ipyparallel.metadata import NOTICE_OF, OF_RANKS, RUNS
from allranks.features.ipyparallel.notebook import ClientPatch
from tests.unit.features.unconnected_client import Unconnected

LATE = "barrier at f.py:2 has waited 5 s for rank 1:\n  rank 1 is at f.py:7\n"


class Requests:
    """Those of one call of both ranks; ``shown`` is what the notebook has shown of them."""

    def __init__(self):
        self.client, self.shown = Unconnected(), []
        self.result = self.client[:].apply_async(abs, 1)

    def say(self, rank, text, **metadata):
        content = {"name": "stderr", "text": text}
        message = {"header": {"msg_type": "stream"}, "content": content, "metadata": metadata}
        for callback in self.result._children[rank].iopub_callbacks:
            callback(message)

    def fail(self, rank, name):
        engine = {"engine_id": rank, "engine_uuid": f"engine-{rank}", "method": "execute"}
        content = {"ename": name, "evalue": "", "traceback": [f"in {name}"], "engine_info": engine}
        for callback in self.result._children[rank].iopub_callbacks:
            callback({"header": {"msg_type": "error"}, "content": content, "metadata": {}})

    def give_notice(self, rank, text=LATE):
        self.say(rank, text, **{NOTICE_OF: rank})

    def answer(self):
        for child in self.result._children:
            child.set_result(1)


@pytest.fixture
def requests(monkeypatch):
    monkeypatch.setattr(late_notices, "_LONG_SECONDS", -1.0)
    with ExitStack() as undo:
        ClientPatch(undo)
        made = Requests()
        monkeypatch.setattr(late_notices, "_show", lambda *shown: made.shown.append(shown))
        yield made
        made.client._closed = True


WAITS = {
    "its result": lambda made: made.result.get(),
    "its end": lambda made: made.result.wait(),
    "the client's requests": lambda made: made.client.wait([made.result]),
    "some time": lambda made: made.result.wait(1e6),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_wait_shows_the_notices_that_have_come_and_those_that_come(requests, wait, monkeypatch):
    def show(rank, text):
        requests.shown.append((rank, text))
        if rank == 0:
            requests.give_notice(1)
        else:
            requests.answer()

    monkeypatch.setattr(late_notices, "_show", show)
    requests.give_notice(0)
    assert wait(requests)
    assert requests.shown == [(0, LATE), (1, LATE)]


def ranks(monkeypatch, engine="engine-1", pending=None):
    """Those of this notebook, of which these run a cell."""
    running = None if pending is None else SimpleNamespace(pending=pending)
    made = SimpleNamespace(hellos={1: SimpleNamespace(engine=engine)})
    made.roster = SimpleNamespace(running=running, reserved="")
    monkeypatch.setattr(cluster, "running", lambda: made)
    cell = SimpleNamespace(name="In[5] (%%px --noblock)")
    monkeypatch.setattr(px_results, "in_background", lambda _: [cell] * (running is not None))


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
@pytest.mark.parametrize("ours", [True, False])
def test_an_interrupt_of_a_wait_says_that_ranks_of_this_notebook_go_on(
    requests, wait, ours, monkeypatch
):
    engine = "engine-1" if ours else "that of another notebook"
    ranks(monkeypatch, engine)

    def press(rank, text):
        raise KeyboardInterrupt

    monkeypatch.setattr(late_notices, "_show", press)
    requests.give_notice(0)
    client_requests.follow(requests.client)
    with pytest.raises(KeyboardInterrupt) as pressed:
        wait(requests)
    assert hasattr(pressed.value, "_render_traceback_") == ours
    if ours:
        (line,) = pressed.value._render_traceback_()
        assert "the ranks go on with the request" in line
        assert line.endswith("ranks.interrupt()")


FIRST = "rank 1 runs In[5] (%%px --noblock) first"


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_wait_behind_a_cell_in_the_background_says_so_once(requests, wait, monkeypatch):
    ranks(monkeypatch, pending=(0, 1))
    client_requests.follow(requests.client)
    monkeypatch.setattr(late_notices, "_QUIET_SECONDS", -1.0)
    shown = []

    class Screen(io.StringIO):
        def write(self, text):
            shown.append(text)
            requests.answer()

    monkeypatch.setattr(sys, "stderr", Screen())
    assert wait(requests)
    assert "".join(shown) == f"the request waits: {FIRST}\n"


def test_a_wait_asks_the_ranks_of_another_notebook_what_comes_first(requests, monkeypatch, capsys):
    ranks(monkeypatch, pending=())
    client_requests.follow(requests.client)
    requests.client._config = {OF_RANKS: "yes"}
    monkeypatch.setattr(late_notices, "_QUIET_SECONDS", -1.0)
    asked = []

    def ask(client, rank, ids):
        asked.append((rank, ids == requests.result.msg_ids))
        answer = Future()
        answer.set_result([{"content": {RUNS: "cell In[3]"} if rank else {}}])
        requests.answer() if rank else None
        return answer

    monkeypatch.setattr(client_requests, "ask", ask)
    assert requests.result.get() == [1, 1]
    assert asked == [(0, True), (1, True)]
    assert capsys.readouterr().err == "the request waits: rank 1 runs cell In[3] first\n"


#: The number of tasks, the ranks that may run them, what each rank runs in place of one, and what a
#: wait says.
TASKS = {
    "one of two has begun": (2, None, {0: "cell In[3]"}, "rank 0 runs cell In[3]"),
    "none has begun": (1, None, {0: "cell In[3]", 1: ""}, "rank 0 runs cell In[3]"),
    "of one rank": (1, [1], {0: "cell In[3]", 1: "cell In[4]"}, "rank 1 runs cell In[4]"),
    "all have begun": (1, None, {0: "cell In[3]"}, ""),
}


@pytest.mark.parametrize(("tasks", "targets", "runs", "says"), TASKS.values(), ids=TASKS.keys())
def test_a_wait_for_tasks_says_what_ranks_run_before_them(
    requests, monkeypatch, capsys, tasks, targets, runs, says
):
    ranks(monkeypatch, pending=())
    client = requests.client
    client_requests.follow(client)
    client._config = {OF_RANKS: "yes"}
    monkeypatch.setattr(late_notices, "_QUIET_SECONDS", -1.0)
    result = client.load_balanced_view(targets).map_async(abs, [1] * tasks)

    def ask(client, rank, ids):
        assert {*ids} == {*result.msg_ids}
        for child in result._children:
            if not child.done():
                child.set_result([1])
        answer = Future()
        answer.set_result([{"content": {RUNS: runs[rank]} if rank in runs else {}}])
        return answer

    monkeypatch.setattr(client_requests, "ask", ask)
    result.wait()
    assert capsys.readouterr().err == (f"the request waits: {says} first\n" if says else "")


def test_a_wait_for_other_ranks_than_those_of_the_cell_is_quiet(requests, monkeypatch, capsys):
    ranks(monkeypatch, pending=(0,))
    client_requests.follow(requests.client)
    monkeypatch.setattr(late_notices, "_QUIET_SECONDS", -1.0)
    assert not requests.result.wait(1e-3)
    assert capsys.readouterr().err == ""


def test_an_interrupt_of_a_wait_behind_a_cell_says_that_the_cell_goes_on(requests, monkeypatch):
    ranks(monkeypatch, pending=(1,))
    client_requests.follow(requests.client)

    def press(rank, text):
        raise KeyboardInterrupt

    monkeypatch.setattr(late_notices, "_show", press)
    requests.give_notice(0)
    with pytest.raises(KeyboardInterrupt) as pressed:
        requests.result.get()
    (line,) = pressed.value._render_traceback_()
    assert line.endswith(
        f"the wait was interrupted. {FIRST}; it goes on, and the request comes after it. To end "
        "it, type: ranks.interrupt()"
    )


def test_a_loop_over_the_results_shows_the_notices_of_the_next_one(requests, monkeypatch):
    def show(rank, text):
        requests.shown.append((rank, text))
        requests.result._children[rank].set_result(rank)

    monkeypatch.setattr(late_notices, "_show", show)
    for rank in (0, 1):
        requests.give_notice(rank)
    assert list(requests.result) == [0, 1]
    assert requests.shown == [(0, LATE), (1, LATE)]


def test_a_short_wait_shows_each_notice_once_and_leaves_nothing(requests):
    requests.give_notice(0)
    for _ in range(2):
        assert not requests.result.wait(1e-3)
    assert requests.shown == [(0, LATE)]
    (notices,) = requests.result._children[0].iopub_callbacks
    assert notices.wakes == []


def test_a_cell_that_waits_for_a_request_has_its_notices_once(requests):
    client_requests.follow(requests.client)
    requests.give_notice(0)

    def lines(*engines):
        return late_lines(client_requests.unanswered_futures(engines))

    assert lines("engine-1") == []
    assert lines("engine-0", "engine-1") == [f"rank 0: {LATE.rstrip()}"]
    assert lines("engine-0") == []


def test_output_and_early_notices_are_left_to_ipyparallel(requests, monkeypatch):
    requests.say(0, "printed")
    monkeypatch.setattr(late_notices, "_LONG_SECONDS", 1e6)
    requests.give_notice(0)
    requests.result.wait(1e-3)
    assert requests.shown == []


def test_notices_are_not_shown_twice_where_all_output_is_streamed(requests, capsys):
    with requests.result.stream_output():
        requests.give_notice(0)
        requests.result.wait(1e-3)
    assert requests.shown == []
    assert LATE.splitlines()[0] in capsys.readouterr().err


def test_an_exception_is_shown_once_whether_it_comes_before_its_output_is_shown_or_later(
    requests, capsys
):
    requests.fail(0, "Early")
    with requests.result.stream_output():
        requests.fail(1, "Late")
    shown = capsys.readouterr().err
    assert shown.count("in Early") == shown.count("in Late") == 1


def test_a_notice_looks_as_in_a_cell(capsys):
    late_notices._show(1, LATE)
    shown = "".join(capsys.readouterr())
    assert shown.splitlines()[0] == f"rank 1 · {LATE.splitlines()[0]}"
