"""``--explore``: runs a cell in all its orders of messages, and reports what differs."""

from __future__ import annotations

import copy
from collections import deque
from time import monotonic
from typing import Any

from allranks.collectives.world.world import FIRST_MADE
from allranks.engine.exceptions import is_a
from allranks.features.simulate.cell import SimulatedCell
from allranks.features.simulate.choices import ChosenSchedule
from allranks.features.simulate.findings import Findings, TriedSchedule
from allranks.features.simulate.sandbox import Ranks
from allranks.features.simulate.tokens import EAGER, MOST_SECONDS, RENDEZVOUS, Start
from allranks.records.wire import Record


class ExploredCell(SimulatedCell):
    """A cell that is run in each order; its output is that of the first one with a finding."""

    def run(self) -> None:
        """Runs all schedules. Then the variables are those before the cell."""
        self._begin()
        options = self._record.options
        before = Variables(self._ranks)
        most = int(options["explore"])
        self._found = found = Findings(self._record.source, self._record.size, most)
        ends = monotonic() + float(options.get("seconds") or MOST_SECONDS)
        self._exploring = True
        seed = int(options.get("seed") or 0)
        # Both kinds of sends from the beginning: a limit may end the search. Of each kind, the
        # schedules with the fewest choices come first, so that a finding has a short one.
        waiting = [deque([Start(mode, seed)]) for mode in (EAGER, RENDEZVOUS)]
        try:
            while any(waiting) and found.runs < most and monotonic() < ends:
                starts = waiting.pop(0)
                if not starts:
                    continue
                waiting.append(starts)
                schedule = ChosenSchedule(starts.popleft())
                endless = self._run_again(before, schedule)
                if schedule.is_redundant:
                    continue
                if not schedule.has_sent and not schedule.choices:
                    waiting = [starts]  # the mode of sends makes no difference
                starts.extend(schedule.others)
                if not endless and any(
                    one.error is not None and is_a(one.error, KeyboardInterrupt)
                    for one in self._outcomes
                ):
                    found.stopped = "interrupted"
                    break
                assert self.scheduler is not None
                found.add(
                    TriedSchedule(
                        schedule.done, self.scheduler, self._outcomes, self._outputs, endless
                    )
                )
            if any(waiting) and not found.stopped:
                found.stopped = "stopped"
            if found.differs and found.stopped != "interrupted":
                self._run_again(before, ChosenSchedule(found.first.start))
                found.compare_with_itself(self._outputs)
        finally:
            before.restore()
            self._exploring = False
        shown = found.shown
        if shown is not None and found.stopped != "interrupted":
            self.scheduler = shown.scheduler
            self._outcomes, self._outputs = shown.outcomes, shown.outputs

    _exploring = False

    def _run_again(self, before: Variables, schedule: ChosenSchedule) -> bool:
        before.renew()
        self._clear()
        return self._run_watched(schedule)

    def news(self, final: bool = False) -> list[tuple[Record, list[bytes]]]:
        """No output is sent while schedules run: that of one of them is shown at the end."""
        return [] if self._exploring else super().news(final)

    def _further_records(self) -> list[tuple[Record, list[bytes]]]:
        found = self._found
        return self._report(found.text(), found.sketches(), found.tokens)


class Variables:
    """The variables and libraries' states of all ranks before a cell; each schedule gets copies."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._kept = [
            (
                dict(one.names),
                one.random,
                copy.deepcopy(one.bits),
                one.registers,
                dict(one.modules),
                one.world.groups,
                one.world.made,
            )
            for one in ranks.spaces
        ]

    def renew(self) -> None:
        """Begins a schedule."""
        self._reset(copies=True)

    def restore(self) -> None:
        """Ends the search."""
        self._reset(copies=False)

    def _reset(self, *, copies: bool) -> None:
        ranks = self._ranks
        ranks.epoch += 1
        ranks.shared.slots.clear()
        for space, (names, state, bits, registers, modules, groups, made) in zip(
            ranks.spaces, self._kept, strict=True
        ):
            space.names.clear()
            space.names.update(self._copies(names) if copies else names)
            space.random, space.bits = state, copy.deepcopy(bits)
            space.registers = {} if copies else registers
            space.modules = dict(modules)
            space.world.renewed(ranks.epoch)
            space.world.groups, space.world.made = dict(groups), made
            for number, group in groups.items():
                if number >= FIRST_MADE:
                    group.renew()

    def _copies(self, names: dict[str, Any]) -> dict[str, Any]:
        own, memo, found = self._ranks.names, dict[int, Any](), dict[str, Any]()
        for name, value in names.items():
            found[name] = value
            if name.startswith("__") or own.get(name) is value:
                continue
            try:
                found[name] = copy.deepcopy(value, memo)
            except Exception:
                pass  # such as a module or a file: the schedules share it
        return found
