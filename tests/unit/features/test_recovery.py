"""Each step of a recovery, and what may happen in it: deaths, lost hosts, interrupts, time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from allranks.cluster.failures import ProcessExit
from allranks.features.heal import recovery, requests
from allranks.features.heal.recovered import text_of, text_of_new
from allranks.features.heal.recovery import (
    Ask,
    RecoveryState,
    Say,
    Seat,
    Stage,
    StartAgain,
    Up,
)
from allranks.records.limits import ATTACH_SECONDS, REPLACED_SECONDS

HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2", 4: "h3", 5: "h3"}
SAVED = {"sets": {}, "goes_on": 0, "left": {}, "new": False}
SETTLED = {"goes_on": 0, "version": 1, "new": False}
RESTORED = {"names": ["model"], "seconds": 12.0}


def killed(rank: int) -> ProcessExit:
    return ProcessExit(rank, code=-9, at=0.0, pid=1)


def lost(*ranks: int) -> list[ProcessExit]:
    return [ProcessExit(rank, at=0.0, host=HOSTS[rank], why="is cut off") for rank in ranks]


class Played:
    """A recovery of ranks of which rank 3 has died, and what it has commanded."""

    def __init__(
        self, until: Stage, request: str = "", starts_again: bool = False, **options: Any
    ) -> None:
        self.recovery = RecoveryState(HOSTS, **{"can_start_again": True} | options)
        self.asked, self.said, self.ups = Ask("", (), {}), "", 0
        self.recovery.ranks_died([killed(3)])
        if starts_again or until in (
            Stage.SAVING,
            Stage.STARTING,
            Stage.LOADING,
        ):
            self.recovery.commands.clear()
            self.recovery.seated("no spare process is left")
        self.go_on(until, request)

    def obey(self) -> None:
        recovery = self.recovery
        while recovery.commands:
            match recovery.commands.pop(0):
                case Seat():
                    recovery.seated("")
                case StartAgain():
                    recovery.placed({"h1": [0, 1], "h2": [2, 3], "h3": [4, 5]})
                case Ask() as asked:
                    self.asked = asked
                case Up():
                    self.ups += 1
                case Say(text):
                    self.said += f"{text}\n"

    def go_on(self, until: Stage = Stage.UP, request: str = "") -> RecoveryState:
        """Lets the ranks do what is asked until a step, or until a request is made in it."""
        recovery = self.recovery
        self.obey()
        while not recovery.is_over and (recovery.step, request or self.asked.name) != (
            until,
            self.asked.name,
        ):
            if recovery.step is Stage.SEATING:
                recovery.time_is_over()
            elif recovery.step is Stage.STARTING:
                self.come(range(6))
            else:
                self.answer()
            self.obey()
        return recovery

    def come(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.recovery.rank_came(rank, HOSTS[rank])

    def answer(self) -> None:
        name, ranks, arguments = self.asked.name, self.asked.ranks, self.asked.arguments
        if name == requests.HEAL:
            self.come(arguments["dead"])
        for rank in ranks:
            content = {
                requests.HEAL: {},
                requests.SAVE: SAVED,
                requests.LOAD: {"problem": ""},
                requests.SETTLE: SETTLED | {"new": rank in self.recovery.gone},
                requests.RESTORE: RESTORED,
            }[name]
            self.recovery.rank_answered(rank, content)


def dies(recovery: RecoveryState) -> None:
    recovery.ranks_died([killed(1)])


def loses_a_host(recovery: RecoveryState) -> None:
    recovery.host_lost("h1", "is cut off")
    recovery.ranks_died(lost(0, 1))


def ends(recovery: RecoveryState) -> None:
    recovery.job_ended([ProcessExit(-1, code=1)])


def time(recovery: RecoveryState) -> None:
    recovery.time_is_over()  # of what is said if it takes long
    if recovery.step not in (Stage.SEATING, Stage.STARTING):
        recovery.time_is_over()


def press(recovery: RecoveryState) -> None:
    recovery.interrupted()


def press_twice(recovery: RecoveryState) -> None:
    recovery.interrupted()
    recovery.interrupted()


EVENTS = (dies, loses_a_host, ends, time, press, press_twice)
S = Stage
#: The step that follows when one of these events happens in a step.
TABLE = {
    (S.HEALING, ""): (S.HEALING, S.SAVING, S.LOST, S.SAVING, S.HEALING, S.LOST),
    (S.SAVING, ""): (S.SAVING, S.SAVING, S.PLACING, S.PLACING, S.SAVING, S.LOST),
    (S.STARTING, ""): (S.PLACING, S.PLACING, S.PLACING, S.PLACING, S.STARTING, S.LOST),
    (S.LOADING, ""): (S.PLACING, S.PLACING, S.PLACING, S.PLACING, S.LOADING, S.LOST),
    (S.RESTORING, "settle"): (S.SEATING, S.SAVING, S.LOST, S.UP, S.RESTORING, S.UP),
    (S.RESTORING, "restore"): (S.SEATING, S.SAVING, S.LOST, S.UP, S.RESTORING, S.UP),
}
ROWS = [
    pytest.param(step, request_, event, then, id=f"{step.name} {request_} {event.__name__}")
    for (step, request_), follows in TABLE.items()
    for event, then in zip(EVENTS, follows, strict=True)
]


@pytest.mark.parametrize(("step", "request_", "event", "then"), ROWS)
def test_in_each_step_an_event_leads_to_a_step_from_which_the_recovery_ends(
    step: Stage, request_: str, event: Callable[[RecoveryState], None], then: Stage
) -> None:
    played = Played(step, request_)
    event(played.recovery)
    assert played.recovery.step is then
    assert played.go_on().step in (Stage.UP, Stage.LOST)
    assert (played.recovery.step is Stage.LOST) == (then is Stage.LOST)


def test_a_dead_rank_is_replaced_and_takes_back_what_was_kept():
    done = Played(Stage.UP).go_on()
    assert text_of(done, 1.0) == (
        "rank 3 was replaced, with model kept 12 s ago; ranks 0–2, 4–5 kept theirs (1.0 s)"
    )


def test_a_rank_that_dies_while_another_one_restores_is_replaced_too():
    played = Played(Stage.RESTORING, requests.RESTORE)
    played.recovery.ranks_died([killed(1)])
    done = played.go_on()
    assert done.gone.keys() == {1, 3}
    assert played.ups == 2


def test_a_new_rank_has_joined_if_one_of_the_others_has_though_it_dies_meanwhile():
    played = Played(Stage.HEALING)
    played.recovery.rank_came(3, "h2")
    played.recovery.ranks_died([killed(3)])
    for rank in (0, 1, 2, 4):
        played.recovery.rank_answered(rank, {"warning": ""})
    played.recovery.rank_answered(5, {}, "MPI_ERR_PROC_FAILED")
    played.obey()
    assert played.ups == 1
    assert played.go_on().gone.keys() == {3}


def test_ranks_that_live_have_saved_before_all_start_again():
    played = Played(Stage.LOADING)
    assert played.asked.arguments == {"sets": {}, "saved": [0, 1, 2, 4, 5]}
    assert "rank 3 started again with model kept" in text_of(played.go_on(), 1.0)


def test_what_was_saved_outlives_the_job_that_ends_while_others_save():
    played = Played(Stage.SAVING)
    for rank in (0, 1):
        played.recovery.rank_answered(rank, SAVED)
    ends(played.recovery)
    played.go_on(Stage.LOADING)
    assert played.asked.arguments["saved"] == [0, 1]
    assert played.go_on().gone.keys() == {2, 3, 4, 5}


def test_a_rank_whose_host_is_lost_before_its_answer_is_read_has_saved_nothing():
    played = Played(Stage.SAVING)
    played.recovery.host_lost("h1", "is cut off")
    for rank in (0, 1, 2, 4, 5):
        played.recovery.rank_answered(rank, SAVED)
    played.go_on(Stage.LOADING)
    assert played.asked.arguments["saved"] == [2, 4, 5]


def test_a_job_that_ends_just_after_the_loading_costs_no_variables():
    played = Played(Stage.RESTORING, requests.SETTLE, starts_again=True)
    played.recovery.rank_answered(0, SETTLED)  # which drops its file
    ends(played.recovery)
    played.go_on(Stage.LOADING)
    assert played.asked.arguments["saved"] == [1, 2, 4, 5]


def test_a_rank_that_dies_just_after_it_has_loaded_leaves_its_file_to_the_next_process():
    played = Played(Stage.RESTORING, requests.SETTLE, starts_again=True)
    played.recovery.ranks_died([killed(1)])
    played.go_on(Stage.RESTORING, requests.SETTLE)
    played.answer()
    played.obey()
    assert played.asked == Ask(requests.RESTORE, (1, 3), {"version": 1, "saved": [1]})


def test_new_ranks_take_back_the_newest_version_that_is_whole_on_all_hosts():
    """A host's last rank to write finds the newest one; each host has files of its own."""
    newest = {0: 1, 1: 3, 2: 1, 3: 2, 4: 3, 5: 2}
    played = Played(Stage.RESTORING, requests.SETTLE)
    for rank, version in newest.items():
        played.recovery.rank_answered(rank, SETTLED | {"version": version, "new": rank == 3})
    played.obey()
    assert played.asked == Ask(requests.RESTORE, (3,), {"version": 2, "saved": []})


