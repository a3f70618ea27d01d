"""One world of allranks: a notebook's machine, hosts with ranks, and their faults."""

from __future__ import annotations

import random
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.simulated import models, zeromq
from tests.simulated.kernel import Host, Process, Thread, World

#: Virtual time begins here; what is printed counts from it.
BEGIN = 1000.0
#: The notebook's machine. The others are ``h1``, ``h2``, …
NOTEBOOKS_HOST = "nb"
_FOR_EVER_SECONDS = 1e6
#: After these, a host may be called lost.
_LATE_SECONDS = 2.0


@dataclass(frozen=True)
class Fault:
    """A fault of a plan: ``after`` seconds after its cell has begun, or after a step is reached.

    ``when`` is the number of the cell (0: the start), or the name of a step. ``pick`` decides which
    rank or host it hits, and for how long: so a plan from which others are left out stays the same.
    """

    when: int | str
    kind: str
    after: float
    pick: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class ClusterWorld(World):
    """Hosts with ranks, and a machine with notebooks. ``plan`` holds faults to come.

    Three streams of random numbers keep runs comparable: what cells do (``work``), which faults
    come (``chance``), and how the system schedules (``rng``).
    """

    def __init__(
        self, seed: int, hosts: int, ranks: int, plan: Sequence[Fault] = (), preempt: float = 0.0
    ) -> None:
        super().__init__(seed, preempt)
        self.size = max(1, hosts) * ranks
        self.work, self.chance = random.Random(f"work{seed}"), random.Random(f"chance{seed}")
        self.plan = list(plan)
        #: The hosts with ranks, and how many each has; with no host, they are the notebook's.
        self.places = [(f"h{number + 1}", ranks) for number in range(hosts)]
        for number, name in enumerate([NOTEBOOKS_HOST, *self.host_names]):
            self.hosts[name] = Host(name, f"10.0.0.{number + 1}")
        self.is_one_machine = not self.places
        self.places = self.places or [(NOTEBOOKS_HOST, ranks)]
        self.jobs: list[models.Job] = []
        #: Until when a host stands still.
        self.still: dict[str, float] = {}
        #: What was found to be wrong.
        self.wrong: list[str] = []
        #: The faults that have happened: when, and what.
        self.faults: list[tuple[float, str]] = []
        self.notebooks: list[Any] = []
        self._steps: defaultdict[str, list[tuple[float | None, Callable[[], object]]]]
        self._steps = defaultdict(list)
        for fault in self.plan:
            if isinstance(fault.when, str):
                self.when(fault.when, lambda fault=fault: self.play(fault), fault.after)
        self._ran: dict[tuple[int, int, int], int] = {}
        self._epochs: dict[tuple[int, int], int] = {}
        #: The variables that ranks have kept on other hosts.
        self.kept: dict[int, dict[str, int]] = {}
        self._models: defaultdict[int, list[models.Rank]] = defaultdict(list)
        #: Where processes of each rank have died.
        self._deaths: defaultdict[int, set[str]] = defaultdict(set)
        #: Hosts that may be called lost, because of what has happened to them.
        self._troubled: set[str] = set()

    @property
    def host_names(self) -> list[str]:
        return [name for name, _ in self.places]

    @property
    def notebook(self) -> Any:
        """The notebook that was opened last."""
        return self.notebooks[-1]

    def new_notebook(self) -> Any:
        """Opens another notebook on the same machine."""
        return type(self.notebook)(self, self.notebook)

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, in a scenario."""
        self.block(lambda: False, [], seconds)

    def seconds(self) -> float:
        """Returns the time since the beginning."""
        return round(self.now - BEGIN, 3)

    # Steps.

    def when(self, step: str, action: Callable[[], object], after: float | None = None) -> None:
        """Calls ``action`` once, when the step is reached next and ``after`` more seconds, by
        default up to 0.6 s.

        Steps are requests of ranks (``heal``; see `allranks.records.requests`), the beginning of
        a cell on a rank (``run``), the events of host agents (``agent admitted``), ``relay of h1
        begins``, ``relay of h1 listens`` for ranks, also those of another notebook, ``join`` and
        ``agree`` where a spare process becomes a rank, ``listens`` in the test of the network, and
        ``heal sent to one rank`` in the notebook.
        """
        self._steps[step].append((after, action))

    def awaits(self, step: str) -> bool:
        """Whether something happens when the step is reached next."""
        return bool(self._steps.get(step))

    def trigger(self, step: str) -> None:
        """A process has reached a step."""
        for after, action in self._steps.pop(step, ()):
            self.after(self.chance.uniform(0, 0.6) if after is None else after, action)

    def begin_cell(self, number: int) -> None:
        """The cell of this number begins; 0 is the start."""
        for fault in self.plan:
            if fault.when == number:
                self.after(fault.after, self.play, fault)

    # What models of ranks report.

    def serving(self, model: models.Rank) -> None:
        self._models[model.rank].append(model)
        model.p.on_death.append(lambda p: self._deaths[model.rank].add(p.host.name))

    def runs(self, model: models.Rank, cell: int) -> None:
        """A process runs a cell: no other process may run it as the same rank."""
        first = self._ran.setdefault((model.rank, cell, len(self.notebooks)), model.p.pid)
        if first != model.p.pid:
            self.wrong.append(
                f"two processes run cell {cell} as rank {model.rank}: {first} and {model.p.pid}"
            )

    def begins_in(self, model: models.Rank, cell: int, epoch: int, is_dirty: bool) -> None:
        """A rank begins a cell: in the epoch of all others, which no cell has left unfinished."""
        first = self._epochs.setdefault((cell, len(self.notebooks)), epoch)
        if first != epoch or is_dirty:
            what = f"epoch {epoch}{', left unfinished' if is_dirty else ''}"
            self.wrong.append(f"rank {model.rank} runs cell {cell} in {what}; others in {first}")

    def rank(self, number: int) -> models.Rank | None:
        """Returns the living process of a rank."""
        found = [model for model in self._models[number] if model.p.alive]
        return found[-1] if found else None

    def processes_of(self, number: int) -> int:
        """Returns how many processes have been this rank."""
        return len(self._models[number])

    def find(self, name: str, host: str = "") -> list[Process]:
        """Returns the living processes of a name."""
        return [
            p
            for p in self.procs.values()
            if p.alive and p.name == name and (not host or p.host.name == host)
        ]

    def left(self) -> list[Process]:
        """Returns the processes that must end with the ranks."""
        return [
            p
            for p in self.procs.values()
            if p.alive and p.name not in ("notebook", "ssh", "scenario")
        ]

    def shared_files_of_the_dead(self) -> list[Process]:
        """Returns the processes that have ended, and whose files in shared memory are left."""
        return [
            p
            for p in self.procs.values()
            if not p.alive and models.SHARED.format(p.pid) in p.host.files
        ]

    # What a report may say.

    def may_have_died(self, rank: int, host: str) -> bool:
        """Whether it is right to say that this rank has died on this host."""
        return host in self._deaths[rank] or host in self._troubled

    def may_be_lost(self, host: str) -> bool:
        """Whether it is right to say that this host is lost."""
        return host in self._troubled

    # Faults.

    def play(self, fault: Fault) -> None:
        """Makes a fault of a plan happen."""
        self.fault(fault.kind, random.Random(fault.pick))

    def fault(self, kind: str, rng: random.Random | None = None) -> None:
        """Makes a fault of this kind happen (see `FAULTS`)."""
        FAULTS[kind](self, self.chance if rng is None else rng)

    def note(self, text: str) -> None:
        """Records that a fault has happened."""
        self.faults.append((self.seconds(), text))
        self.log("FAULT", text)

    def any_host(self, rng: random.Random) -> str:
        return rng.choice(self.host_names)

    def kill_rank(self, number: int) -> None:
        if model := self.rank(number):
            self.note(f"rank {number} on {model.p.host.name} is killed")
            model.p.signal(signal.SIGKILL)

    def kill_on(self, host: str, name: str) -> None:
        """Kills the processes of a name on a host."""
        self.note(f"the {name} of {host} is killed")
        self._troubled.add(host)
        for process in self.find(name, host):
            process.signal(signal.SIGKILL)

    def stall(self, host: str, name: str, seconds: float) -> None:
        """Makes processes stand still."""
        self.note(f"the {name} of {host} stands still for {seconds:g} s")
        self._may_be_late(host, seconds)
        for process in self.find(name, host):
            process.freeze(seconds)

    def kill_host(self, host: str, seconds: float = _FOR_EVER_SECONDS) -> None:
        """A host loses power: nothing there runs any more, and nobody is told. It may return."""
        self.note(f"host {host} loses power")
        self._troubled.add(host)
        for other in self.hosts:
            if other != host:
                self.partition(host, other, seconds)
        for process in list(self.procs.values()):
            if process.alive and process.host.name == host:
                process.die(-signal.SIGKILL)

    def stall_host(self, host: str, seconds: float) -> None:
        """A whole host stands still, and does not answer the network."""
        self.note(f"host {host} stands still for {seconds:g} s")
        self._may_be_late(host, seconds)
        self.still[host] = self.now + seconds
        for process in list(self.procs.values()):
            if process.alive and process.host.name == host:
                process.freeze(seconds)
        for other in self.hosts:
            if other != host:
                self.partition(host, other, seconds)

    def cut_off(self, host: str, seconds: float, others: bool = False) -> None:
        """Interrupts the network between a host and the notebook, or all ``others``."""
        self.note(f"{host} is cut off for {seconds:g} s")
        self._may_be_late(host, seconds)
        for other in self.hosts if others else (NOTEBOOKS_HOST,):
            if other != host:
                self.partition(host, other, seconds)

    def reset(self, host: str) -> None:
        """Resets the connections of a host: what is on the way is lost."""
        self.note(f"the connections of {host} are reset")
        for one in self.all_sockets():
            is_up = one.conn is not None and one.conn.up and one.url.startswith("tcp")
            if is_up and one.proc.host.name == host:
                one.conn.flight = [[], []]
                one.conn.break_client()

    def stall_notebook(self, seconds: float) -> None:
        self.note(f"the notebook stands still for {seconds:g} s")
        self._troubled.update(self.host_names if seconds > _LATE_SECONDS else ())
        self.notebook.process.freeze(seconds)
        zeromq.on_frozen_server(self, self.notebook.process, seconds)

    def flood(self, host: str) -> None:
        """MPI's launcher writes more than a pipe holds, while nobody reads, and a rank dies."""
        self.note(f"mpiexec writes much on {host}, whose relay stands still for 2 s")
        self._may_be_late(host, 2.0)
        for process in self.find("relay", host):
            process.freeze(2.0)
        for process in self.find("mpiexec", host):
            Thread(process, lambda p=process: p.fds[1].write(b"x" * 150_000, p), "flood")
        there = [r for r in range(self.size) if (m := self.rank(r)) and m.p.host.name == host]
        self.after(0.3, self.kill_rank, self.chance.choice(there))

    def _may_be_late(self, host: str, seconds: float) -> None:
        if seconds > _LATE_SECONDS:
            self._troubled.add(host)


