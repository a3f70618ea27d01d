"""Scripts about deaths, each on ranks of Open MPI with their host agent, and on the models of both.

On both, the notebook's side, the relay and the host agent are the real code, with one host, as for
several hosts. A script observes the events that reach the notebook, of each rank in order.

    python -m tests.simulated.mpi_scripts real|model     reads names of scripts, a line each, and
                                                         writes a line of JSON for each
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from tests.held import held

SIZE = 3
SPARES = 6
#: The most that a script uses.
_MOST = 3
#: Of virtual time, for a script on the model.
_LIMIT_SECONDS = 3600.0
_EVENTS = ("admitted", "exit", "replaces", "launcher_exit", "agent_exit", "host_left")

Script = Callable[["Stage"], Any]
SCRIPTS: dict[str, Script] = {}


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


class View:
    """Calls ``act`` once, when these ranks have shown a line."""

    def __init__(self, ranks: Collection[int], act: Callable[[], object]) -> None:
        self._missing, self._act = set(ranks), act
        self.left_ranks: dict[int, str] = {}

    def output(self, batch: Any) -> None:
        if batch.rank in self._missing:
            self._missing.remove(batch.rank)
            if not self._missing:
                self._act()

    def left(self, rank: int, status: str) -> None:
        self.left_ranks.setdefault(rank, status)

    def telemetry(self, record: Any, payloads: Any) -> None: ...
    def notice(self, text: str) -> None: ...
    def make_way(self) -> None: ...
    def name_cause(self, text: str) -> None: ...
    def refresh(self) -> None: ...
    def finish(self) -> None: ...


class Stage:
    """A notebook with ranks on one host."""

    cluster: Any

    def __init__(self) -> None:
        # Not before: a simulation replaces modules that these import.
        from allranks.cluster import features
        from allranks.features.heal.notebook import NotebookHeal
        from allranks.features.hosts.notebook import NotebookHosts

        features.register([NotebookHeal, NotebookHosts])
        self._seen: list[tuple[int, str]] = []

    def record(self, event: Any) -> None:
        """Takes each event that reaches the notebook."""
        name, fields = getattr(event, "name", ""), getattr(event, "fields", {})
        record = getattr(event, "record", None)
        kind = type(record).__name__
        if name in _EVENTS:
            said = name
            if name == "exit":
                said = f"exit {fields['code']}" + " by its launcher" * fields["by_launcher"]
            self._seen.append((fields.get("rank", -1), said))
        elif kind == "Hello":
            self._seen.append((record.rank, "hello"))
        elif kind == "Reply":
            self._seen.append((record.rank, f"reply {record.status}"))

    def seen(self) -> dict[str, list[str]]:
        """Returns the events since the last call, of each rank, and of the host."""
        found: dict[str, list[str]] = {}
        for rank, event in self._seen:
            found.setdefault(f"rank {rank}" if rank >= 0 else "host", []).append(event)
        self._seen.clear()
        return dict(sorted(found.items()))

    def lose_spare(self) -> None:
        """Kills a spare process between cells, until the notebook has heard of it."""
        (agents,) = self.cluster.cells.connection._agents
        before = sum(map(len, agents._spares_on.values()))
        self.kill_spare()
        while sum(map(len, agents._spares_on.values())) == before:
            self.cluster.cells.connection.step(0.05)

    def cell(
        self,
        reduces: bool = False,
        late: Collection[int] = (),
        act: Callable[[], object] = lambda: None,
    ) -> Any:
        """Runs a cell; ``late`` ranks would not end it. Returns how it ended, and each rank.

        ``act`` is called when all others have shown a line.
        """
        view = View(set(range(SIZE)) - set(late), act)
        try:
            self.cluster.run(self.source(reduces, late), view=view)
        except Exception as error:
            how = type(error).__name__
        else:
            how = "ok"
        return how, {str(rank): status for rank, status in sorted(view.left_ranks.items())}

    def source(self, reduces: bool, late: Collection[int]) -> str:
        raise NotImplementedError

    def values(self) -> list[Any]:
        """Returns which ranks have the variable that the cells before have set."""
        raise NotImplementedError

    def kill(self, *ranks: int) -> None:
        """Kills the processes of ranks, and returns once they have ended."""
        raise NotImplementedError

    def kill_spare(self) -> None:
        """Kills a spare process."""
        raise NotImplementedError

    def kill_program(self, name: str) -> None:
        """Kills the ``relay``, the ``agent`` or ``mpiexec``."""
        raise NotImplementedError

    @contextmanager
    def hold(self, where: str, act: Callable[[], object]) -> Iterator[None]:
        """Within, the next new rank that comes there goes on once ``act`` has been called.

        ``join``: it has been told its rank. ``joined``: all others wait for it to agree.
        """
        raise NotImplementedError
        yield

    def kill_held(self) -> None:
        """Kills the process that is held."""
        raise NotImplementedError

    def lose(self, *ranks: int) -> None:
        """Kills ranks between cells, until the notebook has heard of it."""
        self.kill(*ranks)
        while not set(ranks) <= set(self.cluster.roster.dead) and self.cluster.state == "running":
            self.cluster.cells.connection.step(0.05)

    def end(self) -> Any:
        """Returns what is true at the end, with a cell that needs all ranks."""
        if self.cluster.state != "running":
            return self.seen(), self.cluster.state
        seen, values = self.seen(), self.values()
        found = seen, values, self.cell(reduces=True)
        self.seen()
        return found


# Deaths between cells.
@script
def a_death_between_cells(stage: Stage) -> Any:
    stage.lose(1)
    return stage.cell(), stage.end()


@script
def the_death_of_the_first_rank_between_cells(stage: Stage) -> Any:
    stage.lose(0)
    return stage.cell(), stage.end()


@script
def two_deaths_between_cells(stage: Stage) -> Any:
    stage.lose(0, 2)
    return stage.cell(), stage.end()


@script
def three_deaths_one_after_the_other(stage: Stage) -> Any:
    seen = []
    for _ in range(3):
        stage.lose(1)
        stage.cell()
        seen.append(stage.seen())
    return seen, stage.end()


@script
def a_death_that_is_to_be_healed_on_demand(stage: Stage) -> Any:
    stage.cluster.heal_when("ask")
    stage.lose(1)
    found = stage.cell()
    stage.cluster.heal()
    stage.cluster.heal_when("on")
    return found, stage.end()


# Deaths in a cell.
@script
def a_death_in_a_cell_in_which_no_rank_waits(stage: Stage) -> Any:
    return stage.cell(late=[1], act=lambda: stage.kill(1)), stage.end()


@script
def a_death_in_a_cell_in_which_the_others_wait(stage: Stage) -> Any:
    return stage.cell(True, late=[1], act=lambda: stage.kill(1)), stage.end()


@script
def the_death_of_the_first_rank_in_a_cell_in_which_the_others_wait(stage: Stage) -> Any:
    return stage.cell(True, late=[0], act=lambda: stage.kill(0)), stage.end()


@script
def two_deaths_in_a_cell_in_which_the_other_waits(stage: Stage) -> Any:
    return stage.cell(True, late=[0, 1], act=lambda: stage.kill(0, 1)), stage.end()


@script
def the_death_of_a_rank_that_waits_while_another_is_late(stage: Stage) -> Any:
    def act() -> None:
        stage.kill(2)
        stage.kill(1)

    return stage.cell(True, late=[1], act=act), stage.end()


# Deaths while a rank is replaced.
@script
def a_death_while_a_new_rank_has_not_joined(stage: Stage) -> Any:
    stage.lose(1)
    with stage.hold("join", lambda: stage.kill(2)):
        found = stage.cell()
    return found, stage.end()[1:]  # as below


@script
def the_death_of_a_new_rank_before_it_joins(stage: Stage) -> Any:
    stage.lose(1)
    with stage.hold("join", stage.kill_held):
        found = stage.cell()
    # Without the events: Open MPI may crash in another process, which is replaced as well, and a
    # new process may be replaced before or after it has joined.
    return found, stage.end()[1:]


@script
def a_death_during_the_agreement(stage: Stage) -> Any:
    stage.lose(1)
    with stage.hold("joined", lambda: stage.kill(2)):
        found = stage.cell()
    return found, stage.end()[1:]  # as above


@script
def the_death_of_the_first_rank_during_the_agreement(stage: Stage) -> Any:
    stage.lose(1)
    with stage.hold("joined", lambda: stage.kill(0)):
        found = stage.cell()
    return found, stage.end()[1:]  # as above


@script
def the_death_of_a_new_rank_during_the_agreement(stage: Stage) -> Any:
    stage.lose(1)
    with stage.hold("joined", stage.kill_held):
        found = stage.cell()
    return found, stage.end()[1:]  # as above


@script
def the_death_of_both_others_during_the_agreement(stage: Stage) -> Any:
    stage.lose(1)
    with stage.hold("joined", lambda: stage.kill(0, 2)):
        found = stage.cell()
    return found, stage.end()


@script
def a_late_hello(stage: Stage) -> Any:
    """The new rank is late, and no process dies: the notebook waits for its hello."""
    stage.lose(1)
    with stage.hold("joined", lambda: None):
        found = stage.cell()
    return found, stage.end()


@script
def a_late_hello_after_a_death_in_a_cell(stage: Stage) -> Any:
    with stage.hold("join", lambda: None):
        found = stage.cell(True, late=[2], act=lambda: stage.kill(2))
    return found, stage.end()


# Deaths of spare processes.
@script
def the_death_of_a_spare_process_between_cells(stage: Stage) -> Any:
    stage.lose_spare()
    return stage.end()


@script
def the_death_of_a_spare_process_in_a_cell(stage: Stage) -> Any:
    return stage.cell(True, act=stage.kill_spare), stage.end()


@script
def the_death_of_a_spare_process_and_then_of_a_rank(stage: Stage) -> Any:
    stage.lose_spare()
    stage.lose(2)
    return stage.cell(), stage.end()


@script
def the_death_of_a_spare_process_during_the_agreement(stage: Stage) -> Any:
    stage.lose(1)
    with stage.hold("joined", stage.kill_spare):
        found = stage.cell()
    return found, stage.end()


# What costs all ranks.
@script
def a_start(stage: Stage) -> Any:
    stage.cluster.stop()
    stage.seen()
    stage.cluster.start()
    return stage.end()


@script
def a_death_where_none_is_replaced(stage: Stage) -> Any:
    stage.cluster.heal_when("off")
    try:
        found = stage.cell(True, late=[1], act=lambda: stage.kill(1))
    finally:
        stage.cluster.heal_when("on")
    return found, stage.cluster.state


@script
def the_death_of_all_ranks(stage: Stage) -> Any:
    found = stage.cell(True, late=[1], act=lambda: stage.kill(0, 1, 2))
    return found, stage.cluster.state


@script
def the_death_of_the_launcher_in_a_cell(stage: Stage) -> Any:
    found = stage.cell(True, late=[1], act=lambda: stage.kill_program("mpiexec"))
    return found, stage.cluster.state


@script
def the_death_of_the_agent_in_a_cell(stage: Stage) -> Any:
    found = stage.cell(True, late=[1], act=lambda: stage.kill_program("agent"))
    return found, stage.cluster.state


@script
def the_death_of_the_relay_in_a_cell(stage: Stage) -> Any:
    found = stage.cell(True, late=[1], act=lambda: stage.kill_program("relay"))
    return found, stage.cluster.state


# Real ranks.
class RealStage(Stage):
    def __init__(self, holds: Path) -> None:
        import psutil

        from allranks.cluster import cluster, sockets
        from allranks.cluster.launchers.command import CommandLauncher
        from allranks.features.heal import recovery
        from allranks.records import limits

        super().__init__()
        # The scripts are of events: a machine that has much to do may take its time for each. Open
        # MPI may wait without end after a death, and then this limit has to end before the test's.
        recovery._REPLACE_SECONDS = recovery._START_SECONDS = limits.START_SECONDS = 200.0
        self._psutil, self._holds = psutil, holds
        self._spares = 0

        class HereLauncher(CommandLauncher):
            name = "here"
            reach = "sh -c {command}"

        put = sockets.EventQueue.put

        def recorded(queue: Any, event: Any) -> None:
            self.record(event)
            put(queue, event)

        sockets.EventQueue.put = recorded  # type: ignore[method-assign]
        cluster.launchers.named = lambda text: HereLauncher(f"localhost:{SIZE}")  # type: ignore[assignment]
        self.cluster = cluster.Cluster(launcher="here", show_output=False)

    def ready(self) -> None:
        """Has ranks that have run a cell, and enough spare processes for a script."""
        if self.cluster.state == "running" and len(self._processes("spare")) < _MOST:
            self.cluster.stop()
        if self.cluster.state != "running":
            self.cluster.start()
        self.cell()
        self.seen()

    def source(self, reduces: bool, late: Collection[int]) -> str:
        return (
            f"print('line', flush=True)\nif rank in {list(late)}:\n    import time\n"
            f"    time.sleep(3600)\nif {reduces}:\n    allreduce(1.0)\nx = True"
        )

    def values(self) -> list[Any]:
        return list(self.cluster.run("'x' in globals()"))

    def _processes(self, name: str) -> list[Any]:
        found = []
        for each in self._psutil.Process().children(recursive=True):
            with suppress(self._psutil.Error, OSError):
                line = " ".join(each.cmdline())
                log = os.path.basename(os.readlink(f"/proc/{each.pid}/fd/2"))
                programs = {
                    "relay": line.endswith("allranks.relay") and "sh -c" not in line,
                    "agent": line.endswith("-m allranks.agent") and log.startswith("host-agent"),
                    # mpiexec runs as this program.
                    "mpiexec": os.path.basename(line.partition(" ")[0]) == "prterun",
                    "spare": log.startswith("spare-"),
                }
                if programs[name]:
                    found.append(each)
        return found

    def _end(self, processes: Collection[Any]) -> None:
        for each in processes:
            each.kill()
        self._psutil.wait_procs(processes)

    def kill(self, *ranks: int) -> None:
        hellos = self.cluster.hellos
        self._end([self._psutil.Process(hellos[rank].pid) for rank in ranks])

    def kill_spare(self) -> None:
        self._end(self._processes("spare")[-1:])

    def kill_program(self, name: str) -> None:
        self._end(self._processes(name)[:1])

    def hold(self, where: str, act: Callable[[], object]) -> AbstractContextManager[None]:
        return held(self._holds, where, act)

    def kill_held(self) -> None:
        while True:  # the pipe is among its files a moment after it is opened
            for process in self._psutil.Process().children(recursive=True):
                with suppress(OSError):
                    for link in Path(f"/proc/{process.pid}/fd").iterdir():
                        if os.path.islink(link) and str(self._holds) in os.readlink(link):
                            self._end([process])
                            return


# The model.
class ModelStage(Stage):
    _STEPS: ClassVar = {"join": "join", "joined": "agree"}

    def __init__(self, world: Any) -> None:
        super().__init__()
        self._world = world

    def ready(self) -> None:
        from allranks.cluster import cluster
        from tests.simulated import production

        cluster.launchers.named = lambda text: production.launcher(self._world)  # type: ignore[assignment]
        self.cluster = cluster.Cluster(SIZE, gpus="none", launcher="simulated", show_output=False)
        self.cluster.start()
        self.cell()
        self.seen()

    def source(self, reduces: bool, late: Collection[int]) -> str:
        kind = "reduce" if reduces else "work"
        return repr({"kind": kind, "seconds": 0.02, "lines": 2, "sets": 1, "late": [*late]})

    def values(self) -> list[Any]:
        found = ["x" in self._world.rank(rank).vars for rank in range(SIZE)]
        self.cell()  # as where the ranks are asked for it
        return found

    def _end(self, processes: Collection[Any]) -> None:
        for process in processes:
            process.signal(signal.SIGKILL)

    def kill(self, *ranks: int) -> None:
        self._end([self._world.rank(rank).p for rank in ranks])

    def kill_spare(self) -> None:
        self._end(self._world.find("spare")[-1:])

    def kill_program(self, name: str) -> None:
        self._end(self._world.find(name)[:1])

    @contextmanager
    def hold(self, where: str, act: Callable[[], object]) -> Iterator[None]:
        came = []

        def reached() -> None:
            came.append(where)
            act()

        self._world.when(self._STEPS[where], reached, 0.0)
        yield
        assert came, f"expected a new rank at {where}, found none"

    def kill_held(self) -> None:
        self._end([self._world.jobs[-1].joining])


def _answer(name: str, run: Callable[[], Any]) -> None:
    try:
        answer = {"found": run()}
    except Exception as error:
        answer = {"problem": f"{type(error).__name__}: {error}"}
    print(json.dumps({"script": name, **answer}), flush=True)


def run_real(names: Iterable[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ALLRANKS_HOLDS"] = folder
        stage = RealStage(Path(folder))

        def run(name: str) -> Any:
            stage.ready()
            return SCRIPTS[name](stage)

        try:
            for name in names:
                _answer(name, partial(run, name))
        finally:
            stage.cluster.stop()


def run_on_model(names: Iterable[str], seed: int = 1) -> None:
    for name in names:
        if os.fork() == 0:  # so that no world depends on the one before
            _answer(name, partial(_on_model, SCRIPTS[name], seed))
            os._exit(0)
        os.wait()


def _on_model(script: Script, seed: int) -> Any:
    from tests.simulated import system

    system.install()  # before anything imports the modules of allranks that are simulated
    from tests.simulated import production  # noqa: F401  # isort: skip
    from allranks.cluster import sockets  # isort: skip
    from tests.simulated.chaos import NOTEBOOKS_HOST, ClusterWorld
    from tests.simulated.kernel import File

    world = ClusterWorld(seed, hosts=1, ranks=SIZE)
    stage = ModelStage(world)
    found: list[Any] = []
    ended = [False]
    put = sockets.EventQueue.put

    def recorded(queue: Any, event: Any) -> None:
        stage.record(event)
        put(queue, event)

    sockets.EventQueue.put = recorded  # type: ignore[method-assign]

    def main() -> None:
        try:
            stage.ready()
            found.append(script(stage))
        finally:
            ended[0] = True

    files = {number: File() for number in range(3)}
    world.spawn("notebook", world.hosts[NOTEBOOKS_HOST], main, None, files, {})
    problem = world.run(lambda: ended[0], _LIMIT_SECONDS)
    world.over = True
    if not found:
        raise RuntimeError(problem or "\n".join(text for *_, text in world.crashes))
    return found[0]


if __name__ == "__main__":
    os.environ["ALLRANKS_SPARES"] = str(SPARES)
    names = iter(sys.stdin.readline, "")
    (run_real if sys.argv[1] == "real" else run_on_model)(name.strip() for name in names)
