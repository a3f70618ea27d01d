"""Whether the ranks train one model, with numbers: pure functions of what they have recorded.

Weights that may differ on purpose are not reported: with other shapes on each rank, with
reductions that do not have the sizes of the weights, or with fewer reductions than steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from allranks.features.verdict import LEAST_STEPS
from allranks.features.verdict.cause import Verdict
from allranks.features.verdict.loop import Loop
from allranks.features.verdict.records import (
    CellParts,
    Kind,
    LastNotFinite,
    Model,
    NotANumber,
    RankPart,
)
from allranks.records.ranks import label

#: Values, or calls, that are NaN up to the cell's end, at least.
NOT_NUMBERS = 5
#: Calls with equal numbers on all ranks: how many different ones, and their part of the calls.
SAME_CALLS, SAME_PART = 8, 0.9
#: Smaller calls alone reduce flags and values, and no gradients.
DATA_NBYTES = 64
#: A single number, as a loss.
NUMBER_NBYTES = 8
#: An array is reduced in this part of the steps, at least. The calls in a step are a whole number,
#: if they are as near to it: steps that an optimizer leaves out change it a bit.
REDUCED_PART = 0.9
#: The arrays of a layer, as its kernel and its bias. Of more, a user may have left them out.
LAYER_ARRAYS = 2
#: Besides the gradients, a step reduces this part of their bytes at most, and as many more.
MOST_REDUCED, LEAST_NBYTES = 1.05, 4096
#: After a call that a rank leaves out, its lines change so often at least.
LEAST_CHANGES = 4
#: Differences that are smaller, in parts of the largest number, may come from the processors.
LEAST_DIFFERENCE = 1e-5


def wrong(cell: CellParts, loop: Loop | None) -> list[Verdict]:
    """Returns the causes of wrong results; one that takes no part of the time is a note."""
    spread = spread_not_finite(cell)
    return [
        *(mixed_lines(cell) or left_out_line(cell) or crossed_lines(cell)),
        *(spread or not_a_number(cell)),
        *(different_weights(cell, loop) or different_variables(cell, loop)),
        *same_data(cell),
        *gradients_alone(cell, loop),
    ]


def mixed_lines(cell: CellParts) -> list[Verdict]:
    """Calls of a line that only some ranks reach, which took part in calls of another line.

    They have the same operation and shape, so no call fails, as where rank 0 alone reduces a value
    to log it. At the end it waits alone. Where the calls of all ranks end, they may be those of the
    branches of an ``if``, or of threads: no mistake.
    """
    if not cell.left or len({part.left_out for part in cell.ranks}) > 1:
        return []
    counts = [_counts_by_line(part, len(cell.ranks)) for part in cell.ranks]
    for op in sorted({op for row in counts for op, _ in row}):
        rows = [{place: n for (own, place), n in row.items() if own == op} for row in counts]
        places = sorted({place for row in rows for place in row})
        some = [place for place in places if any(place not in row for row in rows)]
        alone = [sum(row.get(place, 0) for place in some) for row in rows]
        least, most = min(alone), max(alone)
        # A rank may wait in a call that the others have not made.
        missing = max(sum(row.values()) for row in rows) - min(sum(row.values()) for row in rows)
        if missing > 1 or most - least <= missing or len(some) == len(places):
            continue
        rank = alone.index(most)
        own = max(some, key=lambda place: rows[rank].get(place, 0))
        ranks = tuple(part.rank for part, row in zip(cell.ranks, rows, strict=True) if own in row)
        lacks = {
            place: max(row.get(place, 0) for row in rows) - rows[rank].get(place, 0)
            for place in places
            if place not in some
        }
        met = max(lacks, key=lambda place: lacks[place])
        others = tuple(part.rank for part in cell.ranks if part.rank not in ranks)
        if cell.left != others:
            continue
        count = rows[rank][own]
        times = "once" if count == 1 else f"{count:,} times"
        return [
            Verdict(
                "mixed",
                1.0,
                f"only {label(ranks)} called {own}, {times}, and {op} combined "
                f"these values with those of {label(others)} in {met}: the results are wrong",
                f"Make the call of {own.partition(' ')[0]} on every rank: look for an `if` on the "
                "rank",
                ranks,
            )
        ]
    return []


def left_out_line(cell: CellParts) -> list[Verdict]:
    """Calls of a line that some ranks leave out, whose later calls met those of other lines.

    They began alike, and left when the others still had to make as many calls as they had left out.
    Branches of an ``if`` on the rank do not look so, nor do threads.
    """
    rows = {part.rank: _calls_in_order(part, len(cell.ranks)) for part in cell.ranks}
    others = tuple(rank for rank in rows if rank not in cell.left)
    if not cell.left or not others or any(part.left_out for part in cell.ranks):
        return []
    whole = max((rows[rank] for rank in others), key=len)
    made = rows[cell.left[0]]
    if any(rows[rank] != made for rank in cell.left):
        return []
    if any(rows[rank] != whole[: len(rows[rank])] for rank in others) or made[:1] != whole[:1]:
        return []
    missing, rest = _missing(made, whole)
    # The rest is what the others still had to call when these ranks left.
    if len({*missing}) != 1 or len(rest) != len(missing) + len(made) - len(whole):
        return []
    if rest and not _is_at(rest[0], cell.waits_at):
        return []
    # Branches that each rank takes at random may match so by chance, where lines seldom change.
    unlike = (at for at, (a, b) in enumerate(zip(made, whole, strict=False)) if a != b)
    later = made[next(unlike) :]
    if sum(a != b for a, b in pairwise(later)) < LEAST_CHANGES + len(missing):
        return []
    op, place = missing[0]
    count = len(missing)
    times = "once" if count == 1 else f"{count:,} times"
    return [
        Verdict(
            "mixed",
            1.0,
            f"{label(cell.left)} left out {place}, {times}, and from then on {op} combined values "
            f"of different lines: the results are wrong",
            f"Make the call of {place.partition(' ')[0]} on every rank: look for an `if` on the "
            "rank, or a loop with fewer batches",
            cell.left,
        )
    ]


def crossed_lines(cell: CellParts) -> list[Verdict]:
    """Two calls with the same source on all ranks, which some ranks make in the other order.

    Branches of an ``if`` have lines of their own, and these two calls never meet themselves. Ranks
    that take turns, as a root that broadcasts, make the calls of the same two lines: no mistake.
    """
    rows = {part.rank: _calls_in_order(part, len(cell.ranks)) for part in cell.ranks}
    first, *_ = rows.values()
    other = next((row for row in rows.values() if row != first), first)
    # Calls that are left out shift all later ones.
    if cell.left or len({len(row) for row in rows.values()}) > 1:
        return []
    if len({part.left_out for part in cell.ranks}) > 1:
        return []
    met = Counter(zip(first, other, strict=True))
    pairs = Counter({(_source_of(a), _source_of(b)): 0 for a, b in met})
    for (a, b), count in met.items():
        pairs[_source_of(a), _source_of(b)] += count
    for (a, b), count in met.items():
        one, two = _source_of(a), _source_of(b)
        crosses = one != two and count == pairs[one, two] == pairs[two, one] >= LEAST_STEPS
        # Calls of different operations never meet: they are those of two communicators.
        if not crosses or one[0] != two[0] or pairs[one, one] or pairs[two, two]:
            continue
        both = [(c, d) for c, d in met if {_source_of(c), _source_of(d)} == {one, two}]
        if not {c for c, _ in both}.isdisjoint(d for _, d in both):
            continue
        alike = tuple(rank for rank, row in rows.items() if row == first)
        others = tuple(rank for rank, row in rows.items() if row == other)
        return [
            Verdict(
                "mixed",
                1.0,
                f"{label(alike)} called {a[1]} where {label(others)} called {b[1]}, and the other "
                f"way round, {count:,} times: {a[0]} combined values of different lines, and the "
                "results are wrong",
                "Make both calls in the same order on every rank",
                others,
            )
        ]
    return []


def pairs_unlike_lines(cell: CellParts) -> bool:
    """Whether a call of one line met that of another one, and all ranks call both lines."""
    rows = [_calls_in_order(part, len(cell.ranks)) for part in cell.ranks]
    common = set(rows[0]).intersection(*rows)
    return any(len({*met}) > 1 and common.issuperset(met) for met in zip(*rows, strict=False))


_CallOfLine = tuple[str, str]


def _missing(
    made: Sequence[_CallOfLine], whole: Sequence[_CallOfLine]
) -> tuple[list[_CallOfLine], Sequence[_CallOfLine]]:
    """Returns the calls that a rank left out before one that it made, and those it made after all
    that the others had made.
    """
    missing: list[_CallOfLine] = []
    at = 0
    for index, one in enumerate(made):
        try:
            found = whole.index(one, at)
        except ValueError:
            return missing, made[index:]
        missing += whole[at:found]
        at = found + 1
    return missing, []


def _source_of(call: _CallOfLine) -> tuple[str, str]:
    """Returns the operation and the source of a call, which other lines may have, too."""
    return call[0], call[1].partition(" ")[2]


def _is_at(call: _CallOfLine, line: int | None) -> bool:
    return call[1].partition(" ")[0].endswith(f":{line}")


def _counts_by_line(part: RankPart, size: int) -> Counter[_CallOfLine]:
    """Returns how often the rank has made the calls of all ranks, by operation and line."""
    return Counter(_calls_in_order(part, size))


def _calls_in_order(part: RankPart, size: int) -> list[_CallOfLine]:
    """Returns the operations and lines of the rank's calls of all ranks."""
    lines = [
        # A call that has a name of its own may have another line each time.
        (kind.op, f"{kind.name} `{kind.source}`") if kind.source and kind.meets(size) else None
        for kind in part.kinds
    ]
    return [line for call in part.calls if (line := lines[call.kind]) is not None]


