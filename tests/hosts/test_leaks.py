"""However a notebook, or its connection, ends, nothing of it is left on any host."""

import re
import time

import pytest

from tests.hosts.conftest import SSH

#: For a host's lease of ten seconds, the end of its ranks, and a machine that has much to do.
GONE_SECONDS = 60
SLEEP = "import time\nprint('here')\ntime.sleep(60)"
ALLREDUCE = "import numpy as np\nprint('here')\nwhile True: allreduce(np.ones(9))"


@pytest.fixture
def notebook(new_notebook):
    notebook = new_notebook()
    started = notebook.on_ranks("kept = 10 * rank", SSH)
    assert started.status == "ok", started.text
    return notebook


@pytest.mark.parametrize("source", [None, ALLREDUCE], ids=["idle", "collective"])
def test_a_kernel_killed_with_9_leaves_nothing_on_any_host(notebook, source):
    if source:
        notebook.start_on_ranks(source).wait_for("here")
    notebook.kill9()
    notebook.check_nothing_left()


def test_a_kernel_killed_with_9_while_the_ranks_start_leaves_nothing(hosts, new_notebook):
    notebook = new_notebook()
    notebook.start_on_ranks("rank", SSH)
    notebook.pump(lambda: len(hosts.processes("h2")) > 3, 60, "a host agent")
    notebook.kill9()
    notebook.check_nothing_left()


@pytest.mark.leases
def test_a_notebook_that_is_cut_off_leaves_nothing_on_the_hosts(hosts, notebook):
    notebook.start_on_ranks(SLEEP).wait_for("here")
    hosts.cut("h0")
    try:
        deadline = time.monotonic() + GONE_SECONDS
        for name in ("h1", "h2"):
            while left := hosts.processes(name) + hosts.files(name):
                assert time.monotonic() < deadline, left
                notebook.drain(0.5)
    finally:
        hosts.mend("h0")


def test_a_host_of_another_version_or_that_cannot_be_reached_is_named(new_notebook):
    notebook = new_notebook()
    notebook.run("import allranks; ours, allranks.__version__ = allranks.__version__, '9'")
    cell = notebook.run(f"%distributed start {SSH}")
    assert cell.error_name == "StartFailed"
    assert re.search(r"Host h\d has allranks \S+, and the notebook 9\.", cell.error_value)
    notebook.run("allranks.__version__ = ours")
    cell = notebook.run("%distributed start --on ssh:h1:2,nowhere:2")
    assert cell.error_name == "StartFailed"
    assert "Host nowhere was lost: ssh ended with exit code 255" in cell.error_value
    assert "Could not resolve hostname" in cell.error_value
    notebook.shutdown()
    notebook.check_nothing_left()
