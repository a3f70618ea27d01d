"""Why a cell is slow, or wrong: pure functions of what its ranks have recorded.

A false alarm is worse than silence, so each rule has a reason why less does not suffice. A rule
names no rank whose delay may come from threads that had no core: other programs cause that.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, linear_regression, median, quantiles

from allranks.features.verdict import LEAST_STEPS
from allranks.features.verdict.cause import Verdict
from allranks.features.verdict.loop import OWN_CORES, Looked, Loop, RankLoop, Spent
from allranks.features.verdict.records import CellParts, CodeLine, Doing, EndedCall, Kind, RankPart
from allranks.features.verdict.results import pairs_unlike_lines, wrong
from allranks.records.ranks import label
from allranks.widgets.dashboard.tables import seconds

#: The share of the time that waits must take: a remedy of less gains little.
WAIT_SHARE = 0.15
#: How much longer than for the next rank the others wait for a slow one.
DOMINATES = 2.0
#: A slow rank is late in most steps: the median of its delay, in steps. A few interruptions of a
#: process change the mean, and not this median.
USUAL_WAIT = 0.10
#: What a rank that is late in some steps has to cost, and the part of it that delays explain which
#: are longer than a step. In half of the steps or more it is a slow one.
RARE_SHARE, RARE_PART = 0.25, 0.6
#: After a single delay that is shorter, later steps may have none: a module that is imported, or a
#: disk that wakes up, takes a second or two.
ONCE_SECONDS = 3.0
#: A cause explains at least this part of its effect.
EXPLAINS = 0.5
MOST_EXPLAINED = 1.5
#: Equal work takes some processes up to 1.4 times as long as others: by the pages of memory that
#: they have got (measured for small convolutions of torch; it stays with the process on any core),
#: or by a core that other programs use too. What takes longer than this is more work.
MORE_WORK = 0.6
#: A line is a rank's own, if it spends this many times more there than a rank that is as slow.
ALONE = 4.0
#: A look that comes later than this part of what it explains may have missed it: short work has
#: ended before the interpreter lets the thread in that looks, after 5 ms mostly. By how many
#: deviations of such looks the time at a line has to differ.
IN_TIME, SURE = 0.5, 2.5
#: A function that a line calls explains at least this part of the time at that line.
FOLLOWED = 0.6
#: What all ranks have to do for this part of the time, to be named: so much may be gained.
COMPILE_SHARE, INPUT_SHARE, IDLE_SHARE = 0.20, 0.30, 0.35
#: A thread that uses less of a core waits.
IDLE_CORES = 0.4
_SLEEP = re.compile(r"\bsleep\(")
#: While another thread reads data, the main thread uses less of a core, if it waits for them. What
#: the process uses besides the time of reading is for the rest of the step: where it takes nearly
#: all of it, little may be gained by reading ahead.
FEEDING_MAIN_CORES = 0.6
#: The clocks of hosts may differ by this much.
CLOCKS_SECONDS = 1e-3
#: What moves data, or calls small collectives, for this part of the time: half of a transfer may be
#: saved. Small calls also take longer because ranks have to be woken.
TRANSFER_SHARE, LATENCY_SHARE = 0.25, 0.30
SMALL_NBYTES, SMALL_CALLS, SHORT_WAIT_SECONDS = 16 << 10, 4, 1e-3
#: What a call takes whatever its size, if each rank has a core: to wake ranks, also of other hosts.
#: Where ranks share cores it is a slice of time. So much data takes longer than that in any memory.
CALL_SECONDS, LARGE_NBYTES = 1e-4, 1 << 20
#: Calls follow each other at once after a shorter pause: a library needs up to a tenth of a
#: millisecond to end and begin a call, and a layer of a model mostly longer. `MANY_CALLS` in a
#: step are one cause, however often a rank loses its core to another one, for a slice of time.
PAUSE_SECONDS, MANY_CALLS, SLICE_SECONDS = 2e-4, 12, 0.01
#: Equal calls are those of a step after a pause that is so much longer, if half of the steps have
#: the same number.
LONGER, REGULAR = 3.0, 0.5
#: No update of a model in Python is as short: calls that follow each other so soon are those of a
#: loop within the step.
SHORTEST_STEP_SECONDS = 25e-6
#: Transfers whose median is this much above the fastest tenth were interrupted.
STEADY, STEADY_SECONDS = 3.0, 1e-3
#: A rank without a core: the share of the time in which its main thread could run and had none.
CORE_SHARE = 0.25
#: A busy host: the part of the time of the ranks' threads in which those had no core.
HOST_SHARE, HOST_SECONDS = 0.45, 3.0
#: The part of the time that this has to be: a rank that sleeps needs no core.
HOST_TIME = 0.25
#: Memory that grows: by how much, of a loop of ten seconds or longer and of the shortest ones, as
#: libraries take a few MB in a second; in how many of the parts of the time; and how much of the
#: rise at the beginning there is at the end. A library that starts takes a second or two.
GROWN_NBYTES, GROWN_SOON_NBYTES, GROWN_IN_SECONDS, GROWN_PART = 64e6, 32e6, 10.0, 0.05
RISING, EVEN, MEMORY_SECONDS, MEMORY_PARTS = 0.8, 0.5, 2.0, 6


def verdicts(cell: CellParts) -> list[Verdict]:
    """Returns all causes: of wrong results, then of lost time, the costliest first, then others."""
    loop = Loop.of(cell)
    found = wrong(cell, loop)
    if loop is None:
        return found
    moved = moving(cell, loop)
    waits = waiting(loop)
    if any(one.kind == "latency" for one in moved):
        # In many calls one after the other the ranks also wait for each other.
        waits = [one for one in waits if one.kind != "uneven"]
    idle = not_computing(loop)
    if any(one.kind == "input" for one in idle):
        waits = [one for one in waits if not _is_only_behind_with_data(loop, one)]
    slow = sorted([*waits, *moved, *idle], key=lambda one: -one.share)
    notes = [one for one in found if not one.share]
    found = [one for one in found if one.share]
    # Values of different lines also give the ranks different numbers of steps.
    steps = [] if any(one.kind == "mixed" for one in found) else unequal_steps(cell, loop)
    return [*steps, *found, *slow, *growing(loop), *crowded(loop), *notes]


def unequal_steps(cell: CellParts, loop: Loop) -> list[Verdict]:
    if not cell.left or any(one.part.left_out for one in loop.ranks.values()):
        return []
    # A rank that leaves out a call, and not a step, also leaves before the others.
    if pairs_unlike_lines(cell) or not _is_in_loop(loop, f":{cell.waits_at}"):
        return []
    # A rank that was interrupted in its last call has not counted it.
    done = max(_count(loop, one.part) for one in loop.ranks.values())
    if done < LEAST_STEPS:
        return []
    return [
        Verdict(
            "steps",
            1.0,
            f"the ranks have different numbers of steps: {label(cell.left)} ended after {done:,} "
            f"calls of {loop.kind.place}, and the others wait in another one",
            "Give each rank as many batches, drop the remainder, or call join()",
            cell.left,
        )
    ]


def _is_in_loop(loop: Loop, line: str) -> bool:
    """Whether a call of each step is made at a line of the cell."""
    part = loop.first.part
    counts = Counter(call.kind for call in loop.first.calls)
    # The name of a call without one is its line. The others wait in the first call of a step.
    each = [part.kinds[at] for at, count in counts.items() if count >= loop.steps - 1]
    if any(kind.name.endswith(line) for kind in each):
        return True
    named = not any(kind.source for kind in each)
    began, ended = loop.first.edges[0], loop.first.edges[-1]
    inside = {look.path for look in part.looks if look.path >= 0 and began <= look.at <= ended}
    return named and any(part.paths[at][0].place.endswith(line) for at in inside)


def _count(loop: Loop, part: RankPart) -> int:
    same = loop.kind.op, loop.kind.name
    kinds = {at for at, kind in enumerate(part.kinds) if (kind.op, kind.name) == same}
    return sum(call.kind in kinds for call in part.calls)


# ---- waiting


def waiting(loop: Loop) -> list[Verdict]:
    first, second = sorted(loop.ranks, key=lambda rank: -loop.late[rank])[:2]
    late, ready = loop.late[first], loop.ready(first)
    if ready is None or not _beyond_clocks(loop, late):
        return []
    if late >= WAIT_SHARE and late >= DOMINATES * loop.late[second]:
        more = loop.computes(first) / max(1e-9, _others_compute(loop, first))
        # The delay of a rank without a core is at most the time for which its threads had none.
        # It is slower at all lines, and at some of them much more.
        own_work = _longer_at_a_line(loop, first, ALONE * more) or _works_more(loop, first)
        if ready > EXPLAINS * late and not own_work:
            return _without_core(loop, first)
        if not _computes_longer(loop, first):
            return []
        waits = [one.waits_in_steps(first) for rank, one in loop.ranks.items() if rank != first]
        slow = max(map(median, waits)) >= USUAL_WAIT
        longer = more >= 1 + MORE_WORK or _longer_at_a_line(loop, first, 1 + MORE_WORK)
        return _rarely_late(loop, first) or ([_straggler(loop, first)] if slow and longer else [])
    return _several_slow(loop) or _by_turns(loop, loop.late[second])


def _beyond_clocks(loop: Loop, share: float) -> bool:
    return len(loop.by_host()) == 1 or share * loop.step >= CLOCKS_SECONDS


def _computes_longer(loop: Loop, rank: int) -> bool:
    # Else it waits for something else than its own work, as another group of ranks.
    extra = loop.computes(rank) - _others_compute(loop, rank)
    return extra >= EXPLAINS * loop.late[rank] * loop.step


def _works_more(loop: Loop, rank: int, than: Sequence[int] = ()) -> bool:
    """Whether the threads of a rank run for so much longer than those of others, as these wait.

    Threads that wait for one without a core may run as well, as those of OpenMP. Then they lack a
    core for more of the time in which they run than the threads of other ranks.
    """
    used = {other: one.used for other, one in loop.ranks.items() if not than or other in than}
    used.pop(rank, None)
    own = loop.ranks[rank].used
    others = [one for one in used.values() if one is not None and one.run]
    if own is None or not own.run or len(others) < len(used):
        return False
    if own.ready / own.run > fmean(one.ready / one.run for one in others):
        return False
    most = max(one.run / one.at for one in others)
    more = own.run / own.at - most
    # With the time for which the main thread had no core for this work.
    explains = more * (1 + own.main_ready / own.run) >= EXPLAINS * loop.late[rank]
    return explains and more >= MORE_WORK * most


def _longer_at_a_line(loop: Loop, rank: int, times: float) -> bool:
    """Whether a line that takes it so many ``times`` as long as others explains its delay."""
    others = [one.lines for other, one in loop.ranks.items() if other != rank]
    looked = loop.ranks[rank].looked
    if looked is None or None in others:
        return False
    extra = loop.computes(rank) - _others_compute(loop, rank)
    least = EXPLAINS * extra / loop.step
    for path, share in loop.ranks[rank].spent(lambda one: one.late <= IN_TIME * extra).items():
        other = fmean(one.get(path, 0.0) for one in others if one is not None)
        error = sqrt(max(0.0, share * (1 - share)) / len(looked))
        if path and share - SURE * error >= times * other and share - other >= least:
            return True
    return False


def _others_compute(loop: Loop, rank: int) -> float:
    return fmean(loop.computes(other) for other in loop.ranks if other != rank)


def _straggler(loop: Loop, rank: int) -> Verdict:
    late, where = loop.late[rank], longer_at(loop, rank)
    extra = loop.computes(rank) - _others_compute(loop, rank)
    at = f": {seconds(extra)} more, at {where}" if where else ""
    return Verdict(
        "straggler",
        late,
        f"rank {rank} is the slow one: the others wait {late:.0%} of the time for it, "
        f"{seconds(late * loop.step)} of a step of {seconds(loop.step)}. It computes "
        f"{seconds(loop.computes(rank))} per step, the others "
        f"{seconds(_others_compute(loop, rank))}{at}",
        f"Give rank {rank} less work there"
        if where
        else f"%%distributed --profile shows at which lines, or give rank {rank} less work",
        (rank,),
    )


def longer_at(loop: Loop, rank: int) -> str:
    """Returns the line at which a rank spends more time than the others; "" if none explains it.

    It is followed from the cell's own line into the functions that explain most of the difference.
    """
    others = [one.lines for other, one in loop.ranks.items() if other != rank]
    looked = loop.ranks[rank].looked
    if looked is None or any(one is None for one in others):
        return ""
    extra = loop.computes(rank) - _others_compute(loop, rank)
    more: Spent = {}
    for path, share in loop.ranks[rank].spent(lambda one: one.late <= IN_TIME * extra).items():
        other = fmean(one.get(path, 0.0) for one in others if one is not None)
        variance = share * (1 - share) + other * (1 - other) / len(others)
        if share - other >= SURE * sqrt(max(0.0, variance) / len(looked)):
            # Looks that came late are missing: a line has at least what the lines below it have.
            for depth in range(len(path) + 1):
                more[path[:depth]] = max(share - other, more.get(path[:depth], 0.0))
    part = extra / loop.step
    path = _followed(more, EXPLAINS * part)
    return _place(path) if path and more[path[:1]] <= MOST_EXPLAINED * part else ""


def _followed(spent: Spent, least: float) -> tuple[CodeLine, ...]:
    """Returns the lines that explain most of what is spent, as far as one is ahead of the others.

    The outermost line comes first; it explains ``least``.
    """
    path = tuple[CodeLine, ...]()
    while True:
        below = [one for one in spent if len(one) == len(path) + 1 and one[:-1] == path]
        first, second = [*sorted(below, key=lambda one: -spent[one]), None, None][:2]
        if first is None or spent[first] < least:
            return path
        if second is not None and DOMINATES * spent[second] > spent[first]:
            return path
        path, least = first, max(least, FOLLOWED * spent[first])


def _place(path: tuple[CodeLine, ...]) -> str:
    # As a generator or a lambda in this line.
    while len(path) > 1 and path[-1].function[:1] == "<" and path[-1].place == path[-2].place:
        path = path[:-1]
    return str(path[0]) + (f", in {path[-1].function} {path[-1]}" if len(path) > 1 else "")


def _several_slow(loop: Loop) -> list[Verdict]:
    """Some ranks that are each late in most steps, and the others in few."""
    ranks = sorted(loop.ranks, key=loop.computes)
    # Where most ranks are slow, the others have less work, as one that gives work to all.
    half = (len(ranks) + 1) // 2
    least = {at: loop.computes(ranks[at]) for at in range(half, len(ranks) - 1)}
    at = max(least, key=lambda at: least[at] - loop.computes(ranks[at - 1]), default=0)
    fast, slow = ranks[:at], sorted(ranks[at:])
    if not fast:
        return []
    waits = {
        rank: sum(one.waits.get(other, 0.0) for other in slow) / one.seconds
        for rank, one in loop.ranks.items()
        if rank in fast
    }
    late, most = fmean(waits.values()), loop.computes(fast[-1])
    extra = least[at] - most
    usual = min(median(loop.ranks[rank].waits_in_steps(*slow)) for rank in fast)
    ready = [loop.ready(rank) for rank in slow]
    if late < WAIT_SHARE or usual < USUAL_WAIT:
        return []
    if extra < max(MORE_WORK * most, EXPLAINS * late * loop.step):
        return []
    if not all(
        share is not None and (share <= EXPLAINS * late or _works_more(loop, rank, fast))
        for rank, share in zip(slow, ready, strict=True)
    ):
        return []
    computes, others = (fmean(map(loop.computes, row)) for row in (slow, fast))
    return [
        Verdict(
            "straggler",
            late,
            f"{label(slow)} are the slow ones: the others wait {late:.0%} of the time for them, "
            f"{seconds(late * loop.step)} of a step of {seconds(loop.step)}. They compute "
            f"{seconds(computes)} per step, the others {seconds(others)}",
            f"%%distributed --profile shows at which lines, or give {label(slow)} less work",
            tuple(slow),
        )
    ]


def _rarely_late(loop: Loop, rank: int) -> list[Verdict]:
    late = loop.late[rank]
    rows = [
        sorted((call.wait for call in one.whole if call.last == rank), reverse=True)
        for other, one in loop.ranks.items()
        if other != rank
    ]
    # Of the rank that waited longest.
    waits = max(rows, key=sum)
    few = [wait for wait in waits if wait > loop.ranks[rank].usual_step]
    if late < RARE_SHARE or not few or sum(few) < RARE_PART * sum(waits):
        return []
    once = len(few) == 1
    if once and few[0] < ONCE_SECONDS:
        return []
    times = "once" if once else f"{len(few)} times"
    return [
        Verdict(
            "sometimes",
            late,
            f"rank {rank} is late {times} in {loop.steps:,} steps, by {seconds(median(few))}: the "
            f"others wait {late:.0%} of the time for it",
            f"If it writes files or evaluates then: do that {'' if once else 'less often, or '}"
            "in a thread",
            (rank,),
        )
    ]


def _without_core(loop: Loop, rank: int) -> list[Verdict]:
    host = loop.ranks[rank].part.host
    if len(loop.by_host()[host]) > loop.ranks[rank].part.cores:
        return []  # it is chance which one of the ranks has none
    ready = {one: each.main_ready for one, each in loop.ranks.items()}
    known = {one: share for one, share in ready.items() if share is not None}
    if len(known) < len(ready):
        return []
    most = max(share for one, share in known.items() if one != rank)
    own = known[rank]
    if own < max(CORE_SHARE, DOMINATES * most, EXPLAINS * loop.late[rank]) or most >= CORE_SHARE:
        return []
    # Who has more work needs a core for longer, and lacks it for longer.
    run = {one: used.run if (used := loop.ranks[one].used) else 0.0 for one in loop.ranks}
    if run.pop(rank) > (1 + MORE_WORK) * max(run.values()):
        return []
    return [
        Verdict(
            "core",
            loop.late[rank],
            f"rank {rank} could run and had no core for {own:.0%} of the time (others: at most "
            f"{most:.0%}), and the others wait {loop.late[rank]:.0%} of the time for it: other "
            "processes or threads use its core",
            "Look with top on its host; start fewer ranks or threads there",
            (rank,),
        )
    ]


def _by_turns(loop: Loop, second: float) -> list[Verdict]:
    ready = [loop.ready(rank) for rank in loop.ranks]
    total = fmean(sum(one.waits.values()) / one.seconds for one in loop.ranks.values())
    if total < WAIT_SHARE or second < WAIT_SHARE / 2:
        return []
    # To wake a rank takes a part of such a step.
    if loop.first.usual_step < SHORT_WAIT_SECONDS:
        return []
    means = [loop.computes(rank) for rank in loop.ranks]
    # Few steps of turns differ by chance, and ranks that are always slow by more than these waits.
    if max(means) - min(means) > total * loop.step:
        return []
    # Each of these delays may have made all others wait, and not the rank itself.
    ahead = len(ready) - 1
    cores = loop.first.part.cores
    if cores < len(ready) and loop.has_hosts_alone and len(loop.by_host()) == 1:
        # No other program has the cores: those of them that wait have been ahead on a core, for
        # all ranks that had none meanwhile.
        ahead = min(ahead, max(1, int(cores // (len(ready) - cores))))
    delays = sum(filter(None, ready)) * ahead / len(ready)
    if None in ready or delays > EXPLAINS * total:
        return []
    # A few interruptions of processes are no uneven work: a quarter of the steps has such waits.
    rows = [one.waits_in_steps() for one in loop.ranks.values()]
    steps = [fmean(each) for each in zip(*rows, strict=True)]
    if quantiles(steps, n=4)[-1] < WAIT_SHARE:
        return []
    last = Counter(call.last for one in loop.ranks.values() for call in one.whole if call.wait)
    count = sum(last.values())
    turns = ", ".join(f"rank {rank} in {n / count:.0%}" for rank, n in last.most_common(3))
    return [
        Verdict(
            "uneven",
            total,
            f"the ranks wait {total:.0%} of the time for each other, by turns (the last one: "
            f"{turns}): no rank is slow, but the work of a step varies",
            "Give each rank the same amount in a step: batches of equal length, or larger ones",
        )
    ]


# ---- all ranks compute nothing


def not_computing(loop: Loop) -> list[Verdict]:
    """What all ranks do for a part of each step, in place of computing."""
    found = []
    ranks = loop.ranks.values()
    if all(one.looked is not None for one in ranks):
        found += _compiling(loop)
        # The host does not see what a GPU does meanwhile.
        if not any(one.part.gpu for one in ranks):
            found += _without_data(loop) or _idle(loop)
    return found


def _compiling(loop: Loop) -> list[Verdict]:
    share, where = _on_all(loop, lambda one: one.doing is Doing.COMPILE)
    if share < COMPILE_SHARE:
        return []
    return [
        Verdict(
            "compile",
            share,
            f"all ranks trace or compile for {share:.0%} of the time, in every step{where}",
            "Make compiled functions once, before the loop; pass tensors in place of Python "
            "numbers, and batches of equal shapes",
        )
    ]


def _without_data(loop: Loop) -> list[Verdict]:
    share, where = _on_all(loop, lambda one: one.doing is Doing.INPUT)
    if share < INPUT_SHARE:
        if _threads_read(loop):
            share, where = _on_mean(loop, _waits_for_data, _reads_data)
        else:
            share, where = _on_all(loop, _waits_for_data)
        # What is left if reading takes no time: what computes meanwhile has read ahead.
        ranks = loop.ranks.values()
        saved = fmean(one.computing / one.seconds - _works_besides(one) for one in ranks)
        # A thread that reads lacks a core as the main thread does; others may wait for these two.
        if saved < INPUT_SHARE or not _have_cores(loop, share):
            return []
    if share < INPUT_SHARE:
        return []
    return [
        Verdict(
            "input",
            share,
            f"all ranks wait for data for {share:.0%} of the time{where}",
            "Read ahead: DataLoader(num_workers=2), dataset.prefetch(2), or do less for a sample",
        )
    ]


def _is_only_behind_with_data(loop: Loop, found: Verdict) -> bool:
    """Whether a rank is called slow that waits for data of another thread, as all ranks do.

    Those that are a little ahead have read for as long, and wait for that rank instead. If their
    threads read for a shorter time, that rank is a slow one.
    """
    if found.kind != "straggler" or len(found.ranks) != 1:
        return False
    (rank,) = found.ranks
    if not _threads_read(loop):
        return False  # what fills a queue is not seen: it may be slower on that rank
    reading = {other: one.reading for other, one in loop.ranks.items()}
    own, usual = reading.pop(rank), fmean(reading.values())
    if own - usual >= WAIT_SHARE * max(1.0, usual):
        return False
    feeds = {
        other: one.spent(lambda look: look.doing is Doing.FEED)[()]
        for other, one in loop.ranks.items()
    }
    more = feeds.pop(rank) - fmean(feeds.values())
    extra = loop.computes(rank) - _others_compute(loop, rank)
    return more >= EXPLAINS * extra / loop.step


def _threads_read(loop: Loop) -> bool:
    """Whether threads have been found on all ranks that read data, also beside collectives."""
    return all(any(look.readers for look in one.looked or ()) for one in loop.ranks.values())


def _works_besides(one: RankLoop) -> float:
    """Returns the share of the time that all but reading takes, if it needs one core or less."""
    # Moments may find more than the threads have used altogether.
    rest = max(0.0, one.cores - one.reading)
    if one.used is None or one.cores >= 1:
        return rest
    # A rank that gets less of a core than it needs takes longer for all of it.
    needed = min(1.0, one.cores + one.used.ready / one.used.at)
    return rest * needed / max(1e-9, one.cores)


def _waits_for_data(one: Looked) -> bool:
    # While another thread reads ahead, the main thread may compute.
    waits = one.main_cores < FEEDING_MAIN_CORES
    return one.doing is Doing.INPUT or (one.doing is Doing.FEED and waits)


def _reads_data(one: Looked) -> bool:
    return one.doing in (Doing.INPUT, Doing.FEED) or one.reading > 0


def _idle(loop: Loop) -> list[Verdict]:
    share, where = _on_all(loop, _waits_for_something)
    share = min(share, *(_stands_still(one) for one in loop.ranks.values()))
    if share < IDLE_SHARE or not _have_cores(loop, share):
        return []
    return [
        Verdict(
            "idle",
            share,
            f"all ranks stand still for {share:.0%} of the time, outside of collectives{where}: "
            "they wait for a file, the network, another process or a sleep",
            "Read ahead in a thread, or from a local disk",
        )
    ]


def _waits_for_something(one: Looked) -> bool:
    # A sleep in a function of another cell may stand for a slow disk.
    return bool(one.path) and one.main_cores < IDLE_CORES and not _sleeps_in_the_cell(one.path)


def _sleeps_in_the_cell(path: tuple[CodeLine, ...]) -> bool:
    """Whether the cell that runs has a sleep in its own text: it slows itself down on purpose."""
    first, last = path[0], path[-1]
    here = first.place.partition(":")[0] == last.place.partition(":")[0]
    return here and _SLEEP.search(last.source) is not None


def _stands_still(one: RankLoop) -> float:
    """At least this share of the time no thread ran, or could have, outside of collectives."""
    if one.used is None:
        return 0.0
    used = (one.used.run + one.used.ready) / one.used.at
    return max(0.0, one.computing / one.seconds - used)


def _on_all(loop: Loop, chosen: Callable[[Looked], bool]) -> tuple[float, str]:
    """Returns the share of the time that some looks have on each rank, and at which lines."""
    shares = {rank: one.steadily(chosen) for rank, one in loop.ranks.items()}
    rank = min(shares, key=lambda one: shares[one])
    return shares[rank], _where(loop.ranks[rank], chosen)


def _on_mean(
    loop: Loop, chosen: Callable[[Looked], bool], reading: Callable[[Looked], bool]
) -> tuple[float, str]:
    """Returns the share of the time that some looks have as a mean of the ranks, and at which
    lines. All ranks have to be ``reading``, each for half as long as the mean or longer: one that
    is a little ahead waits for the others instead of its data.
    """
    reads = [one.steadily(reading) for one in loop.ranks.values()]
    if min(reads) < EXPLAINS * fmean(reads) or not min(reads):
        return 0.0, ""
    shares = {rank: one.spent(chosen)[()] for rank, one in loop.ranks.items()}
    rank = max(shares, key=lambda one: shares[one])
    return fmean(shares.values()), _where(loop.ranks[rank], chosen)


def _where(one: RankLoop, chosen: Callable[[Looked], bool]) -> str:
    spent = one.spent(chosen)
    path = _followed(spent, EXPLAINS * spent[()])
    return f", at {_place(path)}" if path else ""


# ---- moving data


def moving(cell: CellParts, loop: Loop) -> list[Verdict]:
    small = _small(loop.first)
    return [*_latency(cell, loop, small), *_bandwidth(loop, small)]


def _small(one: RankLoop) -> set[int]:
    """The kinds of small calls of a rank. Each rank counts the kinds that it has called."""
    return {at for at, kind in enumerate(one.part.kinds) if kind.nbytes <= SMALL_NBYTES}


def _transfers(loop: Loop, kinds: Collection[int]) -> dict[int, list[float]]:
    """The times of the first rank's transfers by kind, of those kinds that it has called."""
    found: dict[int, list[float]] = defaultdict(list)
    for call in loop.first.calls:
        if call.kind in kinds:
            found[call.kind].append(call.transfer)
    return found


