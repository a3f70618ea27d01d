"""Wrong results are found in records of ranks that differ, and in none of healthy ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from allranks.features.verdict.records import (
    BroughtNumbers,
    CellParts,
    EndedCall,
    Kind,
    LastNotFinite,
    Model,
)
from allranks.features.verdict.rules import verdicts
from tests.unit.features.recorded_cells import GRADIENTS, cell, each_rank

NAMES, NBYTES = ["net.0.weight", "net.0.bias", "net.2.weight"], [60_000, 200, 39_800]
DOUBLING = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
WORK = [0.01] * 3


def with_parts(parts: CellParts, *fields: dict) -> CellParts:
    ranks = [replace(one, **own) for one, own in zip(parts.ranks, fields, strict=True)]
    return replace(parts, ranks=ranks)


def found(parts: CellParts):
    return [(one.kind, one.ranks) for one in verdicts(parts)]


# ---- calls of different lines


VALUE = Kind("allreduce", "In[3]:12", 100_000, 3, "allreduce(accuracy)")


def with_value(parts: CellParts, *counts: int, place: str = VALUE.name) -> CellParts:
    """Of the last calls of each rank as many are of another line."""
    ranks = []
    for part, count in zip(parts.ranks, counts, strict=True):
        calls = [*part.calls]
        calls[len(calls) - count :] = [one._replace(kind=1) for one in calls[len(calls) - count :]]
        kinds = [*part.kinds, VALUE._replace(name=place)]
        ranks.append(replace(part, kinds=kinds, calls=calls))
    return replace(parts, ranks=ranks)


LEFT_ALONE = {"well": False, "left": (1, 2), "waits_at": 9}


def test_a_call_of_one_rank_that_meets_another_line_of_the_others_is_named():
    (said,) = verdicts(with_value(cell(WORK, steps=90, **LEFT_ALONE), 25, 0, 0))
    assert (said.kind, said.ranks) == ("mixed", (0,))
    assert str(said) == (
        "only rank 0 called In[3]:12 `allreduce(accuracy)`, 25 times, and allreduce combined these "
        "values with those of ranks 1–2 in In[3]:9 `allreduce(gradients)`: the results are wrong. "
        "Make the call of In[3]:12 on every rank: look for an `if` on the rank"
    )


def test_one_such_call_is_named_too():
    (said,) = verdicts(with_value(cell(WORK, steps=90, **LEFT_ALONE), 1, 0, 0))
    assert "called In[3]:12 `allreduce(accuracy)`, once, and" in said.text


def test_branches_on_the_rank_whose_calls_meet_are_no_mistake():
    # Rank 0 takes another branch in some steps, and all calls end.
    assert found(with_value(cell(WORK, steps=90), 25, 0, 0)) == []
    assert found(with_value(cell(WORK, steps=90), 1, 0, 0)) == []
    branches = with_value(cell(WORK, steps=90), 0, 0, 90)
    assert found(branches) == []
    every = with_value(cell(WORK, steps=90), 30, 30, 30)
    assert found(every) == []
    part = replace(
        branches, ranks=[with_value(every, 30, 30, 30, place="In[3]:7").ranks[0], *every.ranks[1:]]
    )
    assert found(part) == []


#: The second call of a step.
ACCURACY = Kind("allreduce", "In[3]:12", 100_000, 0, "allreduce(accuracy)")
WAITS = {"well": False, "left": (0,), "waits_at": 12}


def with_calls(lines: Mapping[int, Sequence[int]], **fields) -> CellParts:
    """A cell whose ranks have made calls of these lines, one after the other."""
    steps = max(map(len, lines.values()))
    parts = cell([0.01] * len(lines), steps=steps, kinds=[GRADIENTS, ACCURACY], **fields)
    rows = []
    for part in parts.ranks:
        own = zip(part.calls, lines[part.rank], strict=False)
        rows.append({"calls": [one._replace(kind=at) for one, at in own]})
    return with_parts(parts, *rows)


def steps_of(count: int, *skips: int) -> list[int]:
    """The lines of steps with two calls each, but one in some steps."""
    return [at for step in range(count) for at in (0, 1) if not (at and step in skips)]


def test_a_call_that_a_rank_skips_is_named_in_place_of_different_numbers_of_steps():
    every = steps_of(30)[:-1]
    parts = with_calls({0: steps_of(30, 5), 1: every, 2: every, 3: every}, **WAITS)
    (said,) = verdicts(parts)
    assert (said.kind, said.ranks) == ("mixed", (0,))
    assert str(said) == (
        "rank 0 left out In[3]:12 `allreduce(accuracy)`, once, and from then on allreduce combined "
        "values of different lines: the results are wrong. Make the call of In[3]:12 on every "
        "rank: look for an `if` on the rank, or a loop with fewer batches"
    )
    rest = every[:-2]
    (said,) = verdicts(with_calls({0: steps_of(30, 5, 9, 17), 1: rest, 2: rest}, **WAITS))
    assert "rank 0 left out In[3]:12 `allreduce(accuracy)`, 3 times, and" in said.text


#: The lines of a branch for rank 0, and of one for the others, with the same two calls.
BRANCHES = [
    Kind("allreduce", f"In[3]:{line}", 8, 3, f"{name} = allreduce({name})")
    for line, name in ((5, "error"), (6, "right"), (8, "right"), (9, "error"))
]


def with_branches(*orders: Sequence[int]) -> CellParts:
    parts = with_calls({rank: [*order] * 30 for rank, order in enumerate(orders)})
    return each_rank(parts, kinds=BRANCHES)


def test_two_calls_in_another_order_on_some_ranks_are_named():
    (said,) = verdicts(with_branches((0, 1), (2, 3), (2, 3)))
    assert (said.kind, said.ranks) == ("mixed", (1, 2))
    assert str(said) == (
        "rank 0 called In[3]:5 `error = allreduce(error)` where ranks 1–2 called In[3]:8 `right = "
        "allreduce(right)`, and the other way round, 30 times: allreduce combined values of "
        "different lines, and the results are wrong. Make both calls in the same order on every "
        "rank"
    )


def test_ranks_that_take_turns_are_no_mistake():
    # Such as: if (rank + step) % 2: allreduce(part()), else: allreduce(0.0)
    assert found(with_branches((0, 1), (1, 0), (0, 1))) == []
    # Two communicators.
    orders = with_branches((0, 1), (2, 3), (2, 3))
    kinds = [one._replace(op=("allreduce", "bcast")["right" in one.source]) for one in BRANCHES]
    assert found(each_rank(orders, kinds=kinds)) == []


def test_branches_with_the_same_calls_in_the_same_order_or_other_calls_are_no_mistake():
    assert found(with_branches((0, 1), (3, 2), (0, 1))) == []
    assert found(with_branches((0, 0), (2, 2), (2, 2))) == []
    assert found(with_branches((0, 1, 0, 1), (2, 3, 0, 1), (0, 1, 0, 1))) == []


def test_ranks_that_skip_calls_in_different_steps_have_not_made_fewer_steps():
    rows = {0: steps_of(30, 5, 9), 1: steps_of(30, 7)[:58], 2: steps_of(30)[:58]}
    assert found(with_calls(rows, **WAITS)) == []


def test_ranks_with_fewer_steps_of_two_lines_have_left_none_out():
    each = dict.fromkeys(range(3), steps_of(29))
    parts = with_calls(each, well=False, left=(0,), waits_at=9)
    assert [kind for kind, _ in found(parts)] == ["steps"]


def test_branches_by_turns_and_fewer_steps_are_not_taken_for_a_call_that_is_left_out():
    turns = {rank: [(rank + step) % 2 for step in range(60)] for rank in range(2)}
    for line in (9, 12):
        parts = with_calls(turns, well=False, left=(0,), waits_at=line)
        assert "mixed" not in [kind for kind, _ in found(parts)]


def test_branches_that_ranks_take_seldom_and_by_chance_are_no_mistake():
    own, others = [0] * 60, [0] * 60
    own[30] = others[10] = others[31] = 1
    parts = with_calls({0: own, 1: others, 2: others}, well=False, left=(0,), waits_at=9)
    assert found(parts) == []


def test_calls_of_a_group_of_some_ranks_are_no_mistake():
    parts = with_value(cell(WORK, steps=90, **LEFT_ALONE), 25, 0, 0)
    (kinds, *_) = [[part.kinds[0], part.kinds[1]._replace(ranks=2)] for part in parts.ranks]
    assert found(with_parts(parts, *({"kinds": kinds} for _ in range(3)))) == []


# ---- NaN


def not_finite(call: int, begun: float, count: int = 50) -> dict:
    row = LastNotFinite(0, call, begun, count, GRADIENTS.op, GRADIENTS.name, GRADIENTS.nbytes)
    return {"not_finite": [row]}


def test_the_rank_that_brings_nan_first_is_named_with_the_call():
    parts = cell(WORK, steps=90)
    begun = [part.calls[39].ended + 1e-4 for part in parts.ranks]
    later = [not_finite(41, at + 0.011) for at in begun]
    (said,) = verdicts(with_parts(parts, later[0], not_finite(40, begun[1]), later[2]))
    assert (said.kind, said.ranks) == ("nan", (1,))
    assert said.text == (
        "NaN or infinity came first on rank 1: in the input of call 41 of allreduce at In[3]:9 "
        "`allreduce(gradients)`, which spread it to the other ranks"
    )


def test_nan_on_all_ranks_in_one_call_is_blamed_on_none_alone():
    parts = cell(WORK, steps=90)
    rows = [not_finite(40, part.calls[39].ended) for part in parts.ranks]
    (said,) = verdicts(with_parts(parts, *rows))
    assert "came on all ranks at once: in the input of call 41" in said.text


def test_a_few_infinite_gradients_or_numbers_that_never_were_finite_are_no_mistake():
    parts = cell(WORK, steps=90)
    few = not_finite(88, parts.ranks[1].calls[87].ended, count=3)
    always = not_finite(1, 0.0, count=90)
    assert found(with_parts(parts, {}, few, {})) == []
    assert found(with_parts(parts, always, always, always)) == []


# ---- the same data


def brought(rank: int, count: int = 40, same: bool = False, **fields) -> dict:
    rows = [
        BroughtNumbers(0, call, 100_000, (0 if same else 1000 * rank) + call, varied=True)
        for call in range(1, count + 1)
    ]
    return {"brought": [row._replace(**fields) for row in rows]}


def test_equal_gradients_on_all_ranks_are_named():
    (said,) = verdicts(with_parts(cell(WORK), *(brought(rank, same=True) for rank in range(3))))
    assert said.kind == "same_data"
    assert "the same numbers to its reductions, in 40 of 40 calls that were compared" in said.text


@pytest.mark.parametrize(
    "rows",
    [
        [brought(rank) for rank in range(3)],
        # Constants, as of a count; one array again and again; few calls.
        [brought(rank, same=True, varied=False) for rank in range(3)],
        [brought(rank, same=True, checksum=7) for rank in range(3)],
        [brought(rank, count=7, same=True) for rank in range(3)],
        # One of three ranks has other data.
        [brought(0, same=True), brought(1, same=True), brought(2)],
        # A rank has recorded nothing.
        [brought(0, same=True), brought(1, same=True), {}],
    ],
)
def test_different_numbers_and_constants_are_no_mistake(rows):
    assert found(with_parts(cell(WORK), *rows)) == []


# ---- weights


def model(rank: int, wrong=(), since: int = 0, until: int = 10**6, **fields) -> dict:
    """A rank's weights, of which some arrays differ between ranks after some steps."""
    checksums = {
        step: [
            1000 * step + at + (7 * rank if at in wrong and since <= step <= until else 0)
            for at in range(3)
        ]
        for step in DOUBLING
    }
    numbers = [[1.0 + at + (0.03 * rank if at in wrong else 0.0)] for at in range(3)]
    own = {"names": NAMES, "nbytes": NBYTES, "steps": 300, "sampled": 300, "checksums": checksums}
    return {"models": [Model(**{**own, "numbers": numbers, **fields})]}


