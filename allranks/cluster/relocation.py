"""Starting all ranks again on the hosts that are left, with their variables: when one is lost, or
dead ranks cannot be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allranks.cluster.connection import Connection
from allranks.cluster.failures import NEXT_CELL, ProcessExit, death_lines
from allranks.countdown import Countdown
from allranks.errors import ClusterLost
from allranks.records import requests
from allranks.records.ranks import label

#: Models may be large.
_SAVE_SECONDS = 120.0
_START_SECONDS = 30.0
_STEP_SECONDS = 0.1
_TRIES = 3
_SHOWN_NAMES = 5
_TWICE = "you have interrupted it twice"


class Relocation:
    """New processes for all ranks, on the hosts that are left.

    MPI ends a job that has lost a host, and there may be too few spare processes for the ranks that
    have died. So the ranks that live save their variables in the memory
    of their host, and are started again there; the ranks of the lost host start on others.

    ``dead`` are the ends of ranks whose variables are lost, ``goes_on`` is the commit from which a
    training continues, ``presses`` the number of the notebook's interrupts meanwhile, also during
    the replacement before it.
    """

    def __init__(self, ranks: Connection, tell: Callable[[str], None], presses: int = 0) -> None:
        self.dead: dict[int, ProcessExit] = {}
        self.goes_on = 0
        self.presses = presses
        self._ranks = ranks
        self._tell = tell
        self._left_out: dict[int, dict[str, str]] = {}
        self._not_saved: dict[int, str] = {}
        self._hosts: dict[str, list[int]] = {}
        self._before: dict[int, str] = {}
        self._lost = set[str]()
        #: The ranks that have died while they started.
        self._died_once = set[int]()

    def make(self) -> None:
        """Starts the ranks again. Raises ClusterLost if they cannot be; all are killed then."""
        ranks, roster, problem = self._ranks, self._ranks.roster, ""
        self._before = {rank: hello.host for rank, hello in roster.hellos.items()}
        with ranks.inbox.hearing_interrupts():
            sets, tries = self._save(), 0
            self.dead |= roster.dead
            while not roster.ends and self.presses < 2 and tries < _TRIES:
                problem = self._try(sets)
                if not problem:
                    ranks.all_up()
                    return
                if not self._hosts:
                    break
                # What was saved is still there, but for ranks of hosts that are lost meanwhile.
                if not self._note_lost_hosts():
                    tries += 1
                    self._note_deaths()
                    self._tell(problem)
                roster.ends.clear()
        if not problem:  # they were only to save their variables
            problem = _TWICE if self.presses > 1 else _first_end(roster.ends)
        roster.ends = roster.ends or list(self.dead.values())
        why = f"{death_lines(self.dead.values())}. All variables are lost"
        why += f", because the ranks could not be started again: {problem}. "
        why += f"{NEXT_CELL} The logs are in {ranks.log_dir}"
        ranks.close("lost", why)
        raise ClusterLost(why)

    def _try(self, sets: dict[str, list[int]]) -> str:
        """Starts the ranks once, and makes them load; returns the obstacle, if any."""
        ranks, roster = self._ranks, self._ranks.roster
        self._note_lost_hosts()
        self._hosts = ranks.relocate()
        if not self._hosts:
            return "no host is left"
        self._tell(f"the ranks start again on {', '.join(self._hosts)}")
        problem = self._wait() or self._load(sets)
        if not problem and (roster.lost_hosts or roster.dead or roster.ends):
            problem = "a rank or a host was lost meanwhile"
        return problem

    def _note_lost_hosts(self) -> bool:
        """Notes that the ranks of lost hosts have lost what they had saved; returns whether there
        are any.
        """
        lost = self._ranks.roster.known_losses
        self._lost |= lost.keys()
        for host, why in lost.items():
            for rank in self._hosts.get(host, ()):
                self.dead[rank] = ProcessExit(rank, host=host, why=why)
        return bool(lost)

    def _note_deaths(self) -> None:
        # What it loads may end it: a rank that dies twice does not load again.
        roster = self._ranks.roster
        for end in (*roster.dead.values(), *roster.ends):
            if end.rank in self._died_once:
                self.dead.setdefault(end.rank, end)
            elif end.rank >= 0 and not end.by_launcher:
                self._died_once.add(end.rank)

    def _save(self) -> dict[str, list[int]]:
        """Makes the ranks that live save their variables; returns the process sets."""
        ranks, sets, alive = self._ranks, dict[str, list[int]](), self._ranks.roster.alive
        goes_on = list[int]()
        dead = ranks.roster.dead
        with ranks.asking(alive, requests.SAVE, {}) as got:
            self._step(lambda: all(r in got or r in dead for r in alive), _SAVE_SECONDS)
        for rank in alive:
            if rank in dead:
                continue
            if rank not in got:
                self._not_saved[rank] = "it did not answer"
                continue
            answer, _ = got[rank]
            if answer.problem:
                self._not_saved[rank] = answer.problem
                continue
            if answer.content["new"]:
                # It has replaced a rank, and not taken back yet what was kept.
                self.dead[rank] = ProcessExit(rank, host=self._before.get(rank, ""))
                continue
            sets |= answer.content["sets"]
            goes_on.append(answer.content["goes_on"])
            self._left_out[rank] = answer.content["left"]
        self.goes_on = min(goes_on, default=0)
        return sets

    def _wait(self) -> str:
        roster, seconds = self._ranks.roster, _START_SECONDS + self._ranks.size
        self._step(lambda: bool(not roster.missing or roster.ends or roster.lost_hosts), seconds)
        if roster.ends:
            return _first_end(roster.ends)
        if not roster.missing or roster.lost_hosts:
            return ""
        return f"{label(roster.missing)} did not start: {self._why_over(seconds)}"

    def _step(self, done: Callable[[], bool], seconds: float) -> None:
        limit = Countdown(seconds)
        while not done() and limit.left() > 0 and self.presses < 2:
            try:
                self.presses += len(self._ranks.step(_STEP_SECONDS))
            except Exception as error:  # an error of the display, not of the start
                self._tell(str(error))

    def _load(self, sets: dict[str, list[int]]) -> str:
        ranks, roster, everyone = self._ranks, self._ranks.roster, range(self._ranks.size)
        if roster.ends or roster.lost_hosts:
            return "a host was lost meanwhile"
        saved = [rank for rank in everyone if rank in self._left_out and rank not in self.dead]

        def over() -> bool:
            lost = roster.dead or roster.ends or roster.lost_hosts
            return bool(lost) or len(got) == len(everyone)

        with ranks.asking(everyone, requests.LOAD, {"sets": sets, "saved": saved}) as got:
            self._step(over, _SAVE_SECONDS)
        for end in (*roster.ends, *roster.dead.values()):
            return f"rank {end.rank} {end.how()}"
        for rank, (answer, _) in sorted(got.items()):
            if answer.problem:
                return answer.problem
            if answer.content["problem"]:
                self._not_saved[rank] = answer.content["problem"]
        if silent := set(everyone) - got.keys():
            return f"{label(silent)} did not load the variables: {self._why_over(_SAVE_SECONDS)}"
        return ""

    def _why_over(self, seconds: float) -> str:
        return _TWICE if self.presses > 1 else f"it took {seconds:g} s"

    def text(self, had: str, seconds: float) -> str:
        """Returns what has come back; ``had`` is what the ranks of lost hosts had kept."""
        dead, parts = sorted(self.dead), []
        for host, there in self._hosts.items():
            came = [rank for rank in there if rank in self.dead and self._before[rank] != host]
            if came:
                before = len(there) - len(came)
                parts.append(f"{label(came)} on {host}, which has {len(there)} ranks, not {before}")
        moved = f": {', '.join(parts)}" if parts else ""
        kept = f"with {had}" if had else "without variables: they had kept none"
        said = f"{label(dead)} started again {kept}{moved}. "
        gone = self.dead.keys() | self._not_saved.keys()
        back = [rank for rank in range(self._ranks.size) if rank not in gone]
        if back:
            said += f"{label(back)} {'has its' if len(back) == 1 else 'have their'} variables again"
            said += f", but not {names}" if (names := _listed(self._left_out, back)) else ""
            said += ", in new processes. "
        for problem in dict.fromkeys(self._not_saved.values()):
            ranks = [rank for rank, why in self._not_saved.items() if why == problem]
            said += f"{label(ranks)} lost the variables that were not kept: {problem}. "
        again = "To use all hosts again, which deletes variables: %distributed restart "
        return f"{said}{again if self._lost else ''}({seconds:.1f} s)"


def _first_end(ends: Sequence[ProcessExit]) -> str:
    first = ends[0]
    return f"rank {first.rank} {first.how()}" if first.rank >= 0 else "mpiexec has ended"


def _listed(left_out: dict[int, dict[str, str]], ranks: Sequence[int]) -> str:
    """Returns the names that are missing, with the reasons."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        for name, why in left_out.get(rank, {}).items():
            found.setdefault((name, why), []).append(rank)
    shown = [
        f"{name}{'' if len(there) == len(ranks) else f' of {label(there)}'} ({why})"
        for (name, why), there in list(found.items())[:_SHOWN_NAMES]
    ]
    more = len(found) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])
