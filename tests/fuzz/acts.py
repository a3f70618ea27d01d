"""What is done to the session itself: what is asked of ranks, idle and busy; restarts; clusters."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

import psutil

import allranks
from allranks.features.ensemble.slots import member_slots
from tests.faults.notebook import GONE_SECONDS, Notebook
from tests.fuzz.grammar import Draw, act, check
from tests.fuzz.sessions import Ended, InNotebook, InProcess, Session
from tests.kernel import WARNINGS_AS_ERRORS

_VALUES = (
    "5",
    "{'a': [1, None, 2.5], 'é': ('漢', b'\\x00')}",
    "'x' * 2_000_000",
    "list(range(1000))",
    "float('inf')",
    "'\\ud83d'",
    "{(1, 2): {3}}",
    "2 ** 4000",
)
_SUM = "int(allreduce(rank + 5, Sum))"
#: What an extension that is loaded anew no longer knows of this session is said again.
_LOAD = "%load_ext allranks\n%distributed heal off\n%distributed start -n {}"


def _must(ended: Ended, how: str, values: object = None) -> None:
    right = ended.how == how and (values is None or ended.values == values)
    found = f"{ended.how} {ended.values!r:.300}\n{ended.text[:2000]}"
    check(right, "talk", f"expected {how} {values!r:.300}, found {found}")


@act(weight=2)
def push_and_pull(draw: Draw, session: Session) -> None:
    expression = draw.rng.choice(_VALUES)
    _must(session.push("_pushed", expression), "ok")
    _must(session.pull("_pushed"), "ok", [eval(expression)] * session.size)


@act()
def push_what_cannot(draw: Draw, session: Session) -> None:
    _must(session.push("_pushed", "__import__('threading').Lock()"), "UsageError")


@act()
def pull_what_cannot(draw: Draw, session: Session) -> None:
    session.cell(
        "import threading; _lock = threading.Lock()\n"
        "class _Exits:\n    def __reduce__(self): raise OSError(4)\n_exits = _Exits()"
    )
    _must(session.pull(draw.rng.choice(("_nowhere", "_lock", "_exits"))), "UsageError")


@act()
def a_pushed_value_that_exits(draw: Draw, session: Session) -> None:
    name = draw.rng.choice(("SystemExit", "KeyboardInterrupt"))
    source = f"type('Exits', (), {{'__reduce__': lambda s: (exec, ('raise {name}',))}})()"
    _must(session.push("_pushed", source), "UsageError")


@act()
def status(draw: Draw, session: Session) -> None:
    _must(session.status(), "ok", [(session.pids[r], "idle") for r in range(session.size)])


@act()
def an_interrupt_while_idle(draw: Draw, session: Session) -> None:
    if isinstance(session, InNotebook):
        session.notebook.interrupt()
        session.notebook.drain(0.1)
    elif isinstance(session, InProcess):
        check(not session.cluster.interrupt(), "talk", "expected no cell to interrupt, found one")


@act(weight=2, only="cluster")
def asked_while_busy(draw: Draw, session: InProcess) -> None:
    cluster, began, go_on = session.cluster, session.folder / "began", session.folder / "go on"
    calls: dict[str, Callable[[], object]] = {
        "push": lambda: cluster.push({"_x": 1}),
        "pull": lambda: cluster.pull("kept"),
        "run": lambda: cluster.run("1"),
        "crew": lambda: member_slots(cluster.cells, 1).__enter__(),
    }
    which = draw.rng.choice((*calls, "status"))

    def both() -> None:
        run = cluster.cells.begin(
            f"open(f'{began}-{{rank}}', 'w').close()\n"
            f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)\nbarrier()"
        )
        while len(list(session.folder.glob("began-*"))) < session.size:
            time.sleep(0.01)
        if which == "status":
            states = [each.state for each in cluster.status()]
            check(states == ["running"] * session.size, "talk", f"expected running, found {states}")
        else:
            _must(session.do(calls[which]), "UsageError")
        go_on.touch()
        cluster.cells.wait(run)

    _must(session.do(both), "ok")
    for left in [go_on, *session.folder.glob("began-*")]:
        left.unlink()


@act(only="cluster")
def a_cell_that_nobody_waits_for(draw: Draw, session: InProcess) -> None:
    session.cluster.cells.begin(draw.rng.choice(("pass", "time.sleep(0.2)", "1 / 0")))
    deadline = time.monotonic() + GONE_SECONDS
    while session.do(lambda: session.cluster.run("1")).how == "UsageError":
        check(time.monotonic() < deadline, "talk", "expected the cell to end, found the ranks busy")
        time.sleep(0.05)


@act(weight=2, only="cluster")
def a_function(draw: Draw, session: InProcess) -> None:
    n, ranks, cluster = draw.rng.randint(0, 99), range(session.size), session.cluster

    def value(x: int) -> int:
        from allranks.collectives import rank

        return rank() * x

    def raises(x: int) -> int:
        return x // 0

    def exits(x: int) -> int:
        raise SystemExit(1 + x)

    function, argument, how, values = draw.rng.choice(
        (
            (value, n, "ok", [r * n for r in ranks]),
            (lambda x: [x] * 3, n, "ok", [[n] * 3 for _ in ranks]),
            (value, threading.Lock(), "UsageError", None),
            (raises, n, "CellFailed", None),
            (exits, n, "CellFailed", None),
        )
    )
    _must(session.do(lambda: cluster.run(function, argument)), how, values)


@act(only="notebook")
def completion(draw: Draw, session: InNotebook) -> None:
    found = session.notebook.complete("%%distributed\nkep")
    check("kept" in found, "talk", f"expected kept among the completions, found {found}")
    tooltip = session.notebook.inspect("%%distributed\nkept")
    check("steps" in tooltip, "talk", "expected kept's value in its tooltip")


@act(only="notebook")
def completion_while_busy(draw: Draw, session: InNotebook) -> None:
    cell = session.notebook.start_on_ranks("time.sleep(0.4); barrier()")
    session.notebook._client.complete("%%distributed\nkep")  # its reply is not waited for
    check(cell.wait(60).status == "ok", "talk", cell.text)


_ENSEMBLE = (
    "%%ensemble x=0:{many}\nimport sys, time\nimport numpy as np\n{more}\n"
    "log(step=0, loss=x)\nresult = {{'x': x, 'w': np.full(9, x)}}"
)


@act(only="notebook")
def an_ensemble(draw: Draw, session: InNotebook) -> None:
    many = draw.rng.randint(1, 12)
    bad = draw.rng.randrange(many)
    fails = (f"if x == {bad}: raise ValueError(x)", f"if x == {bad}: sys.exit(1)\ntime.sleep(0.01)")
    more = draw.rng.choice(("", "allreduce(np.ones(2))", *fails))
    failed = {bad} if more in fails else set()
    ended = session.notebook.run(_ENSEMBLE.format(many=many, more=more), 60)
    shown = session.notebook.run("sorted(m.result['x'] for m in runs.finished), len(runs.failed)")
    found = shown.displays[0]["text/plain"] if shown.displays else shown.text
    session.notebook.run("del runs")  # which gives the memory of its results back
    expected = f"({[x for x in range(many) if x not in failed]},{len(failed)})".replace(" ", "")
    said = f"expected {expected}, found {found}\n{ended.text}"
    check("".join(found.split()) == expected, "ensemble", said)


@act(only="notebook")
def an_interrupted_ensemble(draw: Draw, session: InNotebook) -> None:
    notebook = session.notebook
    cell = notebook.start(_ENSEMBLE.format(many=4000, more="time.sleep(0.02)"))
    cell.wait_for_begin()
    notebook.drain(draw.rng.uniform(0.05, 0.5))
    notebook.interrupt()
    how = cell.wait(60).error_name
    check(how in ("CellInterrupted", "KeyboardInterrupt"), "ensemble", f"interrupted: {cell.text}")
    if how == "CellInterrupted":
        found = notebook.value("all(m.result['x'] == m.number for m in runs.finished)")
        notebook.run("del runs")
        check(found == "True", "ensemble", f"expected right results, found {found}")


@act(only="notebook", soak=True, lost=True)
def an_ensemble_whose_rank_dies(draw: Draw, session: InNotebook) -> None:
    notebook, flag = session.notebook, session.folder / f"died-{draw.step}"
    ended = notebook.run(
        f"%%ensemble x=0:6\nimport os\n"
        f"if x == {draw.rng.randrange(6)} and not os.path.exists({str(flag)!r}):\n"
        f"    open({str(flag)!r}, 'w').close(); os.kill(os.getpid(), 9)\nresult = x",
        90,
    )
    shown = notebook.run("sorted(m.result for m in runs.finished)")
    notebook.run("del runs")
    check("[0, 1, 2, 3, 4, 5]" in shown.text, "ensemble", f"{shown.text}\n{ended.text}")


@act(lost=True)
def a_restart(draw: Draw, session: Session) -> None:
    session.restart(draw.rng.choice((2, 3, 4)))


@act(lost=True)
def a_stop(draw: Draw, session: Session) -> None:
    session.stop()


@act(lost=True)
def a_death_while_idle(draw: Draw, session: Session) -> None:
    rank = draw.rank % session.size
    os.kill(session.pids[rank], draw.rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV)))
    session.hear_of_death(rank)
    session.revive()


@act(soak=True, lost=True)
def a_helper_process_is_killed(draw: Draw, session: Session) -> None:
    which = draw.rng.choice(("prterun", "allranks.agent"))
    for process in session.leader().children(recursive=True):
        if which in process.cmdline() or which == process.name():
            process.kill()
            break
    else:
        check(False, "helper", f"expected a process {which}")
    time.sleep(1)
    session.revive()


@act(only="cluster")
def two_clusters(draw: Draw, session: InProcess) -> None:
    with allranks.Cluster(2) as other:
        _must(session.do(lambda: other.run(_SUM)), "ok", [11, 11])
        total = sum(range(5, 5 + session.size))
        _must(session.do(lambda: session.cluster.run(_SUM)), "ok", [total] * session.size)


@act(only="cluster")
def a_cluster_that_is_dropped(draw: Draw, session: Session) -> None:
    other = allranks.Cluster(1).start()
    pid = other.hellos[0].pid
    del other
    gc.collect()
    with suppress(psutil.Error):
        psutil.Process(pid).wait(GONE_SECONDS)
    check(not psutil.pid_exists(pid), "left", "a rank of a cluster that was dropped")


@act(only="notebook")
def a_second_cluster_in_the_notebook(draw: Draw, session: InNotebook) -> None:
    source = f"import allranks\nwith allranks.Cluster(2) as _other: print(_other.run({_SUM!r}))"
    cell = session.notebook.run(source)
    check(cell.stdout.endswith("[11, 11]\n"), "two clusters", cell.text)


@act(only="notebook", lost=True)
def the_extension_is_loaded_again(draw: Draw, session: InNotebook) -> None:
    cell = session.notebook.run("%unload_ext allranks\n" + _LOAD.format(session.size))
    check(cell.status == "ok", "reload", cell.text)


@act(only="notebook", soak=True, lost=True)
def the_kernel_is_restarted(draw: Draw, session: InNotebook) -> None:
    session.notebook.restart()
    with suppress(TimeoutError):
        session.notebook.wait_for_no_children(GONE_SECONDS)
    left = session.notebook.children()
    check(not left, "left", f"{left}")
    cell = session.notebook.run(_LOAD.format(session.size))
    check(cell.status == "ok", "kernel restart", cell.text)


@act(only="notebook")
def cells_for_the_ranks_by_default(draw: Draw, session: InNotebook) -> None:
    session.notebook.run("%distributed on")
    cell = session.notebook.run("kept['rank']")
    session.notebook.run("%distributed off")
    check("rank 0" in cell.text or "ranks 0" in cell.text, "on", cell.text)


_JOBS: tuple[dict[str, str | None], ...] = (
    {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NODELIST": "node1", "SLURM_NNODES": "1"}
    | {"SLURM_TASKS_PER_NODE": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    {"LSB_JOBID": "7", "LSB_HOSTS": "node1", "LSB_MCPU_HOSTS": "node1 4"},
)
_STRANGE: tuple[dict[str, str | None], ...] = (
    {"HOME": None, "XDG_STATE_HOME": None, "ALLRANKS_LOG_DIR": None},
    {"MPI4PY_RC_INITIALIZE": "0", "MPI4PY_RC_FINALIZE": "0"},
    {"MPI4PY_RC_THREADS": "0", "MPI4PY_RC_RECV_MPROBE": "0"},
    {"PYTHONWARNINGS": WARNINGS_AS_ERRORS},
    {"LANG": "C", "LC_ALL": "C", "TZ": "Mars/Olympus"},
    {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "7"},
    {"PATH": ""},
    {"OMP_NUM_THREADS": "3", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "20"},
)


def _start_in(environment: dict[str, str | None]) -> None:
    added = {name: value for name, value in environment.items() if value is not None}
    with patch.dict(os.environ, added):
        for name in environment.keys() - added:
            os.environ.pop(name, None)
        with allranks.Cluster(2) as other:
            found = other.run("int(allreduce(rank + 1, Sum)), comm.allreduce(1)")
    check(found == [(3, 2)] * 2, "start", f"{environment}: {found}")


@act(only="cluster")
def a_start_inside_a_job_of_a_scheduler(draw: Draw, session: Session) -> None:
    _start_in(draw.rng.choice(_JOBS))


@act(only="cluster")
def a_start_in_a_strange_environment(draw: Draw, session: Session) -> None:
    _start_in(draw.rng.choice(_STRANGE))


@act(only="cluster", soak=True)
def a_start_with_modules(draw: Draw, session: Session) -> None:
    with allranks.Cluster(2, preload=("sqlite3", "decimal")) as other:
        found = other.run("import sys\n'sqlite3' in sys.modules, int(allreduce(rank, Sum))")
    check(found == [(True, 1)] * 2, "start", f"with modules: {found}")


_RANDOM = {
    "numpy": "np.random.random(4).tolist(), np.random.permutation(99).tolist()",
    "pandas": "__import__('pandas').Series(range(9999)).sample(9).tolist()",
    "scipy.stats": "__import__('scipy.stats').stats.norm.rvs(size=4).tolist()",
}
"""Expressions that draw with what a module has made when it was imported."""


@act(only="cluster")
def random_numbers_after_a_preload(draw: Draw, session: InProcess) -> None:
    """No two ranks, and no replacement, draw what another one has drawn."""
    module = draw.rng.choice(sorted(_RANDOM))
    cell = f"import os\nimport numpy as np\n{_RANDOM[module]}"
    with allranks.Cluster(draw.rng.choice((2, 3)), preload=module) as other:
        other.heal_when("on")
        drawn = session.do(lambda: other.run(cell)).values
        dies = f"import os\nif rank == {draw.rank % other.size}: os.kill(os.getpid(), 9)"
        _must(session.do(lambda: other.run(dies)), "RankDied")
        drawn += session.do(lambda: other.run(cell)).values
    different = len(set(map(repr, drawn)))
    check(different == 2 * other.size, "random", f"with {module}: {drawn}")


_VIEW_CALLS = (
    "dv.push({{'_sent': {0}}})",
    "dv.execute('_sent = {0}')",
    "dv.scatter('_sent', [{0}] * len(rc), flatten=True)",
)


@act(only="notebook", soak=True)
def a_view_that_does_not_block(draw: Draw, session: InNotebook) -> None:
    """A cell comes after the calls before it, which have a slow one before them."""
    (folder := session.folder / f"view-{draw.step}").mkdir()
    with Notebook(folder) as notebook:
        notebook.run("%load_ext allranks.px\n%distributed start -n 2\nimport time")
        for number in range(1, 6):
            call = draw.rng.choice(_VIEW_CALLS).format(number)
            notebook.run(f"dv.apply_async(time.sleep, {draw.rng.uniform(0.1, 0.4)})\n{call}")
            cell = notebook.run("%%px\n_sent")
            check(cell.text.endswith(f"ranks 0–1 → {number}\n"), "order", f"{call}: {cell.text}")


_OPPOSITE = """
import tensorflow as tf
import allranks.tensorflow as hvd
tall, wide = tf.Variable(tf.ones([8, 16])), tf.Variable(tf.fill([16, 8], 100.0))
def step(variables):
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in variables])
    return hvd.DistributedGradientTape(tape).gradient(loss, variables)
