"""Plays the steps of a seed, each followed by a cell whose result is known; shortens what fails."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tests.fuzz import grammar, oracle, ranks
from tests.fuzz.grammar import RIGHT, Act, Case, Fault, Made, Seed, check
from tests.fuzz.sessions import Healing, InNotebook, InProcess, Session

grammar.load()
_SESSIONS = {cls.kind: cls for cls in (InNotebook, InProcess, Healing)}
_LENGTHS = (1, 7, 1000, 20_000, 300_000)
_MOST_BEFORE = 3
_SHOWN_CHARACTERS = 600
SHORTEN_SECONDS = 600.0
"""How long is looked for a shorter sequence: a few dozen sessions, or a handful of hangs."""


@dataclass
class Played:
    """What was played, and what went wrong.

    Attributes:
        steps: the numbers of the steps that were begun.
        sizes: how many ranks there were in each of them.
        ends: how many cells ended how.
        fault: what went wrong in the last step, or when the session was closed.
    """

    seed: Seed
    steps: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    before: str = "-"
    after: str = "-"
    fault: Fault | None = None


def play(
    seed: Seed,
    steps: Iterable[int],
    go_on: Callable[[], bool] = lambda: True,
    tell: Callable[[str], object] = lambda _: None,
) -> Played:
    """Plays steps in a fresh session, until the first fault.

    Args:
        seed: of which session.
        steps: their numbers, in their order.
        go_on: asked before each step.
        tell: takes a line a step.
    """
    played = Played(seed)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    session: Session | None = None
    try:
        session = _SESSIONS[seed.kind](seed.size, folder)
        played.before = session.figures()
        for step in steps:
            if not go_on():
                break
            played.steps.append(step)
            played.sizes[step] = session.size
            _play_step(session, seed, step, played, tell)
        played.after = session.figures()
        session.close()
    except Exception as error:
        fault = error if isinstance(error, Fault) else _unexpected(error)
        fault.add_note(_last_lines(folder))
        played.fault = fault
    finally:
        if session is not None and (played.fault or sys.exc_info()[0]):
            session.abandon()
        played.starts = session.starts if session is not None else 0
        shutil.rmtree(folder, ignore_errors=True)
    return played


def made(seed: Seed, step: int, size: int) -> tuple[str, Made, str]:
    """Returns a step's name, what it does, and the right statements that stand before it."""
    draw = seed.draw(step, size)
    chosen = next(islice(seed.statements(), step, None))
    what = chosen.make(draw)
    before = ""
    if isinstance(what, Case) and what.mixes and what.ranks is None:
        names = draw.rng.choices(sorted(RIGHT), k=draw.rng.randint(0, _MOST_BEFORE))
        before = "\n".join(draw.fill(RIGHT[name], draw.words()) for name in names)
    return chosen.name, what, before


def source_of(seed: Seed, step: int, size: int) -> str:
    """Returns what a step is, for a reader."""
    name, what, before = made(seed, step, size)
    if isinstance(what, Act):
        return f"# step {step}: {name}\n"
    extra = {
        key: value
        for key in ("ranks", "timeout", "presses", "signals")
        if (value := getattr(what, key)) not in (None, ())
    }
    return f"# step {step}: {name} {extra or ''}\n{ranks.cell(what, step, before)}"


def _play_step(
    session: Session, seed: Seed, step: int, played: Played, tell: Callable[[str], object]
) -> None:
    name, what, before = made(seed, step, session.size)
    played.names[name] += 1
    n = seed.draw(step, session.size).rng.choice(_LENGTHS)
    if isinstance(what, Act):
        tell(f"{step} {name}")
        what.do(session)
        played.ends["act"] += 1
        if what.lost:
            session.set_up()
        oracle.probe(session, step, n)
        return
    ended = session.cell(
        ranks.cell(what, step, before),
        ranks=what.ranks,
        timeout=what.timeout,
        presses=what.presses,
        signals=what.signals,
        wants_values=what.values is not None,
    )
    tell(f"{step} {name}: {ended.how} {ended.message[:100]!r}")
    played.ends[ended.how] += 1
    oracle.judge(what, ended, session, step)
    oracle.follow(what, ended, session, step, n)
    if what.late and ended.how == "ok":
        oracle.await_late(what, ended, session, step)
    if what.undo:
        undone = session.cell(what.undo)
        check(undone.how == "ok", "undo", f"{undone.how}: {undone.message}\n{undone.text}")


def _unexpected(error: Exception) -> Fault:
    return Fault(type(error).__name__, "".join(traceback.format_exception(error)))


def _last_lines(folder: Path) -> str:
    """Returns the ends of the newest cluster's logs."""
    logs = [*folder.glob("notebook/.state/allranks/*"), *folder.glob("logs/*")]
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=folder)
    return "\n".join(
        f"── {path.name}\n{path.read_text(errors='replace')[-_SHOWN_CHARACTERS:]}"
        for path in sorted(newest.glob("*.log"))
    )


def shortest(steps: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Returns a part of ``steps`` that fails, from which pieces, then steps, are left out.

    Args:
        steps: what has failed.
        fails: whether a part of it fails as well.

    After Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, 2002.
    """
    left = list(steps)
    if len(left) > 1 and fails(left[-1:]):
        return left[-1:]
    size = len(left) // 2
    while size:
        # From the end, so that the places of the pieces before stay as they are.
        for start in range(0, len(left), size)[::-1]:
            rest = left[:start] + left[start + size :]
            if rest and fails(rest):
                left = rest
        size //= 2
    return left


def shorten(played: Played, seconds: float = SHORTEN_SECONDS) -> list[int]:
    """Returns the shortest part found of the steps that were played, with a fault of that kind."""
    kind, deadline = played.fault.kind if played.fault else "", time.monotonic() + seconds

    def fails(steps: Sequence[int]) -> bool:
        if time.monotonic() > deadline:
            return False
        again = play(played.seed, steps)
        return again.fault is not None and again.fault.kind == kind

    return shortest(played.steps, fails)


def report(played: Played, steps: Sequence[int]) -> str:
    """Returns what a person needs to see the fault again."""
    listed = ",".join(map(str, steps))
    again = f"python -m tests.fuzz --seed {played.seed} --steps {listed}"
    sources = "\n".join(source_of(played.seed, step, played.sizes[step]) for step in steps)
    return (
        f"{played.fault}\n" + "\n".join(getattr(played.fault, "__notes__", [])) + "\n\n"
        f"{played.seed}: found after {len(played.steps)} steps, these {len(steps)} fail as well\n"
        f"again:  {again}\nread:   {again} --source\n\n{sources}"
    )
