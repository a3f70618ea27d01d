"""Starts in strange environments and with modules, and what ranks keep while they live."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from unittest.mock import patch

import psutil

import allranks
from tests.fuzz.grammar import Act, Case, Draw, Fault, act, statement, statements
from tests.fuzz.in_notebook import InNotebook
from tests.fuzz.in_process import InProcess
from tests.fuzz.sessions import Session
from tests.kernel import WARNINGS_AS_ERRORS

_JOBS = (
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


def _start_in(environment: dict[str, str | None]) -> Act:
    def do(session: Session) -> None:
        del session
        added = {name: value for name, value in environment.items() if value is not None}
        with patch.dict(os.environ, added):
            for name in environment.keys() - added:
                os.environ.pop(name, None)
            with allranks.Cluster(2) as other:
                found = other.run("int(allreduce(rank + 1, Sum)), comm.allreduce(1)")
        if found != [(3, 2)] * 2:
            raise Fault("start", f"{environment}: {found}")

    return Act(do)


@statement(only="cluster")
def a_start_inside_a_job_of_a_scheduler(draw: Draw) -> Act:
    return _start_in(dict(draw.rng.choice(_JOBS)))


@statement(only="cluster")
def a_start_in_a_strange_environment(draw: Draw) -> Act:
    return _start_in(draw.rng.choice(_STRANGE))


@act(only="cluster", soak=True)
def a_start_with_modules(draw: Draw, session: Session) -> None:
    with allranks.Cluster(2, preload=("sqlite3", "decimal")) as other:
        found = other.run("import sys\n'sqlite3' in sys.modules, int(allreduce(rank, Sum))")
    if found != [(True, 1)] * 2:
        raise Fault("start", f"with modules: {found}")


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
    with allranks.Cluster(2, preload="tensorflow") as other:
        if session.do(lambda: other.run(_OPPOSITE)).how != "ok":
            raise Fault("tensorflow", "expected both orders to be right alone")
        ended = session.do(lambda: other.run("for order in [*orders, orders[rank]]: step(order)"))
    if ended.how != "CellFailed" or "CollectiveMismatch" not in ended.text:
        raise Fault("wrong result", f"expected a mismatch, found {ended.how}\n{ended.text}")


def _addresses(family: int) -> list[str]:
    """This machine's addresses of one family but the loopback's."""
    found = [each for card in psutil.net_if_addrs().values() for each in card]
    own = [each.address for each in found if each.family == family]
    return [address for address in own if not address.startswith("127.") and address != "::1"]


@act()
def doors(draw: Draw, session: Session) -> None:
    """No rank hears anybody who comes by this machine's address in the network."""
    for rank, pid in session.pids.items():
        for link in psutil.Process(pid).net_connections("inet"):
            if link.status != psutil.CONN_LISTEN or link.laddr.ip.startswith("127."):
                continue
            # Of the same family: the other one's port of this number may be another process's.
            for address in _addresses(link.family):
                with suppress(OSError):
                    socket.create_connection((address, link.laddr.port), 0.3).close()
                    raise Fault("door", f"rank {rank} listens on {link.laddr}")


_FAILS = """
def _fails():
    mine = np.ones({n})
    raise ValueError(len(mine))
_fails()
"""
_PRINTS = "for _i in range(60_000): print('a line that is {} letters long'.ljust(99, '.'))"


def _kept(source: str, nbytes: int, often: int = 4) -> Act:
    """Runs a cell once, so that what is kept of one is kept, and several times more."""

    def do(session: Session) -> None:
        session.cell(source)
        before = _memory(session)
        for _ in range(often):
            session.cell(source)
        grown = [after - was for was, after in zip(before, _memory(session), strict=True)]
        # Half of what would be kept if ranks kept it.
        if max(grown) > nbytes * often // 2:
            raise Fault("memory", f"ranks grew by {grown} bytes in {often} cells of {nbytes} each")

    return Act(do)


def _memory(session: Session) -> list[int]:
    return [psutil.Process(pid).memory_info().rss for pid in session.pids.values()]


@statement(soak=True)
def output_is_not_kept_in_memory(draw: Draw) -> Act:
    return _kept(_PRINTS, 6_000_000)


@act(only="notebook")
def completion_while_busy(draw: Draw, session: InNotebook) -> None:
    notebook = session.notebook
    cell = notebook.start_on_ranks("time.sleep(0.4); barrier()")
    notebook._client.complete("%%distributed\nkep")  # its reply is not waited for
    if cell.wait(60).status != "ok":
        raise Fault("talk", cell.text)


@act(only="notebook", soak=True, lost=True)
def an_ensemble_whose_rank_dies(draw: Draw, session: InNotebook) -> None:
    bad = draw.rng.randrange(6)
    notebook, flag = session.notebook, session.folder / f"died-{draw.step}"
    body = (
        f"import os\nif x == {bad} and not os.path.exists({str(flag)!r}):\n"
        f"    open({str(flag)!r}, 'w').close(); os.kill(os.getpid(), 9)\nresult = x"
    )
    ended = notebook.run(f"%%ensemble x=0:6\n{body}", 90)
    shown = notebook.run("sorted(m.result for m in runs.finished)")
    notebook.run("del runs")
    if "[0, 1, 2, 3, 4, 5]" not in shown.text:
        raise Fault("ensemble", f"{shown.text}\n{ended.text}")


statements(
    failed_cells_do_not_keep_their_frames=lambda draw: _kept(
        _FAILS.format(n=4_000_000), 32_000_000
    ),
    asynchronous_calls_in_the_timings=lambda draw: Case(
        "_before, _began = len(records()), time.monotonic()\n"
        "_h = [allreduce_async(np.ones(2000)) for _i in range(100)]\n"
        "time.sleep(0.2)\nfor _each in _h: synchronize(_each)\n"
        "_spent = time.monotonic() - _began\n"
        "_summed = sum(r.wait_seconds + r.transfer_seconds for r in records()[_before:])\n"
        "assert 0 <= _summed <= _spent, WrongResult(f'{_summed} of {_spent}')"
    ),
)
