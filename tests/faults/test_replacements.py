"""What may befall the replacement of a rank, while it is under way and just before."""

import os
import signal
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import allranks
from allranks.cluster import sockets
from allranks.cluster.sockets import InterruptRequested
from allranks.errors import CellFailed, ClusterLost, RankDied
from allranks.records.ranks import label
from allranks.widgets.dashboard.view import text_view
from tests.faults.notebook import stopped
from tests.held import held
from tests.kernel import wait_until

pytestmark = pytest.mark.replaces
SIZE = 4
ALL = "(kept, comm.allreduce(1), float(allreduce(1.0, op=Sum)))"


class Holds:
    """Named pipes at which a new rank waits for a test."""

    def __init__(self, folder):
        self.folder = folder

    def hold(self, where, act):
        return held(self.folder, where, act)

    def held_pid(self):
        """The process that is held: the pipe is among its files a moment after it is opened."""

        def held():
            for process in psutil.Process().children(recursive=True):
                with suppress(OSError):  # it ends, or closes a file, just now
                    for link in Path(f"/proc/{process.pid}/fd").iterdir():
                        if str(self.folder) in os.readlink(link):
                            return process.pid
            return None

        wait_until(held)
        return held()


heard = []


@pytest.fixture(autouse=True)
def _count_interrupts(monkeypatch):
    def counted():
        heard.append("an interrupt")
        return InterruptRequested()

    monkeypatch.setattr(sockets, "InterruptRequested", counted)


def press(*_):
    """Interrupts this process; returns when that was heard: two that come at once are one."""
    before = len(heard)
    os.kill(os.getpid(), signal.SIGINT)
    wait_until(lambda: len(heard) > before)


def kill(cluster, rank):
    process = psutil.Process(cluster.hellos[rank].pid)
    process.kill()
    psutil.wait_procs([process], timeout=5)
    while rank not in cluster.roster.dead:  # else the next cell is sent, and hears of it then
        cluster.cells.connection.step(0.05)


@pytest.fixture(scope="module")
def holds(tmp_path_factory):
    return Holds(tmp_path_factory.mktemp("holds"))


@pytest.fixture(scope="module")
def shared(holds):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLRANKS_HOLDS", str(holds.folder))
        with allranks.Cluster(SIZE) as started:
            yield started


@pytest.fixture
def cluster(shared):
    """Four ranks with ``kept``; the module's own, or fresh ones where a test has ended them."""
    shared.start().run("import os, signal, time; kept = 10 * rank")
    return shared


def check(cluster, dead):
    cluster.run("globals().setdefault('kept', None)", timeout=60)
    kept = [None if rank in dead else 10 * rank for rank in range(SIZE)]
    assert cluster.run(ALL, timeout=60) == [(each, SIZE, float(SIZE)) for each in kept]


def leave(cluster, source):
    """Sends a cell and leaves it once it has printed: what would show it fails."""
    view = text_view(range(SIZE), cluster.log_dir)

    show, came = view.output, []

    def output(batch):
        came.append(batch)
        show(batch)

    def refresh():
        if came:
            raise UnicodeEncodeError("latin-1", "→", 0, 1, "this stream has no such letter")

    view.output, view.refresh = output, refresh
    run = cluster.cells.begin(source, view=view)
    with pytest.raises(UnicodeEncodeError):
        cluster.cells.wait(run)


DIE_WHEN_INTERRUPTED = """
try:
    if rank == 1: print("in it")
    while True: time.sleep(0.1)
except KeyboardInterrupt:
    if rank == 1:
        time.sleep(0.5)
        os._exit(5)
"""


def test_a_rank_that_dies_in_a_cell_that_was_left_is_replaced_before_the_next(cluster, capsys):
    leave(cluster, DIE_WHEN_INTERRUPTED)
    check(cluster, [1])
    said = capsys.readouterr().out
    assert "rank 1 " in said
    assert "ended with exit code 5" in said


def kill_held(pids, holds):
    os.kill(holds.held_pid(), signal.SIGKILL)


def kill_others(*ranks):
    return lambda pids, holds: [os.kill(pids[rank], signal.SIGKILL) for rank in ranks]


DIE = "if rank == 1: os._exit(5)\nbarrier()"
#: What is done while a new rank is held, and which ranks are new then.
REPLACED = {
    "another dies": ("joined", kill_others(2), [1, 2]),
    "the new one dies": ("joined", kill_held, [1]),
    "an interrupt before all have agreed": ("join", press, [1]),
    "an interrupt when all have agreed": ("joined", press, [1]),
}