def not_a_number(cell: CellParts) -> list[Verdict]:
    if not cell.not_numbers:
        return []
    first = min(one.step for one in cell.not_numbers)
    name, member = min((o.name, o.member) for o in cell.not_numbers if o.step == first)
    same = [one for one in cell.not_numbers if (one.name, one.member) == (name, member)]
    ranks = tuple(sorted(one.rank for one in same if one.step == first))
    later = {one.rank for one in cell.not_numbers} - {*ranks}
    value = f"{name} of member {member}" if member else name
    if all(one.always for one in cell.not_numbers):
        # It may not be measured here: that is a note, unless the largest array is NaN, too.
        reduced = any(
            one.nbytes >= max((kind.nbytes for kind in part.kinds), default=0)
            for part in cell.ranks
            for one in part.not_finite
        )
        return [
            Verdict(
                "nan",
                1.0 if reduced else 0.0,
                f"{value} is NaN in all steps on {label(ranks)}",
                "Look at the data, the first weights, divisions and logarithms",
                ranks,
            )
        ]
    others = f", later on {label(sorted(later))}" if later else ""
    if any(one.passing for one in same):
        ranks = tuple(sorted(one.rank for one in same))
        times = max(one.passing for one in same)
        steps = "1 step" if times == 1 else f"{times} steps"
        most = "up to " if len({one.passing for one in same}) > 1 else ""
        at = f" on {label(sorted({*ranks} - later))}" if later.intersection(ranks) else ""
        return [
            Verdict(
                "nan",
                1.0,
                f"{value} was NaN in {most}{steps} on {label(ranks)}, first in step {first:g}{at}, "
                "and a number in all others",
                f"Look at the batch of step {first:g} there, and at divisions and logarithms",
                ranks,
            )
        ]
    return [
        Verdict(
            "nan",
            1.0,
            f"{value} is NaN since step {first:g} on {label(ranks)}{others}",
            f"Look at the batch of step {first:g}, the learning rate, and divisions and logarithms",
            ranks,
        )
    ]


