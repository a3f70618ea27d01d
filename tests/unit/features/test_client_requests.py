"""Which requests of ipyparallel's clients a cell comes after."""

import socket
from collections import defaultdict
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace

import ipyparallel
import pytest

from allranks.errors import UsageError
from allranks.features.ipyparallel import client_requests
from allranks.features.ipyparallel.metadata import CLIENT, NOTEBOOK, REQUESTS
from allranks.features.ipyparallel.notebook import ClientPatch
from tests.unit.features.unconnected_client import Unconnected


class Client:
    """The part of ipyparallel's client that is read."""

    def __init__(self):
        self._closed, self._config = False, {"key": "ours"}
        self._engines = {0: "engine-0", 1: "engine-1"}
        self._outstanding_dict = defaultdict(set)
        self._futures = {}
        self.session, self.outstanding = SimpleNamespace(session="ours"), set()
        self.signals = []

    def request(self, rank, name):
        self._outstanding_dict[self._engines[rank]].add(name)
        self._futures[name] = Future()

    def answer(self, rank, name):
        self._outstanding_dict[self._engines[rank]].remove(name)
        self._futures.pop(name).set_result(None)

    def _send_control_request(self, targets, kind, content, block):
        assert (kind, content["sig"], block) == ("signal_request", "SIGINT", False)
        self.signals.append((targets, content.get(REQUESTS), content[CLIENT]))


@pytest.fixture
def client():
    made = Client()
    client_requests.follow(made)
    return made


def test_requests_of_the_cells_ranks_are_waited_for_until_their_answers(client):
    client.request(0, "first")
    client.request(1, "second")
    assert client_requests.unanswered(["engine-1"]) == {client: {"engine-1": {"second"}}}
    answered = []
    client_requests.call_when_answered(["engine-1"], lambda: answered.append("one"))
    client.answer(0, "first")
    assert answered == []
    client.answer(1, "second")
    assert answered == ["one"]
    assert client_requests.unanswered(["engine-0", "engine-1"]) == {}


def test_a_request_that_was_given_up_is_interrupted_and_not_waited_for_again(client):
    client.request(0, "never answered")
    client_requests.give_up(["engine-0", "engine-1"])
    assert client.signals == [([0], ["never answered"], "ours")]
    assert client_requests.unanswered(["engine-0"]) == {}
    assert client_requests.given_up(["engine-0", "engine-1"]) == {"engine-0"}
    client.request(0, "another")
    assert client_requests.unanswered(["engine-0"]) == {client: {"engine-0": {"another"}}}
    client.answer(0, "never answered")
    assert client_requests.given_up(["engine-0"]) == set()


def test_what_ranks_run_for_clients_of_this_process_is_interrupted_tasks_included(client):
    client_requests.interrupt_running(["engine-0"])
    assert client.signals == []
    client.outstanding.add("a task, which runs on any rank")
    client_requests.interrupt_running(["engine-0", "that of other ranks"])
    assert client.signals == [([0], None, "ours")]


def test_a_closed_client_gets_no_answers_and_is_not_followed(client):
    client.request(0, "open")
    assert client_requests.are_followed("ours")
    client._closed = True
    assert client_requests.unanswered(["engine-0"]) == {}
    assert not client_requests.are_followed("ours")


def test_a_rank_may_register_while_requests_are_given_up(client):
    class Engine(str):
        __slots__ = ()

        def __hash__(self):  # the thread of the client runs in between
            client._engines[2] = "engine-2"
            return super().__hash__()

    client.request(0, "not yet answered")
    client._engines = {0: Engine("engine-0"), 1: "engine-1"}
    client_requests.give_up(["engine-0"])
    assert client.signals == [([0], ["not yet answered"], "ours")]


CALLS = {
    "a view": lambda client: client[:].apply_async(abs, 1),
    "code": lambda client: client[:].execute("1"),
    "one rank": lambda client: client[0].apply_async(abs, 1),
    "any rank": lambda client: client.load_balanced_view().map_async(abs, [1, 2]),
    "a tree": lambda client: client.broadcast_view().apply_async(abs, 1),
}


