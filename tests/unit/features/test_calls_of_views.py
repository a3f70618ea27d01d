"""The numbers of requests of views, and whether a rank has ended its part of a blocking call."""

import asyncio
import mmap
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from ipyparallel.client.asyncresult import AsyncResult
from ipyparallel.client.magics import ParallelMagics

from allranks.collectives.calls.rank_state import ENDED_PARTS, Board, RankState
from allranks.features.ipyparallel import rank as of_ranks
from allranks.features.ipyparallel.metadata import BLOCKS, CALL, CELL, CLIENT, REQUESTS, RUNS
from allranks.features.ipyparallel.notebook import ClientPatch
from tests.unit.features.unconnected_client import Unconnected

RANKS = {"engine-0": 0, "engine-1": 1}


def numbers(client):
    """Returns the number of each request that a client has made, and whether its call blocks."""
    return [
        (of_ranks._number_of(message, RANKS.get(engine, 0)), message["metadata"].get(BLOCKS))
        for engine, message in client.send()
    ]


@pytest.fixture
def notebook(monkeypatch):
    """Waits for results end at once there."""
    monkeypatch.setattr(AsyncResult, "get", lambda *_: [])
    monkeypatch.setattr(AsyncResult, "wait_for_output", lambda *_: True)
    with ExitStack() as undo:
        ClientPatch(undo)
        yield


def px(client):
    view = client[:]
    view.block = True
    magics = ParallelMagics(SimpleNamespace(user_ns={}), view)
    magics.parallel_execute("1", stream_output=False, progress_after=-1)


BLOCKING = {
    "a function": lambda client: client[:].apply_sync(abs, 1),
    "code": lambda client: client[:].execute("1", block=True),
    "code, by position": lambda client: client[:].execute("1", True, None, True),
    "a view in another order": lambda client: client[[1, 0]].apply_sync(abs, 1),
    "a view that blocks": lambda client: client[:].set_flags(block=True).apply(abs, 1),
    "a tree": lambda client: client.broadcast_view().apply_sync(abs, 1),
    "the magic": px,
}


@pytest.mark.usefixtures("notebook")
@pytest.mark.parametrize("call", BLOCKING.values(), ids=BLOCKING.keys())
def test_the_requests_of_a_blocking_call_have_a_number_that_no_other_call_has(call, monkeypatch):
    monkeypatch.setattr(AsyncResult, "display_outputs", lambda *_: None)
    clients = Unconnected(), Unconnected()  # as of two notebooks
    found = []
    for client in (*clients, *clients):
        call(client)
        (one,) = {*numbers(client)}
        found.append(one)
    assert len({*found}) == 4
    assert all(number and blocks for number, blocks in found)


OTHERS = {
    "a call that goes on": lambda client: client[:].apply_async(abs, 1),
    "code that goes on": lambda client: client[:].execute("1"),
    "the same, by position": (
        lambda client: client[:].set_flags(block=True).execute("1", True, None, False)
    ),
    "a call for each rank": lambda client: client[:].map_sync(abs, [1, 2]),
    "tasks": lambda client: client.load_balanced_view().map_sync(abs, [1, 2]),
}


@pytest.mark.usefixtures("notebook")
@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS.keys())
def test_a_call_whose_collectives_the_next_one_may_complete_does_not_block(call):
    client = Unconnected()
    client[:].apply_sync(abs, 1)
    client.send()
    call(client)
    found = numbers(client)
    assert len(found) >= 2
    assert not any(blocks for _, blocks in found)


@pytest.mark.usefixtures("notebook")
def test_later_calls_have_higher_numbers_on_all_ranks():
    # Of calls in the order 1, 0, counts of messages would give rank 1 the number of an earlier one.
    client, found = Unconnected(), []
    for view in (client[[1, 0]], client[0], client[1], client[:], client[[1, 0]]):
        view.apply_async(abs, 1)
        found.append({number for number, _ in numbers(client)})
    assert [len(one) for one in found] == [1] * 5
    ordered = [number for (number,) in found]
    assert ordered == sorted({*ordered})


@pytest.mark.usefixtures("notebook")
def test_the_calls_for_each_rank_of_a_map_have_one_number():
    client = Unconnected()
    client[:].map_sync(abs, [1, 2])
    (one, other) = numbers(client)
    assert one == other


