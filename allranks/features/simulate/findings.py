"""What the schedules of a cell have shown: deadlocks, lost messages, results that differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from allranks.collectives.calls.deadlocks import NEVER
from allranks.collectives.calls.sites import Site, of_traceback
from allranks.engine.exceptions import text_of, traceback_of
from allranks.errors import CollectiveMismatch, RankLeft
from allranks.features.simulate.events import ANY, PostedReceive, SimulatedMessage
from allranks.features.simulate.output import RankOutput
from allranks.features.simulate.scheduler import Scheduler
from allranks.features.simulate.sketches import sketch
from allranks.features.simulate.tokens import Start
from allranks.records.ranks import label

_LINES, _WIDTH = 3, 160
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_PICTURES = 8


class TriedSchedule:
    """One schedule, and how it ended."""

    def __init__(
        self,
        start: Start,
        scheduler: Scheduler,
        outcomes: list[Any],
        outputs: list[RankOutput],
        endless: bool,
    ) -> None:
        self.start, self.scheduler = start, scheduler
        self.outcomes, self.outputs, self.endless = outcomes, outputs, endless
        self.messages, self.receives = scheduler.mail.unmatched()
        self.calls: list[tuple[str, Site, tuple[int, ...]]] = [
            (call.spec.title, call.site, call.missing())
            for arrival in scheduler.tasks[0].world.shared.slots.values()
            for call in list(arrival.calls.values())[:1]
        ]
        """The posted collectives that some ranks have not called."""
        self.contents = tuple(_comparable(one) for one in outputs)
        self.errors: dict[int, BaseException] = (
            {}
            if endless
            else {rank: one.error for rank, one in enumerate(outcomes) if one.error is not None}
        )
        self.length = (sum(map(bool, start.choices)), len(start.choices), len(scheduler.events))

    @property
    def is_complete(self) -> bool:
        return not self.endless and not self.errors

    def problem(self) -> tuple[tuple[Any, ...], str]:
        """Returns what went wrong as a key that is equal for the same problem, and as text."""
        if self.endless:
            return ("endless",), "never ends: its ranks poll, and no message comes"
        # Ranks that wait for one that has failed are not the cause.
        roots = {r: e for r, e in self.errors.items() if not isinstance(e, RankLeft)}
        roots = roots or self.errors
        rank, error = min(roots.items())
        stuck = all(isinstance(e, RankLeft) or _is_deadlock(e) for e in roots.values())
        kind = "deadlock" if stuck else "error"
        key = (kind, type(error).__name__, _place(error))
        if stuck:
            return key, f"deadlock: {text_of(error)}"
        return key, f"error: rank {rank}, {_place(error)}: {type(error).__name__}: {text_of(error)}"

    def left(self) -> tuple[tuple[Any, ...], str]:
        """As `problem`: messages that no rank has received, receives without one, and collectives
        that some ranks have not called.
        """
        key = (
            "left",
            *sorted({("message", str(one.site)) for one in self.messages}),
            *sorted({("receive", str(one.site)) for one in self.receives}),
            *sorted({("call", str(site)) for _, site, _ in self.calls}),
        )
        lines = [*map(_of_message, self.messages), *map(_of_receive, self.receives)]
        lines += [
            f"{title} at {site} was not called by {label(missing)}"
            for title, site, missing in self.calls
        ]
        return key, "lost: " + "; ".join(lines[:_LINES]) + ("; …" if len(lines) > _LINES else "")


@dataclass
class ScheduleFinding:
    """The same problem in some schedules, of which ``shortest`` is the shortest."""

    text: str
    shortest: TriedSchedule
    count: int = 1


@dataclass
class Findings:
    """The findings of all schedules of a cell."""

    source: str
    size: int
    most: int
    runs: int = 0
    stopped: str = ""
    """Why not all schedules were tried: ``stopped`` by a limit, or ``interrupted``."""
    unstable: tuple[int, ...] = ()
    """Ranks whose output is not the same if the same schedule runs again."""
    _problems: dict[tuple[Any, ...], ScheduleFinding] = field(default_factory=dict)
    _results: dict[tuple[Any, ...], ScheduleFinding] = field(default_factory=dict)
    _first: TriedSchedule | None = None
    _began: float = field(default_factory=monotonic)

    def add(self, run: TriedSchedule) -> None:
        self.runs += 1
        self._first = self._first or run
        if not run.is_complete:
            _count(self._problems, *run.problem(), run)
            return
        _count(self._results, run.contents, "", run)
        if run.messages or run.receives or run.calls:
            _count(self._problems, *run.left(), run)

    @property
    def differs(self) -> bool:
        """Whether a rank's output is not the same in all schedules."""
        return len(self._results) > 1

    @property
    def first(self) -> TriedSchedule:
        """The schedule of one of the results."""
        return next(iter(self._results.values())).shortest

    def compare_with_itself(self, outputs: Sequence[RankOutput]) -> None:
        """Takes the output of a second run of `first`: what differs is not due to the order."""
        pairs = zip(self.first.contents, map(_comparable, outputs), strict=True)
        self.unstable = tuple(rank for rank, (one, other) in enumerate(pairs) if one != other)
        results, self._results = self._results, {}
        for contents, one in results.items():
            key = tuple(() if rank in self.unstable else text for rank, text in enumerate(contents))
            _count(self._results, key, one.text, one.shortest, one.count)

    @property
    def found(self) -> list[ScheduleFinding]:
        """All findings but the results that differ."""
        return list(self._problems.values())

    @property
    def shown(self) -> TriedSchedule | None:
        """The schedule whose output is the cell's."""
        found = self.found
        return found[0].shortest if found else self._first

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(run.start.token(self.source) for run in self._named())

    def _named(self) -> Iterable[TriedSchedule]:
        yield from (one.shortest for one in self.found)
        if self.differs:
            yield from (one.shortest for one in self._variants())

    def _variants(self) -> list[ScheduleFinding]:
        """The results that differ, those of the shortest schedules first."""
        return sorted(self._results.values(), key=lambda one: one.shortest.length)[:_LINES]

    def text(self) -> str:
        """The report, with a line to type for each schedule that it names."""
        count = len(self.found) + self.differs
        seconds = f"{monotonic() - self._began:.2g} s"
        schedules = f"{self.runs:,} schedules" if self.runs != 1 else "1 schedule"
        said = (
            f"tried all {schedules} in {seconds}"
            if self.runs > 1
            else f"tried the only schedule in {seconds}"
        )
        if self.stopped:
            said = f"{self.stopped} after {schedules} ({seconds}): not all"
            said += f", more with --explore {10 * self.most} --timeout 300"
        found = f"{count} finding{'s' if count != 1 else ''}" if count else "no finding"
        lines = [f"{said}; {found}"]
        for number, one in enumerate(self.found, 1):
            text = one.text.replace("\n", "\n   ")
            lines += [f"{number}. {text}", f"   {self._replay(one)}"]
        if self.differs:
            lines += self._differences(count)
        if self.unstable:
            lines.append(
                f"not compared: the output of {label(self.unstable)}, which differs between two "
                "runs of the same schedule. Print no times, and seed all random numbers"
            )
        return "\n".join(lines)

    def _replay(self, one: ScheduleFinding) -> str:
        token = one.shortest.start.token(self.source)
        return (
            f"in {one.count:,} of {self.runs:,}, the shortest: "
            f"%%distributed -n {self.size} --replay {token}"
        )

    def _differences(self, number: int) -> list[str]:
        variants = self._variants()
        contents = [one.shortest.contents for one in variants]
        ranks = [
            rank
            for rank in range(self.size)
            if rank not in self.unstable and len({content[rank] for content in contents}) > 1
        ]
        lines = [
            f"{number}. results depend on the order of messages: {label(ranks)}, "
            f"{len(self._results):,} different results"
        ]
        for one, content in zip(variants, contents, strict=True):
            lines.append(f"   rank {ranks[0]}: {_short(content[ranks[0]])}")
            lines.append(f"   {self._replay(one)}")
        return lines

    def sketches(self) -> list[tuple[str, bytes]]:
        """The token of each schedule that the report names, and what its picture shows."""
        named = list(self._named())[:_PICTURES]
        return [(run.start.token(self.source), sketch(run.scheduler)) for run in named]