def not_a_number_in_members(found: Sequence[NotANumber]) -> list[Verdict]:
    """NaN in the logged values of members of an ensemble, whose numbers are in place of ranks."""
    if not found:
        return []
    name = min(found, key=lambda one: one.step).name
    same = sorted({(one.rank, one.step) for one in found if one.name == name})
    members = ", ".join(f"in member {number} since step {step:g}" for number, step in same[:3])
    more = f", and in {len(same) - 3} more" if len(same) > 3 else ""
    return [
        Verdict(
            "nan",
            1.0,
            f"{name} is NaN {members}{more}",
            "Look at their values of the grid, as the learning rate",
        )
    ]


def spread_not_finite(cell: CellParts) -> list[Verdict]:
    """NaN or infinity that some rank brought to a reduction, and that stayed to the cell's end."""
    found: dict[tuple[int, str, str, int], dict[int, LastNotFinite]] = {}
    for part in cell.ranks:
        for one in part.not_finite:
            key = one.group, one.op, one.name, one.nbytes
            if one.calls >= NOT_NUMBERS:
                found.setdefault(key, {})[part.rank] = one
    if not found:
        return []
    # By time: calls are counted in each group.
    rows = min(found.values(), key=lambda row: min(one.begun for one in row.values()))
    first = min(one.call for one in rows.values())
    ranks = tuple(sorted(rank for rank, one in rows.items() if one.call == first))
    one = rows[ranks[0]]
    # Numbers that were never finite may be meant so.
    earlier = _earlier_calls(cell, ranks[0], one)
    if not earlier:
        return []
    place = Kind(one.op, one.name, one.nbytes, 0, _source(cell, one.name)).place
    all_at_once = len(ranks) == len(cell.ranks)
    where = "on all ranks at once" if all_at_once else f"first on {label(ranks)}"
    spread = "" if all_at_once else ", which spread it to the other ranks"
    return [
        Verdict(
            "nan",
            1.0,
            f"NaN or infinity came {where}: in the input of call {earlier + 1:,} of {place}"
            f"{spread}",
            f"%%distributed --check nan raises at that line on {label(ranks)}; look at its batch, "
            "the learning rate, divisions and logarithms",
            ranks,
        )
    ]