def _kill_a_spare(world: ClusterWorld, rng: random.Random) -> None:
    if found := world.find("spare"):
        process = rng.choice(found)
        world.note(f"a spare process on {process.host.name} is killed")
        process.signal(signal.SIGKILL)


def _stall_a_rank(world: ClusterWorld, rng: random.Random) -> None:
    number, seconds = rng.randrange(world.size), rng.choice([0.5, 2, 5])
    if model := world.rank(number):
        world.note(f"rank {number} stands still for {seconds:g} s")
        model.p.freeze(seconds)


#: The kinds of faults. Each takes the world and random numbers.
FAULTS: dict[str, Callable[[ClusterWorld, random.Random], object]] = {
    "kill_rank": lambda w, rng: w.kill_rank(rng.randrange(w.size)),
    "stall_rank": _stall_a_rank,
    "kill_spare": _kill_a_spare,
    "kill_agent": lambda w, rng: w.kill_on(w.any_host(rng), "agent"),
    "kill_relay": lambda w, rng: w.kill_on(w.any_host(rng), "relay"),
    "kill_host": lambda w, rng: w.kill_host(w.any_host(rng)),
    "stall_agent": lambda w, rng: w.stall(w.any_host(rng), "agent", rng.choice([0.5, 2.5, 6])),
    "stall_relay": lambda w, rng: w.stall(w.any_host(rng), "relay", rng.choice([0.5, 2.5, 6])),
    "stall_host": lambda w, rng: w.stall_host(w.any_host(rng), rng.choice([1, 2.5, 3.5, 6])),
    "stall_notebook": lambda w, rng: w.stall_notebook(rng.choice([0.5, 2.5, 6, 12])),
    "cut_short": lambda w, rng: w.cut_off(w.any_host(rng), rng.choice([0.3, 1, 2.5, 3.9])),
    "cut_middle": lambda w, rng: w.cut_off(w.any_host(rng), rng.choice([5, 8, 12])),
    "cut_long": lambda w, rng: w.cut_off(w.any_host(rng), rng.choice([45, 70]), others=True),
    "reset": lambda w, rng: w.reset(w.any_host(rng)),
    "interrupt": lambda w, rng: w.notebook.interrupt(),
}


def random_plan(
    rng: random.Random,
    kinds: Sequence[str],
    cells: int,
    most: int = 3,
    steps: Sequence[str] = ("heal", "settle", "save", "load"),
    first: int = 1,
) -> list[Fault]:
    """Returns up to ``most`` faults: some close together, some when a step is reached."""
    plan: list[Fault] = []
    cell, after = rng.randint(first, cells), rng.uniform(0, 2)
    for _ in range(rng.randint(1, most)):
        kind, pick = rng.choice(kinds), rng.getrandbits(32)
        if plan and rng.random() < 0.35:
            plan.append(Fault(rng.choice(steps), kind, round(rng.uniform(0, 0.6), 4), pick))
            continue
        plan.append(Fault(cell, kind, round(after, 4), pick))
        if rng.random() < 0.4:
            cell, after = min(cells, cell + rng.randint(0, 2)), rng.uniform(0, 2)
        else:
            after += rng.uniform(0, 0.7)
    return plan
