"""Restarts, stops, and clusters beside each other."""

from __future__ import annotations

import gc
import os
import signal
import time

import psutil

import allranks
from tests.fuzz.grammar import Act, Draw, Fault, act, statement, statements
from tests.fuzz.in_notebook import InNotebook
from tests.fuzz.sessions import Session

#: What an extension that is loaded anew no longer knows of this session is said again.
_LOAD = "%load_ext allranks\n%distributed heal off\n"


@statement()
def a_restart(draw: Draw) -> Act:
    size = draw.rng.choice((2, 3, 4))
    return Act(lambda session: session.restart(size), lost=True)


@act(lost=True)
def a_death_while_idle(draw: Draw, session: Session) -> None:
    number = draw.rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV))
    pid = session.pids[draw.rank % session.size]
    os.kill(pid, number)
    try:
        psutil.Process(pid).wait(10)
    except psutil.NoSuchProcess:
        pass
    time.sleep(0.5)  # the leader hears of it a moment later
    session.revive()


@act(only="cluster")
def two_clusters(draw: Draw, session: Session) -> None:
    with allranks.Cluster(2) as other:
        found = session.do(lambda: other.run("int(allreduce(rank + 5, Sum))"))
        own = session.do(lambda: session.cluster.run("int(allreduce(rank, Sum))"))
    if found.values != [11, 11] or own.values != [sum(range(session.size))] * session.size:
        raise Fault("two clusters", f"{found} {own}")


@act(only="cluster")
def a_cluster_that_is_dropped(draw: Draw, session: Session) -> None:
    other = allranks.Cluster(1).start()
    pid = other.hellos[0].pid
    del other
    gc.collect()
    try:
        psutil.Process(pid).wait(10)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        raise Fault("left", "a rank of a cluster that was dropped") from None


@act(only="notebook")
def a_second_cluster_in_the_notebook(draw: Draw, session: InNotebook) -> None:
    cell = session.notebook.run(
        "import allranks\nwith allranks.Cluster(2) as _other:\n"
        "    print(_other.run('int(allreduce(rank + 5, Sum))'))"
    )
    if not cell.stdout.endswith("[11, 11]\n"):
        raise Fault("two clusters", cell.text)


@act(only="notebook", lost=True)
def the_extension_is_loaded_again(draw: Draw, session: InNotebook) -> None:
    cell = session.notebook.run(
        f"%unload_ext allranks\n{_LOAD}%distributed start -n {session.size}"
    )
    if cell.status != "ok":
        raise Fault("reload", cell.text)


@act(only="notebook")
def cells_for_the_ranks_by_default(draw: Draw, session: InNotebook) -> None:
    run = session.notebook.run
    run("%distributed on")
    cell = run("kept['rank']")
    run("%distributed off")
    if "rank 0" not in cell.text and "ranks 0" not in cell.text:
        raise Fault("on", cell.text)


@act(only="notebook", soak=True, lost=True)
def the_kernel_is_restarted(draw: Draw, session: InNotebook) -> None:
    notebook = session.notebook
    notebook.restart()
    try:
        notebook.wait_for_no_children(10)
    except TimeoutError as error:
        raise Fault("left", str(error)) from error
    cell = notebook.run(f"{_LOAD}%distributed start -n {session.size}")
    if cell.status != "ok":
        raise Fault("kernel restart", cell.text)


@act(soak=True, lost=True)
def a_helper_process_is_killed(draw: Draw, session: Session) -> None:
    which = draw.rng.choice(("prterun", "allranks.agent"))
    for process in session.leader().children(recursive=True):
        if which in process.cmdline() or which == process.name():
            process.kill()
            break
    else:
        raise Fault("helper", f"expected a process {which}")
    time.sleep(1)
    session.revive()


statements(a_stop=lambda draw: Act(lambda session: session.stop(), lost=True))
