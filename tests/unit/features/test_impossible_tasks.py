"""Tasks that no rank may run, in ipyparallel's scheduler without sockets."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from ipyparallel import Dependency
from ipyparallel.controller.task_scheduler import Job, TaskScheduler

from allranks.features.ipyparallel import impossible_tasks

FIRST, SECOND = b"engine-0", b"engine-1"


def scheduler_of(kind):
    class Unconnected(kind):
        """Of two engines: ``sent`` has those of each task, ``errors`` why tasks have failed."""

        engine_stream, session = SimpleNamespace(flush=lambda: None), None
        loop = SimpleNamespace(add_timeout=lambda *_: None)

        def __init__(self):
            super().__init__()
            self.sent, self.errors = defaultdict(list), {}
            self.session = SimpleNamespace(send=self.answer)
            for engine in (FIRST, SECOND):
                self._register_engine(engine)

        def submit(self, name, *targets, follow=(), retries=0, timeout=None):
            when = Dependency([]), Dependency([*follow]), timeout
            about = {"retries": retries}
            job = Job(name, None, [], None, {"msg_id": name}, about, {*targets}, *when)
            self.retries[name] = retries
            if not self.maybe_run(job) and name not in self.all_failed:
                self.save_unmet(job)

        def submit_task(self, job, indices=None):
            engine = self.targets[indices[0]]
            self.add_job(indices[0])
            self.pending[engine][job.msg_id] = job
            self.sent[job.msg_id].append(engine)

        def answer(self, stream, kind, content=None, parent=None, **_):
            if kind == "apply_reply":
                self.errors[parent["msg_id"]] = content["evalue"]

        def leave(self, name):
            engine = self.sent[name][-1]
            self.finish_job(self.targets.index(engine))
            return engine

        def succeed(self, name):
            engine = self.leave(name)
            del self.pending[engine][name]
            for ended in (self.completed[engine], self.all_completed, self.all_done):
                ended.add(name)
            self.destinations[name] = engine
            self.update_graph(name)

        def cannot_run(self, name):
            self.handle_unmet_dependency([self.leave(name)], {"msg_id": name})

        def fail(self, name):
            self.retries[name] -= 1
            self.cannot_run(name)

        def end(self, engine):
            self.pending[engine].clear()  # what it ran has been answered
            self._unregister_engine(engine)

    return Unconnected()


@pytest.fixture
def scheduler(monkeypatch):
    changed = type("Changed", (TaskScheduler,), {})
    monkeypatch.setattr(impossible_tasks, "TaskScheduler", changed)
    impossible_tasks.fail_impossible_tasks()
    return scheduler_of(changed)


def test_a_task_whose_targets_have_ended_fails_while_the_other_ranks_are_busy(scheduler):
    scheduler.submit("on the first", FIRST)
    scheduler.submit("on the second", SECOND)
    scheduler.submit("waits", SECOND)
    scheduler.submit("waits for any")
    assert scheduler.errors == {}
    scheduler.end(SECOND)
    assert [*scheduler.errors] == ["waits"]
    scheduler.succeed("on the first")
    assert scheduler.sent["waits for any"] == [FIRST]


def test_thousands_of_tasks_whose_target_has_ended_fail_also_where_another_rank_is_free(scheduler):
    names = [f"waits {number}" for number in range(2000)]
    scheduler.submit("on the second", SECOND)
    for name in names:
        scheduler.submit(name, SECOND)
    scheduler.end(SECOND)
    assert [*scheduler.errors] == names
    assert not scheduler.queue_map


def test_a_task_that_follows_one_of_a_rank_that_has_ended_fails(scheduler):
    scheduler.submit("first", SECOND)
    scheduler.submit("next", follow=["first"])
    scheduler.succeed("first")
    assert scheduler.sent["next"] == [SECOND]
    scheduler.end(SECOND)
    scheduler.submit("last", follow=["first"])
    assert [*scheduler.errors] == ["last"]
    assert scheduler.errors["last"].startswith("expected a rank that may run this task, found none")


def test_a_task_whose_dependencies_no_rank_meets_fails(scheduler):
    scheduler.submit("task")
    scheduler.cannot_run("task")
    assert scheduler.errors == {}
    scheduler.cannot_run("task")
    assert [*scheduler.errors] == ["task"]


def test_a_task_that_has_failed_on_all_ranks_fails_also_with_retries_left(scheduler):
    scheduler.submit("task", retries=3)
    for _ in range(2):
        assert scheduler.errors == {}
        scheduler.fail("task")
    assert {*scheduler.sent["task"]} == {FIRST, SECOND}
    assert scheduler.errors["task"].startswith(
        "expected a rank on which this task has not failed, found none, with 1 of its retries left."
    )


def test_a_task_with_a_timeout_waits_until_then_as_with_ipyparallel(scheduler):
    scheduler.submit("task", retries=2, timeout=60)
    for _ in range(2):
        scheduler.fail("task")
    assert len(scheduler.sent["task"]) == 2
    assert [one.msg_id for one in scheduler.queue] == ["task"]
    assert scheduler.errors == {}


def test_ipyparallels_own_scheduler_lets_such_tasks_wait():
    scheduler = scheduler_of(TaskScheduler)
    scheduler.submit("task", retries=3)
    for _ in range(2):
        scheduler.fail("task")
    scheduler.end(SECOND)
    assert len(scheduler.sent["task"]) == 2
    assert scheduler.errors == {}
