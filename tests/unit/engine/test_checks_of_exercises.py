"""A failed check of an exercise is a coloured box: no traceback, no source that has the answer."""

import pytest

from allranks.cluster.failures import describe, headline, plain
from allranks.engine.exceptions import report
from allranks.errors import RIGHT, WRONG, CheckFailed
from allranks.grading import ExpectationFailed, Traffic, check, collective, passed
from allranks.grading.traffic import COLLECTIVE, RankRecord, RecordedCall

ANSWER = "check(found == sum(values), message)"


def reported(message, rank=0):
    """The report of a check that has failed in a cell."""
    code = compile(f"def fails(check):\n    check(False, {message!r})  # {ANSWER}", "In[3]", "exec")
    names = {}
    exec(code, names)
    try:
        names["fails"](check)
    except CheckFailed as error:
        return report(error, ["traceback", ANSWER], rank, "cpu", "In[3]")


def test_the_report_is_the_message_in_a_box():
    found = reported("not yet: my_sum still returns None")
    box = "\x1b[30;43m not yet: my_sum still returns None \x1b[0m"
    assert (found.traceback, found.line, found.source_line) == ((box,), None, "")
    assert headline([found], 1) == "rank 0 of 1: CheckFailed: not yet: my_sum still returns None"
    title, *rest = describe([found], [0]).splitlines()
    assert (plain(title).endswith(") raised CheckFailed"), rest) == (True, [box])


def test_a_wrong_answer_is_red_and_has_the_box_of_its_longest_line():
    (box,) = reported("expected 3\nfound 12 on rank 0").traceback
    lines = "expected 3        ", "found 12 on rank 0"
    assert box == "\n".join(f"\x1b[{WRONG}m {line} \x1b[0m" for line in lines)


def test_other_communication_than_expected_is_such_a_box_too():
    error = ExpectationFailed("expected 1 call of allreduce.\nfound: rank 0 made no call.")
    found = report(error, ["traceback", ANSWER], 0, "cpu", "In[3]")
    (box,) = found.traceback
    assert box.startswith(f"\x1b[{WRONG}m expected 1 call of allreduce. ")
    assert (ANSWER in box, found.line, found.source_line) == (False, None, "")


def test_ranks_that_call_no_collective_are_found_together():
    called = RankRecord((RecordedCall(COLLECTIVE, "broadcast"),), "", "", ())
    traffic = Traffic([RankRecord((), "", "", ())] * 3 + [called])
    assert [*collective("allreduce").problems(traffic)] == [
        "ranks 0–2 called no collective",
        "rank 3 received no message, sent no message and called broadcast",
    ]


def test_a_box_is_as_narrow_as_a_page():
    (box,) = reported(f"expected {'words ' * 40}\n  and\n\n{'x' * 120}").traceback
    first, second, third, *others = plain(box).splitlines()
    assert (len(first), len(third)) == (122, 122)
    assert max(map(len, (first.strip(), second.strip(), third.strip()))) <= 100
    assert [line.rstrip() for line in others] == ["   and", "", f" {'x' * 120}"]


def test_boxes_of_several_ranks_are_each_shown_once():
    reports = [reported(f"rank {rank} found nothing", rank) for rank in range(3)]
    assert plain(describe(reports, range(3))).splitlines()[1:] == [
        " rank 0 found nothing ",
        "This is the report of rank 0. The others:",
        "rank 1: CheckFailed: rank 1 found nothing",
        "rank 2: CheckFailed: rank 2 found nothing",
    ]


def test_a_condition_that_holds_fails_nothing_and_the_end_is_green(capsys):
    check([1], "not shown")
    passed("one call", 3)
    assert capsys.readouterr().out == f"\x1b[{RIGHT}m right: one call 3 \x1b[0m\n"


def test_a_check_is_an_assertion_for_graders():
    with pytest.raises(AssertionError, match=r"^not yet"):
        check(None, "not yet: nothing")
