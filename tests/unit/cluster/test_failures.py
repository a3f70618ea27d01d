"""The report of a failed cell, and what is checked before a cell is sent."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from allranks.cluster import failures, last_words
from allranks.cluster.failures import (
    SHOWN_NBYTES,
    ProcessExit,
    all_over,
    describe,
    loss_text,
    read_statuses,
    refused_by_all,
)
from allranks.cluster.last_words import LastWords
from allranks.cluster.options import check_source
from allranks.cluster.state import ClusterState
from allranks.records.code_names import code_name
from allranks.records.ranks import BETWEEN, IDLE, MEETS, RUNNING, WAITS, Activity
from allranks.records.wire import Answer, Hello, Report, decode, encode


def report(
    rank: int, message: str = "bad", etype: str = "ValueError", waiting: bool = False
) -> Report:
    lines = (f"{etype}: {message}",)
    return Report(rank, "host", "cpu", etype, message, lines, 3, "f(x)", waiting)


def test_ranks_that_waited_are_one_group_and_different_failures_are_a_line_each():
    saw = "rank 2 has left\nWaiting for it:\n  {} at In[1]:3: f(x)"
    reports = [
        report(0, saw.format("rank 0"), "RankLeft", waiting=True),
        report(1, saw.format("ranks 0–1"), "RankLeft", waiting=True),
        report(2),
    ]
    text = describe(reports, ran=range(3))
    assert text.endswith("ranks 0–1 were waiting at line 3: f(x)\n  rank 2 has left")
    saw = "rank 2 has left\nWaiting for it:\n  rank 0 at In[1]:3: f(x)\n  rank 1 at a.py:8: g(x)"
    text = describe([report(0, saw, "RankLeft", waiting=True), report(2)], ran=range(3))
    assert saw in text
    text = describe([report(rank, "bad", f"Error{rank}") for rank in range(9)], ran=range(9))
    assert "rank 8 raised Error8 at line 3: f(x): bad" in text


def test_a_rank_that_waited_is_advised_on_the_errors_of_all_ranks():
    waited = report(1, "rank 0 has left. Correct the error of rank 0.", "RankLeft", waiting=True)
    assert describe([report(0), waited], range(2)).endswith("Correct the error of rank 0.")
    failed = [report(0), report(2), report(3, "worse")]
    assert describe([*failed, waited], range(4)).endswith("Correct the errors of ranks 0, 2–3.")
    dead = report(2, "died", failures.DEATH)
    assert describe([report(0), waited, dead], range(3)).endswith("Correct the error of rank 0.")


def test_ranks_that_waited_when_the_cell_was_interrupted_have_no_traceback_of_their_own():
    waited = "barrier waited for rank {} when the cell was interrupted."
    late = report(0, "", "KeyboardInterrupt")
    others = [report(r, waited.format(0), "KeyboardInterrupt", waiting=True) for r in (1, 2)]
    text = describe([late, *others], ran=range(3))
    assert text.count("KeyboardInterrupt: ") == 1
    assert text.endswith(f"\n\nranks 1–2 were waiting at line 3: f(x)\n  {waited.format(0)}")
    for_each_other = [report(0, waited.format(1), "KeyboardInterrupt", waiting=True), others[0]]
    text = describe(for_each_other, ran=range(2))
    assert text.count("raised KeyboardInterrupt") == 1
    assert waited.format(1) in text.partition("rank 1 was waiting at line 3: f(x)")[0]
    timeouts = [failures.as_timeout(one, "too late") for one in (late, *others)]
    assert describe(timeouts, ran=range(3)).endswith(waited.format(0))


def test_messages_that_differ_between_ranks_are_each_listed_once():
    text = "ValueError                Traceback\n----> 3 f(x)\n\nValueError: pair {0}\n  rank {0}"
    reports = [
        replace(report(rank, f"pair {pair}\n  rank {pair}"), traceback=(text.format(pair),))
        for rank, pair in enumerate((0, 0, 2, 2))
    ]
    assert describe(reports, ran=range(4)).splitlines()[1:] == [
        *("ValueError                Traceback", "----> 3 f(x)", ""),
        "The traceback of rank 0; the messages of all:",
        *("ranks 0–1: ValueError: pair 0", "    rank 0"),
        *("ranks 2–3: ValueError: pair 2", "    rank 2"),
    ]


def test_ranks_refuse_together_if_all_raise_the_same_usage_error():
    both = [report(0, etype="UsageError"), report(1, etype="UsageError")]
    assert refused_by_all(both, 2)
    assert not refused_by_all(both, 3)
    assert not refused_by_all([both[0], report(1, "another", "UsageError")], 2)
    assert not refused_by_all([both[0], report(1, etype="UsageError", waiting=True)], 2)
    assert not refused_by_all([report(0), report(1)], 2)
    assert not refused_by_all([], 2)


def test_the_rank_that_died_of_itself_is_the_culprit():
    hellos = {r: Hello(r, 3, r, 3, "host", 10 + r, "cpu", "e", "mpi", "/l/x.log") for r in range(3)}
    ends = [
        ProcessExit(0, -9, by_launcher=True),
        ProcessExit(2, 3, by_launcher=False),
        ProcessExit(1, -9, True),
    ]
    text = loss_text(ends, hellos, "", size=3, shown=True)
    assert text.startswith(
        "rank 2 (host, pid 12, cpu) ended with exit code 3; ranks 0–1 were killed"
    )
    assert "; rank 0 was killed with it" in loss_text(
        [ProcessExit(1, 3, False)], hellos, "", 2, shown=True
    )


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ((3, 3, 3), "all 3 ranks ended with exit code 3, and the variables of all 3 ranks"),
        ((-9, 3, 3), "ranks 1–2 ended with exit code 3; rank 0 was killed with them, and"),
        ((-11, -11, -11), "all 3 ranks were killed by signal 11 (SIGSEGV), and the variables of"),
        ((-9, -11, -11), "ranks 1–2 were killed by signal 11 (SIGSEGV); rank 0 was killed with"),
        ((-9, -9, -11), "rank 2 (host, pid 12, cpu) was killed by signal 11 (SIGSEGV); ranks 0–1"),
    ],
)
def test_ranks_that_ended_in_the_same_way_were_not_killed_with_the_first(codes, said):
    hellos = {r: Hello(r, 3, r, 3, "host", 10 + r, "cpu", "e", "mpi", "/l/x.log") for r in range(3)}
    ends = [ProcessExit(rank, code, by_launcher=rank < 2) for rank, code in enumerate(codes)]
    assert loss_text(ends, hellos, "", size=3, shown=True).startswith(said)


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ((-9, -9, -9), "all 3 ranks were killed by signal 9 (SIGKILL: often the system, out of"),
        ((-15, -15), "ranks 0–1 were killed by signal 15 (SIGTERM); rank 2 was killed with them"),
        ((3, -11), "rank 0 (host, pid 10, cpu) ended with exit code 3; rank 1 was killed by"),
        ((3, -9, 3), "ranks 0, 2 ended with exit code 3; rank 1 was killed by signal 9"),
    ],
)
def test_no_rank_that_ended_by_itself_was_killed_with_the_first(codes, said):
    hellos = {r: Hello(r, 3, r, 3, "host", 10 + r, "cpu", "e", "mpi", "/l/x.log") for r in range(3)}
    ends = [ProcessExit(rank, code) for rank, code in enumerate(codes)]
    assert loss_text(ends, hellos, "", size=3, shown=True).startswith(said)


def test_a_reason_that_not_all_ranks_have_names_its_rank():
    hellos = {r: Hello(r, 2, r, 2, "host", 10 + r, "cpu", "e", "mpi", "/l/x.log") for r in range(2)}

    def lost(*reasons):
        ends = [ProcessExit(rank, -9, reason=reason) for rank, reason in enumerate(reasons)]
        return loss_text(ends, hellos, "", size=2, shown=True)

    assert lost("why", "why").startswith("all 2 ranks were killed by signal 9 (SIGKILL: why), and")
    assert "(SIGKILL: for rank 0, its peak memory was 7 MiB)" in lost(
        "its peak memory was 7 MiB", "its peak memory was 8 MiB"
    )


def test_a_death_is_told_without_waiting_for_the_end_of_all_that_it_took_along(monkeypatch):
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: 100.5))
    died, ended = ProcessExit(5, -9, False, 100.0), ProcessExit(6, -9, True, 100.0)
    assert all_over([died, ended], 128)
    assert not all_over([ended], 128)
    assert all_over([ended], 1)


@pytest.mark.parametrize(
    "cell",
    ["x = 1", "await f()", "!ls", "%time x = 1", "x?", "%%time\nx = 1", "async for a in b: pass"],
)
def test_all_of_ipythons_syntax_is_valid(cell):
    check_source(cell)


@pytest.mark.parametrize("expression", ["-" * 10_000 + "1", "+".join(["1"] * 20_000)], ids="-+")
def test_an_expression_that_python_cannot_compile_is_not_valid_either(expression):
    if sys.version_info >= (3, 14) and "+" in expression:
        pytest.skip("needs a Python before 3.14, which compiles it")
    with pytest.raises(SyntaxError, match=r"^\w.*\. Split the long expression into several lines"):
        check_source(f"x = {expression}")


def test_the_stack_of_a_crash_has_the_numbers_of_the_cells(tmp_path):
    ranks, log = ClusterState(1), tmp_path / "rank-0.log"
    ranks.apply(Hello(0, 1, 0, 1, "host", 10, "cpu", "e", "mpi", str(log)))
    words = LastWords(ranks)
    for number, source in ((3, "def f(): crash()"), (4, "f()")):
        words.numbers[source] = number
    frames = (("def f(): crash()", 1, "f"), ("f()", 2, "<module>"))
    stack = [f'  File "{code_name(one)}", line {line} in {name}' for one, line, name in frames]
    log.write_text("\n".join(["Fatal Python error: Segmentation fault", *stack, "  File x"]))
    told = words.report(ProcessExit(0, -11, by_launcher=False))
    assert told.line == 1
    assert told.traceback[1].endswith(
        '\n  File "In[3]", line 1 in f\n  File "In[4]", line 2 in <module>'
    )


def test_a_cell_may_begin_while_the_words_of_a_death_are_found(tmp_path, monkeypatch):
    ranks, log = ClusterState(1), tmp_path / "rank-0.log"
    ranks.apply(Hello(0, 1, 0, 1, "host", 10, "cpu", "e", "mpi", str(log)))
    log.write_text("the end\n")
    words = LastWords(ranks)
    words.numbers["f()"] = 1

    def name_while_another_begins(source):
        words.numbers["g()"] = 2
        return code_name(source)

    monkeypatch.setattr(last_words, "code_name", name_while_another_begins)
    words.read_log(0)
    assert words.death_text(ProcessExit(0, -9, by_launcher=False)).endswith("the end")
    assert words.numbers == {"g()": 2}


def test_a_rank_that_dies_was_last_seen_at_a_line_of_the_last_cell(tmp_path):
    ranks = ClusterState(1)
    ranks.apply(Hello(0, 1, 0, 1, "host", 10, "cpu", "e", "mpi", str(tmp_path / "rank-0.log")))
    words, end = LastWords(ranks), ProcessExit(0, -9, by_launcher=False)
    ranks.begin_cell(1, (0,), 1)
    words.note_line(1, 0, "In[1]:2  f()")
    assert words.death_text(end).endswith(", last seen at In[1]:2  f()")
    ranks.begin_cell(2, (0,), 1)
    words.note_line(1, 0, "In[1]:3  g()")  # it comes late
    assert "last seen" not in words.death_text(end)
    words.note_line(2, 0, "In[2]:1  h()")
    assert words.death_text(end).endswith(", last seen at In[2]:1  h()")


def test_a_rank_that_has_left_a_cell_that_others_run_is_not_called_idle():
    hellos = {r: Hello(r, 4, r, 4, "host", 10 + r, "cpu", "e", "mpi", "/l/x.log") for r in range(4)}
    answer = {"rss_nbytes": 0, "line": "", "doing": IDLE}
    answers = {0: answer | {"doing": RUNNING}, 1: answer, 2: answer, 3: answer}
    left = {1: "error", 2: "waiting", 3: "ok"}
    found = {one.rank: one.state for one in read_statuses(hellos, answers, left=left)}
    waited = "waited for a rank that failed"
    assert found == {0: "running", 1: "failed", 2: waited, 3: "finished"}
    assert {one.state for one in read_statuses(hellos, answers)} == {"running", "idle"}


@pytest.mark.parametrize(
    ("doing", "text"),
    [
        (Activity(WAITS, "allreduce(Sum)", "ranks 0, 2–3"), None),
        (MEETS, "waiting for the other ranks"),
        (Activity(BETWEEN, "at f.py:3"), "at f.py:3"),
    ],
)
def test_what_a_rank_does_arrives_as_fields_and_becomes_text(doing, text):
    hello = Hello(1, 4, 1, 4, "host", 10, "cpu", "e", "mpi", "/l/x.log")
    content = {"rss_nbytes": 0, "line": "", "doing": doing}
    answer, _ = decode(encode(Answer(1, 1, content, "")))
    (found,) = read_statuses({1: hello}, {1: answer.content})
    assert found.doing == doing
    assert found.state == (text or "waiting in allreduce(Sum) for ranks 0, 2–3")


def test_of_a_long_end_that_was_not_sent_the_user_reads_how_much_only_the_log_has(tmp_path):
    ranks, log = ClusterState(1), tmp_path / "rank-0.log"
    ranks.apply(Hello(0, 1, 0, 1, "host", 10, "cpu", "e", "mpi", str(log)))
    words = LastWords(ranks)
    words.sent_nbytes[0] = 5
    log.write_text("sent\n" + "a" * SHOWN_NBYTES)
    assert words.unsent_output(0) == "a" * SHOWN_NBYTES
    log.write_text("sent\nlost\n" + "a" * SHOWN_NBYTES)
    said, _, shown = words.unsent_output(0).partition("\n")
    assert said == f"… 5 bytes are not shown; {log} has them …"
    assert shown == "a" * SHOWN_NBYTES
