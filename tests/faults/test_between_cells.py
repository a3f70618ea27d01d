"""What a rank still does between two cells: it is shown, interrupted, and replaced at last."""

import re

import pytest

from tests.kernel import wait_until

pytestmark = pytest.mark.replaces
SETTLED_SECONDS = 60
# The next cell needs a new epoch, because this one fails amid calls; what rank 1 has left in its
# event loop runs first.
STAYS = """
import asyncio, signal, time
def stays():
    {}
if rank == 1:
    asyncio.get_running_loop().call_later(0.2, stays)
    raise ValueError("on purpose")
allreduce(1)
"""
KEPT = "rank 0 → 0\nrank 1 → {}\nrank 2 → 20\nrank 3 → 30\n"


def interrupted_in(notebook, source):
    assert notebook.on_ranks(STAYS.format(source), timeout=SETTLED_SECONDS).status == "error"
    status: list[str] = []

    def told():
        # A busy rank may be silent in one look.
        lines = notebook.run("%distributed status").text.splitlines()
        status[:] = [line for line in lines if "rank 1 " in line]
        return "time.sleep" in "".join(status)

    wait_until(told, lambda: f"where rank 1 sleeps, found {status}")
    # A busy machine may show first that no rank has answered.
    sleeps = "time.sleep(600); the new cell waits for that, or interrupt"
    cell = notebook.start_on_ranks("kept").wait_for(sleeps)
    notebook.interrupt()
    assert cell.wait(SETTLED_SECONDS).error_name == "KeyboardInterrupt"
    return status, cell.text


def test_the_stop_button_ends_what_a_rank_does_between_two_cells(notebook):
    status, _ = interrupted_in(notebook, "time.sleep(600)")
    (line,) = status
    assert "idle" not in line
    assert "time.sleep(600)" in line
    assert notebook.on_ranks("kept").text == KEPT.format(10)


def test_a_rank_that_the_stop_button_cannot_free_is_replaced_and_no_other(notebook):
    # As a library's C++ that no signal reaches.
    deaf = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()), time.sleep(600)"
    _, text = interrupted_in(notebook, deaf)
    shown = re.sub(" +", " ", notebook.on_ranks("globals().get('kept', -1)").text)
    for rank, kept in enumerate((0, -1, 20, 30)):
        assert f"rank {rank} → {kept}" in shown
    # With an open client of ipyparallel, it is replaced at the end of the interrupted cell already.
    both = text + shown
    replaced = "rank 1 was replaced and has no variables; ranks 0, 2–3 kept theirs"
    for report in ("ended by allranks, because it was at In[", replaced):
        assert both.count(report) == 1, both
