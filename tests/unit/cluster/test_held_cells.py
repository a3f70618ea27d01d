"""The words about a cell that waits for requests of clients."""

from allranks.cluster.held_cells import what_ended, what_waits

HELD = {
    1: {"client": "ours", "notebook": "a.ipynb"},
    0: {"client": "ours", "notebook": "a.ipynb"},
    2: {"client": "theirs", "notebook": "b.ipynb"},
    3: {"client": "others", "notebook": ""},
}


def test_the_notebooks_for_which_a_cell_waits_are_named_with_what_ends_their_requests():
    assert what_waits(HELD, {"ours"}, "a request").splitlines() == [
        "ranks 0–1 must first answer a request; interrupt to end both",
        "rank 2 must first answer a request of another notebook (b.ipynb); interrupt to leave the "
        "cell out, and to end the request as well, type then: ranks.interrupt()",
        "rank 3 must first answer a request of another notebook; interrupt to leave the "
        "cell out, and to end the request as well, type then: ranks.interrupt()",
    ]
    assert what_waits({}, {"ours"}, "a request") == ""


def test_after_an_interrupt_it_is_named_what_has_ended_and_what_goes_on():
    assert what_ended(HELD, {"ours"}, "a request").split("; ") == [
        "a request on ranks 0–1 was interrupted, too",
        "rank 2 goes on with a request of another notebook (b.ipynb)",
        "to end it, type: ranks.interrupt()",
        "rank 3 goes on with a request of another notebook",
        "to end it, type: ranks.interrupt()",
    ]