orders = [[tall, wide], [wide, tall]]
for order in orders: step(order)
"""


@act(only="cluster", soak=True)
def structures_in_opposite_order(draw: Draw, session: InProcess) -> None:
    session.import_here("tensorflow")  # as the exception of the ranks does
    with allranks.Cluster(2, preload="tensorflow") as other:
        _must(session.do(lambda: other.run(_OPPOSITE)), "ok")
        ended = session.do(lambda: other.run("for order in [*orders, orders[rank]]: step(order)"))
    _must(ended, "CellFailed")
    check("CollectiveMismatch" in ended.text, "wrong result", ended.text)


@act()
def doors(draw: Draw, session: Session) -> None:
    """No rank hears anybody who comes by this machine's address in the network."""
    cards = [each for card in psutil.net_if_addrs().values() for each in card]
    for rank, pid in session.pids.items():
        for link in psutil.Process(pid).net_connections("inet"):
            if link.status != psutil.CONN_LISTEN or link.laddr.ip.startswith("127."):
                continue
            # Of the same family: the other one's port of this number may be another process's.
            own = [each.address for each in cards if each.family == link.family]
            for address in own:
                if not address.startswith("127.") and address != "::1":
                    with suppress(OSError):
                        socket.create_connection((address, link.laddr.port), 0.3).close()
                        check(False, "door", f"rank {rank} listens on {link.laddr}")


def _is_not_kept(session: Session, source: str, nbytes: int) -> None:
    """Runs a cell once, so that what is kept of one is kept, and several times more."""

    def memory() -> list[int]:
        return [psutil.Process(pid).memory_info().rss for pid in session.pids.values()]

    session.cell(source)
    before = memory()
    for _ in range(4):
        session.cell(source)
    grown = [after - was for was, after in zip(before, memory(), strict=True)]
    # Half of what would be kept if ranks kept it.
    check(max(grown) <= 2 * nbytes, "memory", f"4 cells of {nbytes} bytes: ranks grew by {grown}")


@act(soak=True)
def output_is_not_kept_in_memory(draw: Draw, session: Session) -> None:
    source = "for _i in range(60_000): print('a line that is {} letters long'.ljust(99, '.'))"
    _is_not_kept(session, source, 6_000_000)


@act()
def failed_cells_do_not_keep_their_frames(draw: Draw, session: Session) -> None:
    source = (
        "def _fails():\n    mine = np.ones(4_000_000)\n    raise ValueError(len(mine))\n_fails()"
    )
    _is_not_kept(session, source, 32_000_000)