def models(*args, **fields) -> list[dict]:
    return [model(rank, *args, **fields) for rank in range(3)]


def text_of(parts: CellParts) -> str:
    (said,) = verdicts(parts)
    assert said.kind == "weights"
    return str(said)


ALL = (0, 1, 2)
#: A call for each array.
EACH = [Kind("allreduce", f"In[3]:{at}", nbytes, 0, "") for at, nbytes in enumerate(NBYTES, 7)]


def test_weights_that_differ_from_the_start_are_named():
    text = text_of(with_parts(cell(WORK), *models(ALL)))
    assert text.startswith(
        "the ranks' weights differ in 3 of 3 arrays: net.0.weight, largest difference 0.06, "
        "although gradients were reduced: they differed before the first step. Before it call "
    )


def test_small_arrays_count_too():
    nbytes = [60_000, 400, 4]
    kinds = [replaced_nbytes(one) for one in nbytes]
    text = text_of(with_parts(cell(WORK, kinds=kinds), *models(ALL, nbytes=nbytes)))
    assert "differ in 3 of 3 arrays: net.0.weight" in text
    assert "they differed before the first step" in text


def test_weights_that_differ_later_are_named_with_the_step():
    text = text_of(with_parts(cell(WORK), *models(ALL, since=64)))
    assert "arrays since step 64 (equal after step 32): net.0.weight" in text
    assert "each rank applies another update. Compare the optimizers' settings" in text