@pytest.mark.parametrize(("goes_on", "commit"), [((3, 4, 4, 3, 4, 4), 4), ((3, 4, 4, 4, 4, 0), 0)])
def test_a_training_continues_from_the_commit_that_the_last_rank_has_written(goes_on, commit):
    played = Played(Stage.RESTORING, requests.SETTLE)
    for rank, found in enumerate(goes_on):
        played.recovery.rank_answered(rank, SETTLED | {"goes_on": found, "new": rank == 3})
    assert played.go_on().goes_on == commit


def test_a_host_that_is_lost_twice_in_a_recovery_costs_its_own_ranks_alone():
    played = Played(Stage.LOADING)
    loses_a_host(played.recovery)
    played.go_on(Stage.LOADING)
    assert played.asked.arguments["saved"] == [2, 4, 5]
    played.recovery.host_lost("h3", "is cut off")
    assert played.go_on().gone.keys() == {0, 1, 3, 4, 5}


def test_a_rank_that_dies_again_and_again_ends_the_tries():
    played = Played(Stage.HEALING, can_start_again=False)
    for _ in range(9):
        played.go_on(Stage.HEALING)
        if played.recovery.is_over:
            break
        for rank in (0, 1, 2, 4, 5):
            played.recovery.rank_answered(rank, {})
        played.recovery.ranks_died([killed(3)])
    assert played.recovery.step is Stage.LOST
    assert played.recovery.problem == "it was tried 5 times"


