"""A host that is lost does not cost the variables: the ranks start again on the other hosts."""

import pytest

from tests.hosts.conftest import SSH, folder_in
from tests.hosts.notebook import NotebookOnAHost

#: The lease of ten seconds, and a slow machine.
LOST_SECONDS = 120
DEFINED = """
import threading
import numpy as np
scale, weights, kept = 2, np.arange(4.0) + rank, 10 * rank
shared = [weights, weights]
lock = threading.Lock()
def scaled(): return scale * weights.sum()
class Model:
    def __init__(self): super().__init__(); self.weights = weights
    def total(self): return self.weights.sum() + scale
model, pair = Model(), add_process_set([1, 2])
keep("kept")
"""
LOOP = "print('here')\nwhile True: allreduce(weights)"
#: On a rank that has its variables again, a function uses the new value of another variable.
NOW = """
import socket
scale, found = 3, (kept, socket.gethostname(), allreduce(1, op=Sum), comm.allreduce(rank))
if "model" in globals():
    weights += 1
    assert shared[0] is shared[1] is model.weights is weights
    found += bool(scaled() == 3 * weights.sum()), bool(model.total() == weights.sum() + 3)
    found += pair.size(), "lock" in globals()
found
"""
HAS, LOST = ", True, True, 2, False", ""


def shown(host_of, lost):
    return [
        f"rank {rank} → ({10 * rank}, '{host}', 4, 6{LOST if rank in lost else HAS})"
        for rank, host in enumerate(host_of)
    ]


@pytest.fixture(scope="module")
def notebook(hosts):
    with NotebookOnAHost(hosts, folder_in(hosts.shared)) as shared:
        started = shared.on_ranks(DEFINED, SSH)
        assert started.status == "ok", started.text
        yield shared
        shared.shutdown()
        shared.check_nothing_left()


def check(notebook, host_of, lost):
    cell = notebook.on_ranks(NOW)
    assert cell.text.splitlines() == shown(host_of, lost), cell.text
    used = "pair = add_process_set([1, 2]); rank in (1, 2) and allreduce(rank, process_set=pair)"
    assert notebook.on_ranks(used).status == "ok"


@pytest.mark.leases
def test_a_host_that_is_cut_off_costs_its_ranks_what_they_had_not_kept(hosts, notebook):
    cell = notebook.start_on_ranks(LOOP).wait_for("here")
    hosts.cut("h2")
    try:
        cell.wait(LOST_SECONDS)
    finally:
        hosts.mend("h2")
    assert cell.error_name == "RankDied", cell.text
    assert (
        "Host h2 is cut off or has crashed: no heartbeat for 10 s; ranks 2–3 are lost with it"
        in (cell.text)
    )
    assert "ranks 2–3 started again with kept kept" in cell.text, cell.text
    assert "ranks 2–3 on h1, which has 4 ranks, not 2" in cell.text
    assert (
        "ranks 0–1 have their variables again, but not lock (TypeError: cannot pickle" in cell.text
    )
    check(notebook, ["h1"] * 4, {2, 3})


@pytest.mark.leases
def test_the_first_host_crashes_while_the_ranks_are_idle(hosts, notebook):
    notebook.run("%distributed restart").ok()
    assert notebook.on_ranks(DEFINED).status == "ok"
    hosts.crash("h1")
    try:
        # Whether the host is known to be lost before this cell, or in it.
        said = notebook.on_ranks("None").text
        assert "Host h1 is cut off or has crashed" in said, said
        assert "ranks 0–1 on h2, which has 4 ranks, not 2" in said, said
        check(notebook, ["h2"] * 4, {0, 1})
    finally:
        hosts.boot("h1")
