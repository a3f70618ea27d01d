"""Plays one fault after the other on a training on several hosts, and checks what comes of it.

python -m tests.hosts.chaos --minutes 30
python -m tests.hosts.chaos --minutes 30 --seed 17     the same faults in the same order

At every step each rank compares the sum with the one that it expects. The ranks count their steps
in a file that all hosts see, so it is known without the notebook which ranks go on.

`tests.simulated` plays these faults and others on models. Here are those whose end depends on what
has no model there: collectives of Open MPI and of shared memory that a death or a stop divides, TCP
that repeats what was lost, and variables that are pickled, kept and loaded. Only here times mean
something.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from tests.hosts.hosts import Hosts, missing
from tests.hosts.notebook import NotebookOnAHost
from tests.kernel import Cell, KernelDied

EVERY_SECONDS = 29.0
_OUTAGE_SECONDS = 5.0
_LEASE_SECONDS = 10
_NAMED_SECONDS, _HEALED_SECONDS, _SHARE = 2.0, 5.0, 0.95
#: For a fault that is not healed; the next one is played on fresh ranks.
_PATIENCE_SECONDS = 90.0
_LOOK_SECONDS = 0.05

# The columns of the file, which has a line for each rank, and one whose first word ends the cell.
_DONE, _WRONG, _PID, _HOST, _AT_NS, _COLUMNS = range(6)
_TRAIN = """
import os, socket, time
import numpy as np
board = np.memmap({path!r}, np.int64, "r+", shape=(size + 1, {columns}))
pairs = size * (size + 1) // 2

def wrong(what):
    board[rank, {wrong}] += 1
    print("wrong:", what)

