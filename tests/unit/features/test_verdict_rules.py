"""Causes are found in records whose cause is known; healthy cells have none."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from allranks.features.verdict.explained import compare, explain
from allranks.features.verdict.records import (
    BroughtNumbers,
    CellParts,
    CodeLine,
    Doing,
    EndedCall,
    Kind,
    LastNotFinite,
    Look,
    Model,
    NotANumber,
    RankPart,
    Sample,
)
from allranks.features.verdict.rules import verdicts
from tests.unit.features.recorded_cells import GRADIENTS, cell, each_rank, often_short, varied

#: One of 40 parameters.
SMALL = Kind("allreduce", "In[3]:9", 256, 0, "")


READ, AUGMENT, TRAIN = (
    (CodeLine("In[3]:4", "", "x = read(step)"),),
    (CodeLine("In[3]:5", "", "x = augment(x)"), CodeLine("In[3]:2", "augment", "return sorted(x)")),
    (CodeLine("In[3]:6", "", "train(x)"),),
)


def kinds(parts: CellParts) -> list[str]:
    return [one.kind for one in verdicts(parts)]


# ---- healthy cells


def test_equal_ranks_have_no_verdict():
    assert kinds(cell([0.01] * 3)) == []


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("jitter", "bursts"), [(0.1, 0.0), (0.15, 0.0), (0.0, 0.01), (0.1, 0.02)])
def test_noise_is_no_cause(jitter, bursts, size):
    spent = [(READ, 0.2), (AUGMENT, 0.2), (TRAIN, 0.6)]
    lines = dict.fromkeys(range(size), spent)
    cells = [
        cell([0.01] * size, jitter=jitter, bursts=bursts, seed=seed, steps=220, lines=lines)
        for seed in range(25)
    ]
    assert [verdicts(one) for one in cells] == [[]] * 25


def test_few_steps_prove_nothing():
    assert kinds(cell([0.01, 0.05], steps=15)) == []


@pytest.mark.parametrize("first", [5.0, 0.05])
def test_the_slow_first_steps_do_not_count(first):
    def work(step, _):
        return first if step < 2 else 0.01

    assert kinds(cell([work, 0.01])) == []


def test_the_fewest_steps_are_judged_without_the_slow_ones():
    def work(step, _):
        return 5.0 if step < 2 else 0.01

    assert kinds(cell([work, 0.03], steps=22)) == ["straggler"]


def test_a_rank_alone_has_no_verdict():
    assert kinds(cell([0.01])) == []


def test_a_rank_that_is_a_little_slower_is_not_named():
    assert kinds(cell([0.01, 0.0105], jitter=0.1)) == []


def test_messages_of_two_ranks_are_no_steps():
    messages = [Kind(op, "In[3]:9", 8, 0, "") for op in ("send", "recv", "Isendrecv_replace")]
    for kind in messages:
        assert kinds(cell([0.01, 0.03], kinds=[kind])) == []


@pytest.mark.parametrize("seed", range(40))
def test_no_records_are_too_strange(seed):
    random_of = random.Random(seed)
    number = random_of.random

    def times(most):
        return sorted(random_of.choice([0.0, number(), 5 * number()]) for _ in range(most))

    def part(rank):
        kinds = [SMALL._replace(nbytes=at, ranks=3) for at in range(random_of.randrange(1, 4))]
        return RankPart(
            rank=rank,
            number=3,
            host=random_of.choice("ab"),
            cores=1,
            kinds=kinds,
            calls=[
                EndedCall(random_of.randrange(len(kinds)), at, number(), number(), last)
                for at in times(random_of.choice([0, 5, 30, 200]))
                for last in (random_of.randrange(-1, 3),)
            ],
            samples=[Sample(at, at, number(), 0.0, 1e9 * number()) for at in times(7)],
            looks=[
                Look(at, random_of.randrange(-1, 2), random_of.choice([*Doing]), at, number())
                for at in times(100)
            ],
            paths=[AUGMENT, TRAIN],
        )

    parts = CellParts(3, [part(rank) for rank in range(3)], logged=random_of.choice([0, 30]))
    assert explain(parts)
    assert compare(parts, parts)


# ---- a slow rank


def test_a_slow_rank_is_named_with_its_time():
    found = verdicts(cell([0.01, 0.01, 0.025]))[0]
    assert (found.kind, found.ranks) == ("straggler", (2,))
    assert "the others wait 58% of the time for it" in found.text
    assert "It computes 25 ms per step, the others 10 ms" in found.text


SAME, SLOW = [(READ, 0.5), (TRAIN, 0.5)], [(READ, 0.125), (AUGMENT, 0.75), (TRAIN, 0.125)]


def test_the_line_at_which_a_slow_rank_spends_more_is_named():
    # Each works for 5 ms at the first and the last line.
    parts = cell([0.01, 0.01, 0.04], lines={0: SAME, 1: SAME, 2: SLOW})
    found = verdicts(parts)
    assert "the others 10 ms: 30 ms more, at In[3]:5 `x = augment(x)`" in found[0].text
    assert "in augment In[3]:2 `return sorted(x)`" in found[0].text
    assert found[0].next == "Give rank 2 less work there"


def test_a_generator_is_named_by_the_function_in_whose_line_it_is():
    inner = AUGMENT[1]._replace(function="<genexpr>")
    slow = [(READ, 0.125), ((*AUGMENT, inner), 0.75), (TRAIN, 0.125)]
    found = verdicts(cell([0.01, 0.01, 0.04], lines={0: SAME, 1: SAME, 2: slow}))
    assert "`x = augment(x)`, in augment In[3]:2 `return sorted(x)`. Give" in str(found[0])


def test_no_line_is_named_if_several_take_longer():
    parts = cell([0.01, 0.01, 0.04], lines=dict.fromkeys(range(3), SAME))
    assert "more, at" not in verdicts(parts)[0].text


def test_the_line_is_named_where_ranks_also_wait_for_the_input_of_a_collective():
    # As for arrays of jax: the records count this as computing.
    parts = cell([0.01, 0.01, 0.04], lines={0: SAME, 1: SAME, 2: SLOW})
    for doing, found in ((Doing.AWAIT, True), (Doing.COLLECTIVE, False)):
        ranks = [
            replace(
                part,
                looks=[
                    look._replace(path=-1, doing=doing) if look.path == 1 else look
                    for look in part.looks
                ],
            )
            for part in parts.ranks
        ]
        assert parts.ranks[0].paths[1] == TRAIN
        assert ("more, at In[3]:5" in verdicts(replace(parts, ranks=ranks))[0].text) is found


def test_no_line_is_named_where_looks_may_mislead():
    lines = {0: SAME, 1: SAME, 2: SLOW}
    few = cell([0.01, 0.01, 0.04], lines=lines, steps=40)
    parts = cell([0.01, 0.01, 0.04], lines=lines)
    # The extra work takes 30 ms, and has been over for up to 16 ms.
    late = with_late_looks(parts, 0.016)
    beating = each_rank(parts, looks=[look._replace(path=-1) for look in parts.ranks[2].looks])
    for one in (few, late, beating):
        assert verdicts(one)[0].ranks == (2,)
        assert "more, at" not in verdicts(one)[0].text


def with_late_looks(parts: CellParts, seconds: float) -> CellParts:
    """All looks at rank 2 came so late."""
    *others, slow = parts.ranks
    looks = [look._replace(late=seconds) for look in slow.looks]
    return replace(parts, ranks=[*others, replace(slow, looks=looks)])


def test_the_line_of_python_code_is_named_that_lets_looks_in_after_5_ms():
    parts = cell([0.01, 0.01, 0.022], lines={0: SAME, 1: SAME, 2: SLOW})
    found = verdicts(with_late_looks(parts, 0.0055))
    assert "12 ms more, at In[3]:5 `x = augment(x)`, in augment In[3]:2" in found[0].text


def test_the_line_of_short_work_is_named_if_looks_come_in_time():
    short = cell([0.001, 0.001, 0.004], lines={0: SAME, 1: SAME, 2: SLOW}, steps=3000)
    assert "3 ms more, at In[3]:5 `x = augment(x)`" in verdicts(short)[0].text


def test_a_line_in_a_function_is_named_where_late_looks_hide_that_of_its_caller():
    # All ranks are in one line of the cell, and half of the looks at the slow one came late.
    fit, called = AUGMENT[:1], AUGMENT
    parts = cell([0.02, 0.04], lines={0: [(fit, 1.0)], 1: [(called, 0.5), (fit, 0.5)]}, steps=400)
    first, slow = parts.ranks
    looks = [
        look._replace(late=0.01) if at % 5 == 0 or slow.paths[look.path] == fit else look
        for at, look in enumerate(slow.looks)
    ]
    parts = replace(parts, ranks=[first, replace(slow, looks=looks)])
    assert "more, at In[3]:5 `x = augment(x)`, in augment In[3]:2" in verdicts(parts)[0].text


def test_no_line_is_named_for_a_difference_that_may_be_chance():
    # It explains most of the delay, and 14 looks of 30 % of the time differ as much by themselves.
    slow = [(READ, 0.35), (AUGMENT, 0.3), (TRAIN, 0.35)]
    parts = cell([0.015, 0.0255], lines={0: [(READ, 0.5), (TRAIN, 0.5)], 1: slow}, steps=40)
    found = verdicts(parts)[0]
    assert (found.kind, found.ranks) == ("straggler", (1,))
    assert "more, at" not in found.text


def test_a_rank_that_takes_a_little_longer_is_named_only_with_a_line_that_explains_it():
    # The memory that a process has got may make it as slow, at some lines more than at others.
    usual = {0: [(READ, 0.2), (TRAIN, 0.6)]}
    at_all_lines = {1: [(READ, 0.25), (TRAIN, 0.75)]}
    assert not kinds(cell([0.01, 0.014], lines=usual | at_all_lines, steps=600))
    assert not kinds(cell([0.01, 0.014]))
    (found,) = verdicts(
        cell([0.01, 0.014], lines=usual | {1: [(READ, 0.45), (TRAIN, 0.55)]}, steps=600)
    )
    assert (found.kind, found.ranks) == ("straggler", (1,))
    assert "more, at In[3]:4" in found.text


def test_a_slow_rank_is_named_among_many_calls_of_one_line():
    # It is late for the first of them only.
    sizes = [SMALL._replace(nbytes=8 * (1 + at)) for at in range(40)]

    parts = cell([0.01, 0.03], kinds=sizes, transfer=1e-5, steps=100)
    assert [one.ranks for one in verdicts(parts)] == [(1,)]


def test_a_rank_that_is_slower_than_all_others_is_no_matter_of_size():
    assert kinds(cell([0.01] * 7 + [0.02], jitter=0.05))[:1] == ["straggler"]


def test_a_rank_that_saves_now_and_then_is_late_sometimes():
    found = verdicts(cell([often_short, 0.01]))[0]
    assert (found.kind, found.ranks) == ("sometimes", (0,))
    assert "rank 0 is late 6 times in 299 steps, by 490 ms" in found.text


def test_a_rank_that_evaluates_in_each_sixth_step_is_late_sometimes():
    def work(step, _):
        return 0.06 if step % 6 == 5 else 0.01

    found = verdicts(cell([0.01, work, 0.01]))[0]
    assert (found.kind, found.ranks) == ("sometimes", (1,))
    assert "rank 1 is late 50 times in 299 steps, by 50 ms" in found.text


@pytest.mark.parametrize(("delay", "found"), [(2.0, []), (4.0, ["sometimes"])])
def test_a_single_delay_of_a_second_or_two_is_no_cause(delay, found):
    # As of a module that one rank imports in the middle of a short cell.
    def work(step, _):
        return delay if step == 150 else 0.01

    assert kinds(cell([work, 0.01])) == found


def test_several_slow_ranks_are_named():
    found = verdicts(cell([0.01, 0.03, 0.01, 0.03], jitter=0.05))
    assert [(one.kind, one.ranks) for one in found] == [("straggler", (1, 3))]
    assert found[0].text.startswith("ranks 1, 3 are the slow ones: the others wait 6")
    busy = dict.fromkeys(range(4), 0.5)
    assert kinds(cell([0.01, 0.03, 0.01, 0.03], jitter=0.05, ready=busy)) == []


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_rank_that_gives_work_to_all_others_makes_them_no_slow_ones(size):
    assert kinds(cell([0.001] + [0.02] * (size - 1), jitter=0.1)) == []


def test_what_comes_before_the_loop_does_not_matter():
    # A library is imported between the first call and the loop.
    parts = cell([0.01, 0.025])
    first = EndedCall(1, -100.0, 0.0, 0.0, 0)
    ranks = [
        replace(part, calls=[first, *part.calls], kinds=[*part.kinds, SMALL._replace(ranks=2)])
        for part in parts.ranks
    ]
    assert kinds(replace(parts, ranks=ranks)) == ["straggler"]


def test_a_test_at_the_end_is_not_the_loop():
    parts = cell([0.01, 0.025])
    end = parts.ranks[0].calls[-1].ended
    tests = [EndedCall(1, end + 1e-4 * at, 0.0, 1e-4, 0) for at in range(25)]
    ranks = [
        replace(part, calls=[*part.calls, *tests], kinds=[*part.kinds, SMALL._replace(ranks=2)])
        for part in parts.ranks
    ]
    assert kinds(replace(parts, ranks=ranks)) == ["straggler"]


def test_turns_are_blamed_on_no_rank():
    found = verdicts(cell([varied, varied]))
    assert [(one.kind, one.ranks) for one in found] == [("uneven", ())]


def test_turns_are_named_where_a_missing_core_explains_less_than_half_of_them():
    # A rank waits for 27 % of the time, of which the other one had no core for 10 %.
    assert kinds(cell([varied, varied], ready={0: 0.1, 1: 0.1})) == ["uneven"]
    assert kinds(cell([varied, varied], ready={0: 0.15, 1: 0.15})) == []


def test_turns_are_named_where_ranks_share_too_few_cores_with_no_other_program():
    # Two of the four may be ahead while another one has no core.
    ready = dict.fromkeys(range(4), 0.08)
    assert kinds(cell([varied] * 4, ready=ready, busy=0.3, idle=0.7)) == ["uneven"]
    assert kinds(cell([varied] * 4, ready=ready, busy=0.3)) == []


@pytest.mark.parametrize("work", [[0.01, 0.025], [often_short, 0.01], [varied, varied]])
def test_delays_that_a_missing_core_explains_are_blamed_on_no_rank(work):
    # Each rank could run for a third of the time and had no core.
    assert kinds(cell(work, ready={0: 0.35, 1: 0.35})) == []


def test_a_rank_without_a_core_is_named_as_that():
    found = verdicts(cell([0.01, 0.025], ready={1: 0.5, 0: 0.02}))[0]
    assert (found.kind, found.ranks) == ("core", (1,))


def test_a_slow_rank_on_a_busy_host_is_named_if_its_delay_is_its_own():
    # Each rank runs for a millisecond only, and waits as long for a core.
    parts = cell([0.001, 0.03], ready={0: 0.05, 1: 0.05}, busy=0.03)
    assert kinds(parts)[:1] == ["straggler"]


def test_a_slow_rank_on_a_busy_host_is_named_with_a_line_that_the_others_do_not_have():
    # Its threads had no core for as long as the others wait.
    busy = {0: 0.5, 1: 0.5}
    (found, *_) = verdicts(cell([0.01, 0.04], lines={0: SAME, 1: SLOW}, ready=busy))
    assert (found.kind, found.ranks) == ("straggler", (1,))
    assert "more, at In[3]:5 `x = augment(x)`" in found.text


def runs(parts: CellParts, *cores: float) -> CellParts:
    ranks = [
        replace(part, samples=[one._replace(run=ran * one.at) for one in part.samples])
        for part, ran in zip(parts.ranks, cores, strict=True)
    ]
    return replace(parts, ranks=ranks)


def test_a_slow_rank_on_a_busy_host_is_named_if_its_threads_run_for_longer():
    # All threads lack a core for half of the time in which they could run.
    work, busy = [0.01, 0.04], {0: 0.3, 1: 0.6}
    assert kinds(runs(cell(work, ready=busy), 0.3, 0.6))[:1] == ["straggler"]
    assert "straggler" not in kinds(runs(cell(work, ready=busy), 0.3, 0.35))
    # As much longer as a core takes that other programs share with the rank.
    assert "straggler" not in kinds(runs(cell(work, ready=busy), 0.3, 0.45))


def test_a_rank_whose_threads_run_a_little_longer_on_a_busy_host_is_not_named():
    parts = cell([0.01, 0.0165], transfer=1e-5, ready={0: 0.8, 1: 0.9})
    assert "straggler" not in kinds(runs(parts, 0.8, 1.2))
    assert "straggler" in kinds(runs(parts, 0.5, 0.9))


def test_a_rank_whose_threads_run_while_they_wait_for_one_without_a_core_is_not_named():
    # As those of OpenMP: the other rank has all its cores.
    parts = cell([0.01, 0.04], ready={0: 0.0, 1: 0.6})
    assert "straggler" not in kinds(runs(parts, 0.3, 0.9))


@pytest.mark.parametrize("slow", [0.5, 0.7, 0.85])
def test_a_rank_on_a_busy_host_that_is_slower_at_lines_of_all_is_not_named(slow):
    # A missing core makes one line slower than another.
    lines = {0: SAME, 1: [(READ, 1 - slow), (TRAIN, slow)]}
    assert kinds(cell([0.01, 0.04], lines=lines, ready={0: 0.5, 1: 0.5})) == []


def test_a_small_line_of_one_rank_does_not_explain_why_it_has_no_core():
    # It saves, for a twentieth of its time.
    saving = [(READ, 0.45), (TRAIN, 0.45), (AUGMENT, 0.1)]
    assert kinds(cell([0.01, 0.04], lines={0: SAME, 1: saving}, ready={0: 0.5, 1: 0.5})) == []


def test_without_counters_of_the_system_no_time_is_explained():
    for work in ([0.01, 0.025], [often_short, 0.01], [varied, varied]):
        assert kinds(each_rank(cell(work), samples=[])) == []
    assert kinds(each_rank(cell([0.001] * 2, transfer=0.01), samples=[])) == []


def test_a_delay_below_the_error_of_clocks_proves_nothing():
    apart = ("a", "b")
    assert kinds(cell([0.0010, 0.0018], hosts=apart, transfer=1e-5)) == []
    assert kinds(cell([0.0010, 0.0018], transfer=1e-5)) == ["straggler"]
    assert kinds(cell([0.010, 0.018], hosts=apart)) == ["straggler"]


# ---- all ranks wait, or compile


def both(*spent):
    return {0: spent, 1: spent}


LOADED = (*READ, CodeLine("In[3]:2", "__getitem__", "return np.load(at)"))


def test_reading_data_in_each_step_is_named_with_its_lines():
    parts = cell(
        [0.04] * 2, lines=both((LOADED, 0.6), (TRAIN, 0.4)), does={LOADED: (Doing.INPUT, 1, 1)}
    )
    (found,) = verdicts(parts)
    assert found.kind == "input"
    assert found.text.startswith("all ranks wait for data for 5")
    assert found.text.endswith(
        ", at In[3]:4 `x = read(step)`, in __getitem__ In[3]:2 `return np.load(at)`"
    )


def test_data_that_are_read_in_a_fifth_of_the_time_are_no_cause():
    spent = both((READ, 0.2), (TRAIN, 0.8))
    assert kinds(cell([0.04] * 2, lines=spent, does={READ: (Doing.INPUT, 1, 1)})) == []


def test_another_thread_that_reads_counts_only_while_nothing_else_computes():
    # The main thread waits for it; in the second cell the threads of C compute meanwhile, in the
    # third one the main thread does.
    spent = both((READ, 0.7), (TRAIN, 0.3))
    found = {
        (0.1, 1.0, 1.0): ["input"],
        (0.1, 1.4, 1.0): ["input"],
        (0.1, 1.9, 1.0): [],
        (0.9, 1.0, 0.1): [],
    }
    # Most is computed while the next data are read.
    overlap = cell([0.04] * 2, lines=both((READ, 0.97), (TRAIN, 0.03)), does={READ: AHEAD})
    assert kinds(overlap) == []
    for cores, expected in found.items():
        parts = cell([0.04] * 2, lines=spent, does={READ: (Doing.FEED, *cores)})
        assert kinds(parts) == expected


def test_a_thread_that_reads_also_during_collectives_takes_its_core_from_no_other_work():
    # As the generator of Keras' `fit` does. In the second cell other threads compute meanwhile.
    for cores, ahead, expected in ((1.0, 0.8, ["input"]), (1.6, 0.4, [])):
        parts = cell(
            [0.012] * 2,
            transfer=0.008,
            kinds=[SMALL],
            lines=both((READ, 1.0)),
            does={READ: (Doing.FEED, 0.1, cores, 1.0)},
            ahead=ahead,
        )
        assert kinds(parts) == expected


def test_a_rank_that_is_a_little_behind_with_its_data_is_not_the_slow_one():
    # The other one reads ahead for as long, while it waits in the collective.
    spent, does = both((READ, 0.9), (TRAIN, 0.1)), {READ: (Doing.FEED, 0.1, 1.0, 0.95)}
    behind = cell([0.04, 0.02], lines=spent, does=does, ahead=0.95)
    assert kinds(behind) == ["input"]
    # Here its threads read for a shorter time.
    ahead = {0: ((READ, 0.95), (TRAIN, 0.05)), 1: ((READ, 0.5), (TRAIN, 0.5))}
    slow = cell([0.04, 0.004], lines=ahead, does=does, ahead=0.65)
    assert kinds(slow)[0] == "straggler"
    # Here it has nothing to read then.
    assert kinds(cell([0.04, 0.008], lines=spent, does=does)) == ["straggler"]


def test_a_wait_for_a_thread_that_fills_a_queue_is_one_for_data_if_nothing_computes():
    spent = both((READ, 0.95), (TRAIN, 0.05))
    for cores, expected in ((1.0, []), (0.05, ["input"])):
        does = {READ: (Doing.FEED, 0.02, cores)}
        assert kinds(cell([0.04] * 2, lines=spent, does=does, busy=cores)) == expected


def test_a_thread_that_reads_and_gets_its_core_back_late_is_found_by_its_clock():
    # In moments it is on a core for a part of the time only. Another one, of a pool, reads for a
    # part of its time only; and in the last cell others compute as long.
    spent = both((READ, 0.97), (TRAIN, 0.03))
    found = {(0.95, 0.6, 0.9): ["input"], (0.95, 0.2, 0.9): [], (1.85, 0.9, 1.8): []}
    for cores, expected in found.items():
        assert (
            kinds(cell([0.04] * 2, lines=spent, does={READ: (Doing.FEED, 0.1, *cores)})) == expected
        )


def test_a_thread_that_waits_for_a_disk_while_others_compute_is_no_cause():
    # The main thread waits for both. The other cell has nothing to compute meanwhile.
    spent = both((READ, 0.7), (TRAIN, 0.3))
    computes, waits = (Doing.FEED, 0.1, 1.0, 0.02), (Doing.FEED, 0.1, 0.1, 0.02)
    assert kinds(cell([0.04] * 2, lines=spent, does={READ: computes})) == []
    assert kinds(cell([0.04] * 2, lines=spent, does={READ: waits}, busy=0.4)) == ["input"]


def test_a_thread_that_reads_is_named_where_threads_that_need_not_run_had_no_core():
    # As those of TensorFlow, which look for work: the main thread had a core.
    spent = both((READ, 0.7), (TRAIN, 0.3))
    parts = cell(
        [0.04] * 2, lines=spent, does={READ: (Doing.FEED, 0.5, 1.0, 1.0)}, ready={0: 1, 1: 1}
    )
    ranks = [
        replace(part, samples=[one._replace(main_ready=0.1 * one.at) for one in part.samples])
        for part in parts.ranks
    ]
    assert kinds(replace(parts, ranks=ranks)) == ["input"]


def test_a_thread_that_reads_without_a_core_is_no_cause():
    spent = both((READ, 0.7), (TRAIN, 0.3))
    does = {READ: (Doing.FEED, 0.1, 1.0, 1.0)}
    assert kinds(cell([0.04] * 2, lines=spent, does=does, ready={0: 0.5, 1: 0.5})) == []


def test_data_that_one_rank_waits_for_make_it_the_slow_one():
    lines = {0: [(TRAIN, 1.0)], 1: [(READ, 0.75), (TRAIN, 0.25)]}
    parts = cell([0.01, 0.04], lines=lines, does={READ: (Doing.INPUT, 1, 1)})
    found = verdicts(parts)
    assert [(one.kind, one.ranks) for one in found] == [("straggler", (1,))]
    assert "more, at In[3]:4 `x = read(step)`" in found[0].text


def test_ranks_that_stand_still_are_named_with_their_line():
    spent, does = both((READ, 0.6), (TRAIN, 0.4)), {READ: (Doing.COMPUTE, 0.0, 0.0)}
    (found,) = verdicts(cell([0.04] * 2, lines=spent, does=does, busy=0.4))
    assert found.kind == "idle"
    assert "stand still for 5" in found.text
    assert ", at In[3]:4 `x = read(step)`: they wait for a file" in found.text


def test_a_sleep_that_the_cell_shows_is_no_cause():
    sleep = CodeLine("In[3]:8", "", "time.sleep(0.1)")
    in_train = (CodeLine("In[3]:9", "", "train()"), sleep._replace(function="train"))
    for path in ((sleep,), in_train):
        spent, does = both((path, 0.9), (TRAIN, 0.1)), {path: (Doing.COMPUTE, 0.0, 0.0)}
        assert kinds(cell([0.04] * 2, lines=spent, does=does, busy=0.1)) == []


def test_a_sleep_in_a_function_of_another_cell_is_named():
    path = (CodeLine("In[3]:9", "", "train()"), CodeLine("In[2]:8", "read", "time.sleep(0.1)"))
    spent, does = both((path, 0.9), (TRAIN, 0.1)), {path: (Doing.COMPUTE, 0.0, 0.0)}
    (found,) = verdicts(cell([0.04] * 2, lines=spent, does=does, busy=0.1))
    assert found.kind == "idle"


def test_ranks_whose_threads_compute_or_have_no_core_do_not_stand_still():
    # Threads of C compute for the main thread; or the main thread is ready, and has no core.
    spent, does = both((READ, 0.6), (TRAIN, 0.4)), {READ: (Doing.COMPUTE, 0.0, 1.0)}
    assert kinds(cell([0.04] * 2, lines=spent, does=does, busy=0.9)) == []
    ready = {0: 0.5, 1: 0.5}
    assert kinds(cell([0.04] * 2, lines=spent, does=does, busy=0.4, ready=ready)) == ["host"]


def test_nothing_is_said_of_waits_of_ranks_with_a_gpu():
    spent = both((READ, 0.6), (TRAIN, 0.4))
    for doing, busy in ((Doing.COMPUTE, 0.4), (Doing.INPUT, 0.9)):
        parts = cell([0.04] * 2, lines=spent, does={READ: (doing, 0.0, 0.0)}, busy=busy)
        assert kinds(parts) != []
        assert kinds(each_rank(parts, gpu=True)) == []


def test_compiling_in_every_step_is_named():
    spent, does = both((READ, 0.4), (TRAIN, 0.6)), {READ: (Doing.COMPILE, 1, 1)}
    (found,) = verdicts(cell([0.04] * 2, lines=spent, does=does))
    assert found.kind == "compile"
    assert ", in every step, at In[3]:4 `x = read(step)`" in found.text


def test_reading_in_each_step_is_named_though_one_step_stands_still():
    # As between two epochs of Keras' `fit`, for a third of the time.
    parts = cell(
        [lambda step, _: 8.0 if step == 150 else 0.04] * 2,
        lines=both((READ, 0.6), (TRAIN, 0.4)),
        does={READ: (Doing.INPUT, 1, 1)},
    )
    still = [each.ended for each in parts.ranks[0].calls[149:151]]
    for part in parts.ranks:
        for at, look in enumerate(part.looks):
            if still[0] < look.at < still[1]:
                part.looks[at] = look._replace(doing=Doing.COMPUTE)
    assert kinds(parts) == ["input"]


def test_reading_in_each_step_of_a_long_cell_is_named_though_only_its_last_minute_was_looked_at():
    parts = cell([0.1] * 2, lines=both((READ, 0.6), (TRAIN, 0.4)), does={READ: (Doing.INPUT, 1, 1)})
    assert kinds(replace(parts, ranks=[_looked_at_last(part) for part in parts.ranks])) == ["input"]


def _looked_at_last(part: RankPart) -> RankPart:
    return replace(part, looks=part.looks[-len(part.looks) // 3 :])


def test_compiling_in_a_part_of_the_steps_is_no_cause():
    # A second function is compiled in the middle of the loop.
    parts = cell([0.04] * 2, lines=both((READ, 1.0)))
    for part in parts.ranks:
        for at in range(60, 160):
            part.looks[at] = part.looks[at]._replace(doing=Doing.COMPILE)
    assert kinds(parts) == []


# ---- moving data, memory, the host


def test_large_messages_limit_the_bandwidth():
    large = Kind("allreduce", "In[3]:9", 32_000_000, 0, "")
    found = verdicts(cell([0.01, 0.01], kinds=[large], transfer=0.02))[0]
    assert found.kind == "bandwidth"
    assert "67% of the time" in found.text
    assert "32 MB in 20 ms" in found.text


def test_a_quarter_of_the_time_in_transfers_is_named():
    for transfer, found in ((0.0038, ["bandwidth"]), (0.0028, [])):
        assert kinds(cell([0.01] * 2, transfer=transfer)) == found


def test_transfers_are_named_where_the_fastest_of_them_take_as_long():
    # The ranks had no core for some of the time, and each transfer takes as long.
    parts = cell([0.01] * 2, transfer=0.01, ready={0: 0.4, 1: 0.4})
    assert kinds(parts) == ["bandwidth"]


def advice(*kinds: Kind, **options) -> str:
    (found,) = verdicts(cell([0.01] * 2, kinds=kinds, transfer=0.01, **options))
    assert found.kind == "bandwidth"
    return found.next


LARGE = Kind("allreduce", "In[3]:9", 32_000_000, 0, "allreduce(gradients)", "float32")
BUCKET = LARGE._replace(op="all_reduce", source="loss.backward()")


def test_the_advice_fits_what_is_moved():
    fewer = "Make fewer updates with larger batches"
    assert advice(LARGE) == f"{fewer}, or send 16-bit numbers"
    assert advice(LARGE._replace(dtype="float16")) == fewer
    # A model in DistributedDataParallel, and a loop that does its work itself.
    assert advice(BUCKET) == f"{fewer}, or send 16-bit numbers"
    own = BUCKET._replace(source="dist.all_reduce(p.grad)")
    assert advice(own).endswith(
        ", or let DistributedDataParallel move them beside the backward pass"
    )
    rows = LARGE._replace(op="allgather", dtype="int64")
    objects = LARGE._replace(op="allgather_object", dtype="")
    assert advice(rows) == advice(objects) == "Move less data, or less often"


def test_buckets_of_a_model_on_a_gpu_are_not_said_to_cost_time():
    # The GPU computes the gradients while the host is in the call.
    for kind, found in ((BUCKET, []), (LARGE, ["bandwidth"])):
        assert kinds(each_rank(cell([0.01] * 2, kinds=[kind], transfer=0.01), gpu=True)) == found


def test_calls_that_take_as_long_as_without_data_do_not_limit_the_bandwidth():
    medium = GRADIENTS._replace(nbytes=20_000)
    assert kinds(cell([2e-4] * 2, kinds=[medium], transfer=9e-5, steps=9000)) == []
    # As over a network of 1 Gbit/s, unless the calls of a loss take as long there.
    assert kinds(cell([2e-4] * 2, kinds=[medium], transfer=3e-4, steps=9000)) == ["bandwidth"]
    parts = cell([2e-4] * 2, kinds=[medium, SMALL], transfer=3e-4, steps=4000)
    assert kinds(parts) == []


def test_calls_that_wait_for_cores_that_ranks_share_do_not_limit_the_bandwidth():
    medium = GRADIENTS._replace(nbytes=20_000)
    busy = {"ready": dict.fromkeys(range(4), 0.1), "busy": 0.4}
    assert kinds(cell([0.005] * 4, kinds=[medium], transfer=0.004, **busy)) == []
    assert kinds(cell([0.005] * 4, kinds=[LARGE], transfer=0.04, **busy)) == ["bandwidth"]


AHEAD = (Doing.FEED, 0.1, 1.85, 0.97)
CALLED = (CodeLine("In[3]:9", "", "allreduce(gradients)"),)
IN_CALL = {CALLED: (Doing.CALL, 1, 1)}


def test_time_between_small_collectives_counts_if_it_is_spent_at_their_lines():
    # As in functions of torch that begin and end a call.
    sizes = [SMALL._replace(nbytes=8 * (1 + at)) for at in range(40)]
    for path, found in ((CALLED, ["latency"]), (TRAIN, [])):
        lines = both((path, 1.0))
        parts = cell([0.004] * 2, kinds=sizes, transfer=1e-5, steps=900, lines=lines, does=IN_CALL)
        assert kinds(parts) == found


def test_what_is_computed_in_the_line_of_a_small_collective_is_no_part_of_it():
    # As in `allreduce(x @ y)`, many times in a step.
    sizes = [SMALL._replace(nbytes=8 * (1 + at)) for at in range(40)]
    lines = both((CALLED, 1.0))
    assert kinds(cell([0.004] * 2, kinds=sizes, transfer=1e-5, steps=900, lines=lines)) == []


def test_small_collectives_cost_time_where_ranks_share_too_few_cores():
    # In each call one of the ranks comes late, because another one has its core.
    sizes = [SMALL._replace(nbytes=8 * (1 + at)) for at in range(38)]

    def late(_, random_of):
        return 38 * random_of.choice([1e-5, 1e-5, 1e-5, 2e-3])

    ready = dict.fromkeys(range(4), 0.5)
    parts = cell([late] * 4, kinds=sizes, transfer=5e-5, ready=ready, busy=0.4, idle=0.2)
    assert kinds(parts) == ["latency"]
    parts = cell([late] * 4, kinds=sizes, transfer=5e-5, ready=ready, busy=0.2)
    assert "latency" not in kinds(parts)


def test_pauses_tell_how_many_equal_calls_a_step_has():
    def work(step, _):
        return 1.5e-3 if step % 40 == 0 else 1e-5

    (found,) = verdicts(cell([work] * 2, transfer=5e-5, kinds=[SMALL], steps=40 * 400))
    assert found.kind == "latency"
    assert "goes into 40 small collectives per step" in found.text


def test_a_short_step_is_told_from_the_pauses_between_its_calls():
    def work(step, _):
        return 1.5e-4 if step % 40 == 0 else 4e-5

    lines = both((CALLED, 1.0))
    parts = cell(
        [work] * 2, transfer=1e-5, kinds=[SMALL], steps=40 * 1500, lines=lines, does=IN_CALL
    )
    assert kinds(parts) == ["latency"]

    def alike(step, random_of):
        return random_of.uniform(4e-5, 8e-5)

    assert kinds(cell([alike] * 2, transfer=1e-5, kinds=[SMALL], steps=40 * 400)) == []


def test_many_small_messages_cost_their_latency():
    sizes = [SMALL._replace(nbytes=8 * (1 + at)) for at in range(39)]
    found = verdicts(cell([0.0002, 0.0002], kinds=sizes, transfer=5e-5, steps=800))[0]
    assert found.kind == "latency"
    assert "39 small collectives per step" in found.text


def test_ranks_that_have_called_different_kinds_each_count_their_own():
    # Rank 0 has made one more call, before all others.
    sizes = [SMALL._replace(nbytes=8 * (1 + at)) for at in range(39)]
    parts = cell([0.0002, 0.0002], kinds=sizes, transfer=5e-5, steps=800)
    first, second = parts.ranks
    calls = [call._replace(kind=call.kind + 1) for call in first.calls]
    more = replace(first, kinds=[GRADIENTS, *first.kinds], calls=calls)
    assert kinds(replace(parts, ranks=[more, second])) == ["latency"]


def test_the_logged_steps_tell_how_many_equal_calls_a_step_has():
    parts = cell([5e-6, 5e-6], kinds=[SMALL], transfer=5e-5, steps=20_000)
    assert kinds(parts) == []  # each call may be a step
    assert kinds(replace(parts, logged=500)) == ["latency"]


def test_calls_that_are_too_many_for_steps_cost_their_latency():
    # No step of a training takes 10 µs.
    (found,) = verdicts(cell([5e-6, 5e-6], kinds=[SMALL], transfer=5e-6, steps=100_000))
    assert found.kind == "latency"
    assert found.text.startswith("50% of the time goes into 100,000 small collectives per second")
    assert kinds(cell([9e-6, 9e-6], kinds=[SMALL], transfer=1e-6, steps=100_000)) == []


def test_calls_that_are_left_out_have_their_part_of_the_time_without_a_core():
    # Of 2 s the last 0.2 s are known. The ranks had no core for a tenth of the time.
    parts = cell([5e-6, 5e-6], kinds=[SMALL], transfer=5e-6, steps=200_000, ready={0: 0.1, 1: 0.1})
    ranks = [replace(one, calls=one.calls[-20_000:], left_out=180_000) for one in parts.ranks]
    assert kinds(replace(parts, ranks=ranks)) == ["latency"]


def test_memory_that_grows_is_reported_with_what_grows_with_it():
    parts = cell([0.03, 0.03], memory=lambda rank, at: 5e8 + 3e7 * at * rank)
    grown = {"history": (3, 300)}
    (found,) = verdicts(each_rank(parts, grown=grown))
    assert (found.kind, found.ranks) == ("memory", (1,))
    assert "grows by 30 MB per second, 0.93 MB per step, and `history` grows with it" in found.text


def test_memory_that_grows_for_a_few_seconds_is_reported():
    def at(memory):
        parts = cell([0.015] * 2, steps=280)
        for part in parts.ranks:
            part.looks[:] = [one._replace(rss_nbytes=memory(one.at)) for one in part.looks]
        return kinds(parts)

    assert parts_seconds(cell([0.015] * 2, steps=280)) < 4.6
    assert at(lambda at: 5e8 + 2e7 * at) == ["memory"]
    assert at(lambda at: 5e8 + 5e6 * at) == []
    # As what libraries fill, slower and slower.
    assert at(lambda at: 5e8 + 2e8 * (1 - 0.3**at)) == []


def parts_seconds(parts: CellParts) -> float:
    return max(part.calls[-1].ended for part in parts.ranks)


def test_memory_that_fills_up_is_no_cause():
    filled = cell([0.03, 0.03], memory=lambda rank, at: 5e8 + 2e8 * min(at, 3))
    assert kinds(filled) == []


def test_ranks_that_sleep_need_no_core():
    assert kinds(cell([0.01, 0.01], ready={0: 0.08, 1: 0.08}, busy=0.05)) == []


def test_a_host_without_free_cores_is_reported():
    parts = cell([varied, varied], ready={0: 0.9, 1: 0.9}, busy=0.3)
    (found,) = verdicts(parts)
    assert found.kind == "host"
    # A notebook shows this behind "ranks 0–1 ·".
    assert found.text == (
        "the ranks got 0.6 of the 2 cores of here: for 75% of the time in which their threads "
        "could run, they had no core. Other programs, or processes that the ranks have started, "
        "use the cores, or a container has a limit"
    )


def test_threads_without_a_core_are_no_sign_of_other_programs_while_cores_are_idle():
    # As those of TensorFlow: they wake up often, and sleep soon. Or the cores are not known.
    for idle in (1.0, float("nan")):
        parts = cell([varied, varied], ready={0: 0.9, 1: 0.9}, busy=0.3, idle=idle)
        assert kinds(parts) == []


def test_a_limit_of_cores_that_the_ranks_use_up_is_no_other_program():
    # A container with half a core for both, on a host with idle ones.
    parts = cell([varied, varied], ready={0: 0.9, 1: 0.9}, busy=0.25)
    assert kinds(parts) == ["host"]
    assert kinds(each_rank(parts, cores=0.5)) == []
    (found,) = verdicts(each_rank(parts, cores=1.5))
    assert "the ranks got 0.5 of the 1.5 cores of here" in found.text


def test_data_that_are_read_in_a_thread_are_named_before_a_busy_host():
    # As those of Keras: the threads that wait for them use no core.
    does = {READ: (Doing.FEED, 0.1, 0.3, 0.2)}
    parts = cell([0.04] * 2, lines=both((READ, 0.8), (TRAIN, 0.2)), does=does, busy=0.3)
    ready = [[one._replace(ready=0.9 * one.at) for one in part.samples] for part in parts.ranks]
    ranks = [replace(one, samples=row) for one, row in zip(parts.ranks, ready, strict=True)]
    assert kinds(replace(parts, ranks=ranks)) == ["input", "host"]
    alone = [
        replace(one, samples=[row._replace(idle=1.4 * row.at) for row in one.samples])
        for one in ranks
    ]
    assert kinds(replace(parts, ranks=alone)) == ["input"]


def test_a_busy_one_of_several_hosts_is_reported_with_its_ranks():
    ready = {0: 0.9, 1: 0.9, 2: 0.0}
    parts = cell([varied] * 3, ready=ready, busy=0.3, hosts=["h1", "h1", "h2"])
    assert any("ranks 0–1 got 0.6 of the 2 cores of h1" in one.text for one in verdicts(parts))


# ---- wrong


def test_a_value_that_is_not_a_number_comes_first():
    lost = [NotANumber("loss", 1, 40), NotANumber("loss", 0, 41), NotANumber("loss", 2, 41)]
    found = verdicts(cell([0.01, 0.01, 0.025], not_numbers=lost))
    assert [one.kind for one in found] == ["nan", "straggler"]
    assert found[0].text == "loss is NaN since step 40 on rank 1, later on ranks 0, 2"


def test_a_value_of_a_member_that_is_not_a_number_is_named_with_the_member():
    lost = [NotANumber("loss", 1, 40, "rate=0.1"), NotANumber("loss", 1, 45, "rate=0.01")]
    (found,) = verdicts(cell([0.01] * 3, not_numbers=lost))
    assert found.text == "loss of member rate=0.1 is NaN since step 40 on rank 1"


def test_gradients_of_jax_that_stay_on_their_rank_are_noted():
    loss = Kind("allreduce", "In[3]:11", 4, 0, "log(loss=float(allreduce(loss)))")
    start = Kind("broadcast", "In[3]:5", 400, 0, "w = broadcast(w)")
    alone = each_rank(cell([0.01] * 2, kinds=[loss]), gradients=True)
    assert verdicts(alone)[0].text.startswith("each rank trains a model of its own: it computes")
    assert kinds(each_rank(alone, gradients=False)) == []
    for kind, found in ((start, ["alone"]), (SMALL, [])):
        more = [replace(part, kinds=[*part.kinds, kind]) for part in alone.ranks]
        assert kinds(replace(alone, ranks=more)) == found


def test_different_numbers_of_steps_are_counted():
    parts = cell([0.01, 0.01], steps=97, left=(1,), waits_at=9)
    found = verdicts(parts)[0]
    assert found.kind == "steps"
    assert "rank 1 ended after 97 calls of allreduce at In[3]:9" in found.text
    assert kinds(replace(parts, waits_at=12)) == []


def test_the_others_wait_in_the_first_call_of_a_step():
    both_lines = [SMALL._replace(name="In[3]:7"), SMALL]
    parts = cell([0.01, 0.01], kinds=both_lines, steps=97, left=(1,), waits_at=7)
    assert kinds(parts)[:1] == ["steps"]


def test_named_calls_are_those_of_the_line_at_which_looks_have_found_the_loop():
    named = SMALL._replace(name="gradients")
    parts = cell(
        [0.01] * 2, kinds=[named], steps=97, left=(1,), waits_at=6, lines=both((TRAIN, 1.0))
    )
    assert kinds(parts)[:1] == ["steps"]
    assert kinds(replace(parts, waits_at=12)) == []
    # Rank 0 evaluates alone after the loop, and calls there.
    first, second = parts.ranks
    after = [Look(first.calls[-1].ended + at, 1) for at in (0.1, 0.2)]
    alone = replace(first, paths=[TRAIN, AUGMENT], looks=[*first.looks, *after])
    assert kinds(replace(parts, ranks=[alone, second], waits_at=5)) == []


# ---- what `why` says


def test_without_a_cause_the_shares_of_time_are_listed():
    text = explain(cell([0.009, 0.009]))
    assert text.startswith("In[3]: nothing stands out: computing 90%, waiting 0%, transfer 10%\n")
    assert "a step: the mean of 299, each up to allreduce at In[3]:9 `allreduce(gradients)`" in text


def test_a_cause_is_explained_with_the_times_of_each_rank():
    text = explain(cell([0.01, 0.01, 0.025]))
    assert text.startswith("In[3]: rank 2 is the slow one: ")
    (row,) = [line for line in text.splitlines() if line.startswith("  rank 0")]
    assert " ".join(row.split()) == (
        "rank 0 26.0 ms 10.0 ms 15.0 ms 1.0 ms 0% rank 2, 58% of the time"
    )


def test_a_rank_has_no_core_for_at_most_the_whole_time_however_many_threads_it_has():
    parts = cell([0.01, 0.01], ready={0: 0.4, 1: 0.4})
    assert "  no core  " in explain(parts)
    threads = [
        replace(part, samples=[one._replace(ready=6 * one.ready) for one in part.samples])
        for part in parts.ranks
    ]
    assert explain(replace(parts, ranks=threads)) == explain(parts)


def test_samples_beyond_the_loop_do_not_add_to_the_time_without_a_core():
    # Half of a long time was without a core, and the loop is a part of that time.
    parts = each_rank(
        cell([0.01, 0.01], steps=30),
        samples=[Sample(-1.0, 0.0, 0.0, 0.0, 5e8), Sample(1.0, 1.0, 1.0, 1.0, 5e8)],
    )
    (row,) = [line for line in explain(parts).splitlines() if line.startswith("  rank 0")]
    assert " 50%" in row


def test_two_cells_are_compared_by_the_part_that_explains_the_difference():
    slow, fast = cell([0.01, 0.01, 0.025]), replace(cell([0.01, 0.01, 0.012]), number=5)
    assert compare(slow, fast) == (
        "In[5] is 2 times faster than In[3]: less waiting for rank 2 (15 ms → 2 ms per step)"
    )
    assert compare(fast, slow).startswith("In[3] is 2 times slower than In[5]: more waiting for")


def test_noise_makes_no_cell_faster():
    one = cell([0.01, 0.01, 0.012])
    other = cell([0.01, 0.01, 0.0121], jitter=0.1, seed=3)
    assert "is as fast as In[3]" in compare(one, replace(other, number=5))


# ---- the wire


def test_a_part_is_the_same_after_its_way():
    parts = each_rank(
        cell([0.01, 0.02]),
        grown={"x": (1, 2)},
        left_out=7,
        looks=[Look(1.5, 1, Doing.INPUT, 0.25, 0.5)],
        gpu=True,
        gradients=True,
        paths=[READ, AUGMENT],
        brought=[BroughtNumbers(0, 3, 4096, 2**32 - 1, True)],
        not_finite=[LastNotFinite(0, 41, 1.5, 7, "allreduce", "In[3]:9", 4096)],
        models=[
            Model(
                ["w", "b"],
                [4096, 40],
                9,
                8,
                {1: [5, 6], 2: [7, 8]},
                [[1.0, 2.0], [3.0]],
                {2: [6, 7]},
            ),
            Model([], [], 0, 0, {}, []),
        ],
        updated=[Model(["p"], [8], 0, 0, {}, [[5.0]])],
    )
    part = parts.ranks[1]
    content, payloads = part.message()
    assert RankPart.read(1, content, payloads) == replace(part, kinds=[*part.kinds])
