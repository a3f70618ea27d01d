"""Ranks on several hosts that stay when their notebook ends, and the notebook that attaches."""

import os
import re
import shlex
import signal
import time

import pytest

from tests.faults.notebook import stopped
from tests.hosts.conftest import SSH, folder_in
from tests.hosts.notebook import NotebookOnAHost

KEPT = "".join(f"rank {rank} → {10 * rank}\n" for rank in range(4))
#: The lease of ten seconds, and some more.
LOST_SECONDS = 14
STAYS = "keep running for 2 min."


@pytest.fixture(scope="module")
def notebook(hosts):
    with NotebookOnAHost(hosts, folder_in(hosts.shared)) as opened:
        opened.run("%distributed detach-on-exit 120s").says("keep running for 2 min")
        started = opened.on_ranks("import os\nkept = 10 * rank\nkeep('kept')", SSH)
        assert started.status == "ok", started.text
        opened.run("from allranks.cluster import cluster as held")
        yield opened


def kill(notebook):
    os.kill(notebook.pid, signal.SIGKILL)


def again(notebook):
    notebook.restart()
    loaded = notebook.run("%load_ext allranks\nfrom allranks.cluster import cluster as held")
    assert loaded.status == "ok", loaded.text


def check_at_work(notebook):
    assert notebook.on_ranks("kept").text == KEPT
    assert notebook.on_ranks("allreduce(1, op=Sum)").text == "ranks 0–3 → 4\n"


def test_a_kernel_that_was_killed_has_its_ranks_back_and_they_are_replaced_as_before(
    hosts, notebook
):
    key = notebook.value("held.session.running.cells.connection._wire.key").strip("'")
    kill(notebook)
    again(notebook)
    listed = notebook.run("%distributed clusters").text
    assert re.search(r"ranks 0–3 of .*, idle; detached, \d+ s left: %distributed attach", listed)
    for path in hosts.on("h0", "find", "/tmp", "-name", "allranks-session-*").split():
        assert hosts.on("h0", "stat", "-c", "%a %F", path) == "700 directory\n"
    find = f"grep -rlF -D skip --exclude-dir='hosts-*' -e {shlex.quote(key)} /tmp || :"
    for host in hosts.names:
        assert hosts.on(host, "sh", "-c", find) == ""
    attached = notebook.run("%distributed attach")
    assert re.match(r"Attached to ranks 0–3 of \w{8}, running since \d\d:\d\d\. ", attached.text)
    assert STAYS in attached.text
    check_at_work(notebook)
    died = notebook.on_ranks("if rank == 3: os.kill(os.getpid(), 9)\nbarrier()")
    assert "rank 3 was replaced, with kept kept" in died.text, died.text
    assert notebook.on_ranks("import os").status == "ok"
    check_at_work(notebook)


def test_a_kernel_that_was_killed_as_it_tested_the_network_has_its_ranks_back(notebook):
    # As it does where ranks come late. The relays answer again, to the next notebook.
    notebook.run("test = held.session.running.cells.connection._agents[0].test_network()").ok()
    while notebook.value("test.over") != "True":
        time.sleep(0.01)
    kill(notebook)
    again(notebook)
    notebook.run("%distributed attach").says("Attached to ranks 0–3", STAYS)
    check_at_work(notebook)
    tested = "held.session.running.cells.connection._agents[0].test_network()"
    while notebook.value(f"{tested}.over") != "True":
        time.sleep(0.01)
    assert notebook.value(f"{tested}.problems()") == "[]"


@pytest.mark.parametrize("victim", [3, 2], ids=["a rank", "the first of its host"])
def test_a_cell_ends_on_all_hosts_where_its_kernel_dies_before_it_has_reported_a_death(
    hosts, notebook, victim
):
    pid = notebook.value(f"held.session.running.hellos[{victim}].pid")
    notebook.start_on_ranks(
        f"import time\nprint('begun')\nif rank == {victim}: time.sleep(600)\nbarrier()"
    ).wait_for("ranks 0–3 │ begun")
    with stopped(notebook.pid):
        hosts.on("h2", "kill", "-9", pid)
        kill(notebook)
    again(notebook)
    while ", idle; " not in notebook.run("%distributed clusters").text:
        notebook.drain(0.1)
    attached = notebook.run("%distributed attach")
    attached.fails("CellFailed", "RankLost: ")
    attached.says("finished while no notebook was attached", f"rank {victim} has died")
    attached.says("was killed by signal 9", f"rank {victim} was replaced, with kept kept")
    assert notebook.on_ranks("import os").status == "ok"
    check_at_work(notebook)


@pytest.mark.leases
def test_a_host_that_is_lost_meanwhile_is_named_and_the_ranks_start_on_the_other(hosts, notebook):
    notebook.run("%distributed restart").ok()
    defined = notebook.on_ranks("mine, kept = rank, 10 * rank\nkeep('kept')")
    assert defined.status == "ok", defined.text
    kill(notebook)
    hosts.crash("h2")
    try:
        time.sleep(LOST_SECONDS)  # until its loss is known, and MPI's job has ended
        again(notebook)
        attached = notebook.run("%distributed attach")
        assert "Host h2 is cut off or has crashed" in attached.text, attached.text
        assert "ranks 2–3 started again with kept kept" in attached.text, attached.text
        # The next notebook knows where they are now, and they stay as before.
        kill(notebook)
        again(notebook)
        notebook.run("%distributed attach").says("Attached to ranks 0–3", STAYS)
        # If a kernel died before the hosts knew that all is restored, that is done again, and said.
        assert notebook.on_ranks("kept, globals().get('mine')").text.endswith(
            "rank 0 → (0, 0)\nrank 1 → (10, 1)\nrank 2 → (20, None)\nrank 3 → (30, None)\n"
        )
        check_at_work(notebook)
        died = notebook.on_ranks("import os\nif rank == 3: os.kill(os.getpid(), 9)\nbarrier()")
        assert "rank 3 was replaced, with kept kept" in died.text, died.text
    finally:
        hosts.boot("h2")


@pytest.mark.leases
def test_ranks_that_nobody_attaches_to_end_on_all_hosts(hosts, notebook):
    said = notebook.run("%distributed detach 2s")
    assert "keep running for 2 s. Type in another notebook" in said.text
    notebook.shutdown()
    notebook.check_nothing_left()
