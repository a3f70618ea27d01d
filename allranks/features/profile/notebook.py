"""Has the ranks of a cell sampled, and shows the flame graph: of all of it, or of some seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from allranks.cluster.features import CellContext, NotebookFeature
from allranks.cluster.options import CellOption, LineCommand, check_timeout
from allranks.errors import UsageError
from allranks.features.profile import PROFILE, PROFILED
from allranks.features.profile.flame_graph import Profile, bundle, check_file, show
from allranks.records.wire import Answer
from allranks.widgets.dashboard.view import PanelButton

#: Ranks answer at once, unless C code holds the interpreter.
_ASK_SECONDS = 10.0
_MARGIN_SECONDS = 0.05
#: How long a button of the panel profiles the cell, and the lines that the panel shows then.
PANEL_SECONDS = 5.0
_BEGUN = f"profiling the next {PANEL_SECONDS:g} s"
_BELOW = "the flame graph is below"
_EMPTY = "this cell has no samples of a rank, so there is no flame graph"
_SAVE = "write the profile here: stacks as text, or a .svg picture"


@dataclass
class Profiling:
    """One profile: the samples of a cell's ranks.

    ``show`` is called once, with the profiles of the ranks that have samples; if ``empty``, without
    samples too. With 0 seconds, the whole cell is sampled.
    """

    show: Callable[[list[Profile]], object]
    seconds: float = 0.0
    empty: bool = False
    #: Whether it has been shown.
    over: bool = False
    _ranks: tuple[int, ...] = ()
    _over_at: float | None = None
    _profiles: dict[int, Profile] = field(default_factory=dict)

    def begin(self, cell: CellContext, ranks: tuple[int, ...]) -> None:
        # A rank without a cell samples its next one.
        self._ranks = ranks
        cell.ask_soon(PROFILE, {"seconds": self.seconds}, lambda _: None, ranks)
        if self.seconds:
            self._over_at = time.monotonic() + self.seconds + _MARGIN_SECONDS

    def step(self, cell: CellContext) -> None:
        if not self._ranks and (pending := cell.pending()):
            self.begin(cell, pending)
        if self._over_at is not None and time.monotonic() >= self._over_at:
            self._over_at = None
            cell.ask_soon(PROFILED, {}, self._answered, self._ranks)

    def finish(self, cell: CellContext) -> None:
        missing = [rank for rank in self._ranks if rank not in self._profiles]
        if missing:
            answers = cell.ask(PROFILED, {}, missing, _ASK_SECONDS)
            for rank, (content, _) in answers.items():
                self._profiles.setdefault(rank, Profile.from_content(rank, content))
        self._show_once()

    def _answered(self, answer: Answer) -> None:
        if not answer.problem:
            profile = Profile.from_content(answer.rank, answer.content)
            self._profiles.setdefault(answer.rank, profile)
        if set(self._profiles) >= set(self._ranks):
            self._show_once()

    def _show_once(self) -> None:
        found = [profile for _, profile in sorted(self._profiles.items()) if profile.stacks]
        if (found or self.empty) and not self.over:
            self.over = True
            self.show(found)


def _showing(save: str | None) -> Callable[[list[Profile]], object]:
    file = check_file(save) if save else None
    return lambda profiles: show(profiles, file)


class NotebookProfile(NotebookFeature):
    """Profiles the cell that runs, or the next one."""

    commands = frozenset({"profile_cell"})
    cell_options = (
        CellOption(
            "profile",
            "profile_cell",
            {"action": "store_true", "help": "show a flame graph of the ranks' time in the cell"},
            prepares=True,
        ),
        CellOption("save", "profile_cell", {"metavar": "FILE", "help": _SAVE}, prepares=True),
    )
    line_commands = (
        LineCommand(
            "profile",
            "shows a flame graph of the next cell on the ranks, or of its first seconds",
            arguments={
                "seconds": {
                    "nargs": "?",
                    "type": float,
                    "default": 0.0,
                    "metavar": "SECONDS",
                    "help": "how long; default: all of the cell",
                },
                "--save": {"metavar": "FILE", "help": _SAVE},
            },
        ),
    )
    panel_buttons = (
        PanelButton(
            "Profile",
            f"draw a flame graph of the next {PANEL_SECONDS:g} seconds",
            "profile_in_panel",
        ),
    )
    in_cells = False  # until a profile is requested

    def __init__(self) -> None:
        self._next: Profiling | None = None
        self._running: Profiling | None = None

    def command(self, name: str, *arguments: Any) -> Any:
        """Begins a profile; may run in another thread, as the subshell of a notebook.

        ``profile`` takes the seconds, a file or None, and optionally a function that shows the
        profiles. It returns whether the running cell is profiled, or the next one.

        ``profile_cell`` takes the options of a cell, and returns what has the next cell profiled.

        ``profile_in_panel`` takes a function, which gets the picture, or None where no rank has
        samples, and a line for the panel. It returns such a line.
        """
        if name == "profile_cell":
            return self._profile_next(*arguments)
        if name == "profile":
            return self._profile(*arguments)
        if self.cell is not None and self._running is not None and not self._running.over:
            return "this cell is being profiled: its flame graph comes when that has ended"
        (show_below,) = arguments
        self._add(
            Profiling(
                lambda found: show_below(*((bundle(found), _BELOW) if found else (None, _EMPTY))),
                PANEL_SECONDS,
                empty=True,
            )
        )
        return _BEGUN

    def _profile_next(self, options: dict[str, Any]) -> Callable[[], object]:
        save = options.get("save")
        if not options.get("profile"):
            raise UsageError(f"--save needs --profile. Type: --profile --save {save}")
        return partial(self._add, Profiling(_showing(save)))

    def _profile(
        self, options: dict[str, Any], take: Callable[[list[Profile]], object] | None = None
    ) -> str:
        seconds = options["seconds"]
        check_timeout(seconds or None, "profile", " ")
        if self._add(Profiling(take or _showing(options["save"]), seconds)):
            return "The running cell is profiled."
        part = f"The first {seconds:g} s" if seconds else "All"
        return f"{part} of the next cell on the ranks will be profiled."

    def _add(self, profiling: Profiling) -> bool:
        cell, self.in_cells = self.cell, True
        if cell is None or not cell.pending():
            self._next = profiling
            return False
        self._running = profiling
        cell.poll(self._step)
        return True

    def cell_started(self) -> None:
        # The profile may have been requested before the cell.
        assert self.cell is not None
        self._running = None
        if self._next is not None and self.cell.shown:
            self._running, self._next = self._next, None
            self._running.begin(self.cell, self.cell.ranks)
            self.cell.poll(self._step)

    def _step(self) -> bool:
        if self.cell is not None and self._running is not None and self.cell.pending():
            self._running.step(self.cell)
        return False

    def cell_finished(self) -> None:
        running, self._running = self._running, None
        self.in_cells = self._next is not None
        if self.cell is not None and running is not None:
            running.finish(self.cell)


FEATURE = NotebookProfile
