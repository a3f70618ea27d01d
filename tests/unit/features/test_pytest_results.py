"""One result of the reports of all ranks: `allranks.features.pytest.merged`, without ranks."""

from __future__ import annotations

from typing import Any

import pytest

from allranks.errors import Report
from allranks.features.pytest import merged
from allranks.features.pytest.records import Phase, RankOutcome

#: What a rank's call came to: its outcome, whether it waited, and whether its failure is expected.
CALLS: dict[str, tuple[str, bool, bool]] = {
    "passed": ("passed", False, False),
    "failed": ("failed", False, False),
    "skipped": ("skipped", False, False),
    "xfailed": ("skipped", False, True),
    "xpassed": ("passed", False, True),
    "waited": ("failed", True, False),
    "waited as expected": ("skipped", True, True),
}


def phase(request: pytest.FixtureRequest, when: Any, call: str) -> Phase:
    outcome, waiting, expected = CALLS[call]
    failed: Any = {"failed": f"it {call}", "skipped": ("file", 1, "a reason")}.get(outcome)
    report = pytest.TestReport(
        nodeid=request.node.nodeid,
        location=request.node.location,
        keywords={},
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=failed,
        when=when,
    )
    if expected:
        report.wasxfail = "why"  # type: ignore[attr-defined]
    config = request.config
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    return Phase(data, waiting)


def result(request: pytest.FixtureRequest, *calls: str) -> pytest.TestReport:
    """The report of the call; a rank whose call is "died" has none."""
    outcomes = {}
    for rank, call in enumerate(calls):
        if call != "died":
            phases = phase(request, "setup", "passed"), phase(request, "call", call)
            outcomes[rank] = RankOutcome(phases, (), None)
    test = merged.RanksOfTest(len(calls), outcomes, {}, None, "a rank died", None)
    setup, call = merged.reports(request.config, request.node, test)
    assert setup.outcome == "passed"
    return call


@pytest.mark.parametrize("call", ["passed", "failed", "skipped", "xfailed", "xpassed", "waited"])
def test_ranks_that_agree_have_that_outcome(request: pytest.FixtureRequest, call: str) -> None:
    found = result(request, call, call, call)
    outcome, _, expected = CALLS[call]
    assert (found.outcome, hasattr(found, "wasxfail")) == (outcome, expected)


def test_the_rank_that_failed_is_the_cause_and_not_one_that_waited(
    request: pytest.FixtureRequest,
) -> None:
    found = result(request, "waited", "failed", "passed")
    assert found.outcome == "failed"
    assert str(found.longrepr).splitlines() == [
        "rank 1 of 3", "it failed", "rank 0 waited", "rank 2 passed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (("skipped", "passed"), "skipped on rank 0, passed on rank 1"),
        (("skipped", "waited"), "skipped on rank 0, waiting on rank 1"),
        (("xfailed", "xpassed", "xpassed"), "xfailed on rank 0, xpassed on ranks 1–2"),
        (("xfailed", "passed"), "xfailed on rank 0, passed on rank 1"),
    ],
)
def test_different_outcomes_are_an_error_that_names_the_ranks(
    request: pytest.FixtureRequest, calls: tuple[str, ...], said: str
) -> None:
    found = result(request, *calls)
    assert found.outcome == "failed"
    assert f"expected one outcome on all ranks, found {said}. " in str(found.longrepr)


def test_ranks_that_wait_for_an_expected_failure_change_nothing(
    request: pytest.FixtureRequest,
) -> None:
    found = result(request, "xfailed", "waited as expected")
    assert (found.outcome, found.wasxfail) == ("skipped", "why")  # type: ignore[attr-defined]


def test_a_rank_that_died_fails_the_test_also_if_the_others_passed(
    request: pytest.FixtureRequest,
) -> None:
    found = result(request, "passed", "died")
    assert found.outcome == "failed"
    assert str(found.longrepr).splitlines() == ["a rank died", "rank 0 passed"]


def test_a_rank_that_was_killed_at_the_time_limit_is_reported_below_the_limit(
    request: pytest.FixtureRequest,
) -> None:
    passed = phase(request, "setup", "passed"), phase(request, "call", "passed")
    how = "was killed by signal 9 (SIGKILL)"
    killed = Report(1, "here", "cpu", "death", how, ("it stayed",), 7, "loop()", waiting=False)
    outcomes = {0: RankOutcome(passed, (), None)}
    test = merged.RanksOfTest(2, outcomes, {1: killed}, None, "", 2.0, timed_out=True)
    _, call = merged.reports(request.config, request.node, test)
    assert str(call.longrepr).splitlines()[:4] == [
        "the test exceeded its timeout of 2 s",
        f"rank 1 of 2 died: {how}, last seen at line 7",
        "  loop()",
        "it stayed",
    ]


def test_ranks_that_are_all_lost_fail_the_test_with_the_reason(
    request: pytest.FixtureRequest,
) -> None:
    test = merged.RanksOfTest(2, {}, {}, None, "ClusterLost: rank 1 died", None)
    (found,) = merged.reports(request.config, request.node, test)
    assert (found.when, found.outcome) == ("call", "failed")
    assert str(found.longrepr) == "ClusterLost: rank 1 died"
