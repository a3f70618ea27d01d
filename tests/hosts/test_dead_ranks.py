"""On several hosts too, a rank that dies is replaced on its host, and the others keep theirs."""

import os
import re
import threading

import pytest

from allranks.records.ranks import label
from tests.hosts.conftest import SSH, folder_in
from tests.hosts.notebook import NotebookOnAHost

#: The lease of ten seconds, and a slow machine.
LOST_SECONDS = 120
KILL = "if rank in {}: os.kill(os.getpid(), 9)\n{}"
NOW = """
import socket
kept, socket.gethostname(), local_rank, allreduce(1, op=Sum), comm.allreduce(rank)
"""
#: What the ranks show of it: ``kept`` is 10 * rank, on new ranks only if they had kept it.
SHOWN = [f"({10 * rank}, 'h{1 + rank // 2}', {rank % 2}, 4, 6)" for rank in range(4)]


@pytest.fixture(scope="module")
def holds(hosts):
    return folder_in(hosts.shared)


@pytest.fixture(scope="module")
def notebook(hosts, holds):
    env = {"ALLRANKS_SPARES": "16", "ALLRANKS_HOLDS": str(holds)}
    with NotebookOnAHost(hosts, folder_in(hosts.shared), env) as shared:
        started = shared.on_ranks("import os\nkept = 10 * rank", SSH)
        assert started.status == "ok", started.text
        assert shared.on_ranks("keep('kept')").status == "ok"
        shared.run("from allranks.cluster import cluster as held")
        yield shared
        shared.shutdown()
        shared.check_nothing_left()