def check():
    whole, rest = divmod(state[0], 97)
    due = pairs * (whole * 4753 + rest * (rest + 1) // 2) + size * state[0] * np.arange(64.0)
    if not np.array_equal(state[1], due):
        wrong(f"variables of step {{state[0]}}")

if "state" in globals():
    check()
    at = state[0]
else:
    at = -1
steps = comm.allgather(at)
# The ranks that lived have gone on since those that died kept their variables.
state = comm.bcast(state if at >= 0 else (0, np.zeros(64)), steps.index(max(steps)))
board[rank, {pid}], board[rank, {host}] = os.getpid(), int(socket.gethostname()[1:])
if rank == 0:
    print("trains from step", state[0])
while True:
    step, weights = state
    values = np.arange(50_000.0 if step % 20 == 19 else 64.0)
    over = float(rank == 0 and board[size, 0])
    total = allreduce(np.append((rank + 1) * (step % 97 + 1) + values, over), Sum)
    if not np.array_equal(total[:-1], pairs * (step % 97 + 1) + size * values):
        wrong(f"sum of step {{step}}")
    # At once: an error never divides them.
    state = step + 1, weights + total[:64]
    if state[0] % 50 == 0:
        keep("state")
    board[rank, {done}] += 1
    board[rank, {at_ns}] = time.monotonic_ns()
    if total[-1]:
        break
    time.sleep({pause})
check()
if len(set(comm.allgather((state[0], state[1].tobytes())))) > 1:
    wrong("ranks differ")
"""


class Training:
    """The cell that trains until its end is asked for, on ``ranks_each`` ranks of each host."""

    def __init__(
        self, hosts: Hosts, notebook: NotebookOnAHost, ranks_each: int, pause: float
    ) -> None:
        self.hosts, self.notebook = hosts, notebook
        where = hosts.names[1:]
        self.size = len(where) * ranks_each
        self._on = "--on ssh:" + ",".join(f"{name}:{ranks_each}" for name in where)
        path = hosts.shared / "steps"
        path.write_bytes(bytes(8 * _COLUMNS * (self.size + 1)))
        self._board = np.memmap(path, np.int64, "r+", shape=(self.size + 1, _COLUMNS))
        columns = {"done": _DONE, "wrong": _WRONG, "pid": _PID, "host": _HOST, "at_ns": _AT_NS}
        self._source = _TRAIN.format(path=str(path), columns=_COLUMNS, pause=pause, **columns)
        self.cells: list[Cell] = []
        self._wrongs = 0

    def begin(self) -> Cell:
        """Sends the cell; ranks that are not there are started for it."""
        self._board[self.size] = 0
        self.cells.append(self.notebook.start_on_ranks(self._source, self._on))
        return self.cells[-1]

    def end(self) -> Cell:
        """Lets the cell end after its step."""
        self._board[self.size, 0] = 1
        return self.cells[-1].wait(_PATIENCE_SECONDS)

    @property
    def steps(self) -> int:
        """How many steps have been done."""
        return int(self._board[: self.size, _DONE].max())

    def new_wrongs(self) -> int:
        """How many sums and variables were not as expected, since this was last asked."""
        before, self._wrongs = self._wrongs, int(self._board[: self.size, _WRONG].sum())
        return self._wrongs - before

    def goes_on(self, since: float) -> bool:
        """Whether every rank has done a step since then."""
        return bool((self._board[: self.size, _AT_NS] > since * 1e9).all())

    def host_of(self, rank: int) -> str:
        return f"h{self._board[rank, _HOST]}"

    def left_a_host(self) -> bool:
        """Whether the ranks of a lost host go on on others."""
        used = {self.host_of(rank) for rank in range(self.size)}
        return bool(self.cells) and used != set(self.hosts.names[1:])

    def signal(self, rank: int, name: str) -> None:
        """Sends a rank's process a signal."""
        self.hosts.on(self.host_of(rank), "kill", f"-{name}", str(self._board[rank, _PID]))


@dataclass
class Played:
    """A fault that was played, and what was seen of it. Times are in seconds."""

    kind: str
    victim: str
    #: From the fault until the notebook has shown it.
    named: float | None = None
    #: From the moment in which it could be healed until all ranks have done another step.
    healed: float | None = None
    #: How long steps were impossible, whatever allranks does.
    outage: float = 0.0
    #: Steps of a second without a fault, of the whole round, and how long that was.
    pace: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    #: Whether the variables of all ranks were lost.
    lost: bool = False
    problems: list[str] = field(default_factory=list)
    #: What took longer than it may.
    late: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        named = "-" if self.named is None else f"{self.named:.1f} s"
        healed = "-" if self.healed is None else f"{self.healed:.1f} s"
        where = f"{self.kind} ({self.victim})"
        text = f"{where:26} named {named}, healed {healed}, {self.steps} steps at {self.pace:.0f}/s"
        return "\n  ".join([text + ", variables lost" * self.lost, *self.late, *self.problems])


_LOST_HOST = r"Host {} is cut off or has crashed"


@dataclass(frozen=True)
class Fault:
    """What is done to a victim, a rank or a host, and what is expected of allranks.

    Attributes:
        undo: what happens to the victim ``seconds`` later; where they are None once the round ends,
            or ranks cannot be started without the victim.
        shows: finds the fault in what the notebook shows.
        stays: whether the ranks go on as they are once it is undone; others are replaced once the
            fault is known.
    """

    kind: str
    do: Callable[[Chaos, str], None]
    undo: Callable[[Chaos, str], None] | None = None
    seconds: float | None = None
    shows: str = ""
    named_seconds: float = _NAMED_SECONDS
    stays: bool = False

    @property
    def outage_seconds(self) -> float:
        """How long no allranks could do steps."""
        if self.stays:
            return _OUTAGE_SECONDS
        return _LEASE_SECONDS if self.undo is not None else 0.0


FAULTS = (
    Fault(
        "rank killed",
        lambda chaos, rank: chaos.training.signal(int(rank), "KILL"),
        shows=r"\brank {} .*was killed by signal 9",
    ),
    Fault(
        "rank stopped",
        lambda chaos, rank: chaos.training.signal(int(rank), "STOP"),
        lambda chaos, rank: chaos.training.signal(int(rank), "CONT"),
        seconds=_OUTAGE_SECONDS,
        shows=r"\brank {} does not answer",
        stays=True,
    ),
    Fault(
        "cable out for 5 s",
        lambda chaos, host: chaos.hosts.cut(host),
        lambda chaos, host: chaos.hosts.mend(host),
        seconds=_OUTAGE_SECONDS,
        stays=True,
    ),
    Fault(
        "cable out for good",
        lambda chaos, host: chaos.hosts.cut(host),
        lambda chaos, host: chaos.hosts.mend(host),
        shows=_LOST_HOST,
        named_seconds=_LEASE_SECONDS + _NAMED_SECONDS,
    ),
)


class Chaos:
    """Faults of a seed on all hosts but ``h0``, which has the notebook.

    Args:
        hosts: the hosts.
        folder: where the notebook runs.
        ranks_each: how many ranks each host has.
        seed: the same faults, in the same order, for the same victims.
        every_seconds: how long a round with one fault takes.
        pause: the seconds between two steps of a rank.
    """

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        ranks_each: int,
        seed: int,
        every_seconds: float = EVERY_SECONDS,
        pause: float = 0.0,
    ) -> None:
        self.hosts = hosts
        self._ranks_each, self._every_seconds, self._pause = ranks_each, every_seconds, pause
        self._rng = random.Random(seed)
        self._undo: Callable[[Chaos, str], None] | None = None
        self.notebook = NotebookOnAHost(
            hosts, folder, {"ALLRANKS_LEASE": str(_LEASE_SECONDS), "ALLRANKS_LATE_SECONDS": "1"}
        )

    def __enter__(self) -> Self:
        self.notebook.__enter__()
        self.training = Training(self.hosts, self.notebook, self._ranks_each, self._pause)
        return self

    def __exit__(self, *_: object) -> None:
        self.notebook.__exit__()

    def faults(self) -> Iterator[Fault]:
        """Yields all kinds of faults in a random order, and again in another one, without end."""
        while True:
            yield from self._rng.sample(FAULTS, len(FAULTS))

    def _reopen(self) -> None:
        self.notebook.restart()
        self.notebook.run("%load_ext allranks").ok()

    def play(self, fault: Fault) -> Played:
        """Plays one round: some steps, the fault, its healing, and steps until its end."""
        training, rng = self.training, self._rng
        rank, quiet = rng.randrange(training.size), self._every_seconds * rng.uniform(0.25, 0.35)
        self._begin()
        victim = str(rank) if fault.kind.startswith("rank") else training.host_of(rank)
        played = Played(fault.kind, victim)
        first, before, began = len(training.cells) - 1, training.steps, time.monotonic()
        try:
            undisturbed = self._pass(quiet)
            self._hit(fault, played)
            left = began + self._every_seconds - time.monotonic()
            after = self._pass(max(left, self._every_seconds / 4))
            played.pace = (undisturbed + after) / (time.monotonic() - began - self._hit_seconds)
        except (TimeoutError, KernelDied, AssertionError) as error:
            played.problems.append(str(error))
        played.seconds, played.steps = time.monotonic() - began, training.steps - before
        self._finish(fault, played, first)
        return played

    def _begin(self) -> None:
        if self.training.left_a_host():
            self.notebook.run("%distributed restart").ok()
        began = time.monotonic()
        cell = self.training.begin()
        while not self.training.goes_on(began):
            self.notebook.drain(_LOOK_SECONDS)
            if cell.done or time.monotonic() > began + _PATIENCE_SECONDS:
                raise TimeoutError(f"the ranks do not start:\n{cell.text}")

    def _pass(self, seconds: float) -> int:
        """Returns how many steps are done meanwhile; raises TimeoutError if the cell ends."""
        before, end = self.training.steps, time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.notebook.drain(min(_LOOK_SECONDS, left))
            if self.training.cells[-1].done:
                raise TimeoutError(f"the cell has ended:\n{self.training.cells[-1].text}")
        return self.training.steps - before

    def _hit(self, fault: Fault, played: Played) -> None:
        training, first = self.training, len(self.training.cells) - 1
        shows = re.compile(fault.shows.format(played.victim)) if fault.shows else None
        began = time.monotonic()
        fault.do(self, played.victim)
        self._undo = fault.undo
        hit = time.monotonic()
        # From when on it can be healed.
        mended: float | None = None
        while True:
            self.notebook.drain(_LOOK_SECONDS)
            now, cell = time.monotonic(), training.cells[-1]
            text = "".join(cell.text for cell in training.cells[first:])
            if shows is not None and played.named is None and shows.search(text):
                played.named = now - hit
                if not fault.stays:
                    mended = mended or now
            due = fault.seconds is not None and now > hit + fault.seconds
            if due or (cell.done and cell.error_name == "StartFailed"):
                self._undo_now(played)
                if fault.stays:
                    mended = mended or time.monotonic()
            if mended is not None and training.goes_on(mended):
                played.healed = now - mended
                break
            if cell.done:
                training.begin()
                mended = mended or now
            if now > hit + _PATIENCE_SECONDS:
                raise TimeoutError(f"not healed in {_PATIENCE_SECONDS:g} s:\n{text}")
        self._hit_seconds = time.monotonic() - began
        played.outage = min(mended - hit, fault.outage_seconds)

    def _undo_now(self, played: Played) -> None:
        if self._undo is not None:
            self._undo(self, played.victim)
            self._undo = None

    def _finish(self, fault: Fault, played: Played, first: int) -> None:
        training = self.training
        self._undo_now(played)
        try:
            training.end().ok()
        except (TimeoutError, KernelDied, AssertionError) as error:
            played.problems.append(f"the cell has not ended well: {error}")
            self._reopen()
        text = "".join(cell.text for cell in training.cells[first:])
        played.lost = "trains from step 0\n" in text.partition("trains from step")[2]
        problems = {
            "the variables of all ranks are lost": played.lost,
            "it was not named": fault.shows and played.named is None,
            "wrong sums or variables": training.new_wrongs(),
        }
        found = [problem for problem, is_there in problems.items() if is_there]
        if found:
            played.problems.append(f"{', '.join(found)}:\n{text}")
        for what, took, most in (
            ("named", played.named, fault.named_seconds),
            ("healed", played.healed, _HEALED_SECONDS),
        ):
            if took is not None and took > most:
                played.late.append(f"{what} after {took:.1f} s, expected {most:g} s")


