"""Who is waited for by the request of a collective, without ranks and clocks."""

import mmap
from types import SimpleNamespace

import pytest

from allranks.collectives.calls.call import Members, PointCall
from allranks.collectives.calls.posts import Posts
from allranks.collectives.calls.rank_state import FAILED, FINISHED, LEFT, Board, RankState
from allranks.collectives.calls.specs import Spec
from allranks.collectives.calls.watch import Watch
from allranks.errors import CollectiveMismatch, RankLeft, RankLost

LONG = 1e6
"""Seconds of a wait after which each grace is over."""


class Request:
    """A request of mpi4py."""

    def __init__(self, posts):
        self.posts, self.ended = posts, False
        self.number = posts.add(self)

    def has_ended(self):
        return self.ended


class Ranks:
    """Three ranks that share memory, each in a cell and with its posts on one group."""

    def __init__(self):
        memory = mmap.mmap(-1, Board.nbytes(3))
        self.states = [RankState(n, (0,) * 3, Board(memory, (0, 1, 2), n)) for n in range(3)]
        self.posts = [Posts(state, 0) for state in self.states]
        for state in self.states:
            state.notice = lambda text: None
            state.enter("this cell", None, 1)

    def post(self, rank):
        return Request(self.posts[rank])

    def leaves(self, rank, reason=FINISHED, dropped=()):
        self.posts[rank].leave(dropped)
        self.states[rank].leave(reason, False, "")

    def call(self, rank, request):
        agreement = SimpleNamespace(members=Members(0, (0, 1, 2), rank))
        peers = tuple(other for other in range(3) if other != rank)
        call = PointCall(agreement, Spec("comm.Igather"), "Igather", peers)
        call.every = call.posted = True
        call.posts, call.request = request.posts, request.number
        return call

    def waits(self, rank, request):
        """The wait of a rank for a request, looked at from its begin to its end."""
        call, watch = self.call(rank, request), Watch(self.states[rank])
        for look in range(10):
            watch.look(call, look / 9 * LONG)


@pytest.fixture
def ranks():
    return Ranks()


def test_a_rank_that_has_made_its_part_may_finish_the_cell_before_another_arrives(ranks):
    mine, its = ranks.post(0), ranks.post(1)
    its.ended = True
    ranks.leaves(1)
    ranks.waits(0, mine)
    ranks.post(2)
    ranks.waits(0, mine)


def test_a_rank_that_finishes_the_cell_without_its_part_is_named(ranks):
    mine = ranks.post(0)
    ranks.post(2)
    ranks.leaves(1)
    with pytest.raises(RankLeft, match="rank 1 finished this cell without calling comm"):
        ranks.waits(0, mine)


def test_a_rank_that_has_made_an_earlier_part_only_is_named(ranks):
    for rank in range(3):
        ranks.post(rank).ended = True
    mine = ranks.post(0)
    ranks.post(2)
    ranks.leaves(1)
    with pytest.raises(RankLeft, match="rank 1 finished this cell without calling"):
        ranks.waits(0, mine)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_rank_that_finishes_the_cell_before_its_request_has_ended_is_named(ranks, dropped):
    mine, its = ranks.post(0), ranks.post(1)
    ranks.post(2)
    ranks.leaves(1, dropped=[its] if dropped else [])
    with pytest.raises(RankLeft, match="rank 1 finished this cell without waiting for the request"):
        ranks.waits(0, mine)


def test_a_long_wait_for_data_is_reported_although_all_have_made_their_parts(ranks):
    said = []
    ranks.states[0].notice = said.append
    mine, _, _ = (ranks.post(rank) for rank in range(3))
    ranks.waits(0, mine)
    assert " s for the data of ranks 1–2, which move in calls of MPI only:\n  rank 1 " in said[0]


def test_a_request_may_be_awaited_in_a_later_cell(ranks):
    requests = [ranks.post(rank) for rank in range(3)]
    for rank in range(3):
        ranks.leaves(rank)
    for state in ranks.states:
        state.enter("the next cell", None, 2)
    requests[1].ended = True
    ranks.leaves(1)
    ranks.waits(0, requests[0])


def test_a_rank_that_has_died_is_named_although_it_has_made_its_part(ranks):
    mine, _, _ = (ranks.post(rank) for rank in range(3))
    ranks.states[0].died[1] = "has died"
    with pytest.raises(RankLost, match="rank 1 has died"):
        ranks.waits(0, mine)


def test_persistent_requests_may_start_in_any_order(ranks):
    first, second = zip(*((its.persistent(), its.persistent()) for its in ranks.posts), strict=True)
    Request(second[0])
    mine = Request(first[0])
    Request(first[1]).ended = True
    ranks.leaves(1)
    Request(first[2])
    ranks.waits(0, mine)


def test_a_rank_that_has_not_started_a_persistent_request_is_named(ranks):
    made = [its.persistent() for its in ranks.posts]
    mine = Request(made[0])
    Request(made[2])
    ranks.leaves(1)
    with pytest.raises(RankLeft, match="finished this cell without starting the request of comm"):
        ranks.waits(0, mine)


def test_a_rank_in_the_place_of_another_counts_as_the_others_do(ranks):
    for rank in range(3):
        ranks.post(rank).ended = True
    for state in ranks.states:
        state.epoch = 1
    ranks.posts[1] = Posts(ranks.states[1], 0)
    mine, its = ranks.post(0), ranks.post(1)
    ranks.post(2)
    its.ended = True
    ranks.leaves(1)
    ranks.waits(0, mine)


def test_most_requests_that_have_ended_are_forgotten(ranks):
    made = []
    for _ in range(1000):
        made.append(ranks.post(0))
        made[-1].ended = True
    assert len(ranks.posts[0]._known) < 100


def test_posts_of_the_rank_alone_are_no_news_of_another_rank(ranks):
    alone = Posts(ranks.states[1], -1)
    for _ in range(5):
        Request(alone).ended = True
    assert [ranks.states[0].board.get(0, word) for word in (LEFT, FAILED)] == [0, 0]


def test_ranks_that_all_wait_for_requests_of_different_calls_are_found(ranks):
    requests = [ranks.post(rank) for rank in range(3)]
    watches = [(Watch(ranks.states[n]), ranks.call(n, requests[n])) for n in range(3)]

    def look():
        for waited in range(10):
            for watch, call in watches:
                watch.look(call, LONG + waited)

    with pytest.raises(CollectiveMismatch, match="ranks 0–2 wait for each other"):
        look()


def test_a_rank_that_has_left_is_named_although_it_has_had_too_many_groups(ranks):
    for group in range(200):
        Request(Posts(ranks.states[1], group + 1)).ended = True
    mine = ranks.post(0)
    ranks.post(2)
    ranks.waits(0, mine)
    ranks.leaves(1)
    with pytest.raises(RankLeft, match="rank 1 finished this cell"):
        ranks.waits(0, mine)


def test_a_request_of_an_earlier_epoch_is_not_one_that_a_rank_leaves_open(ranks):
    old = ranks.post(1)
    for state in ranks.states:
        state.epoch = 1
    mine, its, _ = (ranks.post(rank) for rank in range(3))
    its.ended = True
    ranks.leaves(1)
    ranks.waits(0, mine)
    assert not old.ended
