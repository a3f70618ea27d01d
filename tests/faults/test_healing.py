"""A rank that dies is replaced in its place; the others keep their variables."""

import os
from pathlib import Path

import psutil
import pytest

from tests.faults.notebook import below, named
from tests.kernel import wait_until

pytestmark = pytest.mark.replaces
SIZE = 4
NAMED_SECONDS = 60
WHOLE = (
    "import numpy as np\nimport allranks.collectives as c\n"
    "again = c.add_process_set([0, 2])\npair = globals().get('pair', again)\n"
    "print(globals().get('kept'), float(allreduce(np.ones(3), op=Sum)[0]), comm.allreduce(rank),"
    " float(allreduce(np.ones(3), op=Sum, process_set=pair)[0]) if rank in (0, 2) else '')"
)
KILL, CRASH = "os.kill(os.getpid(), 9)", "ctypes.string_at(0)"
WAITS = {
    "an allreduce": "allreduce(np.ones(3))",
    "a reduction through comm": "while True: comm.allreduce(1)",
    "an array's reduction through comm": "while True: comm.Allreduce(np.ones(9), np.empty(9))",
}


@pytest.fixture(autouse=True)
def _fresh(notebook):
    notebook.run("%distributed heal on")
    mark(notebook)


def mark(notebook):
    notebook.on_ranks(
        "kept = 10 * rank\nimport ctypes, os, time\nimport numpy as np\n"
        "import allranks.collectives as c\npair = c.add_process_set([0, 2])"
    ).ok()


def die(notebook, dead, act, wait):
    dying = f"if rank in {tuple(dead)}:\n    time.sleep(0.3)\n    {act}\n{wait}"
    source = f"import ctypes, os, time\nimport numpy as np\n{dying}"
    return notebook.on_ranks(source, timeout=NAMED_SECONDS)


def check(notebook, dead):
    """The others have what they had, a process set too; all can do again what ranks do."""
    cell = notebook.on_ranks(WHOLE, "--no-fold").ok()
    total = SIZE * (SIZE - 1) // 2
    for rank in range(SIZE):
        kept = None if rank in dead else 10 * rank
        of_pair = "2.0" if rank in (0, 2) else ""
        assert f"rank {rank} │ {kept} {float(SIZE)} {total} {of_pair}".rstrip() in cell.text


# How a rank dies decides what is reported, and where the others wait how they are released: no
# case of the one depends on a case of the other.
@pytest.mark.parametrize(
    ("act", "ending", "wait"),
    [
        *((KILL, "was killed by signal 9 (SIGKILL", wait) for wait in WAITS.values()),
        (CRASH, "was killed by signal 11", "while True: allreduce(np.ones(1 << 20))"),
    ],
    ids=[*WAITS, "a crash in C"],
)
def test_a_rank_that_dies_is_replaced(notebook, act, ending, wait):
    before = notebook.pids()
    cell = (
        die(notebook, [1], act, wait)
        .fails("RankDied", "rank 1 of 4", ending)
        .says("rank 1 was replaced and has no variables; ranks 0, 2–3 kept theirs", "were waiting")
    )
    assert ("line 6 in <module>" in cell.text) == (act == CRASH)
    if act == CRASH:
        # The report has the frames from the crash to the cell, and no others.
        report = cell.text.partition("rank 1 (")[2]
        assert "died at line 6\n" in report
        assert "in string_at" in report
        assert "host_agent.py" not in report
    assert cell.text.count("often the system") + cell.text.count("out-of-memory") <= 1
    check(notebook, [1])
    after = notebook.pids()
    assert {rank for rank in range(SIZE) if before[rank] != after[rank]} == {1}


@pytest.mark.parametrize("dead", [[0], [0, 1, 2]])
def test_whichever_ranks_die_the_others_keep_their_variables(notebook, dead):
    die(notebook, dead, "os._exit(5)", "allreduce(np.ones(3))").fails("RankDied")
    check(notebook, dead)


def test_a_rank_that_died_between_cells_is_told_and_replaced_and_all_are_a_loss(notebook):
    notebook.kill_rank(3)
    notebook.on_ranks("globals().get('kept')").ok().says(
        "was killed by signal 9 (SIGKILL", "rank 3 was replaced and has no variables"
    )
    notebook.kill_rank(2)
    status = notebook.run("%distributed status").ok()
    status.says("was killed by signal 9 (SIGKILL", "rank 2 was replaced and has no variables")
    # A busy rank may be silent in one look.
    wait_until(lambda: notebook.run("%distributed status").text.count("  idle") == SIZE)
    check(notebook, [2, 3])
    die(notebook, [0, 1, 2, 3], "os._exit(5)", "").fails("ClusterLost")
    assert "allranks started again" in notebook.on_ranks("rank").text