@pytest.mark.parametrize(("where", "act", "new"), REPLACED.values(), ids=REPLACED.keys())
def test_who_dies_once_all_have_agreed_is_replaced_and_an_interrupt_waits_for_the_end(
    cluster, holds, capsys, where, act, new
):
    pids = {rank: hello.pid for rank, hello in cluster.hellos.items()}
    with holds.hold(where, lambda: act(pids, holds)), pytest.raises(RankDied, match="rank 1 of 4"):
        cluster.run(DIE, timeout=60)
    said = capsys.readouterr().out
    for rank in set(new) - {1}:
        assert f"rank {rank} was killed by signal 9" in said
        assert f"{label(tuple(new))} were replaced and have no variables; rank" in said
    assert ("rank 1, which was new, was killed by signal 9" in said) == (act is kill_held)
    check(cluster, new)


#: MPI itself waits for who dies while it makes the communicator with the new one.
LOST = {
    "another dies": (kill_others(2), 3.0, "could not be replaced: "),
    "two interrupts": (lambda *_: (press(), press()), 30.0, "interrupted twice"),
}


@pytest.mark.leases
@pytest.mark.parametrize(("act", "seconds", "said"), LOST.values(), ids=LOST.keys())
def test_before_that_a_death_or_two_interrupts_cost_all_ranks_but_no_more_time(
    cluster, holds, monkeypatch, act, seconds, said
):
    monkeypatch.setattr("allranks.features.heal.recovery._REPLACE_SECONDS", seconds)
    pids = {rank: hello.pid for rank, hello in cluster.hellos.items()}
    with holds.hold("join", lambda: act(pids, holds)), pytest.raises(ClusterLost, match=said):
        cluster.run(DIE, timeout=60)


def test_an_interrupt_before_a_cell_waits_for_the_end_and_the_cell_does_not_run(cluster, holds):
    kill(cluster, 1)
    with holds.hold("join", press), pytest.raises(KeyboardInterrupt):
        cluster.run("kept = 'overwritten'")
    check(cluster, [1])


@pytest.mark.leases
def test_who_cannot_be_replaced_in_time_is_said_while_it_lasts(cluster, holds, monkeypatch, capsys):
    monkeypatch.setattr("allranks.features.heal.recovery._REPLACE_SECONDS", 0.0)
    monkeypatch.setattr("allranks.features.heal.recovery._SLOW_SECONDS", 0.2)
    pipe = holds.folder / "join"
    os.mkfifo(pipe)  # a new rank waits there until the other end is opened: never
    try:
        with pytest.raises(ClusterLost, match="took over 3 s"):
            cluster.run(DIE, timeout=60)
    finally:
        pipe.unlink()
    assert "rank 1: still being replaced" in capsys.readouterr().out


#: Rank 3 is stopped while the ranks agree that one of them has failed, and goes on when the others
#: have left the agreement and the new one has ended.
NO_MEMORY = """
import contextlib, subprocess
from allranks.collectives.host import memory
from allranks.features.heal import replacement

if rank == 0:
    memory.segment = lambda *_, **__: None
all_or_none = replacement._all_or_none

@contextlib.contextmanager
def agrees_late(*comms):
    with all_or_none(*comms):
        try:
            yield
        except BaseException:
            if rank == 3:
                stop = "sleep 0.3; kill -STOP {0}; sleep 1; kill -CONT {0}"
                subprocess.Popen(["sh", "-c", stop.format(os.getpid())])
            else:
                time.sleep(0.6)
            raise

replacement._all_or_none = agrees_late
"""


def test_without_memory_to_share_nobody_is_replaced_and_all_are_fresh(cluster, monkeypatch):
    monkeypatch.setattr("allranks.features.heal.recovery._TRIES", 2)
    cluster.run(NO_MEMORY)
    with pytest.raises(ClusterLost, match="expected memory for all ranks to share"):
        cluster.run(DIE, timeout=60)
    check(cluster.start(), range(SIZE))


#: Rank 0 fails once, while the others of its host wait for its memory.
FAILS_ONCE = """
from allranks.collectives.host import memory

sweep = memory.sweep

def fails():
    memory.sweep = sweep
    raise OSError("expected memory")

if rank == 0:
    memory.sweep = fails
"""


