"""Ranks on two hosts that ssh reaches: the same cell, by one more word."""

import re

import pytest

from tests import labs
from tests.hosts.conftest import SSH
from tests.kernel import wait_until


def test_ranks_run_on_the_hosts_that_are_named_and_know_their_places(notebook):
    cell = notebook.on_ranks("import socket; socket.gethostname(), local_rank, cross_rank")
    assert re.findall(r"rank (\d) → (.+)", cell.text) == [
        ("0", "('h1', 0, 0)"),
        ("1", "('h1', 1, 0)"),
        ("2", "('h2', 0, 1)"),
        ("3", "('h2', 1, 1)"),
    ]
    assert notebook.on_ranks("rank * 2", "-r 1-2").text == "rank 1 → 2\nrank 2 → 4\n"
    # Below the folder of the logs, whose name is drawn and may have a host's in it.
    text = notebook.run("%distributed status").text.partition("\n")[2]
    assert text.index("h1") < text.index("rank 1") < text.index("h2") < text.index("rank 2")
    notebook.run("import allranks, socket\nfrom allranks.cluster import cluster as held")
    asked = "sorted(set(held.session.running.client()[:].apply_sync(socket.gethostname)))"
    assert notebook.value(asked) == "['h1', 'h2']"


def test_what_ranks_can_be_started_on_is_listed_with_why_what_cannot(notebook):
    text = notebook.run("%distributed launchers").text
    assert text.startswith("→ local      ranks on this machine\n  ssh        --on ssh:h1:2,h2:2")
    assert re.search(r"reaches without a password\n  slurm ", text), text
    assert re.search(r"  pbs .*\n +not available: expected qsub, found no such program", text), text


#: Lists what is open below the folder of the logs; each process of ranks has its own log open.
WRITES_LOGS = "ls -l /proc/[0-9]*/fd 2>/dev/null | grep ' /tmp/logs/' || :"


def test_the_logs_of_ranks_can_be_read_where_hosts_share_no_folder(hosts, new_notebook):
    notebook = new_notebook({"ALLRANKS_LOG_DIR": "/tmp/logs"})
    try:
        assert notebook.on_ranks("print('said by', rank)", SSH).status == "ok"
        text = notebook.run("%distributed log -r 3").text
        assert "── rank 3: /tmp/logs/" in text
        assert text.endswith("said by 3\n\n"), text
    finally:
        notebook.shutdown()
        for name in hosts.names:
            # The ranks end after their notebook. A process that only begins there, as the
            # controller of clients, would make the folder again.
            wait_until(lambda: not hosts.on(name, "sh", "-c", WRITES_LOGS))  # noqa: B023
            hosts.on(name, "rm", "-r", "/tmp/logs")


def test_what_the_ranks_have_and_say_goes_both_ways_whole_and_in_order(notebook):
    notebook.run("import numpy as np\nweights = np.arange(300_000.0)")
    notebook.run("%distributed push weights")
    cell = notebook.on_ranks(
        "import time\ntotal = allreduce(weights, op=Sum).sum() + rank\n"
        "for n in range(3): print(n)\n"
        "for n in range(40):\n    print(f'{rank}:{n}')\n    time.sleep(0.01)"
    )
    assert cell.status == "ok", cell.text
    assert "ranks 0–3 │ 0\n          │ 1\n          │ 2\n" in cell.text
    told, label = [], ""
    for line in cell.text.splitlines()[3:]:
        named, _, text = line.partition("│")
        label = named.strip() or label
        told.append((label, text.strip()))
    for rank in range(4):
        mine = [text for label, text in told if label == f"rank {rank}"]
        assert mine == [f"{rank}:{n}" for n in range(40)]
    pulled = notebook.value("%distributed pull total")
    assert re.findall(r"\d: .*?(\d)\.0", pulled) == ["0", "1", "2", "3"]


