"""Runs seeds of scenarios: one with its trace, some of them, or new ones for some minutes.

    python -m tests.simulated SCENARIO --seed 7 [--plan '[…]']     one seed, with its trace
    python -m tests.simulated SCENARIO --seeds 1:20                a line for each seed
    python -m tests.simulated --minutes 10                         new seeds of all scenarios
    python -m tests.simulated --count 20000                        the same, so many

Each seed runs in a forked process, so none depends on the ones before it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import secrets
import select
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.simulated import system

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":
    # Sets would have another order in each process.
    again = [sys.executable, "-m", "tests.simulated", *sys.argv[1:]]
    os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})

system.install()  # before anything imports the modules of allranks that are simulated

from allranks.errors import AllranksError  # noqa: E402
from tests.simulated.chaos import ClusterWorld, Fault  # noqa: E402
from tests.simulated.notebook import NotebookDied, SimulatedNotebook, Stuck  # noqa: E402
from tests.simulated.scenarios import Scenario, described  # noqa: E402

#: In virtual seconds.
_LIMIT_SECONDS, _END_SECONDS = 3000.0, 60.0
#: Seeds of tests lie below.
_FIRST_NEW = 1_000_000
_SHOWN_STEPS = 4000
#: At which share of a thread's calls of the system.
_PREEMPT = 0.03


def scenarios() -> dict[str, Scenario]:
    """Returns all scenarios of this folder by their names."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.simulated.{path.stem}")
        for test in vars(module).values():
            if isinstance(scenario := getattr(test, "scenario", None), Scenario):
                found[scenario.name] = scenario
    return found