def test_a_rank_that_what_was_kept_ends_twice_does_not_restore_it_a_third_time():
    played = Played(Stage.RESTORING, requests.RESTORE)
    for _ in range(2):
        played.recovery.ranks_died([killed(3)])
        played.go_on(Stage.RESTORING, requests.SETTLE)
        played.answer()
    assert played.recovery.step is Stage.UP


def test_a_rank_that_has_restored_what_was_kept_does_not_do_it_again_after_another_death():
    played = Played(Stage.HEALING)
    played.recovery.ranks_died([killed(1)])
    played.go_on(Stage.RESTORING, requests.RESTORE)
    assert played.asked.ranks == (1, 3)
    played.recovery.rank_answered(3, RESTORED)
    played.recovery.ranks_died([killed(1)])
    played.go_on(Stage.RESTORING, requests.SETTLE)
    for rank in range(6):
        played.recovery.rank_answered(
            rank, SETTLED | {"new": rank == 1, "goes_on": 7 * (rank != 3)}
        )
    played.obey()
    assert played.asked.ranks == (1,)
    played.recovery.rank_answered(1, {"names": [], "seconds": 0.0})
    assert "ranks 1, 3 were replaced, with model kept 12 s ago" in text_of(played.recovery, 1.0)
    assert played.recovery.goes_on == 7


