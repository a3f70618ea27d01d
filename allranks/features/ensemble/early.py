"""Early stopping of poor members, and the remaining time of an ensemble.

Optuna's pruners decide which poor members are stopped. Optuna runs in this process: it starts
nothing and writes nothing to disk. Its successive halving is the asynchronous one (Li et al., A
System for Massively Parallel Hyperparameter Tuning, MLSys 2020): no rank waits for others to reach
its step.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

from allranks.errors import MissingDependency


class Early:
    """Decides which members are stopped.

    Args:
        kind: ``halving``: at steps ``grace``, 3 · ``grace``, 9 · ``grace``, … a member goes on if
            it is among the best third of those that came so far. ``median``: from step ``grace`` on
            it goes on while its best value is no worse than the median of the finished ones' at
            that step, once there are four.
        lower: whether lower values are better.
        grace: no member is stopped before this step; None leaves it to Optuna.

    Raises:
        MissingDependency: Optuna is not installed.
    """

    def __init__(self, kind: str, lower: bool, grace: int | None) -> None:
        try:
            import optuna
        except ImportError as error:
            raise MissingDependency(
                f"--stop {kind} needs Optuna, and it is not installed. "
                "Type: pip install 'allranks[early]'"
            ) from error
        self._ended = optuna.trial.TrialState
        self._trials: dict[int, Any] = {}
        self._last: dict[int, int] = {}
        pruners = optuna.pruners
        pruner: optuna.pruners.BasePruner
        if kind == "halving":
            resource = "auto" if grace is None else grace
            pruner = pruners.SuccessiveHalvingPruner(min_resource=resource, reduction_factor=3)
        else:
            pruner = pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=grace or 0)
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(
                direction="minimize" if lower else "maximize", pruner=pruner
            )
        finally:
            optuna.logging.set_verbosity(before)

    def report(self, member: int, points: Iterable[tuple[float, float]]) -> bool:
        # True to stop the member.
        trial = self._trials.get(member)
        if trial is None:
            trial = self._trials[member] = self._study.ask()
        stop = False
        for step, value in points:
            # Optuna counts steps in whole numbers, each once.
            comes = value == value and math.isfinite(step)
            if comes and int(step) > self._last.get(member, -1):
                self._last[member] = int(step)
                trial.report(value, int(step))
                stop = stop or trial.should_prune()
        return stop

    def ended(self, member: int, value: float | None, *, pruned: bool = False) -> None:
        # From now on Optuna compares other members with this one.
        trial = self._trials.pop(member, None)
        self._last.pop(member, None)
        if trial is None:
            return
        if pruned:
            self._study.tell(trial, state=self._ended.PRUNED)
        elif value is None or value != value:
            self._study.tell(trial, state=self._ended.FAIL)
        else:
            self._study.tell(trial, value)


#: Fewer durations do not show how durations vary.
_LEAST_SEEN = 3
_DRAWS = 40
_STEPS = 8000


def remaining_seconds(
    taken: Sequence[float], running: Sequence[float], waiting: int, slots: int
) -> tuple[float, float] | None:
    """Returns the least and the most remaining seconds, right eight times in ten.

    None until three members have ended. A simulation draws the durations of the remaining members
    from those in ``taken``; for a running member, from those longer than its seconds so far. The
    estimate is wrong if the remaining members are of another kind.
    """
    if len(taken) < _LEAST_SEEN or slots < 1:
        return None
    # The same draws each time: otherwise the estimate would change while nothing happens.
    source = random.Random(0)
    ends = []
    for _ in range(max(5, min(_DRAWS, _STEPS // (waiting + 1)))):
        free = [_left(source, taken, elapsed) for elapsed in running]
        free += [0.0] * (slots - len(free))
        heapq.heapify(free)
        for _ in range(waiting):
            # The next member starts on the slot that is free first.
            heapq.heapreplace(free, free[0] + source.choice(taken))
        ends.append(max(free))
    ends.sort()
    # The tenth and the ninetieth percentile.
    return ends[len(ends) // 10], ends[-1 - len(ends) // 10]


def _left(source: random.Random, taken: Sequence[float], elapsed: float) -> float:
    longer = [seconds for seconds in taken if seconds > elapsed]
    if longer:
        return source.choice(longer) - elapsed
    # Longer than any member before. The guess: at most the same time again.
    return elapsed * source.random()
