"""What happens to hosts is said soon, with the host's name."""

import re
import time

import pytest

from tests.kernel import wait_until

#: The lease of these notebooks is ten seconds; it is told at most two later.
NAMED_SECONDS = 12
#: TCP repeats after 6 s and 13 s: it would not notice within the lease that the cable is back.
OUTAGE_SECONDS = 6.5
#: For the machine that runs these tests to come to it.
SLACK_SECONDS = 60
SLEEP = "import time\nprint('here')\ntime.sleep(60)"


@pytest.fixture(autouse=True)
def _ranks_are_up(notebook):
    started = notebook.on_ranks("kept = 10 * rank")
    assert started.status == "ok", started.text


def test_a_rank_that_is_killed_is_named_with_its_host_and_signal(notebook):
    cell = notebook.on_ranks(
        "import os, time\nprint('last words of', rank)\n"
        "if rank == 3: os.kill(os.getpid(), 9)\ntime.sleep(1)"
    )
    assert cell.error_name == "RankDied"
    assert "rank 3 (h2, cpu) died" in cell.text
    assert re.search(r"pid \d+ was killed by signal 9", cell.text)
    assert "last words of 3" in cell.text
    assert "rank 3 was replaced and has no variables; ranks 0–2 kept theirs" in cell.text
    assert notebook.on_ranks("'kept' in globals()").text == "ranks 0–2 → True\nrank 3    → False\n"
    notebook.on_ranks("kept = 10 * rank")


@pytest.mark.leases
def test_a_host_that_is_cut_off_is_named_within_its_lease(hosts, notebook):
    cell = notebook.start_on_ranks(SLEEP).wait_for("here")
    hosts.cut("h2")
    try:
        cell.wait_for(
            "Host h2 is cut off or has crashed: no heartbeat for 10 s; ranks 2–3 are lost with it; "
            "ranks 0–1 keep running",
            NAMED_SECONDS + SLACK_SECONDS,
        )
        wait_until(lambda: hosts.processes("h2") == [])
    finally:
        hosts.mend("h2")
    notebook.interrupt()
    assert cell.wait().error_name == "RankDied", cell.text
    assert "ranks 0–1 have their variables again" in cell.text, cell.text
    notebook.run("%distributed restart")


@pytest.mark.leases
def test_a_host_that_is_frozen_for_six_seconds_goes_on(hosts, notebook):
    frozen = time.monotonic()
    hosts.freeze("h2")
    try:
        cell = notebook.start_on_ranks("kept").wait_for("rank 1 → 10")
        # Of a lease of ten seconds; freezing takes a while on a loaded machine.
        notebook.drain(max(0, frozen + 6 - time.monotonic()))
        assert cell.status == "running"
    finally:
        hosts.thaw("h2")
    assert cell.wait().text.endswith("rank 3 → 30\n")
    assert notebook.on_ranks("kept", "-r 0").text == "rank 0 → 0\n"


@pytest.mark.leases
def test_a_cable_that_is_mended_within_the_lease_costs_nothing(hosts, notebook):
    cell = notebook.start_on_ranks(
        "import time\nprint('here')\n"
        "for n in range(80):\n    print(f'{rank}:{allreduce(n, Sum) // 4}')\n    time.sleep(0.1)"
    ).wait_for("here")
    began = time.monotonic()
    hosts.cut("h2")
    notebook.drain(max(0, began + OUTAGE_SECONDS - time.monotonic()))
    hosts.mend("h2")
    assert cell.wait(NAMED_SECONDS + SLACK_SECONDS).status == "ok", cell.text
    for rank in range(4):
        said = re.findall(rf"\b{rank}:(\d+)$", cell.text, re.M)
        assert said == [str(n) for n in range(80)], cell.text
    assert notebook.on_ranks("allreduce(kept, Sum)").text == "ranks 0–3 → 60\n"


@pytest.mark.leases
def test_the_end_of_what_mpi_runs_on_a_host_is_named_with_the_host(hosts, notebook):
    cell = notebook.start_on_ranks(SLEEP).wait_for("here")
    # Of each: host, pid, program, arguments.
    lines = [re.sub(r"^(\S+ \d+ )\S*/", r"\1^", line) for line in hosts.processes("h2")]
    found = next(line for line in lines if "^prted " in line)
    hosts.on("h2", "kill", "-9", found.split()[1])
    cell.wait_for("Host h2 ", NAMED_SECONDS + SLACK_SECONDS)
    notebook.interrupt()
    cell.wait()
    assert "ranks 0–1 have their variables again" in cell.text, cell.text
    notebook.run("%distributed restart")