def test_ranks_that_wait_for_nobody_finish_the_cell(notebook, tmp_path):
    go = tmp_path / "go"
    cell = notebook.start_on_ranks(
        "if rank == 1: os._exit(4)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\nkept += 1"
    ).wait_for("ranks 0, 2–3 keep running")
    go.touch()
    cell.wait()
    cell.fails("RankDied").says("ranks 0, 2–3 finished the cell")
    assert "rank 0 → 1\n" in notebook.on_ranks("kept", "-r 0").text


def test_where_it_is_to_ask_the_others_can_be_used_until_it_is_told_to(notebook):
    assert "when you type" in notebook.run("%distributed heal ask").text
    assert die(notebook, [1], "os._exit(5)", "barrier()").error_name == "RankDied"
    assert "  dead  ended with exit code 5" in notebook.run("%distributed status").text
    for needs_all in ("%%distributed\nkept", "%distributed pull kept"):
        notebook.run(needs_all).fails("UsageError", "rank 1 (", "Type: %distributed heal")
    assert "rank 3 → 30" in notebook.on_ranks("kept", "-r 0,2,3").text
    assert "rank 1 was replaced" in notebook.run("%distributed heal").text
    check(notebook, [1])
    assert notebook.run("%distributed heal").text == "All ranks are alive.\n"
    wrong = notebook.run("%distributed heal perhaps")
    assert "expected on, ask, off, found 'perhaps'" in wrong.error_value


def test_many_deaths_leave_no_more_than_one(notebook):
    for rank in range(1, SIZE):
        die(notebook, [rank], "os._exit(5)", "barrier()")
    check(notebook, range(1, SIZE))
    # The controller of clients, which may come later than the first cells, has its files then.
    wait_until(lambda: [*notebook.cwd.glob(".ipython/profile_*/security/cluster-*.json")])
    before, open_before = held(notebook), descriptors_of_rank_0(notebook)
    for _ in range(2):
        dead = range(1, SIZE)
        assert die(notebook, dead, "os._exit(5)", "barrier()").error_name == "RankDied"
    check(notebook, range(1, SIZE))

    # What is only just being started or closed is counted in one look and not in the next.
    def more():
        return {what: n for what, n in held(notebook).items() if n > before[what]}

    wait_until(lambda: not more(), lambda: f"no more than {before}, found {more()}")
    # One connection each way to every rank that is new, which is made when it is first needed.
    most = open_before + 2 * (SIZE - 1)
    wait_until(
        lambda: descriptors_of_rank_0(notebook) <= most,
        lambda: f"at most {most} descriptors, found {descriptors_of_rank_0(notebook)}",
    )


def descriptors_of_rank_0(notebook):
    return psutil.Process(notebook.pids()[0]).num_fds()


def held(notebook):
    """What notebook, host agent and ranks hold: processes, descriptors, shared memory."""
    processes = notebook.children()
    agent = named(processes, "prterun").parent()
    return {
        "processes": len(processes),
        "descriptors of the host agent": agent.num_fds(),
        "descriptors of the kernel": psutil.Process(notebook.pid).num_fds(),
        "segments": len([n for n in notebook.note_files() if os.path.exists(f"/dev/shm/{n}")]),
        "files": len(below(notebook.temporary)),
    }


def test_a_rank_that_the_kernel_kills_for_want_of_memory_is_told_from_others(notebook):
    mounted = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").exists() else None
    group = (mounted or Path("/sys/fs/cgroup")) / f"allranks-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if mounted else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(200 << 20))
        (group / "cgroup.procs").write_text(str(notebook.pids()[2]))
    except OSError as problem:
        pytest.skip(f"no cgroup can be made here: {problem}")
    try:
        cell = die(notebook, [2], "b'x' * (1 << 30)", "barrier()")
        assert cell.error_name == "RankDied", cell.text
        assert "killed by signal 9 (SIGKILL: out of memory" in cell.text
        check(notebook, [2])
        cell = die(notebook, [2], KILL, "barrier()")
        assert "(SIGKILL: the kernel reports no out-of-memory kill" in cell.text
    finally:
        group.rmdir()


def test_a_rank_is_replaced_where_the_folder_of_its_log_was_removed(notebook):
    # Not rmtree: the ranks may write a file into the folder meanwhile.
    (notebook.cwd / ".state").rename(notebook.cwd / ".moved")
    die(notebook, [1], "os._exit(5)", "barrier()").fails("RankDied")
    said = notebook.on_ranks("print('again')\n'kept' in globals()").text
    assert "ranks 0, 2–3 → True" in said
    assert notebook.logs()["rank-1.log"].read_text() == "again\n"
    notebook.run("%distributed restart")
