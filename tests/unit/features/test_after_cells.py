"""At the end of a notebook's cell: ranks that have died in a request of one of its views."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from allranks.cluster import cluster
from allranks.features.ipyparallel import client_requests, notebook


@pytest.fixture
def end_cell(monkeypatch, capsys):
    """Ends a cell in which a rank dies, or all end; returns what is shown."""

    def end_cell(
        dies=None,
        *,
        known=(),
        caller=0,
        free=True,
        all_end=False,
        replaces="",
        followed=True,
        presses=False,
    ):
        roster = SimpleNamespace(caller=caller, dead=dict.fromkeys(known), replaced=())

        def is_up(tell):
            if dies is not None and dies not in known:
                connection.deaths += 1
            roster.dead |= {} if dies is None or replaces == "on" else {dies: None}
            if replaces == "on":
                tell(f"rank {dies} was replaced")
            if presses:
                raise KeyboardInterrupt
            return not all_end

        words = SimpleNamespace(deaths_text=lambda: f"rank {dies} ended with exit code 3")
        connection = SimpleNamespace(words=words, deaths=len(known))
        cells = SimpleNamespace(
            is_up=is_up,
            turns=SimpleNamespace(taken_if_free=lambda: nullcontext(free)),
            connection=connection,
            hooks=SimpleNamespace(replaces_ranks="%distributed heal", command=lambda name: {}),
        )
        ranks = SimpleNamespace(roster=roster, cells=cells, lost_because="all ended. Start again")
        monkeypatch.setattr(cluster, "running", lambda: ranks)
        monkeypatch.setattr(client_requests, "are_followed", lambda key: followed)
        notebook._replace_dead(None)
        return capsys.readouterr().out

    return end_cell


def test_a_rank_that_has_died_is_replaced(end_cell):
    assert end_cell(1, replaces="on") == "rank 1 was replaced\n"


def test_an_interrupt_is_shown_as_one_line(end_cell):
    said = "the wait was interrupted; rank 1 will be replaced with the next cell\n"
    assert end_cell(1, presses=True) == said
    assert end_cell(1, presses=True, replaces="on").endswith("\nthe wait was interrupted\n")


def test_the_command_is_shown_once_where_the_user_replaces_ranks(end_cell):
    said = "rank 1 ended with exit code 3. Type: %distributed heal\n"
    assert end_cell(1, replaces="ask") == said
    assert end_cell(1, replaces="ask", known=[1]) == ""


def test_the_loss_of_all_ranks_is_shown(end_cell):
    assert end_cell(all_end=True) == "all ended. Start again\n"


def test_nothing_is_done_while_ranks_run_a_cell_or_without_a_client(end_cell):
    assert end_cell(1, replaces="on", caller=1) == ""
    assert end_cell(1, replaces="on", free=False) == ""
    assert end_cell(1, replaces="on", followed=False) == ""