def _earlier_calls(cell: CellParts, rank: int, one: LastNotFinite) -> int:
    part = next(part for part in cell.ranks if part.rank == rank)
    same = {at for at, kind in enumerate(part.kinds) if (kind.op, kind.name) == (one.op, one.name)}
    earlier = sum(call.kind in same and call.ended <= one.begun for call in part.calls)
    # Of a long cell only the last calls are known.
    return earlier + part.left_out


def _source(cell: CellParts, name: str) -> str:
    return next((kind.source for kind in cell.ranks[0].kinds if kind.name == name), "")


def same_data(cell: CellParts) -> list[Verdict]:
    if len(cell.ranks) < 2:
        return []
    rows = [{(one.group, one.call): one for one in part.brought} for part in cell.ranks]
    same = differ = 0
    seen = set()
    for key, one in rows[0].items():
        others = [row.get(key) for row in rows[1:]]
        # Equal numbers in an array, and arrays that come again, as flags, are equal by right.
        new = (one.nbytes, one.checksum) not in seen
        seen.add((one.nbytes, one.checksum))
        if None in others or not one.varied:
            continue
        if any(other is not None and other.checksum != one.checksum for other in others):
            differ += 1
        elif new:
            same += 1
    if same < SAME_CALLS or same < SAME_PART * (same + differ):
        return []
    return [
        Verdict(
            "same_data",
            1.0,
            f"every rank brings the same numbers to its reductions, in {same} of {same + differ} "
            "calls that were compared: all ranks work on the same data, or draw the same random "
            "numbers",
            "Give each rank its part, as x[rank::size] or a DistributedSampler, and its random "
            "numbers, as default_rng([seed, rank])",
        )
    ]


# ---- weights


