"""A cluster that a program leads, without magics."""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import ipyparallel
import psutil
import pytest
import zmq

import allranks
from allranks.cluster import connection
from allranks.cluster.cell_run import HiddenView
from allranks.cluster.host_agent import HostAgentProcess
from allranks.cluster.sockets import RankSockets
from allranks.errors import CellFailed, CellInterrupted, ClusterLost, StartFailed, UsageError
from allranks.features.ensemble.slots import member_slots
from allranks.magics.session import RanksProxy
from allranks.records import limits
from allranks.records.wire import Query
from allranks.widgets.dashboard.view import text_view
from allranks.widgets.displays import ProgressLine
from tests.attacks import run_as_another
from tests.kernel import wait_until

CALLS = {
    "run": lambda cluster, ranks: cluster.run("kept", ranks=ranks),
    "call": lambda cluster, ranks: cluster.run(int, ranks=ranks),
    "push": lambda cluster, ranks: cluster.push({"kept": 1}, ranks),
    "pull": lambda cluster, ranks: cluster.pull("kept", ranks),
}


@pytest.fixture(scope="module")
def cluster():
    with allranks.Cluster(2) as started:
        started.run("kept = 10 * rank")
        yield started


@pytest.mark.parametrize("ranks", [[2], [-1], [0, 7], [], 1, ["0"]])
@pytest.mark.parametrize("call", CALLS)
def test_ranks_that_are_not_there_are_refused_and_nothing_is_sent(cluster, call, ranks):
    with pytest.raises(UsageError, match=r"^expected .*found .*Type for example: ranks=\[0\]$"):
        CALLS[call](cluster, ranks)
    assert cluster.run("kept", ranks=[1, 0, 1]) == [0, 10]


UNREADABLE = """
import gc, time
if rank == 1:
    wire = next(one for one in gc.get_objects() if type(one).__name__ == "RankWire")
    wire._events.send_multipart([b'["Output", {"rank": 1, "cell": "none"}]'])
    time.sleep(60)
"""


@pytest.mark.replaces
def test_a_rank_that_sends_what_cannot_be_read_ends_alone_and_is_named():
    with allranks.Cluster(2) as ranks:
        ranks.run("kept = 10 * rank")
        with pytest.raises(CellFailed) as failed:
            ranks.run(UNREADABLE)
        assert [report.rank for report in failed.value.reports] == [1]
        assert "ended by allranks, because a message" in failed.value.text
        assert ranks.run("kept", ranks=[0]) == [0]
        assert ranks.run("rank") == [0, 1]


#: The first file lets the ranks begin, the second one lets them come up.
TWO_STEPS = """
import os, time
from allranks import collectives
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.01)
def held(*arguments, init=collectives.init, **options):
    wait_for({1!r})
    return init(*arguments, **options)
collectives.init = held
wait_for({0!r})
"""


def test_a_start_tells_how_many_processes_run_and_a_stop_how_to_start_again(monkeypatch, tmp_path):
    begun, may_come = tmp_path / "begun", tmp_path / "may come"
    (tmp_path / "two_steps.py").write_text(TWO_STEPS.format(str(begun), str(may_come)))
    monkeypatch.syspath_prepend(tmp_path)
    running, told = ("starting ranks: 0 of 2 up", 2, 4, ", 2 started"), []

    def show(_, *said):
        told.append(said)
        begun.touch()
        if said == running:
            may_come.touch()

    monkeypatch.setattr(ProgressLine, "show", show)
    with allranks.Cluster(2, preload=["two_steps"]) as stopped:
        pass
    with pytest.raises(ClusterLost, match=r"stopped\. Type: %distributed start .*\.start\(\)"):
        stopped.run("1")
    assert told[0][:3] == ("starting ranks: 0 of 2 up", 0, 4)
    assert running in told
    assert told[-1] == ("starting ranks: 2 of 2 up", 4, 4, "")


def test_a_start_that_is_interrupted_at_once_is_interrupted_and_not_failed(monkeypatch):
    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressLine, "show", press)
    with pytest.raises(KeyboardInterrupt):
        allranks.Cluster(2).start()


