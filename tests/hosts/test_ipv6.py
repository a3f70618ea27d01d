"""Ranks on hosts that have addresses of IPv6 only, but for the loopback."""

import pytest

from tests.hosts.conftest import folder_in
from tests.hosts.hosts import Hosts, require
from tests.hosts.notebook import NotebookOnAHost

WHERE = "--on ssh:h1:2,h2:2"


@pytest.fixture(scope="module")
def notebook():
    require()
    with Hosts(3, ipv6=True) as up, NotebookOnAHost(up, folder_in(up.shared)) as opened:
        assert "inet " not in up.on("h1", "ip", "addr", "show", "eth0")
        started = opened.on_ranks("kept = 10 * rank\nkeep('kept')", WHERE)
        assert started.status == "ok", started.text
        yield opened
        opened.shutdown()
        opened.check_nothing_left()


def test_ranks_reach_each_other_and_the_notebook(notebook):
    cell = notebook.on_ranks(
        "import socket\nimport numpy as np\n"
        "sums = allreduce(np.full(100_000, rank + 1.0), Sum)\n"
        "socket.gethostname(), comm.allreduce(rank), bool((sums == 10).all())"
    )
    assert cell.text == "ranks 0–1 → ('h1', 6, True)\nranks 2–3 → ('h2', 6, True)\n", cell.text


def test_a_rank_that_leaves_is_named_on_the_other_host(notebook):
    cell = notebook.on_ranks("if rank == 3: 1 / 0\nbarrier()")
    assert cell.error_name == "CellFailed", cell.text
    assert "rank 3 has left" in cell.text, cell.text


def test_a_rank_that_dies_is_replaced(notebook):
    cell = notebook.on_ranks("import os\nif rank == 0: os._exit(7)\nbarrier()")
    assert "rank 0 was replaced, with kept kept" in cell.text, cell.text
    assert notebook.on_ranks("allreduce(kept, Sum)").text == "ranks 0–3 → 60\n"


def test_a_client_of_ipyparallel_connects(notebook):
    cell = notebook.run(
        "from allranks.cluster import cluster\n"
        "print(cluster.session.running.client()[:].apply_sync(lambda: kept))"
    )
    assert cell.text == "[0, 10, 20, 30]\n", cell.text