def different_weights(cell: CellParts, loop: Loop | None) -> list[Verdict]:
    rows = [part.models for part in cell.ranks]
    if len(rows) < 2 or not rows[0] or len({len(row) for row in rows}) > 1:
        return []
    found = [_compared(cell, loop, list(models)) for models in zip(*rows, strict=True)]
    return [one for one in found if one is not None][:1]


def different_variables(cell: CellParts, loop: Loop | None) -> list[Verdict]:
    """Variables that the ranks update with the same gradients, and that differ at the end."""
    rows = [part.updated for part in cell.ranks]
    if loop is None or not cell.well or len({len(row) for row in rows}) > 1:
        return []
    updated = [*zip(*rows, strict=True)]
    for models in updated:
        first = models[0]
        # Statistics and sums of a rank may have the sizes of some gradients.
        whole = _reduces_all(loop, [first]) or _reduces_all(loop, [row[0] for row in updated])
        single = sum(first.nbytes) <= NUMBER_NBYTES
        if single or not whole or any(model.arrays != first.arrays for model in models):
            continue
        differ = _apart([*models])
        names = {first.names[at] for at in differ}
        if not differ or not names <= (_reduced(cell, loop, first, differ) or set()):
            continue
        largest, name = _largest([*models], differ)
        return [
            Verdict(
                "weights",
                1.0,
                f"the ranks' weights differ in {len(differ)} of {len(first.arrays)} arrays at the "
                f"end: {name}, largest difference {largest:.2g}, although gradients of their sizes "
                "were reduced in each step",
                "Begin with the same numbers on all ranks, from the same key or by a broadcast, "
                "and let all ranks make the same update",
            )
        ]
    return []


def gradients_alone(cell: CellParts, loop: Loop | None) -> list[Verdict]:
    """A note on gradients that stay on their rank, where no optimizer shows what they update."""
    if loop is None or not all(part.gradients and not part.models for part in cell.ranks):
        return []
    for part in cell.ranks:
        for kind in part.kinds:
            # Weights may be made equal before the first step.
            if kind.nbytes > NUMBER_NBYTES and "broadcast" not in kind.op.lower():
                return []
    return [
        Verdict(
            "alone",
            0.0,
            "each rank trains a model of its own: it computes gradients with jax, and the "
            "collectives of this cell move single numbers only",
            "If it was meant to be one model, allreduce the gradients in each step",
        )
    ]


def _compared(cell: CellParts, loop: Loop | None, models: list[Model]) -> Verdict | None:
    first = models[0]
    arrays = first.arrays
    steps = {model.steps for model in models}
    if not arrays or any(model.arrays != arrays for model in models) or min(steps) < LEAST_STEPS:
        return None
    common = [at for at in first.checksums if all(at in one.checksums for one in models)]
    averaged = _averaged(models)
    wrong = {at: _different([one.checksums[at] for one in models]) - averaged for at in common}
    after = [at for at in common if at]
    # Ranks of a cell that has failed stop in different steps.
    ended_alike = cell.well and len({(model.steps, model.sampled) for model in models}) == 1
    last = _apart(models) - averaged if ended_alike else wrong[after[-1]] if after else set()
    if not last or not _have_learned(models, common):
        return None
    names = [first.names[at] for at in sorted(last)]
    largest, name = _largest(models, last)
    if largest == 0.0:
        return None
    example = f"{name}, largest difference {largest:.2g}" if ended_alike else name
    reduced = _reduced(cell, loop, first, last)
    every = cell.ranks[0].models
    if len(every) > 1 and reduced != set():
        # Each rank may have one of them for itself, with arrays of the same sizes.
        reduced = {*first.names} if _reduces_all(loop, every) else None
    if reduced is None:
        return None
    if not reduced:
        if len({model.settings for model in models}) > 1:
            return None  # a search for the best ones
        return Verdict(
            "alone",
            0.0,
            f"each rank has trained a model of its own: the weights differ ({example}), and no "
            "collective has reduced gradients in this cell",
            "If it was meant to be one model, wrap the optimizer (DistributedOptimizer) or the "
            "model (DistributedDataParallel)",
        )
    since = _since(wrong, after)
    text = f"the ranks' weights differ in {len(last)} of {len(arrays)} arrays{since}: {example}"
    left = [name for name in names if name not in reduced]
    if left:
        if len(left) < len(names):
            return None
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        return Verdict(
            "weights",
            1.0,
            f"{text}. The gradients of {', '.join(left[:3])}{more} were not reduced, those of the "
            "others were",
            "Reduce the gradients of all weights",
        )
    if wrong.get(0):
        return Verdict(
            "weights",
            1.0,
            f"{text}, although gradients were reduced: they differed before the first step",
            "Before it call broadcast_variables(model.weights, 0), or in fit use "
            "BroadcastGlobalVariablesCallback(0), or wrap the model in DistributedDataParallel",
        )
    return Verdict(
        "weights",
        1.0,
        f"{text}. They were equal before the first step, and gradients were reduced: each rank "
        "applies another update",
        "Compare the optimizers' settings: the learning rate, clipping, steps that a rank leaves "
        "out",
    )


