"""When ranks need another communicator before their next cell."""

import pytest

from allranks.cluster.state import Epoch
from allranks.records.wire import Reply


def reply(
    rank: int, status: str = "ok", dirty: bool = False, traffic: bool = False, epoch: int = 0
) -> Reply:
    return Reply(rank, 1, status, 0.1, dirty, False, "", None, traffic=traffic, epoch=epoch)


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


def test_an_unfinished_call_ends_the_epoch():
    epoch = Epoch()
    epoch.note([reply(0, dirty=True), reply(1)])
    assert epoch.dirty


def test_ranks_that_a_cell_leaves_in_different_epochs_need_another_one():
    """They would wait for each other forever: one of them was interrupted in `renew`."""
    epoch = Epoch()
    epoch.note([reply(0, epoch=1), reply(1, "interrupted")])
    assert (epoch.number, epoch.dirty) == (1, True)
    epoch.begin(2)
    epoch.note([reply(0, epoch=3), reply(1, epoch=3)])
    assert (epoch.number, epoch.dirty) == (3, False)


def test_an_epoch_that_the_ranks_have_begun_for_a_client_needs_no_other_one():
    epoch = Epoch()
    epoch.note([reply(0, traffic=True), reply(1, "error")])
    epoch.follow(0)
    assert epoch.dirty
    epoch.follow(1)
    assert (epoch.number, epoch.dirty, epoch.traffic) == (1, False, False)