def test_the_array_whose_gradients_are_not_reduced_is_named():
    parts = with_parts(cell(WORK, kinds=[EACH[0], EACH[2]]), *models((1,), since=1))
    assert (
        "differ in 1 of 3 arrays: net.0.bias, largest difference 0.06. The gradients of "
        "net.0.bias were not reduced, those of the others were"
    ) in text_of(parts)
    whole = replaced_nbytes(sum(NBYTES) - 200)
    assert "The gradients of net.0.bias were not" in text_of(
        with_parts(cell(WORK, kinds=[whole]), *models((1,), since=1))
    )


def test_an_array_that_has_the_size_of_reduced_ones_is_named_too():
    nbytes, one = [400, 400, 40], replaced_nbytes(400)
    parts = with_parts(cell(WORK, kinds=[one]), *models((1, 2), since=1, nbytes=nbytes))
    assert "The gradients of net.0.bias, net.2.weight were not reduced" in text_of(parts)
    both = cell(WORK, kinds=[one, one._replace(name="In[3]:8")])
    assert found(with_parts(both, *models((1, 2), since=1, nbytes=nbytes))) == []


#: A model of 1.7 MB with a small layer: as its steps, by the calls of a step.
LAYERS = [1_600_000, 12_000, 88_000]
WHOLE, LEFT_OUT = sum(LAYERS), sum(LAYERS) - 12_000


