"""Scenarios: functions that say what happens to a simulated cluster, as tests of many seeds.

Nothing here imports the simulation: pytest has imported the real modules of allranks already. The
seeds run in a process of their own (`tests.simulated.__main__`).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.gate import REPOSITORY

if TYPE_CHECKING:
    from tests.simulated.chaos import ClusterWorld, Fault
    from tests.simulated.notebook import SimulatedNotebook

Play = Callable[["ClusterWorld", "SimulatedNotebook"], None]
MakePlan = Callable[[random.Random], "Sequence[Fault]"]


@dataclass(frozen=True)
class Scenario:
    """What happens in a world, which differs with the seed.

    Attributes:
        name: that of the test.
        play: is called with the world and a notebook, in a process of its own.
        plan: makes the faults to come from random numbers; a failing plan can be shortened.
        known: the fault of today's code for which some of the seeds fail; "" if none does.
    """

    name: str
    module: str
    play: Play
    hosts: int
    ranks: int
    seeds: int
    plan: MakePlan | None
    known: str


def simulated(
    seeds: int, hosts: int = 3, ranks: int = 2, plan: MakePlan | None = None, known: str = ""
) -> Callable[[Play], Callable[[Simulator], None]]:
    """Makes a test of a scenario: a function of a world and a notebook.

    Args:
        seeds: how many worlds the test runs: 1, 2, 3, ….
        hosts: how many hosts there are, each with as many ``ranks``; with 0, the ranks run on the
            notebook's machine.
        plan, known: see `Scenario`. With ``known`` the test fails as soon as no seed does.
    """

    def decorate(play: Play) -> Callable[[Simulator], None]:
        name = play.__name__
        found = Scenario(name, play.__module__, play, hosts, ranks, seeds, plan, known)

        def test(simulator: Simulator) -> None:
            simulator.check(found)

        test.__name__ = name
        test.__doc__ = play.__doc__
        test.scenario = found  # type: ignore[attr-defined]
        return test

    return decorate


class Simulator:
    """The process that runs seeds. It has imported allranks into the simulation, and forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulated", "--serve"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def results(self, name: str, first: int, count: int) -> list[dict[str, Any]]:
        """Runs seeds of a scenario; returns what each has found."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name} {first} {count}\n")
        self._process.stdin.flush()
        return [json.loads(self._process.stdout.readline()) for _ in range(count)]

    def check(self, scenario: Scenario) -> None:
        """Fails the test if a seed of its scenario fails, or if a known fault is gone."""
        import pytest  # the simulation does without

        failed = [each for each in self.results(scenario.name, 1, scenario.seeds) if each["wrong"]]
        counted = f"{len(failed)} of {scenario.seeds} seeds failed."
        if failed and scenario.known:
            pytest.xfail(f"{scenario.known}: {counted}")
        elif failed:
            pytest.fail(f"{counted} {described(failed[0])}", pytrace=False)
        elif scenario.known:
            pytest.fail(f"no seed failed: remove known={scenario.known!r}", pytrace=False)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def described(result: dict[str, Any]) -> str:
    """Returns what was wrong with a seed, what had happened, and how to repeat it."""
    plan = json.dumps(result["plan"])
    again = f"make simulate SCENARIO={result['scenario']} SEED={result['seed']}"
    if result["plan"] and result["shortened"]:
        again += f" PLAN='{plan}'"
    return "\n".join(
        [
            f"Seed {result['seed']}:",
            *(f"  {each}" for each in result["wrong"][:4]),
            "The faults:",
            *(f"  {at:9.3f} s  {what}" for at, what in result["faults"]),
            "What the user saw:",
            *(f"  {each}" for each in result["outcome"][-5:]),
            f"With a trace: {again}",
        ]
    )


def work(seconds: float = 0.3, lines: int = 5, sets: int = 1) -> dict[str, Any]:
    """Returns a cell that prints lines, and sets ``x`` at its end."""
    return {"kind": "work", "seconds": seconds, "lines": lines, "sets": sets}


def reduce(seconds: float = 0.3, lines: int = 5, sets: int = 1) -> dict[str, Any]:
    """Returns a cell that also waits for all ranks, as a collective does."""
    return {"kind": "reduce", "seconds": seconds, "lines": lines, "sets": sets}


def any_cell(rng: random.Random, sets: int) -> dict[str, Any]:
    kind = rng.choice([work, reduce])
    return kind(rng.choice([0.01, 0.3, 1.5]), rng.choice([1, 5, 30]), sets)


def check_replacement_goes_on(world: ClusterWorld, notebook: SimulatedNotebook) -> None:
    """The kernel of six ranks has died as one was replaced: the next one attaches at once to all,
    of which no other has been started again.
    """
    began = world.now
    assert world.new_notebook().attach(notebook)
    assert world.now < began + 10
    assert not world.notebook.told("start again")
    assert not world.notebook.cell(reduce(sets=3)).error
    assert sum(world.processes_of(rank) for rank in range(6)) == 7