def _different(rows: Sequence[Sequence[int]]) -> set[int]:
    """Returns the places of the arrays whose checksums differ between ranks."""
    columns = zip(*rows, strict=False)
    return {at for at, sums in enumerate(columns) if len({*sums}) > 1}


def _averaged(models: list[Model]) -> set[int]:
    """Returns the places of the arrays that differ after a step, and are equal before the next.

    The user's code averages these weights in place of gradients.
    """
    steps = [
        at
        for at in models[0].before
        if all(at in one.before and at in one.checksums for one in models)
    ]
    if not steps:
        return set()
    after = _different([one.checksums[steps[-1]] for one in models])
    return after - _different([one.before[steps[-1]] for one in models])


def _apart(models: list[Model]) -> set[int]:
    columns = zip(*(model.numbers for model in models), strict=False)
    return {at for at, rows in enumerate(columns) if _difference(rows) is not None}


def _difference(rows: tuple[list[float], ...]) -> float | None:
    """Returns the largest difference of some arrays; None if they may be the same numbers."""
    first, *others = rows
    size = max((abs(number) for number in first if number == number), default=0.0)
    most = max(
        (
            abs(a - b)
            for row in others
            for a, b in zip(first, row, strict=True)
            if a == a and b == b
        ),
        default=0.0,
    )
    return most if LEAST_DIFFERENCE * size < most < float("inf") else None


def _largest(models: list[Model], places: set[int]) -> tuple[float, str]:
    found = [
        (_difference(tuple(list(model.numbers[at]) for model in models)) or 0.0, -at)
        for at in places
    ]
    most, at = max(found)
    return most, models[0].names[-at]


def _have_learned(models: list[Model], common: list[int]) -> bool:
    return len(common) > 1 and any(
        model.checksums[a] != model.checksums[b] for model in models for a, b in pairwise(common)
    )


def _since(wrong: dict[int, set[int]], after: list[int]) -> str:
    bad = [at for at in after if wrong[at]]
    good = [at for at in after if not wrong[at]]
    if not bad:
        return " at the end"
    if not good or good[0] > bad[0]:
        return ""
    before = max(at for at in good if at < bad[0])
    return f" since step {bad[0]} (equal after step {before})"