def test_a_start_ends_when_each_rank_gets_what_is_sent(monkeypatch):
    """A rank says that it is there by one socket, and gets cells by another one."""
    send, late = RankSockets.send, []

    def refuse_three(self, ranks, record, *payloads):
        if isinstance(record, Query) and len(late) < 3:
            late.append(record)
            return False
        return send(self, ranks, record, *payloads)

    monkeypatch.setattr(RankSockets, "send", refuse_three)
    with allranks.Cluster(2) as started:
        assert len(late) == 3
        assert started.run("rank") == [0, 1]


def test_a_start_that_takes_too_long_advises_fewer_ranks(monkeypatch):
    monkeypatch.setattr(limits, "START_SECONDS", -60)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    with pytest.raises(StartFailed, match=r"1 cores.*Start fewer ranks.*%distributed start -n 1"):
        allranks.Cluster(2).start()


def test_one_rank_may_run_alone_and_what_cannot_be_sent_is_refused(cluster):
    assert cluster.run("kept", ranks=[1]) == [10]
    assert cluster.pull("kept", range(1, 2)) == {1: 10}
    with pytest.raises(UsageError, match="expected a cell's source or a function, found int"):
        cluster.run(3)
    with pytest.raises(UsageError, match="print cannot be sent to the ranks: cannot pickle"):
        cluster.call(print, (threading.Lock(),))
    assert cluster.run("1") == [1] * cluster.size
    cluster.run("class Odd:\n    def __reduce__(self):\n        raise SystemExit(4)")
    with pytest.raises(UsageError, match=r"expected a last expression that can be pickled.*Odd: 4"):
        cluster.run("Odd()")
    assert cluster.run("kept") == [0, 10]


