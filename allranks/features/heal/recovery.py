"""Recovery from dead ranks and lost hosts: what is done next, from what has happened so far.

New processes take the places of dead ranks (`Stage.SEATING`), the living ranks join with them
(`HEALING`), and the new ones take back what was kept (`RESTORING`). MPI ends a job that has lost a
host, and there may be too few spare processes for the ranks that have died. Then the ranks that
live save their variables in the memory of their host (`SAVING`). All are started again, those of
lost hosts on other hosts (`PLACING`, `STARTING`), and load what they have saved (`LOADING`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Self

from allranks.cluster.failures import ProcessExit, death_lines
from allranks.features.heal import requests
from allranks.records.ranks import label

_REPLACE_SECONDS, _START_SECONDS = 15.0, 30.0
#: On one machine, which may be slow, the end of this time would cost all variables.
_PATIENCE = 3
#: A death that has ended a try may be reported in a moment.
_SETTLE_SECONDS = 0.3
#: Models may be large, and a model's library may have to be imported first.
_FILES_SECONDS = 120.0
_SLOW_SECONDS = 2.0
#: How often dead ranks are replaced, and how often all ranks are started again.
_TRIES, _STARTS = 5, 3
_ANOTHER = "another rank has died meanwhile"


class Stage(Enum):
    """What is waited for, in words about a rank that still does it. ``UP``: there is nothing to do.
    ``LOST``: all ranks have ended, or must end.
    """

    SEATING = "waiting to be replaced"
    HEALING = "being replaced"
    SAVING = "saving variables"
    PLACING = "being placed"
    STARTING = "starting"
    LOADING = "loading variables"
    RESTORING = "reading what was kept"
    UP = "up"
    LOST = "lost"


_STARTS_AGAIN = (Stage.PLACING, Stage.STARTING, Stage.LOADING)
_MAY_BE_SLOW = (
    Stage.HEALING,
    Stage.SAVING,
    Stage.LOADING,
    Stage.RESTORING,
)


@dataclass(frozen=True)
class Seat:
    """Has processes take the places of these ranks; then `RecoveryState.seated`."""

    dead: Sequence[int]


@dataclass(frozen=True)
class Ask:
    """Makes a request of ranks, in place of the last one."""

    name: str
    ranks: Sequence[int]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Up:
    """Ranks are up, these in the place of dead ones."""

    joined: Sequence[int] = ()


@dataclass(frozen=True)
class Note:
    """Saves what the next notebook needs, if this one ends: see `RecoveryState.continued`."""

    record: dict[str, Any]


@dataclass(frozen=True)
class StartAgain:
    """Starts all ranks again on the hosts that are left; then `RecoveryState.placed`."""


@dataclass(frozen=True)
class Limit:
    """In ``seconds`` comes `RecoveryState.time_is_over`, if no other limit follows."""

    seconds: float


@dataclass(frozen=True)
class Say:
    """Shows a line at once."""

    text: str


Command = Seat | Ask | Up | Note | StartAgain | Limit | Say


class RecoveryState:
    """The state of one recovery. Its public methods are events, each of which may come in each
    step; one that comes twice, or too late, changes nothing. They add to the ``commands``.

    ``hosts`` has the host of each rank, and ``own`` the ranks that have saved their variables for
    the process that replaces them. If ``replaces`` is false, it ends with the next death.

    ``gone`` are the ends of ranks whose variables have ended with a process, ``kept`` is what new
    ranks have taken back, and ``unread`` has the reasons why they could not. ``goes_on`` is the
    commit from which a training continues, ``presses`` the number of interrupts. It ends in step
    `Stage.UP`, or in `Stage.LOST` because of a ``problem``.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        epoch: int = 0,
        own: Collection[int] = (),
        can_start_again: bool = False,
        replaces: bool = True,
    ) -> None:
        self.step, self.problem = Stage.UP, ""
        self.epoch, self.goes_on, self.presses = epoch, 0, 0
        self.own, self._new = set(own), set[int]()
        self.gone: dict[int, ProcessExit] = {}
        self.commands: list[Command] = []
        #: Whether all ranks are, or were, started again.
        self.starts_again = False
        self.before, self.host_of = dict(hosts), dict(hosts)
        self._can_start_again, self._replaces = can_start_again, replaces
        self._dead: dict[int, ProcessExit] = {}
        self._lost_hosts = set[str]()
        #: How often it was tried, and the obstacle that the last try has met.
        self._tries, self._starts, self._obstacle = 0, 0, ""
        #: The dead ranks that are being replaced, the new ones that have died again, and those
        #: that have come.
        self._joining: tuple[int, ...] = ()
        self._again: dict[int, ProcessExit] = {}
        self._came = set[int]()
        #: The last request, its ranks, and their answers and problems.
        self._request = ""
        self._asked: tuple[int, ...] = ()
        self._answers: dict[int, tuple[Mapping[str, Any], str]] = {}
        self._seconds = self._seconds_left = 0.0
        #: The ranks whose variables are in a file of their host, why others could not save
        #: theirs, and the names that they have left out, with the reasons.
        self._copies = set[int]()
        self.not_saved: dict[int, str] = {}
        self.left_out: dict[int, dict[str, str]] = {}
        self._sets: dict[str, list[int]] = {}
        self.places: Mapping[str, Sequence[int]] = {}
        self._died_once, self._died_twice = set[int](), set[int]()
        self.kept: dict[int, Mapping[str, Any]] = {}
        self.unread: dict[str, None] = {}

    @classmethod
    def continued(cls, record: Mapping[str, Any], places: Mapping[str, Sequence[int]]) -> Self:
        """Returns the recovery of a notebook that has ended while all ranks were started again on
        these hosts. It goes on with `restarted`.
        """
        found = cls(dict(record["before"]), 0, record["own"], can_start_again=True)
        found.step, found.starts_again, found.goes_on = (
            Stage.PLACING,
            True,
            record["goes_on"],
        )
        found.host_of = {rank: host for host, there in places.items() for rank in there}
        found._copies, found._sets = set(record["copies"]), record["sets"]
        found.gone = {end["rank"]: ProcessExit(**end) for end in record["gone"]}
        found.not_saved, found.left_out = dict(record["not_saved"]), dict(record["left_out"])
        return found

    @property
    def _record(self) -> dict[str, Any]:
        return {
            "before": list(self.before.items()),
            "own": sorted(self.own),
            "goes_on": self.goes_on,
            "copies": sorted(self._copies),
            "sets": self._sets,
            "gone": [asdict(end) for end in self.gone.values()],
            "not_saved": list(self.not_saved.items()),
            "left_out": list(self.left_out.items()),
        }

    @property
    def is_over(self) -> bool:
        return self.step in (Stage.UP, Stage.LOST)

    # Events.

    def ranks_died(self, ends: Sequence[ProcessExit]) -> None:
        """Processes have ended: ranks, also with their host, or those that were to replace some."""
        for end in ends if self.step is Stage.HEALING else ():
            if end.rank in self._joining and not end.why:
                self._again[end.rank] = end
                self._say(f"rank {end.rank}, which was new, {end.how()}")
        fresh = self._note_dead(ends)
        if not fresh or self.step is Stage.LOST:
            self._look()
        elif self.step in _STARTS_AGAIN:
            self._fail_start(fresh, death_lines(fresh))
        elif self.step is Stage.RESTORING:
            if self._request == requests.RESTORE:
                self._note_deaths(end for end in fresh if end.rank in self._asked)
            self._replace(fresh)
        elif self.step is Stage.UP and self._replaces:
            self._seat()
        else:
            self._look()

    def host_lost(self, host: str, why: str) -> None:
        if host in self._lost_hosts or self.step is Stage.LOST:
            return
        self._lost_hosts.add(host)
        there = sorted(rank for rank, name in self.host_of.items() if name == host)
        ends = [ProcessExit(rank, host=host, why=why) for rank in there]
        self._note_dead(ends)
        self._copies -= set(there)
        if self.step in _STARTS_AGAIN:
            self._note_gone(ends)
            self._place()
        elif self.step is Stage.SAVING:
            self._look()
        elif self._replaces:
            self._save()
        elif self.step is Stage.RESTORING:
            self._replace(ends)

    def job_ended(self, ends: Sequence[ProcessExit]) -> None:
        """MPI's job has ended, or no rank is left; ``ends`` are the first ends of processes."""
        lost = [end for end in ends if end.why] if self._can_start_again else []
        for end in lost:
            self.host_lost(end.host, end.why)
        if self.step is Stage.SAVING:
            # Files outlive the job.
            self._dead |= {rank: replace(ends[0], rank=rank) for rank in self._waits_for()}
            self._look()
        elif self.step in _STARTS_AGAIN or (self.step is Stage.RESTORING and self._copies):
            if self.step is Stage.RESTORING:
                self._note_gone(replace(ends[0], rank=rank) for rank in self.before)
            if not lost:
                self._fail_start(ends, _first(ends))
        elif self.step is Stage.RESTORING:
            self._lose(_first(ends) if self.starts_again else "")
        elif not self.is_over:
            self._lose(self._obstacle or _ANOTHER)

    def ranks_are_new(self, ranks: Collection[int]) -> None:
        """These ranks run, and have not been asked yet to restore what was kept."""
        if self.step is Stage.UP:
            self.commands.append(Up())  # the notebook that has replaced ranks may not have sent it
            self._new |= set(ranks)
            self._restore()

    def restarted(self) -> None:
        """Another notebook goes on with it."""
        if self.step is Stage.PLACING:
            self._place()

    def seated(self, problem: str) -> None:
        """The answer to `Seat`: why the processes cannot take the places, or ""."""
        if self.step is not Stage.SEATING:
            return
        if problem:
            self._give_up(problem)
            return
        self.epoch += 1
        self._joining = tuple(sorted(self._dead))
        self._again.clear()
        self._came.clear()
        arguments = {"dead": list(self._joining), "epoch": self.epoch}
        seconds = _REPLACE_SECONDS + len(self._joining)
        if not self._can_start_again:
            seconds *= _PATIENCE
        self._ask(Stage.HEALING, requests.HEAL, self._alive, seconds, arguments)

    def placed(self, hosts: Mapping[str, Sequence[int]]) -> None:
        """The answer to `StartAgain`: the ranks of each host, empty if none is left."""
        if self.step is not Stage.PLACING:
            return
        if not hosts:
            self._lose("no host is left")
            return
        self.epoch = self._tries = 0
        self.places = hosts
        self.host_of = {rank: host for host, there in hosts.items() for rank in there}
        self._lost_hosts -= hosts.keys()
        self._dead.clear()
        self._came.clear()
        self._say(f"the ranks start again on {', '.join(hosts)}")
        self._wait(Stage.STARTING, _START_SECONDS + len(self.before))

    def rank_came(self, rank: int, host: str) -> None:
        """A new process is up as this rank."""
        self.host_of[rank] = host
        self._came.add(rank)
        self._look()

    def rank_answered(self, rank: int, content: Mapping[str, Any], problem: str = "") -> None:
        """A rank has answered the last `Ask`."""
        if rank not in self._asked:
            return
        self._answers[rank] = content, problem
        has_its_own = not problem and not content.get("new", True)
        # It may have answered before its host was lost, and with that the file.
        is_lost = self.host_of[rank] in self._lost_hosts
        if self._request == requests.SAVE and has_its_own and not is_lost:
            self._copies.add(rank)
        elif self._request == requests.RESTORE or has_its_own:  # it has removed the file
            self._copies.discard(rank)
            self.own.discard(rank)
        if self._request == requests.RESTORE and not problem:
            self._new.discard(rank)
            self.kept |= {rank: content} if content["names"] else {}
        self._look()

    def interrupted(self) -> None:
        self.presses += 1
        often = "interrupted it twice" if self._replaces else "interrupted it"
        if self.step is Stage.RESTORING and (self.presses > 1 or not self._replaces):
            # All ranks are up: nothing is left to wait for but what new ones had kept.
            self._end_reading(f"you have {often}")
        elif self.presses > 1 and self.step in (Stage.SEATING, Stage.HEALING):
            self._lose(f"replacing {label(sorted(self._dead))} was interrupted twice")
        elif self.presses > 1 and not self.is_over:
            self._lose("you have interrupted it twice")
        elif not self.is_over and (waits := self._waits_for()):
            self._say(f"{label(waits)}: {self.step.value}; {self._cost_of_interrupts}")

    def time_is_over(self) -> None:
        if not self._seconds:
            return
        waits, took = label(self._waits_for()), f"it took {self._seconds:g} s"
        if self._seconds_left:
            self._say(f"{waits}: still {self.step.value}; {self._cost_of_interrupts}")
            self.commands.append(Limit(self._seconds_left))
            self._seconds_left = 0.0
        elif self.step is Stage.SEATING:
            self.commands.append(Seat(sorted(self._dead)))
        elif self.step is Stage.HEALING:
            self._give_up(f"replacing {label(self._joining)} took over {self._seconds:g} s")
        elif self.step is Stage.SAVING:
            self._end_saving()
        elif self.step is Stage.STARTING:
            self._fail_start((), f"{waits} did not start: {took}")
        elif self.step is Stage.LOADING:
            self._fail_start((), f"{waits} did not load the variables: {took}")
        elif self.step is Stage.RESTORING:
            self._end_reading(f"{waits} did not answer: {took}")

    # Replacing dead ranks.

    def _replace(self, ends: Sequence[ProcessExit]) -> None:
        if self._replaces:
            self._seat()
        else:
            self._end_reading(f"{death_lines(ends)}. Type: %distributed heal")

    def _seat(self, after: float = 0.0) -> None:
        self._wait(Stage.SEATING, after)
        if self._tries >= _TRIES:
            self._give_up(f"it was tried {_TRIES} times")
            return
        self._tries += 1
        self.commands.append(Note(self._record))
        if not after:
            self.commands.append(Seat(sorted(self._dead)))

    def _look_at_healing(self) -> None:
        """Once one living rank has done its part, all have, and the new ranks belong to them. A
        rank that dies after that is replaced by the next try.
        """
        problems = [problem for _, problem in self._answers.values() if problem]
        agreed = len(problems) < len(self._answers)
        joined = self._came | self._again.keys() >= set(self._joining)
        if set(self._asked) - self._answers.keys() - self._dead.keys() or (agreed and not joined):
            return
        # Ranks that left because of another rank's error add nothing to the report.
        problem = min(problems, key=lambda problem: "MPI_ERR_REVOKED" in problem, default="")
        if not agreed:
            self._obstacle = problem or _ANOTHER
            self._seat(_SETTLE_SECONDS)
            return
        if problem and not self._again:
            self._give_up(problem)
            return
        self.gone |= {rank: self._dead.pop(rank) for rank in self._joining}
        self._dead |= self._again
        self.commands.append(Up(self._joining))
        for warning in {content.get("warning", "") for content, _ in self._answers.values()} - {""}:
            self._say(warning)
        if self._dead:
            self._seat()
        else:
            self._restore()

    def _give_up(self, problem: str) -> None:
        """Dead ranks cannot be replaced, however often it is tried."""
        # The obstacle that earlier tries have met explains more than the time.
        problem = "; ".join(filter(None, (self._obstacle, problem)))
        if self._can_start_again and self._starts < _STARTS:
            self._say(f"{label(sorted(self._dead))} could not be replaced: {problem}")
            self._starts += self.starts_again
            self._save()
        else:
            self._lose(problem)

    # Starting all ranks again.

    def _save(self) -> None:
        self.starts_again = True
        self._ask(Stage.SAVING, requests.SAVE, self._alive, _FILES_SECONDS)
        self._look()

    def _end_saving(self) -> None:
        goes_on = dict[int, int]()
        for rank in self._asked:
            content, problem = self._answers.get(rank, ({}, "it did not answer"))
            if rank in self._copies and content:
                self._sets |= content["sets"]
                goes_on[rank] = content["goes_on"]
                self.left_out[rank] = self.left_out.get(rank, {}) | content["left"]
            elif rank in self._copies | self._dead.keys():
                continue
            elif problem:
                self.not_saved[rank] = problem
            else:  # it has replaced a rank, and not taken back yet what was kept
                self._note_gone([ProcessExit(rank, host=self.before[rank])])
        if not self.places:
            self.goes_on = self._commit(goes_on)
        self._note_gone(self._dead.values())
        self._place()

    def _place(self) -> None:
        self._wait(Stage.PLACING, 0.0)
        self.commands += [Note(self._record), StartAgain()]

    def _load(self) -> None:
        arguments = {"sets": self._sets, "saved": sorted(self._copies)}
        self._ask(Stage.LOADING, requests.LOAD, self.before, _FILES_SECONDS, arguments)

    def _end_loading(self) -> None:
        for rank, (content, problem) in sorted(self._answers.items()):
            if problem:
                self._fail_start((), problem)
                return
            if content["problem"]:
                self.not_saved[rank] = content["problem"]
                self._copies.discard(rank)  # it settles next, which removes the file
        self.commands.append(Up())
        self._restore()

    def _fail_start(self, ends: Sequence[ProcessExit], problem: str) -> None:
        """What was saved is still there: all ranks start once more."""
        self._note_deaths(ends)
        self._starts += 1
        if self._starts >= _STARTS:
            self._lose(problem)
        else:
            self._say(problem)
            self._place()

    def _note_deaths(self, ends: Iterable[ProcessExit]) -> None:
        """What it reads may end a rank: one that dies twice does not read it again."""
        for end in ends:
            if end.rank < 0 or end.by_launcher or end.why:
                continue
            if end.rank in self._died_once:
                self._died_twice.add(end.rank)
                self._copies.discard(end.rank)
                self.own.discard(end.rank)
                self._note_gone([end])
            self._died_once.add(end.rank)

    def _note_gone(self, ends: Iterable[ProcessExit]) -> None:
        """The variables of these ranks are lost, if no file has them."""
        fresh = {end.rank: end for end in ends if end.rank not in self._copies}
        self.gone = fresh | self.gone

    # Restoring what was kept.

    def _restore(self) -> None:
        self._ask(Stage.RESTORING, requests.SETTLE, self._alive, _FILES_SECONDS)

    def _end_reading(self, problem: str = "") -> None:
        """All have settled, or restored; or there is a problem."""
        problems = [why for _, (_, why) in sorted(self._answers.items())]
        self.unread |= dict.fromkeys(filter(None, [*problems, problem]))
        told = {rank: content for rank, (content, why) in self._answers.items() if not why}
        if self._request == requests.SETTLE and not self.unread and self._take_back(told):
            return
        self.commands.append(Note({}))
        self._wait(Stage.UP, 0.0)

    def _take_back(self, told: Mapping[int, Mapping[str, Any]]) -> bool:
        """New ranks take back what was kept in their places, also those that another death has
        kept from it. Returns whether there are any.
        """
        self._new |= {rank for rank, content in told.items() if content["new"]}
        if not self.starts_again:
            old = told.keys() - self._new - self.gone.keys()
            self.goes_on = self._commit({rank: told[rank]["goes_on"] for rank in old})
        reads = self._new & told.keys() - self._died_twice
        version = self._whole({rank: content["version"] for rank, content in told.items()})
        wanted = {"version": version, "saved": sorted((self.own | self._copies) & reads)}
        if reads:
            # Once they have restored it, they no longer say that they are new.
            self.commands.append(Note(self._record))
            self._ask(Stage.RESTORING, requests.RESTORE, sorted(reads), _FILES_SECONDS, wanted)
        return bool(reads)

    def _whole(self, newest: Mapping[int, int]) -> int:
        """Returns the newest version that all hosts have, from those that ranks have found, each
        after it had written its own files.
        """
        of_hosts = dict[str, int]()
        for rank, version in newest.items():
            # The last rank to write makes the version whole, and removes the one before it.
            host = self.host_of[rank]
            of_hosts[host] = max(version, of_hosts.get(host, 0))
        return min(of_hosts.values(), default=0)

    def _commit(self, goes_on: Mapping[int, int]) -> int:
        """Returns the commit from which a training continues; 0 unless all ranks were in one."""
        return self._whole(goes_on) if all(goes_on.values()) else 0

    # For all steps.

    @property
    def _alive(self) -> list[int]:
        return [rank for rank in self.before if rank not in self._dead]

    def _note_dead(self, ends: Iterable[ProcessExit]) -> list[ProcessExit]:
        """Returns those of ranks that had not died yet."""
        fresh = [end for end in ends if end.rank not in self._dead]
        for end in fresh:
            self._dead[end.rank] = end
            self.kept.pop(end.rank, None)
        if fresh and not self.is_over and self.step not in _STARTS_AGAIN:
            self._say(death_lines(fresh))
        return fresh

    def _waits_for(self) -> list[int]:
        if self.step is Stage.STARTING:
            return sorted(self.before.keys() - self._came)
        if self.step in (Stage.SEATING, Stage.HEALING):
            return sorted(self._dead)
        return sorted(set(self._asked) - self._answers.keys() - self._dead.keys())

    @property
    def _cost_of_interrupts(self) -> str:
        if not self._replaces:
            return "interrupt to go on without it"
        more = "interrupting once more" if self.presses else "interrupting twice"
        if self.step is Stage.RESTORING:
            return f"{more} goes on without it"
        return f"it ends by itself, and {more} kills all ranks, with their variables"

    def _look(self) -> None:
        """Ends the step if what it waits for is there."""
        if self.step is Stage.HEALING:
            self._look_at_healing()
        elif self.step in _ENDS and not self._waits_for():
            _ENDS[self.step](self)

    def _ask(
        self,
        step: Stage,
        name: str,
        ranks: Iterable[int],
        seconds: float,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        asked = tuple(ranks)
        self.commands.append(Ask(name, asked, arguments or {}))
        self._wait(step, seconds)
        self._request, self._asked = name, asked

    def _wait(self, step: Stage, seconds: float) -> None:
        """Begins a step; with 0 seconds it has no limit."""
        self.step, self._seconds = step, seconds
        self._request, self._asked, self._answers = "", (), {}
        first = min(seconds, _SLOW_SECONDS) if step in _MAY_BE_SLOW else seconds
        self._seconds_left = seconds - first
        if seconds:
            self.commands.append(Limit(first))

    def _say(self, text: str) -> None:
        self.commands.append(Say(text))

    def _lose(self, problem: str) -> None:
        self._wait(Stage.LOST, 0.0)
        self.problem, self.gone = problem, self._dead | self.gone


_ENDS: Mapping[Stage, Callable[[RecoveryState], None]] = {
    Stage.SAVING: RecoveryState._end_saving,
    Stage.STARTING: RecoveryState._load,
    Stage.LOADING: RecoveryState._end_loading,
    Stage.RESTORING: RecoveryState._end_reading,
}


def _first(ends: Sequence[ProcessExit]) -> str:
    first = ends[0]
    return f"rank {first.rank} {first.how()}" if first.rank >= 0 else "mpiexec has ended"