def test_what_takes_long_is_said_with_the_ranks_that_are_waited_for():
    played = Played(Stage.RESTORING, requests.SETTLE)
    for rank in (0, 1, 2, 3):
        played.recovery.rank_answered(rank, SETTLED)
    played.recovery.time_is_over()
    played.obey()
    assert played.said.endswith(
        "ranks 4–5: still reading what was kept; interrupting twice goes on without it\n"
    )


def test_an_interrupt_is_answered_with_what_the_next_one_costs():
    played = Played(Stage.HEALING)
    played.recovery.interrupted()
    played.obey()
    assert played.said.endswith(
        "rank 3: being replaced; it ends by itself, and interrupting once more kills all ranks, "
        "with their variables\n"
    )
    played.go_on(Stage.RESTORING, requests.RESTORE)
    played.recovery.time_is_over()
    played.obey()
    assert played.said.endswith(
        "rank 3: still reading what was kept; interrupting once more goes on without it\n"
    )


def test_two_interrupts_while_new_ranks_read_what_was_kept_cost_only_that():
    played = Played(Stage.RESTORING, requests.RESTORE)
    press_twice(played.recovery)
    assert played.recovery.step is Stage.UP
    assert text_of(played.recovery, 1.0) == (
        "rank 3 was replaced and has no variables: you have interrupted it twice; "
        "ranks 0–2, 4–5 kept theirs (1.0 s)"
    )


def test_a_copy_that_cannot_be_read_is_not_called_missing():
    problem = "what rank 3 kept cannot be read: ValueError: no"
    replaced = Played(Stage.RESTORING, "restore")
    started = Played(Stage.RESTORING, "restore", starts_again=True)
    for played in (replaced, started):
        played.recovery.rank_answered(3, {}, problem)
    assert text_of_new(replaced.recovery, [3]) == (
        f"rank 3 was replaced and has no variables: {problem}"
    )
    assert f"rank 3 started again without variables: {problem}. " in text_of(started.recovery, 1.0)


def new_ranks() -> RecoveryState:
    recovery = RecoveryState(HOSTS, can_start_again=True, replaces=False)
    recovery.ranks_are_new([3])
    return recovery


def test_ranks_that_only_restore_are_left_as_they_are_at_the_next_death():
    for event in (dies, loses_a_host, press):
        recovery = new_ranks()
        event(recovery)
        assert recovery.step is Stage.UP
        assert [each.name for each in recovery.commands if isinstance(each, Ask)] == ["settle"]


def test_ranks_that_only_restore_say_so_and_an_interrupt_goes_on_without():
    recovery = new_ranks()
    recovery.time_is_over()
    said = [each.text for each in recovery.commands if isinstance(each, Say)]
    assert said == ["ranks 0–5: still reading what was kept; interrupt to go on without it"]
    recovery.interrupted()
    assert recovery.step is Stage.UP
    assert text_of_new(recovery, [3]).endswith("has no variables: you have interrupted it")


# Random sequences.

_FAULTS = ("kill", "kill", "kill", "host", "job", "press", "time")


