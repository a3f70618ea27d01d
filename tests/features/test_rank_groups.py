"""What the sidebar shows of ranks: their states, and their logs as text."""

from __future__ import annotations

from allranks.cluster.failures import RankStatus
from allranks.features.toolbar.groups import are_busy, rows, summary
from allranks.features.toolbar.notebook import as_text, wanted_log
from allranks.records.ranks import BETWEEN, IDLE, RUNNING, SILENT, STOPPED, WAITS, Activity


def status(rank, doing=RUNNING, line="In[1]:2 f()", nbytes=10**8):
    return RankStatus(rank, "h0", 100 + rank, "cpu", nbytes, doing, line)


def test_ranks_in_one_state_are_counted_together():
    waits = Activity(WAITS, "allreduce(Sum)", "ranks 13, 18")
    states = {13: STOPPED, 18: SILENT} | dict.fromkeys(range(20, 47), waits)
    found = [status(rank, states.get(rank, RUNNING)) for rank in range(60)]
    assert summary(found) == "31 running; 27 wait for ranks 13, 18; rank 13 stopped; rank 18 silent"
    alone = Activity(WAITS, "barrier", "rank 0")
    assert summary([status(0), status(1, alone)]) == "1 running; 1 waits for rank 0"
    places = [status(rank, Activity(BETWEEN, f"at f.py:{rank}")) for rank in range(2)]
    assert summary(places) == "2 between two cells"
    assert [row["detail"] for row in rows(places)] == [
        "at f.py:0 · In[1]:2 f()",
        "at f.py:1 · In[1]:2 f()",
    ]


def test_a_rank_that_ends_a_librarys_groups_is_busy_between_two_cells():
    ends = status(0, Activity(BETWEEN, "ending torch's groups"), "")
    assert are_busy([ends])
    assert not are_busy([status(0, IDLE)])
    assert rows([ends])[0]["detail"] == ends.state == "ending torch's groups"


def test_few_ranks_have_a_row_each_and_many_a_row_for_each_group():
    few = rows([status(rank) for rank in range(4)])
    assert [one["ranks"] for one in few] == ["0", "1", "2", "3"]
    waits = Activity(WAITS, "barrier", "rank 3")
    many = [status(rank, waits if rank > 3 else RUNNING, nbytes=rank) for rank in range(12)]
    running, waiting = rows(many)
    assert (running["ranks"], running["nbytes"], running["state"]) == ("0–3", [0, 3], "running")
    assert (waiting["ranks"], waiting["state"]) == ("4–11", "waiting")
    assert waiting["detail"] == "in barrier for rank 3 · In[1]:2 f()"


def test_a_log_is_text_without_codes_of_a_terminal():
    log = "\x1b[1;31mred\x1b[0m\t1\r\n 50%\r100%\x1b[K\n\x1b]8;;file:///a\x1b\\a\x1b]8;;\x07\x1b[?25h\n"
    assert as_text(log) == "red\t1\n 50%\n100%\na\n"


def test_a_page_asks_for_the_log_of_a_rank_that_exists():
    asked = [wanted_log({"content": {"data": data}}, 4) for data in ({"log": 3}, {"log": 4})]
    assert asked == [3, None]
    others = ({}, {"log": True}, {"log": "../x"}, {"log": -1}, None)
    assert all(wanted_log({"content": {"data": data}}, 4) is None for data in others)