def trained(*calls: int, steps: int = 300, early: int = 0, wrong=(1,), **fields) -> CellParts:
    """A cell whose steps have calls of some sizes, after a broadcast of some arrays."""
    parts = cell(WORK, kinds=[replaced_nbytes(nbytes) for nbytes in calls])
    rows = models(wrong, since=1, nbytes=LAYERS, steps=steps, **fields)
    start = Kind("broadcast", "In[3]:4", 1000, 3, "broadcast(w)")
    ranks = [
        replace(
            part,
            kinds=[*part.kinds, start],
            calls=[*[EndedCall(len(calls), -1.0, 0.0, 0.0, 0)] * early, *part.calls],
            **row,
        )
        for part, row in zip(parts.ranks, rows, strict=True)
    ]
    return replace(parts, ranks=ranks)


@pytest.mark.parametrize(("early", "steps"), [(0, 300), (4, 300), (60, 300), (0, 296), (4, 291)])
def test_a_small_layer_is_named_also_if_the_steps_are_not_known_exactly(early, steps):
    # Calls before the loop, and steps that the optimizer has left out.
    for calls in ([LEFT_OUT], [LEFT_OUT, 8], [LEFT_OUT - 88_000, 88_000], [LAYERS[0], LAYERS[2]]):
        text = text_of(trained(*calls, early=early, steps=steps))
        assert "The gradients of net.0.bias were not reduced, those of the others were" in text
    for calls in ([WHOLE], [WHOLE, 8], LAYERS):
        text = text_of(trained(*calls, early=early, steps=steps))
        assert "gradients were reduced: each rank applies another update" in text


def test_a_layer_of_two_arrays_is_named_by_what_one_call_lacks():
    text = text_of(trained(LAYERS[0], early=4, wrong=(1, 2)))
    assert "The gradients of net.0.bias, net.2.weight were not reduced, those of" in text


def test_a_small_layer_of_one_of_two_models_is_not_said_to_have_another_update():
    parts = trained(LEFT_OUT, WHOLE)
    rows = [{"models": [*part.models, *part.models]} for part in parts.ranks]
    assert found(with_parts(parts, *rows)) == []