def _bandwidth(loop: Loop, small: set[int]) -> list[Verdict]:
    kinds = loop.first.part.kinds
    spent = _transfers(loop, {*range(len(kinds))} - small)
    share = loop.transfer - sum(map(sum, _transfers(loop, small).values())) / loop.first.seconds
    if not spent or share < TRANSFER_SHARE:
        return []
    costliest = max(spent, key=lambda kind: sum(spent[kind]))
    usual = median(spent[costliest])
    best = sorted(spent[costliest])[len(spent[costliest]) // 10]
    steady = usual <= STEADY * best or usual - best <= STEADY_SECONDS
    # A rank without a core makes the transfer of the others longer, but not that of each call.
    undisturbed = best * len(spent[costliest]) / loop.first.seconds
    known = all(one.used is not None for one in loop.ranks.values())
    if not steady or not (_have_cores(loop, share) or (known and undisturbed >= TRANSFER_SHARE)):
        return []
    kind = kinds[costliest]
    if kind.nbytes < LARGE_NBYTES and EXPLAINS * usual < _whatever_the_size(loop, small):
        return []
    # The host is in the call while the GPU still computes what comes before it.
    if kind.is_made_in_torch and any(one.part.gpu for one in loop.ranks.values()):
        return []
    return [
        Verdict(
            "bandwidth",
            share,
            f"{share:.0%} of the time goes into moving data: {kind.place} moves "
            f"{kind.nbytes / 1e6:.3g} MB in {seconds(usual)}",
            _move_less(kind),
        )
    ]


def _whatever_the_size(loop: Loop, small: set[int]) -> float:
    """Returns the seconds that a call may take without any data."""
    crowded = any(len(ranks) > loop.cores_of(ranks) for ranks in loop.by_host().values())
    known = [one for row in _transfers(loop, small).values() for one in row]
    least = SLICE_SECONDS if crowded else CALL_SECONDS
    return max(least, median(known)) if len(known) >= LEAST_STEPS else least


def _move_less(kind: Kind) -> str:
    advice = ["Move less data, or less often"]
    if "reduce" in kind.op.lower():
        advice = ["Make fewer updates with larger batches"]
    # Not of what has no dtype, as pickled objects.
    if kind.dtype in ("float32", "float64"):
        advice.append("send 16-bit numbers")
    if kind.op.startswith("all_reduce") and not kind.is_made_in_torch:
        advice.append("let DistributedDataParallel move them beside the backward pass")
    *others, last = advice
    return f"{', '.join(others)}, or {last}" if others else last


def _latency(cell: CellParts, loop: Loop, small: set[int]) -> list[Verdict]:
    spent = _transfers(loop, small)
    count = sum(map(len, spent.values()))
    if count < LEAST_STEPS:
        return []
    costliest = max(spent, key=lambda kind: sum(spent[kind]))
    # A step of which each call is one of the loop's edges is known from its logged values, or from
    # the pauses between its calls.
    part = len(loop.first.calls) / (len(loop.first.part.calls) + loop.first.part.left_out)
    steps = part * cell.logged if cell.logged >= LEAST_STEPS else loop.steps
    if count < SMALL_CALLS * steps:
        steps = _rounds(loop) or steps
    within = count >= SMALL_CALLS * steps
    if not within and loop.first.seconds / count > SHORTEST_STEP_SECONDS:
        return []
    # The ranks of a host with fewer cores wait for each other in each of many calls.
    crowded = loop.has_hosts_alone and count >= MANY_CALLS * steps
    longest = SLICE_SECONDS if crowded else SHORT_WAIT_SECONDS
    share = min(_in_small_calls(one, longest) for one in loop.ranks.values())
    if share < LATENCY_SHARE or not (crowded or _have_cores(loop, share)):
        return []
    kind = loop.first.part.kinds[costliest]
    each = share * loop.first.seconds / count
    return [
        Verdict(
            "latency",
            share,
            f"{share:.0%} of the time goes into "
            + (
                f"{count / steps:.0f} small collectives per step"
                if within
                else f"{count / loop.first.seconds:,.0f} small collectives per second"
            )
            + f" (as {kind.place}, {kind.nbytes:,} bytes): each takes {seconds(each)}, "
            "almost whatever its size",
            "One call for all of a step: grouped_allreduce(list)"
            if within
            else "One call for all of a step: grouped_allreduce(list), or fewer steps",
        )
    ]


def _pauses(one: RankLoop) -> list[tuple[EndedCall, float]]:
    """The small calls, each with the time since the end of the call before it."""
    small = _small(one)
    began = [call.ended - call.wait - call.transfer for call in one.calls]
    ended = [-inf, *(call.ended for call in one.calls)]
    rows = zip(one.calls, began, ended, strict=False)
    return [(call, max(0.0, at - before)) for call, at, before in rows if call.kind in small]


def _rounds(loop: Loop) -> int:
    """Returns how often some small calls follow a pause of all ranks, mostly as many; else 0."""
    rows = [[pause for _, pause in _pauses(one)] for one in loop.ranks.values()]
    count = min(map(len, rows))
    # A rank may have sent its last calls only; one that loses its core makes a pause alone.
    pauses = [min(each) for each in zip(*(row[-count:] for row in rows), strict=True)]
    long = min(PAUSE_SECONDS, LONGER * median(pauses)) if pauses else PAUSE_SECONDS
    begins = [at for at, pause in enumerate(pauses) if pause > long]
    lengths = [after - before for before, after in pairwise(begins)]
    if len(lengths) < LEAST_STEPS - 1:
        return 0
    usual = median(lengths)
    regular = sum(length == usual for length in lengths) >= REGULAR * len(lengths)
    return len(lengths) if regular and usual >= MANY_CALLS else 0


def _in_small_calls(one: RankLoop, longest: float) -> float:
    """Returns the share of the time in small calls, and between those that follow at once.

    Between them a rank may be in functions of a library that end and begin the calls, or compute:
    what counts is the time in which looks have found it in such functions, at the lines of the
    calls. These lines may compute as well, as ``allreduce(x @ y)`` does.
    """
    kinds, spent, between = one.part.kinds, 0.0, 0.0
    for call, pause in _pauses(one):
        at_once = pause <= PAUSE_SECONDS
        spent += call.transfer
        if call.wait <= (longest if at_once else SHORT_WAIT_SECONDS):
            spent += call.wait
        between += pause if at_once else 0.0
    places = {kinds[at].name for at in _small(one)}
    at_calls = sum(
        look.share
        for look in one.looked or ()
        if look.doing is Doing.CALL and look.path and look.path[-1].place in places
    )
    return spent / one.seconds + min(between / one.seconds, at_calls)


def _have_cores(loop: Loop, share: float) -> bool:
    ready = [one.main_ready for one in loop.ranks.values()]
    return all(one is not None and one <= EXPLAINS * share for one in ready)


# ---- memory, and the host


def growing(loop: Loop) -> list[Verdict]:
    grows = {rank: slope for rank, one in loop.ranks.items() if (slope := _growth(one))}
    if not grows:
        return []
    most = max(grows, key=lambda rank: grows[rank])
    grown = loop.ranks[most].part.grown
    longest = max(grown, key=lambda name: grown[name][1] - grown[name][0], default="")
    what = f", and `{longest}` grows with it, to {grown[longest][1]:,} elements" if longest else ""
    ranks = tuple(sorted(grows))
    return [
        Verdict(
            "memory",
            0.0,
            f"the memory of {label(ranks)} grows by {grows[most] / 1e6:.3g} MB per second, "
            f"{grows[most] * loop.step / 1e6:.2g} MB per step{what}",
            "Keep numbers in place of arrays and tensors: loss.item(), float(loss)",
            ranks,
        )
    ]


def _growth(one: RankLoop) -> float:
    """Returns by how many bytes the memory grows in a second, as much at the end; else 0."""
    began, ended = one.edges[0], one.edges[-1]
    began += (ended - began) / 4  # allocators fill up at first
    sampled = [(row.at, row.rss_nbytes) for row in one.part.samples]
    looked = [(row.at, row.rss_nbytes) for row in one.part.looks if row.rss_nbytes]
    rows = [row for row in sampled + looked if began <= row[0] <= ended]
    parts: list[list[float]] = [[] for _ in range(MEMORY_PARTS)]
    for at, nbytes in rows:
        part = int(MEMORY_PARTS * (at - began) / (ended - began))
        parts[min(part, MEMORY_PARTS - 1)].append(nbytes)
    if ended - began < MEMORY_SECONDS or not all(parts):
        return 0.0
    levels = [median(part) for part in parts]
    first, *more = [after - before for before, after in pairwise(levels)]
    rising = fmean(rise > 0 for rise in (first, *more))
    slope = float(linear_regression(*zip(*rows, strict=True)).slope)
    least = GROWN_NBYTES * min(1.0, (ended - began) / GROWN_IN_SECONDS)
    grown = slope * (ended - began) >= max(least, GROWN_SOON_NBYTES, GROWN_PART * levels[0])
    # What fills up grows less and less.
    even = sum(more[-2:]) >= EVEN * (first + more[0])
    return slope if grown and even and rising >= RISING else 0.0


def crowded(loop: Loop) -> list[Verdict]:
    for host, ranks in loop.by_host().items():
        left = loop.left_to_ranks(ranks)
        if left is None or left >= OWN_CORES or loop.seconds < HOST_SECONDS:
            continue
        used = [one for rank in ranks if (one := loop.ranks[rank].used) is not None]
        own, cores = sum(one.run / one.at for one in used), loop.cores_of(ranks)
        lost = min(one.ready / max(1e-9, one.run + one.ready) for one in used)
        # Threads that often sleep, as those of a library, lack a core for moments on any host.
        if lost < HOST_SHARE or min(one.ready / one.at for one in used) < HOST_TIME:
            continue
        # A notebook shows the line behind the label of all ranks.
        whose = "the ranks" if len(ranks) == len(loop.ranks) else label(ranks)
        return [
            Verdict(
                "host",
                0.0,
                f"{whose} got {own:.1f} of the {cores:g} cores of {host}: for {lost:.0%} of "
                "the time in which their threads could run, they had no core. Other "
                "programs, or processes that the ranks have started, use the cores, or a "
                "container has a limit",
                "Look with top; start fewer ranks, or fewer threads (OMP_NUM_THREADS=1)",
                tuple(ranks),
            )
        ]
    return []