class World:
    """Ranks on hosts that do what a recovery commands, in any order, and what happens to them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.recovery = RecoveryState(HOSTS, can_start_again=True)
        self.host_of = dict(HOSTS)
        self.hosts = set(HOSTS.values())
        self.alive = set(HOSTS)
        #: The ranks that have their variables, and those that have not been asked to restore yet.
        self.has, self.new = set(HOSTS), set[int]()
        self.files = set[tuple[int, str]]()
        self.spares = self.chance.choice([0, 1, 3, 9])
        self.request, self.to_do = 0, list[Callable[[], object]]()
        self.is_starting = False
        #: Ranks whose variables no process and no file has had at some moment.
        self.doomed = set[int]()
        self.faults = list[str]()
        self.kills = list[int]()

    def run(self) -> RecoveryState:
        chance, recovery, left = self.chance, self.recovery, self.chance.randrange(1, 6)
        self.fault("kill" if chance.random() < 0.7 else "host")
        for _ in range(5000):
            self.obey()
            if recovery.is_over:
                return recovery
            if left and chance.random() < 0.15:
                left -= 1
                self.fault(chance.choice(_FAULTS))
            elif self.to_do:
                self.to_do.pop(chance.randrange(len(self.to_do)))()
            else:
                recovery.time_is_over()
        raise AssertionError(f"no end after {self.faults}, in step {recovery.step}")

    def later(self, action: Callable[[], object]) -> None:
        self.to_do.append(action)

    # What happens to them.

    def fault(self, kind: str) -> None:
        recovery, chance = self.recovery, self.chance
        self.faults.append(f"{kind} in {recovery.step.name}")
        if kind == "kill" and self.alive:
            rank = chance.choice(sorted(self.alive))
            self.kills.append(rank)
            self.die([rank])
        elif kind == "host" and self.hosts:
            host = chance.choice(sorted(self.hosts))
            self.hosts.remove(host)
            self.files = {each for each in self.files if each[1] != host}
            there = [rank for rank in sorted(self.alive) if self.host_of[rank] == host]
            recovery.host_lost(host, "is cut off")
            self.die(there, host)
        elif kind == "job" and self.alive:
            self.die(sorted(self.alive), ended=True)
        elif kind == "press":
            recovery.interrupted()
        elif kind == "time":
            recovery.time_is_over()

    def die(self, ranks: Sequence[int], host: str = "", ended: bool = False) -> None:
        was_starting = self.is_starting
        self.alive -= set(ranks)
        self.has -= set(ranks)
        self.note()
        why = "is cut off" if host else ""
        found = [ProcessExit(rank, -9, ended, 0.0, host, why) for rank in ranks]
        if ended:
            self.recovery.job_ended([ProcessExit(-1, 1, at=0.0), *found])
        elif was_starting and not host:
            self.recovery.job_ended(found)
        elif found and not was_starting:
            self.recovery.ranks_died(found)
            if not self.alive:
                self.recovery.job_ended(found)

    def note(self) -> None:
        saved = {rank for rank, host in self.files if self.host_of[rank] == host}
        self.doomed |= HOSTS.keys() - self.has - saved

    # What they do.

    def obey(self) -> None:
        recovery = self.recovery
        while recovery.commands:
            match recovery.commands.pop(0):
                case Seat(dead):
                    enough = self.spares >= len(dead)
                    self.spares -= len(dead) if enough else 0
                    recovery.seated("" if enough else "no spare process is left")
                case StartAgain():
                    self.start_again()
                case Ask(name, ranks, arguments):
                    self.request += 1
                    self.to_do.clear()
                    if name == requests.HEAL:
                        self.later(lambda r=ranks, a=arguments: self.heal(r, a["dead"]))
                        continue
                    for rank in ranks:
                        do = getattr(self, name)
                        self.later(lambda rank=rank, do=do, a=arguments: self.answer(rank, do, a))

    def answer(self, rank: int, do: Callable[..., Any], arguments: Any) -> None:
        if rank in self.alive:
            self.recovery.rank_answered(rank, do(rank, **arguments))

    def heal(self, asked: Sequence[int], dead: Sequence[int]) -> None:
        if not set(asked) <= self.alive:
            for rank in asked:
                self.later(lambda rank=rank: self.recovery.rank_answered(rank, {}, "one has died"))
            return
        for rank in dead:
            if self.host_of[rank] not in self.hosts:
                self.host_of[rank] = min(self.hosts)
            self.alive.add(rank)
            self.new.add(rank)
            self.later(lambda rank=rank: self.come(rank))
        for rank in asked:
            self.later(lambda rank=rank: self.recovery.rank_answered(rank, {}))

    def come(self, rank: int) -> None:
        if rank in self.alive:
            self.recovery.rank_came(rank, self.host_of[rank])
            self.is_starting = self.is_starting and self.recovery.step is Stage.STARTING

    def start_again(self) -> None:
        self.to_do.clear()
        self.alive, self.has, self.new = set(), set(), set(HOSTS)
        for rank, host in self.host_of.items():
            if self.hosts and host not in self.hosts:
                self.host_of[rank] = min(self.hosts)
        self.note()
        places: dict[str, list[int]] = {host: [] for host in sorted(self.hosts)}
        for rank, host in self.host_of.items() if places else ():
            places[host].append(rank)
        self.recovery.placed(places)
        if places:
            self.alive, self.is_starting = set(HOSTS), True
            for rank in HOSTS:
                self.later(lambda rank=rank: self.come(rank))

    def save(self, rank: int) -> dict[str, Any]:
        if rank not in self.new:
            self.files.add((rank, self.host_of[rank]))
        return SAVED | {"new": rank in self.new}

    def load(self, rank: int, sets: Any, saved: Sequence[int]) -> dict[str, Any]:
        if rank not in saved:
            return {"problem": ""}
        return {"problem": self.read(rank)}

    def read(self, rank: int) -> str:
        if (rank, self.host_of[rank]) not in self.files:
            return "the file is gone"
        self.has.add(rank)
        self.new.discard(rank)
        return ""

    def settle(self, rank: int) -> dict[str, Any]:
        if rank in self.has:
            self.files.discard((rank, self.host_of[rank]))
        return SETTLED | {"new": rank in self.new}

    def restore(self, rank: int, version: int, saved: Sequence[int]) -> dict[str, Any]:
        self.new.discard(rank)
        if rank in saved:
            self.read(rank)
        return {"names": [], "seconds": 0.0}


@pytest.mark.parametrize("seed", range(400))
def test_variables_are_lost_only_where_no_process_and_no_file_has_them(seed: int) -> None:
    world = World(seed)
    done = world.run()
    twice = {rank for rank in world.kills if world.kills.count(rank) > 1}
    if done.step is Stage.LOST:
        failed = [each for each in world.faults if "PLACING" not in each]
        may = done.presses > 1 or not world.hosts or not world.alive or len(failed) > 2
        assert may or any(each.startswith("job") for each in world.faults), world.faults
        return
    assert world.alive == HOSTS.keys()
    without = HOSTS.keys() - world.has
    assert without <= done.gone.keys() | done.not_saved.keys(), "it is not said"
    assert without <= world.doomed | done.not_saved.keys() | twice, "they could have been kept"


def test_ranks_that_cannot_start_again_are_lost_with_a_host_that_is_lost_meanwhile():
    played = Played(Stage.HEALING, can_start_again=False)
    played.recovery.job_ended(lost(4))
    assert played.recovery.step is Stage.LOST


def test_a_rank_that_could_not_load_its_variables_is_not_asked_for_them_again():
    played = Played(Stage.LOADING)
    for rank in range(6):
        problem = "ModuleNotFoundError: mine" if rank == 1 else ""
        played.recovery.rank_answered(rank, {"problem": problem})
    played.go_on(Stage.RESTORING, requests.RESTORE)
    assert 1 not in played.asked.arguments["saved"]
    assert played.recovery.not_saved[1] == "ModuleNotFoundError: mine"


def test_an_attach_on_one_machine_waits_longer_than_a_replacement_of_some_ranks():
    some = 4
    replacement = (recovery._REPLACE_SECONDS + some) * recovery._PATIENCE
    assert ATTACH_SECONDS < replacement < REPLACED_SECONDS