def test_a_rank_that_fails_is_named_with_its_host_and_an_interrupt_reaches_all(notebook):
    cell = notebook.on_ranks("import numpy as np\nif rank == 3: 1 / 0\nallreduce(np.ones(9))")
    assert cell.error_name == "CellFailed"
    assert "rank 3 (h2, cpu) raised ZeroDivisionError at line 3" in cell.text
    assert "ranks 0–2 were waiting" in cell.text
    cell = notebook.start_on_ranks("import time; print('here'); time.sleep(60)").wait_for("here")
    notebook.interrupt()
    assert cell.wait().error_name == "CellInterrupted", cell.text
    assert notebook.on_ranks("kept", "-r 3").text == "rank 3 → 30\n"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("ssh:", "expected hosts and how many ranks each has, found ssh:."),
        ("ssh:h1:0", "Type for example: --on ssh:h1:2,h2:2"),
        ("ssh:-oProxyCommand=x:2", "expected hosts and how many ranks each has"),
        ("ssh:h1,h1", "expected each host once"),
        ("ssh:h1:2,h2:2 -n 3", "expected the number of ranks given to the hosts, 4, found -n 3"),
    ],
)
def test_what_cannot_be_is_refused_and_the_ranks_live_on(notebook, where, said):
    cell = notebook.run(f"%distributed restart --on {where}")
    assert (cell.error_name, said in cell.error_value) == ("UsageError", True), cell.text
    assert notebook.on_ranks("kept", "-r 0").text == "rank 0 → 0\n"


def test_hosts_start_that_are_not_next_to_the_first_in_the_tree_of_mpiexec(new_notebook):
    # By default this is so from the 66th host on.
    notebook = new_notebook(env={"PRTE_MCA_rml_base_radix": "1"})
    cell = notebook.on_ranks("allreduce(rank, Sum)", "--on ssh:h0,h1,h2")
    assert "ranks 0–2 → 3" in cell.text, cell.text
    notebook.shutdown()


def test_a_firewall_between_two_hosts_is_named_at_the_start_and_by_the_doctor(hosts, new_notebook):
    notebook = new_notebook()
    address = hosts.on("h2", "hostname", "-I").split()[0]
    # Packets from h1 to h2 vanish, as in a firewall.
    hosts.on("h1", *f"ip neigh replace {address} lladdr 02:00:00:00:00:99 dev eth0".split())
    try:
        cell = notebook.on_ranks("rank", SSH)
        said = rf"h1 cannot connect to h2 \({address}, port \d+\): no answer within"
        assert cell.error_name == "StartFailed", cell.text
        assert re.search(said, cell.error_value), cell.error_value
        assert "To check again: allranks doctor --on ssh:h1:2,h2:2" in cell.error_value
        checks = notebook.run("!{__import__('sys').executable} -m allranks doctor --on ssh:h1,h2")
        assert re.search(said, checks.text), checks.text
        assert re.search("ok .* h1 .* connects to this machine", checks.text), checks.text
    finally:
        hosts.on("h1", *f"ip neigh del {address} dev eth0".split())
    checks = notebook.run("!{__import__('sys').executable} -m allranks doctor --on ssh:h1,h2")
    assert "each host can connect to each other host" in checks.text
    assert "No problems found." in checks.text
    notebook.shutdown()


#: What cells write to the temporary folder is to be read on both hosts.
PLACE = '[pair]\non = "{on}"\nenvironment = {{ TMPDIR = "{folder}" }}\n'


def test_a_lab_runs_on_two_hosts_unchanged(hosts, new_notebook):
    folder = hosts.shared / "temporary"
    folder.mkdir()
    sites = hosts.shared / "sites.toml"
    sites.write_text(PLACE.format(on=SSH.split()[1], folder=folder))
    notebook = new_notebook(env={"ALLRANKS_SITES": str(sites)})
    started = notebook.run("%distributed start --on pair", timeout=120)
    assert "started ranks 0–3 on h1, h2" in started.text
    lab, failed = labs.solved("03_messages"), []
    for cell in labs.code_cells(lab):
        ran = notebook.run(cell.source, timeout=120)
        if ran.status != "ok":
            failed.append((cell.id, ran.error_value))
        assert "started ranks" not in ran.text, ran.text
    assert [cell for cell, _ in failed] == labs.tagged(lab, labs.FAILS), failed
    notebook.shutdown()