def _reduced(cell: CellParts, loop: Loop | None, model: Model, differ: set[int]) -> set[str] | None:
    """Returns the arrays whose gradients were reduced in each step, by the bytes of the calls.

    ``differ`` are the places of the arrays that differ between ranks. None if these do not tell it.
    A model whose steps are not known has made those of the loop.
    """
    part = cell.ranks[0]
    reductions = {at for at, kind in enumerate(part.kinds) if _is_allreduce(kind)}
    data = {at for at, kind in enumerate(part.kinds) if kind.nbytes > DATA_NBYTES}
    counts = Counter(call.kind for call in part.calls)
    if not any(counts[at] for at in data & reductions):
        # They may exchange gradients in another way.
        other = sum(counts[at] for at in data if "broadcast" not in part.kinds[at].op.lower())
        return set() if not part.left_out and other < LEAST_STEPS else None
    # What is reduced to one rank, or to parts, is that of sharded weights.
    sharded = any("reduce" in kind.op.lower() and not _is_allreduce(kind) for kind in part.kinds)
    # Groups of ranks may each train a model.
    groups = any(counts[at] and part.kinds[at].ranks != len(cell.ranks) for at in data & reductions)
    if loop is None or sharded or groups:
        return None
    # Fewer reductions than steps may average the weights now and then.
    same = {at for at, kind in enumerate(part.kinds) if kind[:2] == loop.kind[:2]}
    made = sum(call.kind in same for call in part.calls) * (1 + part.left_out / len(part.calls))
    whole = loop.steps * made / sum(call.kind in same for call in loop.first.calls)
    if whole < REDUCED_PART * model.steps:
        return None
    steps = loop.steps / max(1.0, _rounded(whole / model.steps)) if model.steps else loop.steps
    calls = _calls_by_size(loop, steps)
    values = {size for size in calls if size <= NUMBER_NBYTES and size not in model.nbytes}
    nbytes = sum(size * count for size, count in calls.items() if size not in values)
    # A layer that differs was left out, if the bytes of all others were reduced, and few more.
    left = [model.nbytes[at] for at in differ]
    rest = sum(model.nbytes) - sum(left)
    if rest and len(left) <= LAYER_ARRAYS and 0 <= nbytes - rest < 0.5 * min(left):
        return {name for at, name in enumerate(model.names) if at not in differ}
    # A small array may be missing. Much more may be activations, as of tensor parallelism.
    most = MOST_REDUCED * sum(model.nbytes) + LEAST_NBYTES
    if sum(model.nbytes) - 0.5 * min(model.nbytes) < nbytes <= most:
        return {*model.names}
    sizes = {size for size, count in calls.items() if count >= REDUCED_PART}
    found = {name for name, size in model.arrays if size in sizes}
    for size in sizes:
        alike = [at for at, nbytes in enumerate(model.nbytes) if nbytes == size]
        apart = differ.intersection(alike)
        # Of arrays of one size, those that differ were left out, if as many calls are missing.
        if len(apart) == len(alike) - round(calls[size]):
            found -= {model.names[at] for at in apart}
    return found or _all_but_one(model, sizes) or None


def _calls_by_size(loop: Loop, steps: float) -> dict[int, float]:
    """Returns how many allreduces of each size a step has."""
    kinds = loop.first.part.kinds
    reduced = [kind for call in loop.first.calls if _is_allreduce(kind := kinds[call.kind])]
    counts = Counter(kind.nbytes for kind in reduced)
    return {size: _rounded(count / steps) for size, count in counts.items()}


def _rounded(number: float) -> float:
    """Returns a whole number if it is near enough, else the number itself."""
    nearest = round(number)
    return nearest if abs(number - nearest) <= (1 - REDUCED_PART) * max(1, nearest) else number


def _is_allreduce(kind: Kind) -> bool:
    return "allreduce" in kind.op.lower().replace("_", "")


def _reduces_all(loop: Loop | None, models: Sequence[Model]) -> bool:
    """Whether the allreduces of a step have the bytes of all models."""
    if loop is None:
        return False
    nbytes = sum(size * count for size, count in _calls_by_size(loop, loop.steps).items())
    whole = sum(sum(model.nbytes) for model in models)
    least = min(min(model.nbytes, default=0) for model in models)
    return whole - 0.5 * least < nbytes <= MOST_REDUCED * whole + LEAST_NBYTES


def _all_but_one(model: Model, sizes: set[int]) -> set[str]:
    """Returns the arrays that one call has reduced, if its size is that of all but one of them."""
    whole = sum(model.nbytes)
    missing = [name for name, size in model.arrays if whole - size in sizes]
    return {*model.names} - {*missing} if len(missing) == 1 else set()