def run(
    scenario: Scenario, seed: int, plan: Sequence[Any] | None = None, trace: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Runs one seed in this process, which must end then; returns what it has found."""
    if plan is None and scenario.plan is not None:
        plan = scenario.plan(random.Random(f"plan{seed}"))
    faults = [each if isinstance(each, Fault) else Fault(**each) for each in plan or ()]
    # In every other world, threads also lose the processor within a step.
    preempt = _PREEMPT if seed % 2 else 0.0
    world = ClusterWorld(seed, scenario.hosts, scenario.ranks, faults, preempt)
    world.tracing = trace
    notebook = SimulatedNotebook(world)
    ended: list[bool] = []

    def play() -> None:
        try:
            scenario.play(world, notebook)
            if world.notebook.process.alive and world.notebook.state == "running":
                world.notebook.stop()
        except (Stuck, NotebookDied) as stop:
            if isinstance(stop, NotebookDied):
                world.wrong.append(f"the notebook has ended in {stop}")
        except AllranksError as error:
            world.wrong.append(f"{type(error).__name__}: {error}")
        except AssertionError as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            world.wrong.append(f"{place.name}, line {place.lineno}: {str(error) or place.line}")
        finally:
            ended.append(True)

    world.spawn("scenario", world.hosts["nb"], play)
    if why := world.run(lambda: bool(ended), _LIMIT_SECONDS):
        world.wrong.append(f"{why}. {world.waits()}")
    elif not world.wrong:
        world.run(lambda: not world.left(), _END_SECONDS)
        if left := world.left():
            world.wrong.append(f"{_END_SECONDS:g} s after the end are left: {left[:6]}")
    for process, thread, text in world.crashes:
        world.wrong.append(f"an exception has left {process}/{thread}: {text[-600:]}")
    world.over = True
    result = {
        "scenario": scenario.name,
        "seed": seed,
        "wrong": world.wrong,
        "faults": world.faults,
        "outcome": notebook.outcome,
        "plan": [each.to_json() for each in faults],
        "shortened": False,
        "virtual_seconds": world.seconds(),
        "steps": world.steps,
        "cells": notebook.world.notebook._cells,
        "lost": sum("ClusterLost" in line for line in notebook.outcome),
    }
    return result, world.trace


def run_apart(scenario: Scenario, seed: int, plan: Sequence[Any] | None = None) -> dict[str, Any]:
    """Runs one seed in a forked process."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        # It ends soon; and no finalizer comes at a moment that the seed does not decide.
        gc.disable()
        try:
            result = run(scenario, seed, plan)[0]
        except BaseException:
            result = _of_the_simulator(scenario, seed, traceback.format_exc())
        with os.fdopen(theirs, "w") as out:
            json.dump(result, out)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        text = said.read()
    _, status = os.waitpid(pid, 0)
    if status or not text:
        return _of_the_simulator(scenario, seed, f"its process has ended with status {status}")
    found: dict[str, Any] = json.loads(text)
    return found


def _of_the_simulator(scenario: Scenario, seed: int, why: str) -> dict[str, Any]:
    return {
        "scenario": scenario.name,
        "seed": seed,
        "wrong": [f"the simulator has failed: {why}"],
        **{"faults": [], "outcome": [], "plan": [], "shortened": False},
        **{"virtual_seconds": 0.0, "steps": 0, "cells": 0, "lost": 0},
    }


def shorten(scenario: Scenario, result: dict[str, Any]) -> dict[str, Any]:
    """Returns the same failure with as few faults of the plan as possible."""
    at = 0
    while at < len(result["plan"]):
        fewer = [*result["plan"][:at], *result["plan"][at + 1 :]]
        tried = run_apart(scenario, result["seed"], fewer)
        if tried["wrong"]:
            result = {**tried, "shortened": True}
        else:
            at += 1
    return result


def _new_seeds(
    chosen: Sequence[Scenario], first: int, count: int | None, seconds: float, lanes: int
) -> Iterator[dict[str, Any]]:
    """Runs new seeds of scenarios in turn, in several processes; yields what each has found."""
    begun = time.monotonic()
    readers = {}
    for lane in range(lanes):
        ours, theirs = os.pipe()
        if os.fork() == 0:
            os.close(ours)
            with os.fdopen(theirs, "w") as out:
                number = lane
                while number < count if count else time.monotonic() - begun < seconds:
                    scenario = chosen[number % len(chosen)]
                    result = run_apart(scenario, first + number // len(chosen))
                    if result["wrong"]:
                        result = shorten(scenario, result)
                    print(json.dumps(result), file=out, flush=True)
                    number += lanes
            os._exit(0)
        os.close(theirs)
        readers[ours] = os.fdopen(ours)
    while readers:
        for ready in select.select(list(readers), [], [])[0]:
            if line := readers[ready].readline():
                yield json.loads(line)
            else:
                readers.pop(ready).close()
                os.wait()


def _search(options: argparse.Namespace, chosen: Sequence[Scenario]) -> int:
    first = options.first or _FIRST_NEW + secrets.randbelow(1_000_000_000)
    lanes = options.lanes or len(os.sched_getaffinity(0))
    found = _new_seeds(chosen, first, options.count, 60 * (options.minutes or 0), lanes)
    ran = failed = cells = faults = lost = 0
    virtual = 0.0
    for result in found:
        ran += 1
        cells += result["cells"]
        faults += len(result["faults"])
        lost += result["lost"]
        virtual += result["virtual_seconds"]
        if result["wrong"]:
            failed += 1
            print(f"{result['scenario']}: {described(result)}\n", flush=True)
    print(
        f"{ran} seeds from {first} of {len(chosen)} scenarios: {virtual / 3600:.1f} simulated "
        f"hours, {cells} cells, {faults} faults; all variables were lost {lost} times; "
        f"{failed} seeds failed"
    )
    return failed > 0


def _serve(found: dict[str, Scenario]) -> None:
    """Runs the seeds that lines of the input name; writes a line of JSON for each."""
    for line in sys.stdin:
        name, first, count = line.split()
        for seed in range(int(first), int(first) + int(count)):
            print(json.dumps(run_apart(found[name], seed)), flush=True)


def main() -> int:
    parse = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parse.add_argument("scenario", nargs="?", default="", help="the name of a test, or a part")
    parse.add_argument("--seed", type=int)
    parse.add_argument("--plan", type=json.loads, help="these faults, as JSON")
    parse.add_argument("--seeds", help="FIRST:COUNT")
    parse.add_argument("--serve", action="store_true", help="SCENARIO FIRST COUNT on each line")
    parse.add_argument("--minutes", type=float)
    parse.add_argument("--count", type=int)
    parse.add_argument("--first", type=int, help="the first of the new seeds")
    parse.add_argument("--lanes", type=int, help="how many seeds run at the same time")
    options = parse.parse_args()
    found = scenarios()
    if options.serve:
        _serve(found)
        return 0
    named = [found[options.scenario]] if options.scenario in found else []
    named = named or [each for each in found.values() if options.scenario in each.name]
    if not named:
        parse.error(f"expected one of {', '.join(found)}, found {options.scenario!r}")
    if options.seed is not None:
        result, trace = run(named[0], options.seed, options.plan, trace=True)
        print("\n".join(trace[-_SHOWN_STEPS:]))
        print(f"\n{named[0].name}: {described(result) if result['wrong'] else 'nothing is wrong'}")
        if not result["wrong"]:
            print("\n".join(result["outcome"]))
        sys.stdout.flush()
        os._exit(bool(result["wrong"]))  # threads of the world have not ended
    if options.seeds:
        first, _, count = options.seeds.partition(":")
        for scenario in named:
            for seed in range(int(first), int(first) + int(count or 1)):
                wrong = "; ".join(run_apart(scenario, seed)["wrong"])
                print(f"{scenario.name} {seed}: {wrong[:600] or 'ok'}", flush=True)
        return 0
    return _search(options, [each for each in named if not each.known])


if __name__ == "__main__":
    sys.exit(main())