def test_a_function_of_a_module_that_the_ranks_lack_is_refused_by_its_name(
    cluster, tmp_path, monkeypatch
):
    (tmp_path / "only_here.py").write_text("def found():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("only_here").found
    with pytest.raises(CellFailed) as failed:
        cluster.call(function)
    assert "No module named 'only_here'" in failed.value.text
    assert cluster.run("kept") == [0, 10]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5"])
def test_a_time_that_is_none_is_refused(cluster, timeout):
    with pytest.raises(UsageError, match=r"timeout in seconds above 0, found .*timeout=60"):
        cluster.run("1", timeout=timeout)


@pytest.mark.parametrize("n", [2.5, "2", 0, 10**6])
def test_a_number_of_ranks_that_cannot_be_is_refused(n):
    with pytest.raises(UsageError, match=r"expected between 1 and \d+ ranks"):
        allranks.Cluster(n)


def settling(run, seconds=60):
    deadline = time.monotonic() + seconds
    while run.pending and time.monotonic() < deadline:
        run.step(0.1)
    return run


def test_a_rank_whose_own_code_fails_still_hears_and_speaks(cluster, capsys):
    cluster.run(
        "from allranks.engine.telemetry import TelemetrySender\nbegin = TelemetrySender.begin\n"
        "def fails(*_):\n    TelemetrySender.begin = begin\n"
        "    raise RuntimeError('no beginning')\n"
        "if rank: TelemetrySender.begin = fails"
    )
    run = settling(cluster.cells.begin("kept = 'overwritten'"))
    assert run.pending == ()
    with pytest.raises(CellFailed, match="rank 1 of 2: RuntimeError: no beginning"):
        cluster.cells.wait(run)
    assert cluster.run("kept = 10 * rank\nkept") == [0, 10]
    cluster.run(
        "from allranks.engine.telemetry import TelemetrySender\nnews = TelemetrySender.news\n"
        "def fails(*_):\n    TelemetrySender.news = news\n    raise RuntimeError('no news')\n"
        "TelemetrySender.news = fails\nimport time\nend = time.monotonic() + 30\n"
        "while TelemetrySender.news is fails and time.monotonic() < end: time.sleep(0.05)\n"
        "time.sleep(0.5)\nprint('heard')"
    )
    assert cluster.run("kept") == [0, 10]
    # What came late is shown with that cell.
    said = capsys.readouterr().out
    assert "RuntimeError: no news" in said
    assert "heard" in said


def test_tracebacks_and_breakpoints_of_a_program_without_a_notebook(cluster):
    with pytest.raises(CellFailed, match="ranks 0–1 of 2 at line 1: BdbQuit"):
        cluster.run("breakpoint()")
    cluster.run("import sys; sys.settrace(lambda *_: None)")
    assert cluster.run("sys.settrace(None); kept") == [0, 10]
    with pytest.raises(CellFailed) as raised:
        cluster.run("x = 1\nif rank:\n    x / 0")
    printed = "".join(traceback.format_exception(raised.value))
    assert "CellFailed: rank 1 of 2 at line 3: ZeroDivisionError: division by zero" in printed
    assert printed.rstrip().endswith("rank 0 finished the cell.")
    assert "----> 3     x / 0" in printed
    assert "\x1b" not in printed


NO_DESCRIPTORS = """
import os, resource
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))
"""


def test_ranks_that_have_used_up_their_descriptors_send_large_values(cluster):
    cluster.run(NO_DESCRIPTORS)
    run = settling(cluster.cells.begin("str(rank) * 100_000", want_value=True))
    assert run.pending == ()
    assert [each.state for each in cluster.status()] == ["idle", "idle"]
    assert cluster.cells.wait(run).values() == ["0" * 100_000, "1" * 100_000]
    cluster.run("resource.setrlimit(resource.RLIMIT_NOFILE, limits)")
    assert cluster.run("kept") == [0, 10]


BEFOREHAND = """
from allranks.collectives import scope
enter = scope.enter
def fails(*arguments):
    scope.enter = enter
    raise RuntimeError('beforehand')
if rank == 1:
    scope.enter = fails
"""


SENDING = """
from allranks.collectives import world
from allranks.collectives.calls import rank_state as fields
from allranks.engine.cell import CellRunner
notices = CellRunner.notices
def fails(runner):
    CellRunner.notices = notices
    raise RuntimeError('sent')
if rank == 1:
    CellRunner.notices = fails
else:
    while 'had ended' not in world.current().board.text(1, fields.REASON): pass
    allreduce(1)
"""


def test_a_rank_that_fails_before_its_cell_begins_says_that_no_line_has_run(cluster):
    cluster.run(BEFOREHAND)
    with pytest.raises(CellFailed, match=r"^rank 1 of 2: RuntimeError: beforehand") as raised:
        cluster.run("kept = 'changed'\nallreduce(1)")
    assert "no line has run here" in raised.value.text
    assert "type: %distributed restart" in raised.value.text
    assert cluster.run("kept") == ["changed", 10]
    cluster.run("kept = rank * 10")


def test_a_rank_that_fails_after_it_has_left_its_cell_has_left_it_for_the_others(cluster):
    with pytest.raises(CellFailed, match=r"^rank 1 of 2: RuntimeError: sent") as raised:
        cluster.run(SENDING)
    assert "rank 0 was waiting" in raised.value.text
    assert cluster.run("kept") == [0, 10]


def test_a_cell_whose_view_fails_before_it_is_sent_leaves_the_ranks_idle(cluster):
    with pytest.raises(AttributeError, match="notice"):
        cluster.run("1", view=print)
    assert cluster.run("kept") == [0, 10]


def test_a_cell_ends_with_its_ranks_although_others_have_started_since():
    """As a button's callback may start them while the cell is awaited."""
    with allranks.Cluster(1) as cluster:
        run = cluster.cells.begin("import time\ntime.sleep(600)")
        cluster.restart()
        with pytest.raises(CellInterrupted):
            cluster.cells.wait(run)
        assert cluster.run("rank") == [0]


def test_a_view_hears_of_each_rank_that_dies_also_of_the_last(capsys):
    class Left(HiddenView):
        def __init__(self):
            super().__init__(lambda batch: None)
            self.ranks = {}

        def left(self, rank, status):
            self.ranks[rank] = status

    with allranks.Cluster(2) as cluster, pytest.raises(ClusterLost):
        cluster.run("import os\nos._exit(3)", view=(view := Left()))
    assert view.ranks == {0: "lost", 1: "lost"}


def test_a_cell_in_flight_shows_its_output_only_if_the_cluster_does(capsys):
    with allranks.Cluster(1, show_output=False) as cluster:
        cluster.cells.wait(cluster.cells.begin("print('seen')"))
    assert "seen" not in capsys.readouterr().out


def test_ranks_that_have_not_been_started_cannot_be_replaced():
    with pytest.raises(ClusterLost, match="has not been started"):
        allranks.Cluster(2).heal()


def test_parts_of_a_cluster_are_names_of_the_variable_ranks():
    started = []

    class Session:
        running = None

        def cluster(self):
            started.append(1)
            return SimpleNamespace(cells="its cells")

    ranks = RanksProxy(Session())
    assert {"cells", "roster", "run", "size"} <= set(dir(ranks))
    assert not started
    assert ranks.cells == "its cells"


AFTERWARDS = """
from allranks.engine import cell
reply = cell.Reply
def fails(**fields):
    cell.Reply = reply
    raise {}('afterwards')
if rank == 1:
    cell.Reply = fails
else:
    allreduce(1)
"""


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit", "KeyboardInterrupt"])
def test_a_rank_that_fails_when_its_cell_has_ended_replies_all_the_same(cluster, error):
    with pytest.raises(CellFailed, match=rf"^rank 1 of 2: {error}: afterwards") as raised:
        cluster.run(AFTERWARDS.format(error))
    assert "its variables are kept, its value is lost" in raised.value.text
    assert "rank 0 was waiting" in raised.value.text
    assert cluster.run("kept") == [0, 10]


def test_a_rank_sees_no_sockets_of_the_host_agent_whose_numbers_may_be_used_again(cluster):
    found = "[one for one in gc.get_objects() if type(one) is socket.socket]"
    source = f"import gc, socket\nsum(one.family == socket.AF_INET for one in {found})"
    assert cluster.run(source)[1] == 0


def test_cells_go_through_sockets_in_a_folder_of_this_user_alone(cluster):
    listening = psutil.Process().net_connections("inet")
    assert [one for one in listening if one.status == psutil.CONN_LISTEN] == []
    folder = Path(cluster.cells.connection.session_dir)
    assert folder.stat().st_mode & 0o777 == 0o700
    found = [folder / "commands-1", folder / "events-1"]
    assert all(path.is_socket() for path in found)
    visit = """
import socket, sys
for path in sys.argv[1:]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
    except PermissionError:
        print("refused")
    else:
        print("connected")
"""
    said = "refused" if os.getuid() == 0 else "connected"  # without root, there is no other account
    assert run_as_another(visit, *map(str, found)) == [said, said]
    assert cluster.run("kept") == [0, 10]


@pytest.mark.parametrize("part", range(4))
def test_an_interrupt_between_two_parts_of_a_message_harms_no_later_cell(
    cluster, part, monkeypatch
):
    send, sent = zmq.Socket.send, []

    def interrupted(self, *arguments, **options):
        done = send(self, *arguments, **options)
        if threading.current_thread() is threading.main_thread():
            sent.append(part)
            if len(sent) == part + 1:
                signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(zmq.Socket, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.run("1")
    assert len(sent) >= 4  # the cell has gone to both ranks all the same
    monkeypatch.undo()
    assert cluster.run("kept") == [0, 10]
    assert not cluster.roster.busy


def test_a_cell_that_is_left_or_runs_beside_another_harms_none(cluster, tmp_path):
    view = text_view((0, 1), str(tmp_path))

    def refresh():
        raise UnicodeEncodeError("latin-1", "→", 0, 1, "this stream has no such letter")

    view.refresh = refresh
    run = cluster.cells.begin("while True:\n    pass", view=view)
    with pytest.raises(UnicodeEncodeError):
        cluster.cells.wait(run)
    assert cluster.run("kept") == [0, 10]
    go = tmp_path / "go"
    run = cluster.cells.begin(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
        "own = 'kept too'"
    )
    for beside in (lambda: cluster.run("1"), lambda: member_slots(cluster.cells, 1).__enter__()):
        with pytest.raises(UsageError, match=r"found them running a cell.*cluster\.interrupt\(\)"):
            beside()
    go.touch()
    cluster.cells.wait(run)
    assert cluster.run("own") == ["kept too", "kept too"]
    cluster.cells.begin("while True:\n    pass")
    assert cluster.interrupt()

    def runs():
        with suppress(UsageError):
            return cluster.run("kept") == [0, 10]

    wait_until(runs)


def held():
    sessions = Path(tempfile.gettempdir()).glob(f"allranks-session-{os.getpid()}-*")
    return Counter(
        [t.name for t in threading.enumerate() if t.name.startswith("allranks")]
        + ["descriptor" for _ in os.listdir("/proc/self/fd")]
        + [str(session) for session in sessions]
    )


def test_a_notebook_that_is_killed_while_it_starts_ranks_leaves_nothing(tmp_path):
    script = (
        "import os, allranks\nfrom allranks.cluster.host_agent import HostAgentProcess\n"
        "def killed(agent, text):\n"
        "    print(agent.pid, flush=True)\n    os.kill(os.getpid(), 9)\n"
        "HostAgentProcess.say = killed\nallranks.Cluster(2).start()"
    )
    environment = {**os.environ, "ALLRANKS_LOG_DIR": str(tmp_path)}
    with tempfile.TemporaryDirectory() as temporary:  # of a short name, which sockets need
        environment["TMPDIR"] = temporary
        ended = subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert ended.returncode == -signal.SIGKILL
        with suppress(psutil.NoSuchProcess):
            psutil.Process(int(ended.stdout)).wait(60)
        wait_until(
            lambda: os.listdir(temporary) == [], lambda: f"the end of {os.listdir(temporary)}"
        )


def test_a_forked_process_neither_uses_the_ranks_of_its_parent_nor_ends_them(tmp_path):
    script = (
        "import os, sys, allranks\n"
        "with allranks.Cluster(2) as cluster:\n"
        "    cluster.show_output = False\n"
        "    cluster.run('kept = rank')\n"
        "    cluster.submit('import time; time.sleep(2)')\n"
        "    if os.fork() == 0:\n"
        "        try:\n            cluster.run('rank')\n"
        "        except allranks.errors.ClusterLost as error:\n"
        "            print(error, flush=True)\n"
        "        with cluster.start():\n"
        "            print(cluster.submit('size').result(), flush=True)\n"
        "        sys.exit(0)\n"
        "    os.wait()\n"
        "    print(cluster.run('kept'))"
    )
    environment = {**os.environ, "ALLRANKS_LOG_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    said, own, kept = ended.stdout.splitlines()
    assert said.startswith("the ranks are those of the process that has forked this one")
    assert (own, kept, ended.returncode) == ("[2, 2]", "[0, 1]", 0)


def test_a_start_that_takes_too_long_says_where_its_ranks_are(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(
        "import time\nfrom allranks import collectives\nfrom allranks.records import limits\n"
        "def never_up():\n    while True: time.sleep(1)\n"
        "collectives.init, limits.SLOW_START_SECONDS = never_up, 0.5\n"
        # A busy rank is elsewhere the first time.
        "import faulthandler, functools\nfaulthandler.dump_traceback_later = "
        "functools.partial(faulthandler.dump_traceback_later, repeat=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ALLRANKS_LOG_DIR", str(tmp_path / "logs"))

    def monotonic():  # The time is over once both ranks have said where they are.
        logs = (tmp_path / "logs").glob("**/rank-*.log")
        said = [log for log in logs if "in never_up" in log.read_text()]
        return time.monotonic() + 1000 * (len(said) == 2)

    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=monotonic))
    with pytest.raises(StartFailed) as failed:
        allranks.Cluster(2, preload=["slow"]).start()
    assert "ranks 0–1 did not start. No process has ended" in str(failed.value)
    for rank in range(2):
        assert f'Rank {rank} is at File "{tmp_path}/slow.py", line 5 in never_up' in str(
            failed.value
        )


def test_a_start_without_a_process_leaves_nothing(cluster, monkeypatch):
    before = held()

    def refused(*_arguments, **_options):
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(StartFailed, match=r"no more processes.*type: %distributed start"):
        allranks.Cluster(1).start()
    wait_until(lambda: held() <= before, lambda: f"the end of {held() - before}")


def test_a_rank_that_died_is_named_before_very_many_others_are_ended(monkeypatch, capsys):
    monkeypatch.setattr("allranks.cluster.cell_run._MANY_RANKS", 1)
    shown = []
    with allranks.Cluster(2) as cluster:
        cluster.heal_when("off")
        ranks = cluster.cells.connection
        end = ranks.close
        monkeypatch.setattr(
            ranks, "close", lambda *state: (shown.append(capsys.readouterr().out), end(*state))
        )
        with pytest.raises(ClusterLost, match=r"rank 1 .* exit code 3"):
            cluster.run("import os\nif rank == 1: os._exit(3)\nbarrier()")
        with pytest.raises(
            ClusterLost, match=r"To start them again, type: .* of a Cluster: \.start\(\)"
        ):
            cluster.run("rank")
    assert "Rank 1 ended with exit code 3. Killing the others." in shown[0]


def test_a_rank_that_dies_in_a_function_on_ranks_of_its_own_is_not_replaced():
    with pytest.raises(ClusterLost, match=r"rank 1 .* exit code 3"):
        allranks.run(lambda: os._exit(3) if os.environ["RANK"] == "1" else 0, np=2)


def test_an_interrupt_while_the_ranks_are_ended_leaves_nothing(monkeypatch):
    others = psutil.Process().children(recursive=True)
    started = allranks.Cluster(1).start()
    children = set(psutil.Process().children(recursive=True)) - set(others)
    stop = HostAgentProcess.stop

    def interrupted(agent):
        signal.raise_signal(signal.SIGINT)
        stop(agent)

    monkeypatch.setattr(HostAgentProcess, "stop", interrupted)
    started.stop()
    assert children
    assert psutil.wait_procs(children, timeout=60)[1] == []


def agents():
    found = set()
    for one in psutil.Process().children():
        with suppress(psutil.Error):  # one that has ended meanwhile
            # A process that has just begun its program has no arguments for a moment.
            wait_until(one.cmdline)
            found |= {one} if "allranks.agent" in one.cmdline() else set()
    return found


def test_ranks_that_were_launched_start_while_the_program_goes_on():
    before = agents()
    launched = allranks.Cluster(2).launch()
    new = agents() - before
    try:
        assert (launched.state, len(new)) == ("starting", 1)
        with pytest.raises(ClusterLost, match=r"^the ranks are starting\. Type: .*\.start\(\)$"):
            launched.run("rank")
        assert launched.launch().start().run("rank") == [0, 1]
    finally:
        launched.stop()
    launched.launch()
    new |= agents() - before
    stopping = threading.Thread(target=launched.stop)
    stopping.start()
    stopping.join()
    assert len(new) == 2
    assert not any(one.is_running() for one in new)


def test_a_client_is_of_the_engines_of_the_ranks_that_run(monkeypatch):
    monkeypatch.setattr(connection, "CLIENTS_RANKS", 1)
    with allranks.Cluster(2) as cluster:
        pids = cluster.run("import os\nkept = 10 * rank\nos.getpid()")
        threads = "len(os.listdir('/proc/self/task'))"
        before = cluster.run(threads)
        # Many ranks have no controller until a client is asked for.
        log = Path(cluster.log_dir) / "controller.log"
        assert not log.exists()
        client = cluster.client()
        assert client.ids == [0, 1]
        assert log.exists()
        assert client[:].apply_sync(os.getpid) == list(pids)
        # ZeroMQ would end a rank that cannot have more threads.
        assert cluster.run(threads) == before
        assert client[:].pull("kept", block=True) == [0, 10]
        client[:].push({"pushed": "by ipyparallel"})
        assert client[:].pull("pushed", block=True) == 2 * ["by ipyparallel"]
        assert cluster.pull("pushed") == dict.fromkeys(range(2), "by ipyparallel")
        # One that was closed, or whose ranks are gone, is not handed out again.
        with cluster.client() as same:
            assert same is client
        second = cluster.client()
        assert second is not client
        assert second[:].apply_sync(abs, -4) == [4, 4]
        cluster.restart()
        assert cluster.client() is not second
        assert cluster.client().ids == [0, 1]


def test_a_client_that_was_not_ready_is_not_handed_out(cluster, monkeypatch):
    wait, asked = ipyparallel.Client.wait_for_engines, []

    def late(client, *arguments, **options):
        asked.append(client)
        if len(asked) == 1:
            raise TimeoutError("no engines")
        if len(asked) == 2:
            raise KeyboardInterrupt
        return wait(client, *arguments, **options)

    monkeypatch.setattr(ipyparallel.Client, "wait_for_engines", late)
    with pytest.raises(KeyboardInterrupt):
        cluster.client()
    assert cluster.client() is asked[2]
    assert cluster.client().ids == [0, 1]