@pytest.mark.usefixtures("notebook")
def test_calls_have_higher_numbers_than_requests_before_them():
    client = Unconnected()
    for _ in range(9):
        client.send_apply_request(None, abs, [1], ident=b"engine-0")
    client[:].apply_async(abs, 1)
    *before, first, second = numbers(client)
    assert first == second > max(before)


class Interrupts:
    """Counts those that are sent while they are heard."""

    number = sent = 0
    heard = False

    def hear(self):
        self.heard = True

    def hear_no_more(self):
        self.heard = False

    def send(self, _number, early):
        assert not early  # it would end the next request
        self.sent += 1

    def wait_for_end(self, _seconds):
        pass


class Rank(of_ranks.ClientRequests):
    """The part of a rank that runs requests; ``state`` is published."""

    def __init__(self):
        self.state = RankState(0, (0,), Board(mmap.mmap(-1, Board.nbytes(1)), (0,), 0))
        self.state.strays_reported = False
        shell = SimpleNamespace(showtraceback=lambda: None, _last_traceback=None)
        session = SimpleNamespace(send=lambda *sent, **_: self.answers.append(sent[2]))
        about = {"get_engine_info": lambda method: {}}
        self._failed, self._kernel = [], SimpleNamespace(shell=shell, session=session, **about)
        self._epochs = SimpleNamespace(in_request=None, enter=lambda: None)
        self._interrupts, self._ids, self._left_out = Interrupts(), frozenset(), set()
        self._loop = SimpleNamespace(call_soon_threadsafe=lambda _: None)
        self._has_begun, self._after_cell = False, 0
        self._wire = SimpleNamespace(output_for_client=self._output, cell=7)
        self.awaited, self.answers = False, []

    async def _cell_ends(self):
        pass

    @contextmanager
    def _output(self, _publish):
        yield not self.awaited

    def run(self, does=lambda: None, call=0, **metadata):
        """Runs a request, and returns whether the rank has ended its part of a blocking call."""
        client = metadata.pop("client", "one")
        metadata |= {CALL: call, BLOCKS: True} if call else {}
        header = {"msg_id": f"{client}_1_7", "session": client}
        parent = {"metadata": metadata, "header": header}
        before = self.ended()
        asyncio.run(self._answer(lambda *_: does(), None, None, parent))
        return self.ended() != before

    def interrupt(self, **which):
        """Interrupts the rank; returns whether that has reached the request that runs."""
        before = self._interrupts.sent
        header = {"session": "one"}
        self._signal(None, None, {"header": header, "content": {"sig": "SIGINT", **which}})
        return self._interrupts.sent > before

    def ended(self):
        """Returns the parts that have ended, of each client the last one."""
        return [self.state.board.get(0, word) for word in ENDED_PARTS]


@pytest.fixture
def rank(monkeypatch):
    made = Rank()
    monkeypatch.setattr(of_ranks.world, "current", lambda: made.state)
    return made


def test_a_request_before_the_first_cell_is_one_of_a_notebook_too(rank):
    rank.run(call=3)
    assert rank.state.notebook


def test_a_rank_has_ended_its_part_whatever_it_runs_for_others_since(rank):
    within = []
    assert rank.run(call=3)
    (ended, *_) = rank.ended()
    assert ended & 0xFFFFFFFF == 3
    assert not rank.run(lambda: within.append(rank.ended()[0]), client="two", retries=0)  # a task
    assert within == [ended]
    assert not rank.run()  # of a client that gives no numbers
    assert rank.run(client="two", call=3)
    assert rank.ended()[1] == ended
    assert rank.run(call=4)
    assert [part & 0xFFFFFFFF for part in rank.ended()[:3]] == [4, 3, 0]
    rank.awaited = True  # a cell awaits meanwhile
    assert not rank.run(call=6)


def test_a_call_in_a_request_carries_its_client(rank):
    seen = []
    for client in ("one", "two", "one"):
        rank.run(lambda: seen.append(rank.state.client), client=client)
    assert seen[0] == seen[2] != seen[1]
    assert all(seen)
    assert rank.state.client == 0
    rank.awaited = True  # what runs is a part of the cell
    rank.run(lambda: seen.append(rank.state.client))
    assert seen[-1] == 0


