"""A session to play steps in: ranks, and the kernel or the process that leads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.fuzz.figures import Figures, of_process, segments
from tests.fuzz.grammar import Fault
from tests.fuzz.ranks import SETUP, Witness

HANG_SECONDS = 60.0
"""A cell that has not ended by then is called a hang. It is no promise of speed: it only has to be
far above what any cell here takes on a busy machine."""
ENVIRONMENT = {"ALLRANKS_LATE_SECONDS": "0.5"}
"""Some ranks here are late for longer than that, and are named."""

Signals = Sequence[tuple[float, int, int]]


@dataclass
class Ended:
    """How a cell ended, as its reader sees it.

    Attributes:
        how: ``ok``, or the error's name.
        reports: rank, exception and whether it only waited, of each rank that did not finish.
        bundles: rich displays, each with the label above it.
        nbytes: how much was sent to the front end, where there is one.
    """

    how: str
    message: str = ""
    text: str = ""
    reports: list[tuple[int, str, bool]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    bundles: list[tuple[str, str]] = field(default_factory=list)
    nbytes: int = 0


class Session(ABC):
    """Ranks that steps are played on.

    Args:
        size: how many.
        folder: where the session may leave files, until it is closed.

    Attributes:
        steps: how many probes the ranks have run since their variables were set.
        starts: how often ranks were started.
    """

    kind: str
    heals = False
    """Whether ranks that die are replaced."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.witness = Witness(folder / "witness")
        self.steps = 0
        self.starts = 0
        self.pids: dict[int, int] = {}

    @abstractmethod
    def cell(
        self,
        source: str,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        presses: Sequence[float] = (),
        signals: Signals = (),
        wants_values: bool = False,
    ) -> Ended:
        """Runs a cell and returns how it ended.

        Raises:
            Fault: it hangs.
        """

    @abstractmethod
    def push(self, name: str, expression: str) -> Ended:
        """Pushes what an expression is in the leader's process."""

    @abstractmethod
    def pull(self, name: str) -> Ended:
        """Pulls a variable; ``values`` is one a rank."""

    @abstractmethod
    def status(self) -> Ended:
        """Asks for the status; ``values`` is a pid and a state a rank."""

    @abstractmethod
    def restart(self, size: int) -> None:
        """Restarts with so many ranks."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the ranks."""

    @abstractmethod
    def revive(self) -> None:
        """Does what a user does before the next cell where ranks were lost."""

    @abstractmethod
    def leader(self) -> psutil.Process:
        """The process that leads the ranks."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything, and says so where something is left.

        Raises:
            Fault: something is left.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Ends everything after a fault, whatever it takes."""

    def set_up(self) -> None:
        """Gives the ranks their variables: they are fresh, or have forgotten them."""
        ended = self.cell(SETUP.format(folder=str(self.witness.folder)))
        if ended.how != "ok":
            raise Fault("set up", f"fresh ranks: {ended.how}: {ended.message}\n{ended.text}")
        pids = dict(enumerate(self.cell("os.getpid()", wants_values=True).values))
        if pids != self.pids:
            self.starts += 1
        self.pids, self.steps = pids, 0

    def figures(self) -> Figures:
        """Returns what the session holds now."""
        leader = self.leader()
        ranks = [of_process(psutil.Process(pid)) for pid in self.pids.values()]
        return Figures(of_process(leader), ranks, len(segments(leader.children(recursive=True))))
