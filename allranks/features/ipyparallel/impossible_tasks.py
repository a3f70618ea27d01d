"""Tasks of load-balanced views that no rank may run: they fail.

ipyparallel's scheduler lets them wait for engines that join later. A rank that replaces a dead one
does so after the cell, and the cell may wait for the task. One that has a timeout waits until then.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from ipyparallel.controller.task_scheduler import TaskScheduler
from ipyparallel.error import ImpossibleDependency

from allranks.features.ipyparallel.metadata import TASK_RETRIES


def fail_impossible_tasks() -> None:
    """Changes the scheduler."""
    run, unregister = TaskScheduler.maybe_run, TaskScheduler._unregister_engine
    update, ended = TaskScheduler.update_graph, deque[tuple[Any, bool]]()

    def update_graph(scheduler: Any, task: Any = None, success: bool = True) -> None:
        # One after the other: each task that fails makes another update, and hundreds within each
        # other would be too many calls for Python, so that tasks would never be answered.
        ended.append((task, success))
        if len(ended) > 1:
            return
        try:
            while ended:
                update(scheduler, *ended[0])
                ended.popleft()
        finally:
            ended.clear()

    def maybe_run(scheduler: Any, job: Any) -> bool:
        if run(scheduler, job):
            return True
        if job.msg_id not in scheduler.all_failed and _is_impossible(scheduler, job):
            scheduler.save_unmet(job)  # `fail_unreachable` removes it from where this puts it
            why = partial(ImpossibleDependency, _reason(scheduler, job))
            scheduler.fail_unreachable(job.msg_id, why)
        return False

    def unregister_engine(scheduler: Any, engine: bytes) -> None:
        unregister(scheduler, engine)
        scheduler.update_graph(None)  # looks at all tasks that wait

    TaskScheduler.maybe_run, TaskScheduler.update_graph = maybe_run, update_graph
    TaskScheduler._unregister_engine = unregister_engine


def _is_impossible(scheduler: Any, job: Any) -> bool:
    """Whether no engine may run a task, also once all are free, and no timeout ends it."""
    if job.timeout or not scheduler.targets or not job.follow.issubset(scheduler.all_done):
        return False
    return not any(
        engine not in job.blacklist
        and (not job.targets or engine in job.targets)
        and job.follow.check(scheduler.completed[engine], scheduler.failed[engine])
        for engine in scheduler.targets
    )


def _reason(scheduler: Any, job: Any) -> str:
    left = scheduler.retries[job.msg_id]
    if left < job.metadata.get(TASK_RETRIES, 0):  # no engine accepts the same message again
        return (
            f"expected a rank on which this task has not failed, found none, with {left} of its "
            "retries left. To see its error, give it fewer retries than there are ranks"
        )
    return (
        "expected a rank that may run this task, found none: those of targets= and follow= have "
        "ended, or none of the ranks meets its dependencies"
    )