UNREADABLE = """
import gc, time
if rank == 3:
    wire = next(one for one in gc.get_objects() if type(one).__name__ == "RankWire")
    wire._events.send_multipart({})
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "frames",
    [
        [b"batch", b"[Infinity]", b"x"],
        [b"what"],
        [b'["Output", {"rank": 3}]'],
        [b'["Output", {"rank": 2}]'],  # of another rank's name
        [b'["Output", {}]'],
    ],
)
def test_a_rank_that_sends_what_cannot_be_read_ends_alone_and_is_named(notebook, frames):
    cell = notebook.on_ranks(UNREADABLE.format(frames))
    assert cell.error_name == "RankDied", cell.text
    assert "rank 3 (h2, cpu) died" in cell.text
    assert "ended by allranks, because" in cell.text
    assert "rank 2" not in cell.error_value
    check(notebook)


def check(notebook):
    cell = notebook.on_ranks(NOW)
    assert re.findall(r"→ (\(.+)", cell.text) == SHOWN, cell.text
    # A process that has become a rank imports nothing by itself.
    assert notebook.on_ranks("import os").status == "ok"


@pytest.mark.parametrize(
    ("dead", "rest"),
    [((3,), "allreduce(1)"), ((0,), "comm.barrier()"), ((1, 2), "import time; time.sleep(0.5)")],
    ids=["another host's", "the first of all", "two at once"],
)
def test_ranks_that_are_killed_are_replaced_on_their_hosts_with_what_they_kept(
    notebook, dead, rest
):
    cell = notebook.on_ranks(KILL.format(dead, rest))
    assert cell.error_name == "RankDied", cell.text
    for rank in dead:
        assert f"rank {rank} (h{1 + rank // 2}, cpu) died" in cell.text
    assert re.search(r"replaced, with kept kept \d+ s ago; ranks \d.* kept theirs", cell.text)
    assert "cannot be reached" not in cell.text
    check(notebook)


def test_a_rank_that_dies_during_a_replacement_is_replaced_too(hosts, notebook, holds):
    pids = notebook.value("[held.session.running.hellos[rank].pid for rank in range(4)]")
    pipe = holds / "join"
    os.mkfifo(pipe)

    def kill_another():
        with pipe.open("wb"):  # once the new rank waits there
            pipe.unlink()
            hosts.on("h1", "kill", "-9", pids.strip("[]").split(", ")[0])

    thread = threading.Thread(target=kill_another)
    thread.start()
    cell = notebook.on_ranks(KILL.format((3,), "barrier()"))
    thread.join()
    assert cell.error_name == "RankDied", cell.text
    # Open MPI itself may crash in another rank while it makes a communicator; it is replaced too.
    crashed = re.findall(r"rank (\d) was killed by signal 11 ", cell.text)
    new = label(sorted({0, 3, *map(int, crashed)}))
    assert f"{new} were replaced, with kept kept" in cell.text, cell.text
    check(notebook)


def test_process_sets_and_a_deadlock_are_found_as_before(notebook):
    notebook.on_ranks("pair = add_process_set([1, 2])")
    notebook.on_ranks(KILL.format((2,), "barrier()"))
    cell = notebook.on_ranks(
        "x = add_process_set([1, 2]); rank in (1, 2) and barrier(process_set=x)"
    )
    assert cell.status == "ok", cell.text
    cell = notebook.on_ranks("if rank == 2: 1 / 0\nbarrier()")
    assert "rank 2 (h2, cpu) raised ZeroDivisionError" in cell.text
    assert "ranks 0–1, 3 were waiting" in cell.text
    cell = notebook.on_ranks("comm.recv(source=(rank + 1) % size)")
    assert "raised Deadlock" in cell.text, cell.text
    check(notebook)


def test_a_host_without_spare_processes_uses_those_of_others_and_then_all_start_again(new_notebook):
    notebook = new_notebook({"ALLRANKS_SPARES": "1"})
    assert notebook.on_ranks("import os\nkept = 10 * rank", SSH).status == "ok"
    source = "import os\n" + KILL.format((3,), "barrier()")
    said = [notebook.on_ranks(source) for _ in range(2)]
    assert "rank 3 was replaced and has no variables; ranks 0–2 kept" in said[0].text
    assert "rank 3 was replaced and has no variables; rank 3 is on h1 now; ranks" in said[1].text
    cell = notebook.on_ranks(f"kept = 10 * rank\n{NOW}")
    assert re.findall(r"→ (\(.+)", cell.text) == [*SHOWN[:3], "(30, 'h1', 2, 4, 6)"], cell.text
    for _ in range(2):  # the second time there are spare processes again
        cell = notebook.on_ranks("import os\n" + KILL.format((0,), "barrier()"))
        assert cell.error_name == "RankDied", cell.text
        if "started again" not in cell.text:
            break
        assert "expected a spare process for rank 0, found 0: each host had 1 at first" in cell.text
        assert "for example: %env ALLRANKS_SPARES=2" in cell.text
        assert "ranks 1–3 have their variables again, in new processes. (" in cell.text, cell.text
    assert "rank 0 was replaced and has no variables; ranks 1–3 kept" in cell.text, cell.text
    cell = notebook.on_ranks(f"if rank == 0: kept = 0\n{NOW}")
    assert re.findall(r"→ (\(.+)", cell.text) == [*SHOWN[:3], "(30, 'h1', 2, 4, 6)"], cell.text


# Only this host's mount namespace has it: a driver that finds two GPUs.
DRIVER = """
mkdir /tmp/driver
printf '#!/bin/sh\\nprintf "GPU-0\\\\nGPU-1\\\\n"\\n' > /tmp/driver/nvidia-smi
chmod +x /tmp/driver/nvidia-smi
mount --bind /tmp/driver /usr/local/sbin
"""
NO_DRIVER = "umount /usr/local/sbin && rm -r /tmp/driver"
DEVICES = "import os\nkept, device, os.environ['CUDA_VISIBLE_DEVICES'], allreduce(1, op=Sum)"


@pytest.fixture
def with_gpus(hosts):
    for host in ("h1", "h2"):
        hosts.on(host, "bash", "-ec", DRIVER)
    yield
    for host in ("h1", "h2"):
        hosts.on(host, "bash", "-ec", NO_DRIVER)


@pytest.mark.usefixtures("with_gpus")
def test_a_dead_rank_with_a_gpu_is_replaced_on_its_gpu(new_notebook):
    opened = new_notebook()
    opened.on_ranks("kept = 10 * rank\nkeep('kept')", SSH).ok()
    shown = re.findall(r"→ (\(.+)", opened.on_ranks(DEVICES).text)
    for rank, line in enumerate(shown):
        assert re.fullmatch(rf"\({10 * rank}, 'cuda:0 \((GPU-[01])\)', '\1', 4\)", line)
    assert len(set(re.findall(r"GPU-\d", "".join(shown[:2])))) == 2
    for dead in (3, 0):
        died = opened.on_ranks(f"import os\nif rank == {dead}:\n    os._exit(3)\nallreduce(1)")
        assert f"rank {dead} was replaced, with kept" in died.text
        assert re.findall(r"→ (\(.+)", opened.on_ranks(DEVICES).text) == shown


def test_a_client_gets_the_error_of_a_rank_that_dies_on_another_host(notebook):
    notebook.run("import os\nclient = ranks.client()").ok()
    notebook.run("client[3].apply_async(os._exit, 1).get(60)").says("EngineError")
    check(notebook)


def test_a_cell_receives_no_message_of_a_clients_failed_request(notebook):
    notebook.run("client = ranks.client()\nclient.wait_for_engines(4, interactive=False)").ok()
    sends = "if rank == 0: comm.send('{}', 3)\nelif rank == 3: {}"
    failed = f"client[:].execute({sends.format('old', 'raise ValueError')!r}).get(60)"
    notebook.run(failed).says("ValueError")
    cell = notebook.on_ranks(sends.format("new", "print(comm.recv())"))
    assert cell.text == "rank 3 │ new\n"


# Last: the ranks of this file's notebook on that host are lost too.
@pytest.mark.leases
def test_a_host_that_crashes_while_a_rank_is_replaced_costs_its_own_ranks(hosts, new_notebook):
    holds = folder_in(hosts.shared)
    notebook = new_notebook({"ALLRANKS_HOLDS": str(holds)})
    assert notebook.on_ranks("import os\nkept = 10 * rank", SSH).status == "ok"
    pipe = holds / "join"
    os.mkfifo(pipe)

    def crash():
        with pipe.open("wb"):  # once the new rank waits there
            pipe.unlink()
            hosts.crash("h2")

    thread = threading.Thread(target=crash)
    thread.start()
    try:
        cell = notebook.start_on_ranks(KILL.format((0,), "barrier()")).wait(LOST_SECONDS)
        assert cell.error_name == "RankDied", cell.text
        assert "rank 1 has its variables again" in cell.text, cell.text
        cell = notebook.on_ranks(f"kept = globals().get('kept')\n{NOW}")
        places = [(None, 0), (10, 1), (None, 2), (None, 3)]
        shown = [f"({kept}, 'h1', {local}, 4, 6)" for kept, local in places]
        assert re.findall(r"→ (\(.+)", cell.text) == shown, cell.text
    finally:
        thread.join()
        hosts.boot("h2")