def test_the_pieces_of_a_step_are_counted():
    # The gradients of a step go in four pieces; the optimizer has left out a step.
    assert "each rank applies another update" in text_of(trained(WHOLE // 4, steps=74))
    assert "gradients of net.0.bias were not" in text_of(trained(LEFT_OUT // 4, steps=74))


def test_variables_of_which_a_small_layer_is_not_reduced_are_not_said_to_be():
    for nbytes, kinds in ((LEFT_OUT, []), (WHOLE, [("weights", ())])):
        parts = trained(nbytes, steps=0, checksums={}, early=4)
        rows = [{"updated": part.models, "models": []} for part in parts.ranks]
        assert found(with_parts(parts, *rows)) == kinds


def replaced_nbytes(nbytes: int) -> Kind:
    return GRADIENTS._replace(nbytes=nbytes)


@pytest.mark.parametrize("kinds", [[GRADIENTS], EACH])
def test_equal_weights_are_no_mistake(kinds):
    assert found(with_parts(cell(WORK, kinds=kinds), *models())) == []


def test_weights_that_were_made_equal_in_the_first_step_are_no_mistake():
    # As Keras' callback broadcasts them.
    assert found(with_parts(cell(WORK), *models((), until=0))) == []
    equal = {"numbers": [[1.0], [2.0], [3.0]]}
    assert found(with_parts(cell(WORK), *models(ALL, until=0, **equal))) == []


def test_differences_as_between_processors_are_no_mistake():
    rows = [model(rank, ALL, numbers=[[1.0 + 1e-7 * rank]] * 3) for rank in range(3)]
    assert found(with_parts(cell(WORK), *rows)) == []


@pytest.mark.parametrize("nbytes", [40_000, 200_000 // 7, 250_000])
def test_weights_of_other_sizes_than_the_reductions_may_differ_on_purpose(nbytes):
    parts = cell(WORK, kinds=[replaced_nbytes(nbytes)])
    assert found(with_parts(parts, *models(ALL))) == []


@pytest.mark.parametrize(
    "kinds",
    [
        [Kind("reduce_scatter", "In[3]:9", sum(NBYTES), 0, "")],
        [Kind("send", "In[3]:8", sum(NBYTES), 0, ""), GRADIENTS._replace(nbytes=8)],
    ],
)
def test_sharded_weights_and_gradients_that_go_another_way_are_no_mistake(kinds):
    assert found(with_parts(cell(WORK, kinds=kinds), *models(ALL))) == []


def test_a_model_that_each_rank_has_beside_a_common_one_is_no_mistake():
    # One of two models of the same sizes is reduced.
    rows = [{"models": model(rank, ALL)["models"] + model(rank)["models"]} for rank in range(3)]
    assert found(with_parts(cell(WORK), *rows)) == []
    both = cell(WORK, kinds=[GRADIENTS, GRADIENTS._replace(name="In[3]:11")])
    assert found(with_parts(both, *rows))[0][0] == "weights"


def test_weights_of_other_shapes_on_each_rank_differ_on_purpose():
    rows = [model(rank, ALL, nbytes=[400 + 4 * rank, 200, 40]) for rank in range(3)]
    assert found(with_parts(cell(WORK), *rows)) == []


def test_weights_that_are_averaged_now_and_then_may_differ_between():
    # Ten steps of the optimizer for each reduction.
    rows = [model(rank, ALL, steps=3000) for rank in range(3)]
    assert found(with_parts(cell(WORK), *rows)) == []


def test_weights_that_are_averaged_in_each_step_may_differ_after_it():
    def parts(apart: int, **fields) -> CellParts:
        before = [{at: [at + apart * rank] * 3 for at in DOUBLING[1:]} for rank in range(3)]
        rows = [model(rank, ALL, before=before[rank], **fields) for rank in range(3)]
        return with_parts(cell(WORK), *rows)

    # At the cell's end they differ if they are averaged first in a step, or the model is gone.
    for fields in ({}, {"sampled": 256}):
        assert found(parts(0, **fields)) == []
        assert found(replace(parts(0, **fields), well=False)) == []
        assert "they differed before the first step" in text_of(parts(1, **fields))


def test_an_array_that_is_left_out_of_the_average_is_named():
    before = [{at: [at, at + rank, at] for at in DOUBLING[1:]} for rank in range(3)]
    rows = [model(rank, ALL, since=1, before=before[rank]) for rank in range(3)]
    parts = with_parts(cell(WORK, kinds=[EACH[0], EACH[2]]), *rows)
    assert "differ in 1 of 3 arrays: net.0.bias" in text_of(parts)


def test_weights_after_different_numbers_of_steps_are_not_compared():
    # The model of rank 1 is gone.
    rows = [model(rank, ALL, since=10**6, sampled=256 if rank == 1 else 300) for rank in range(3)]
    assert found(with_parts(cell(WORK), *rows)) == []


def test_weights_that_no_step_has_changed_are_no_mistake():
    rows = [model(rank, ALL, checksums=dict.fromkeys(DOUBLING, [rank] * 3)) for rank in range(3)]
    assert found(with_parts(cell(WORK), *rows)) == []


def test_of_a_cell_that_has_failed_only_common_steps_are_compared():
    # The ranks were stopped in different steps.
    stopped = replace(cell(WORK), well=False)
    rows = [model(rank, ALL, since=10**6, steps=300 + rank) for rank in range(3)]
    assert found(with_parts(stopped, *rows)) == []
    wrong = [model(rank, ALL, since=8, steps=300 + rank) for rank in range(3)]
    assert "since step 8 (equal after step 4)" in text_of(with_parts(stopped, *wrong))


def test_variables_that_are_updated_with_reduced_gradients_are_compared():
    rows = [{"updated": one["models"], "models": []} for one in models(ALL, steps=0, checksums={})]
    text = text_of(with_parts(cell(WORK), *rows))
    assert "differ in 3 of 3 arrays at the end: net.0.weight, largest difference 0.06" in text
    assert found(with_parts(replace(cell(WORK), well=False), *rows)) == []
    other = cell(WORK, kinds=[replaced_nbytes(8)])
    assert found(with_parts(other, *rows)) == []
    same = [{"updated": one["models"]} for one in models(steps=0, checksums={})]
    assert found(with_parts(cell(WORK), *same)) == []


def updated(rank: int, names: list[str], nbytes: list[int], apart: float = 0.1) -> Model:
    numbers = [[1.0 + at + apart * rank] for at in range(len(names))]
    return Model(names, nbytes, steps=0, sampled=0, checksums={}, numbers=numbers)


def test_statistics_and_sums_of_a_rank_beside_reduced_weights_are_no_mistake():
    # `params, stats, total = step(params, stats, total, x)`, of which the sizes are reduced, too.
    kinds = [replaced_nbytes(nbytes) for nbytes in (60_000, 256, 4)]
    rows = [
        {
            "updated": [
                updated(rank, ["params.w", "params.b"], [60_000, 256], apart=0.0),
                updated(rank, ["stats.mean"], [256]),
                updated(rank, ["total"], [4]),
            ]
        }
        for rank in range(3)
    ]
    assert found(with_parts(cell(WORK, kinds=kinds), *rows)) == []


def test_models_of_groups_of_ranks_differ_on_purpose():
    # A search with two ranks for each model; all ranks reduce the loss.
    parts = cell([0.01] * 4, kinds=[GRADIENTS, replaced_nbytes(8)._replace(name="In[3]:11")])
    pairs = [parts.ranks[0].kinds[0]._replace(ranks=2), parts.ranks[0].kinds[1]]
    rows = [{"kinds": pairs, **model(rank // 2, ALL)} for rank in range(4)]
    assert found(with_parts(parts, *rows)) == []


def test_ranks_that_each_train_a_model_are_noted_last():
    alone = [replace(part, calls=[], kinds=[]) for part in cell(WORK).ranks]
    parts = with_parts(replace(cell(WORK), ranks=alone), *models(ALL))
    (said,) = verdicts(parts)
    assert (said.kind, said.share) == ("alone", 0.0)
    assert said.text.startswith("each rank has trained a model of its own: the weights differ")
    # Ranks with their own settings search for the best ones.
    search = [model(rank, ALL, settings=f"lr {rank}") for rank in range(3)]
    assert found(with_parts(parts, *search)) == []
    # A slow rank comes before: it meets the others in small sums only.
    small = cell([0.01, 0.01, 0.03], kinds=[replaced_nbytes(8)])
    assert [kind for kind, _ in found(with_parts(small, *models(ALL)))] == ["straggler", "alone"]