def report(played: Sequence[Played]) -> str:
    """Returns a table with a line for each kind of fault."""
    lines = [f"{'':20}times  {'named':22}{'healed':22}lost  late  wrong"]
    for kind in sorted({each.kind for each in played}):
        of_kind = [each for each in played if each.kind == kind]
        lines.append(
            f"{kind:20}{len(of_kind):5}  "
            f"{_spread([each.named for each in of_kind]):22}"
            f"{_spread([each.healed for each in of_kind]):22}"
            f"{sum(each.lost for each in of_kind):4}"
            f"{sum(bool(each.late) for each in of_kind):6}"
            f"{sum(bool(each.problems) for each in of_kind):7}"
        )
    whole, outside = share(played, outages=True), share(played)
    lines += [
        f"{sum(each.steps for each in played):,} steps, {whole:.1%} of an undisturbed run;",
        f"{outside:.1%} without the time in which a rank stood still, or a host was silent",
    ]
    return "\n".join(lines)


def share(played: Sequence[Played], *, outages: bool = False) -> float:
    """Returns the steps done, as a share of those of an undisturbed run of the same time."""
    known = [each for each in played if each.pace]
    seconds = [each.seconds - (0 if outages else each.outage) for each in known]
    due = sum(each.pace * left for each, left in zip(known, seconds, strict=True))
    return sum(each.steps for each in known) / due if due else 0.0