def _count(
    found: dict[tuple[Any, ...], ScheduleFinding],
    key: Any,
    text: str,
    run: TriedSchedule,
    count: int = 1,
) -> None:
    known = found.get(key)
    if known is None:
        found[key] = ScheduleFinding(text, run, count)
        return
    known.count += count
    if run.length < known.shortest.length:
        known.shortest, known.text = run, text


def _is_deadlock(error: BaseException) -> bool:
    return isinstance(error, CollectiveMismatch) and NEVER in text_of(error)


def _place(error: BaseException) -> str:
    return str(of_traceback(traceback_of(error)).place)


def _comparable(output: RankOutput) -> tuple[str, ...]:
    # Addresses of objects differ between schedules; text in several pieces is the same text.
    found: list[tuple[str, str]] = []
    for kind, value in output.contents:
        text = _ADDRESS.sub("0x…", value if isinstance(value, str) else _plain(value))
        if found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + text
        elif text:
            found.append((kind, text))
    return tuple(text for _, text in found)


def _plain(value: Any) -> str:
    return str(value.get("text/plain", value)) if isinstance(value, dict) else str(value)


def _short(texts: tuple[str, ...]) -> str:
    text = " ".join(" ".join(texts).split())
    return (text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…") or "no output"


def _of_message(message: SimulatedMessage) -> str:
    return (
        f"the message of rank {message.source} to rank {message.dest} (tag {message.tag}), "
        f"{message.title} at {message.site}, was never received"
    )


def _of_receive(receive: PostedReceive) -> str:
    whom = "any rank" if receive.source == ANY else f"rank {receive.source}"
    return f"rank {receive.rank}'s {receive.title} at {receive.site} from {whom} got no message"