@pytest.fixture
def unconnected():
    made = Unconnected()
    yield made
    made._closed = True  # and so not followed


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_requests_fail_at_once_when_the_ranks_end(unconnected, call):
    before = call(unconnected)
    signal = unconnected.send_signal(0, block=False)
    unconnected.calls.clear()  # what is sent
    client_requests.end([unconnected], lambda: "they have ended")
    assert not before.ready()  # only the client's own thread decides
    for made in unconnected.calls:
        made()
    with pytest.raises(ipyparallel.error.RemoteError, match="EngineError: they have ended"):
        before.get(0)
    assert before.wait_for_output(0)
    assert unconnected.wait(timeout=0)
    assert [one["content"]["status"] for one in signal.result(0)] == ["error", "error"]
    with pytest.raises(UsageError, match="they have ended"):
        call(unconnected)


IDS = {"its ids": lambda client: client.ids, "its number": len, "its views": list}


@pytest.mark.parametrize("reads", IDS.values(), ids=IDS.keys())
def test_a_client_without_ranks_does_not_seem_to_have_none(unconnected, reads):
    assert reads(unconnected)
    client_requests.end([unconnected], lambda: "they have ended")
    with pytest.raises(UsageError, match="they have ended"):
        reads(unconnected)


def test_the_end_of_the_ranks_is_not_that_of_other_clients(client):
    other = Client()
    other._config = {"key": "others'"}
    client_requests.follow(other)
    assert client_requests.of_ranks("ours") == [client]


def test_ranks_that_a_client_has_lost_are_looked_at_after_a_cell(unconnected):
    unconnected._config = {"key": "ours"}
    client_requests.follow(unconnected)
    client_requests.end([unconnected], lambda: "they have ended")
    assert client_requests.are_followed("ours")
    assert not client_requests.are_followed("those of a restart")


def test_a_client_ends_with_the_ranks_of_another_notebook(unconnected, tmp_path):
    file = tmp_path / "client.json"
    file.write_text('{"key": "theirs"}')
    unconnected._config = {"key": "theirs", NOTEBOOK: "/course/lab.ipynb"}
    client_requests.visit(unconnected, file)
    assert client_requests.end_visits()
    before = unconnected[:].apply_async(abs, 1)
    file.write_text("")  # it is written anew
    assert client_requests.end_visits()
    unconnected.calls.clear()  # what is sent
    file.write_text('{"key": "those of a restart"}')
    assert not client_requests.end_visits()
    for made in unconnected.calls:
        made()
    said = "expected ranks of /course/lab.ipynb, found that they have ended"
    with pytest.raises(ipyparallel.error.RemoteError, match=said):
        before.get(0)
    with pytest.raises(UsageError, match=said):
        client_requests.refuse_ended(unconnected)


def test_a_client_whose_controller_still_listens_outlives_the_file(unconnected, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as controller:
        place = f"tcp://127.0.0.1:{controller.getsockname()[1]}"
        unconnected._config = {"key": "theirs", "registration": place}
        client_requests.visit(unconnected, tmp_path / "client.json")
        assert client_requests.end_visits()
    assert not client_requests.end_visits()


def test_a_client_ends_when_the_file_of_its_ranks_is_removed(unconnected, tmp_path):
    unconnected._config = {"key": "theirs"}
    client_requests.visit(unconnected, tmp_path / "client.json")
    assert not client_requests.end_visits()
    with pytest.raises(UsageError, match="expected ranks of another notebook, found"):
        unconnected[:].apply_async(abs, 1)


def test_a_view_of_another_notebooks_ranks_says_that_they_have_ended_also_without_engines(
    unconnected, tmp_path
):
    unconnected._config = {"key": "theirs", NOTEBOOK: "/course/lab.ipynb"}
    client_requests.visit(unconnected, tmp_path / "client.json")
    unconnected._ids = []
    with ExitStack() as undo:
        ClientPatch(undo)
        with pytest.raises(UsageError, match=r"expected ranks of /course/lab\.ipynb, found that"):
            unconnected[:].apply_async(abs, 1)