def _spread(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    if not known:
        return "-"
    return f"{statistics.median(known):.1f} s, {max(known):.1f} at most"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=8, help="of each host")
    parser.add_argument("--every", type=float, default=EVERY_SECONDS, help="seconds of one round")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="the order of the faults"
    )
    parser.add_argument("--only", default="", help="faults whose names have these words")
    options = parser.parse_args()
    # Nothing of the hosts must be left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if reason := missing():
        parser.error(reason)
    print(f"seed {options.seed}: {options.hosts} hosts with {options.ranks} ranks each", flush=True)
    played: list[Played] = []
    ends = time.monotonic() + 60 * options.minutes
    with Hosts(1 + options.hosts) as hosts:
        folder = hosts.shared / "notebook"
        folder.mkdir()
        with Chaos(hosts, folder, options.ranks, options.seed, options.every) as chaos:
            for fault in chaos.faults():
                if time.monotonic() > ends:
                    break
                if options.only in fault.kind:
                    played.append(chaos.play(fault))
                    print(played[-1], flush=True)
            chaos.notebook.shutdown()
            chaos.notebook.check_nothing_left()
    print(report(played))
    return int(any(each.problems or each.late for each in played) or share(played) < _SHARE)


if __name__ == "__main__":
    sys.exit(main())
