"""When ranks need another communicator before their next cell."""

import pytest

from allranks.cluster.epochs import Epoch
from allranks.cluster.sharing import DetachedCell
from allranks.records.wire import Reply


def reply(rank: int, status: str = "ok", dirty: bool = False, traffic: bool = False) -> Reply:
    return Reply(rank, 1, status, 0.1, dirty, False, "", None, traffic=traffic)


@pytest.mark.parametrize("status", ["error", "interrupted"])
def test_a_failure_beside_traffic_of_another_rank_ends_the_epoch(status):
    epoch = Epoch()
    epoch.note([reply(0, traffic=True), reply(1, status)])
    assert epoch.dirty


def test_a_failure_after_a_cell_with_traffic_ends_the_epoch():
    epoch = Epoch()
    epoch.note([reply(0, traffic=True), reply(1)])
    assert not epoch.dirty
    epoch.note([reply(1, "error")])
    assert epoch.dirty


def test_a_failure_without_traffic_in_its_epoch_costs_no_communicator():
    epoch = Epoch()
    epoch.note([reply(0, traffic=True), reply(1, "error")])
    epoch.begin(1)
    epoch.note([reply(0, "error"), reply(1, "error")])
    assert not epoch.dirty


@pytest.mark.parametrize("failed", [False, True])
def test_a_notebook_that_attaches_knows_whether_the_last_cell_failed_beside_traffic(failed):
    about = {"cell": 3, "label": "In[3]", "member": False, "busy": False, "unseen": False}
    about |= {"seconds": 0.1, "epoch": 2, "dirty": False, "ranks": [0, 1]}
    sent, raised = {"traffic": True, "failed": False}, {"traffic": False, "failed": failed}
    left = DetachedCell.of({0: about | sent, 1: about | raised})
    assert left.epoch == Epoch(2, dirty=failed, traffic=True)


@pytest.mark.parametrize(("ranks", "missed"), [([], (1, 2)), ([0, 1], (1,)), ([0], ())])
def test_a_notebook_that_attaches_knows_which_ranks_never_received_the_last_cell(ranks, missed):
    about = {"cell": 3, "label": "In[3]", "member": False, "busy": True, "unseen": False}
    about |= {"seconds": 0.1, "epoch": 0, "dirty": False, "traffic": False, "failed": False}
    about |= {"ranks": ranks}
    left = DetachedCell.of({0: about, 1: about | {"cell": 2}, 2: about | {"cell": 2}})
    assert (left.ranks, left.missed) == ((0,), missed)


def test_an_unfinished_call_ends_the_epoch():
    epoch = Epoch()
    epoch.note([reply(0, dirty=True), reply(1)])
    assert epoch.dirty


def test_an_epoch_that_the_ranks_have_begun_for_a_client_needs_no_other_one():
    epoch = Epoch()
    epoch.note([reply(0, traffic=True), reply(1, "error")])
    epoch.follow(0)
    assert epoch.dirty
    epoch.follow(1)
    assert (epoch.number, epoch.dirty, epoch.traffic) == (1, False, False)