def test_an_error_of_one_rank_during_a_replacement_costs_another_try_only(cluster):
    cluster.run(FAILS_ONCE)
    with pytest.raises(RankDied):
        cluster.run(DIE, timeout=60)
    check(cluster, [1])


@contextmanager
def soon(act):
    """Within, ``act`` is called once half a second has passed."""
    timer = threading.Timer(0.5, act)
    timer.start()
    yield
    timer.join()


def test_a_rank_that_dies_while_the_ranks_are_made_ready_is_replaced(cluster):
    cluster.run("'nothing'")
    with pytest.raises(CellFailed):
        cluster.run("if rank == 0: 1 / 0\nbarrier()")
    pid = cluster.hellos[1].pid
    with stopped(pid), soon(lambda: os.kill(pid, signal.SIGKILL)):
        check(cluster, [1])


@contextmanager
def once(begun, act):
    """Within, ``act`` is called once there is the file ``begun``."""

    def wait_and_act():
        wait_until(begun.exists)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("call", ["comm.Dup()", "comm.Split(rank % 2, rank)"])
def test_a_rank_that_dies_while_communicators_are_made_is_replaced(shared, call, tmp_path):
    shared.stop()  # Open MPI itself may crash there if a rank has been replaced before
    shared.start().run("import os, signal, time; kept = 10 * rank")
    pid, begun = shared.hellos[1].pid, tmp_path / "begun"
    with once(begun, lambda: os.kill(pid, signal.SIGKILL)), pytest.raises(RankDied) as raised:
        shared.run(f"open({str(begun)!r}, 'w').close()\nwhile True: {call}", timeout=60)
    assert "signal 11" not in raised.value.text
    check(shared, [1])


def test_a_death_beside_a_cell_is_named_in_it(cluster, capsys, tmp_path):
    pid = cluster.hellos[2].pid
    begun, go = tmp_path / "begun", tmp_path / "go"

    def kill_and_go():
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: 2 in cluster.roster.dead, lambda: "the news of the death")
        go.touch()

    begins = f"open({str(begun)!r}, 'w').close()"
    with once(begun, kill_and_go):
        cluster.run(f"{begins}\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)", ranks=[0])
    said = capsys.readouterr().out
    assert "rank 2 was killed by signal 9" in said
    assert "rank 2 was replaced" in said
    check(cluster, [2])


def stub_of(cluster, rank):
    """The launcher's process in whose place a rank runs; that of a dead rank may still be there."""
    names = ["PMIX_NAMESPACE", "PMIX_RANK"]
    [own] = cluster.run(f"[os.environ[name] for name in {names}]", ranks=[rank])
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found = process.environ()
            if "stubs.py" in " ".join(process.cmdline()) and [*map(found.get, names)] == own:
                return process
    raise LookupError(f"rank {rank} has no process of the launcher")


def test_a_rank_that_the_launcher_has_ended_ends_all(cluster, tmp_path):
    begun = tmp_path / "begun"
    with once(begun, stub_of(cluster, 3).kill), pytest.raises(ClusterLost) as raised:
        cluster.run(f"open({str(begun)!r}, 'w').close()\ntime.sleep(60)", timeout=60)
    assert "could not be replaced" not in str(raised.value)


def test_the_status_replaces_nobody(cluster):
    kill(cluster, 3)
    assert cluster.status()[3].state == "dead"
    assert list(cluster.roster.dead) == [3]
    check(cluster, [3])


def test_last_words_are_of_the_cell_in_which_a_rank_dies(cluster):
    cluster.run("print('of an earlier cell')")
    for words in ("", "of this cell"):
        with pytest.raises(RankDied) as raised:
            cluster.run(
                f"import os\nprint({words!r})\nif rank == 1: os._exit(5)\nbarrier()", timeout=60
            )
        said = [line for line in raised.value.text.splitlines() if "exit code 5" in line]
        assert "earlier" not in "".join(said)
        assert ("its last lines: of this cell" in "".join(said)) == bool(words)
        cluster.run("print('of an earlier cell')")


def test_a_kernel_that_is_killed_while_a_rank_is_replaced_leaves_nothing_but_logs(
    new_notebook, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("holds")
    os.mkfifo(folder / "join")
    notebook = new_notebook(env={"ALLRANKS_HOLDS": str(folder)})
    cell = notebook.start_on_ranks("import os\nif rank == 1: os._exit(5)\nbarrier()", "-n 2")
    cell.wait_for("rank 1: still being replaced")
    notebook.note_files()
    notebook.kill9()
    notebook.check_nothing_left()