def test_a_rank_whose_part_goes_on_has_not_ended_it(rank):
    end = threading.Event()

    def train():
        end.wait()

    async def later():
        await asyncio.sleep(0)

    thread = threading.Thread(target=train)
    assert not rank.run(thread.start, call=3)
    assert not rank.run(call=4)  # it may make a collective call of any request
    end.set()
    thread.join()
    assert rank.run(call=4)
    tasks = []
    assert not rank.run(lambda: tasks.append(asyncio.ensure_future(later())), call=5)
    assert not rank.run(lambda: setattr(rank.state, "pending", 1), call=6)
    rank.state.pending = 0
    assert not rank.run(call=7, retries=0)  # a task, which any rank may have


#: Which requests an interrupt of the client "one" is for, and what runs in place of these.
FOR = {
    "whatever runs": ({}, None),
    "this client": ({CLIENT: "one"}, None),
    "this client before a cell": ({CLIENT: "one", CELL: 8}, None),
    "this client before a cell that has ended": (
        {CLIENT: "one", CELL: 7},
        "an earlier request of this client",
    ),
    "another client": ({CLIENT: "two"}, "an earlier request of this client"),
    "this request": ({REQUESTS: ["one_1_7", "one_1_8"]}, None),
    "a request of all": ({REQUESTS: ["of all"]}, None),
    "its part of a request of all": ({REQUESTS: ["one_1_7", "one_1_8"]}, None),
    "a task of this client before its request": ({CLIENT: "one", REQUESTS: ["one_1_8"]}, None),
    "its next request": ({REQUESTS: ["one_1_8"]}, "an earlier request of this client"),
}


@pytest.mark.parametrize("name", FOR)
def test_an_interrupt_ends_a_request_of_those_that_it_is_for(rank, name):
    which, runs = FOR[name]
    found, of_all = [], {"original_msg_id": "of all"} if "of all" in name else {}
    rank._interrupts.number = of_ranks._CLIENT

    def does():
        assert rank._prepare("apply") is None
        found.append(rank.interrupt(**which))

    rank.run(does, **of_all)
    assert found == [runs is None]
    assert rank.answers == [{"status": "ok"} | ({} if runs is None else {RUNS: runs})]
    assert not rank.interrupt(**which)  # it has ended
    assert rank.answers[-1] == {"status": "ok", RUNS: ""}


def test_an_interrupt_of_a_request_leaves_those_of_other_clients_and_cells_alone(rank):
    its = {REQUESTS: ["one_1_7"]}
    rank.run(lambda: rank.interrupt(**its), client="two")
    rank.run(lambda: rank.interrupt(**its), client="two", allranks_notebook="lab.ipynb")
    rank._interrupts.heard, rank._interrupts.number = True, 3
    rank.state.scope = SimpleNamespace(name="cell In[3]")
    rank.interrupt(**its)
    assert [answer[RUNS] for answer in rank.answers] == [
        "a request of another client (process 1)",
        "a request of another client (lab.ipynb)",
        "cell In[3]",
    ]
    assert not rank._interrupts.sent


def test_a_question_what_runs_ends_nothing(rank):
    rank._interrupts.number = of_ranks._CLIENT
    began = []
    for request in ("one_1_7", "one_1_8"):
        rank.run(lambda request=request: rank.interrupt(**{REQUESTS: [request], "sig": 0}))
    assert [one.get(RUNS) for one in rank.answers] == [None, "an earlier request of this client"]
    assert not rank._interrupts.sent
    rank.run(lambda: began.append(rank._prepare("apply")))
    assert began == [None]


@pytest.mark.parametrize("which", [{REQUESTS: ["one_1_7"]}, {CLIENT: "one"}, {}])
def test_a_request_is_sent_no_signal_before_it_can_answer_one(rank, which):
    rank._interrupts.number, began = of_ranks._CLIENT, []

    def begins():
        assert not rank.interrupt(**which)
        began.append(rank._prepare("apply"))

    rank.run(begins)
    assert "before this rank began it" in began[0]["evalue"]
    assert rank.answers == [{"status": "ok", RUNS: ""}]


def test_an_interrupt_that_comes_before_its_request_ends_it_when_it_begins(rank):
    began = []
    assert not rank.interrupt(**{REQUESTS: ["two_1_7"]})
    rank.run(lambda: began.append(rank._prepare("apply")))
    for _ in range(2):
        rank.run(lambda: began.append(rank._prepare("apply")), client="two")
    assert began[0] is None
    assert began[1]["ename"] == "KeyboardInterrupt"
    assert "before this rank began it" in began[1]["evalue"]
    assert began[2] is None
