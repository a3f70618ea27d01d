"""Sums of collective calls: what is counted, what it says of waiting, and that it is bounded."""

from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest

from allranks.collectives.calls.journal import Journal
from allranks.collectives.timings import KINDS, Totals
from allranks.records.telemetry import CallRecord, CallTotals


def call(name: str, arrived: float, last: float, ended: float, last_rank: int = 1) -> CallRecord:
    return CallRecord(
        "allreduce", name, 0, 1, 0, 0, 2, "shared", "float32", 4000, arrived, last, last_rank, ended
    )


@pytest.fixture
def counted():
    """A recorder that notes whole records, and what counts them."""
    journal = Journal(SimpleNamespace(offset_seconds=0.0))
    totals = [Totals(journal)]

    def note(*calls: CallRecord) -> list[CallTotals]:
        journal.fresh.extend(calls)
        return totals[0].changed()

    note.begin = lambda: totals.__setitem__(0, Totals(journal))
    return note


def test_waiting_and_transfer_are_summed_apart_and_come_back_equal_from_their_row(counted):
    (row,) = counted(call("g", 0.0, 2.0, 2.5), call("g", 5.0, 5.0, 5.25, last_rank=0))
    assert (row.op, row.name, row.calls) == ("allreduce", "g", 2)
    assert (row.wait_seconds, row.transfer_seconds, row.fastest_seconds) == (2.0, 0.75, 0.25)
    assert row.last == ((0, 1, 0.0), (1, 1, 2.0))
    (row,) = counted(call("g", 0.0, 2.0, 2.5))
    assert CallTotals.from_row(list(astuple(row))) == row


def test_what_a_gpu_moved_while_the_rank_was_away_counts_for_bandwidth_and_not_for_time(counted):
    hidden = replace(call("g", 0.0, 0.0, 3.0), device_seconds=2.0, attended=(0.0, 0.5))
    (row,) = counted(hidden)
    assert (row.transfer_seconds, row.moving_seconds, row.fastest_seconds) == (0.5, 2.0, 2.0)
    assert row.busbw_gbps == pytest.approx(4000 / 2.0 / 1e9)


def test_only_what_has_changed_is_told_and_a_new_cell_counts_from_nothing(counted):
    assert len(counted(call("a", 0, 0, 1), call("b", 0, 0, 1))) == 2
    (row,) = counted(call("b", 0, 0, 1))
    assert (row.name, row.calls) == ("b", 2)
    assert counted() == []
    counted(call("a", 0, 0, 1))
    counted.begin()
    (row,) = counted(call("a", 0, 0, 1))
    assert row.calls == 1


def test_too_many_kinds_are_summed_under_one_name(counted):
    rows = counted(*(call(f"name {i}", 0, 0, 1) for i in range(KINDS + 100)))
    assert len(rows) == KINDS + 1
    assert rows[-1].name == "(others)"
    assert rows[-1].calls == 100


def test_what_has_been_counted_stays_among_the_records():
    journal = Journal(SimpleNamespace(offset_seconds=0.0))
    totals = Totals(journal)
    for name in ("a", "b"):
        journal.fresh.append(call(name, 0, 0, 1))
        assert len(totals.changed()) == 1
    journal.fresh.append(call("c", 0, 0, 1))
    assert [record.name for record in journal.records] == ["a", "b", "c"]
