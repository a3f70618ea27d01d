"""``%distributed heal`` and ``keep``: when dead ranks are replaced, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allranks.cluster import cluster
from allranks.cluster.features import NotebookFeature
from allranks.cluster.healing import AfterCells
from allranks.cluster.options import LineCommand
from allranks.cluster.recovered import listed
from allranks.errors import UsageError

_ALIVE = "All ranks are alive."
_FIXED = (
    "These ranks cannot be replaced: when one dies, all others are killed, and the next cell "
    "starts new ones."
)
_HEALING = {
    "on": "A rank that dies is replaced automatically; the others keep their variables.",
    "ask": "A rank that dies is replaced when you type: %distributed heal",
    "off": "When a rank dies, all others are killed, and the next cell starts new ones.",
}
_VARIABLES = {"nargs": "*", "metavar": "NAMES", "help": "the variables' names"}
_EVERY = {"type": float, "default": 0.0, "metavar": "SECONDS", "help": "at most once in this time"}


class NotebookHeal(NotebookFeature):
    """Does the commands of a notebook; its `Cluster` replaces the ranks."""

    line_commands = (
        LineCommand(
            "keep",
            "keeps variables after each cell, for ranks that replace dead ones, until: keep off",
            arguments={"variables": _VARIABLES, "--every": _EVERY},
        ),
        LineCommand(
            "heal",
            "replaces dead ranks now; or sets when: always (on), on request (ask), never (off)",
            "on|ask|off",
            "when, from now on; without it, dead ranks are replaced now",
        ),
    )

    def command(self, name: str, *arguments: Any) -> Any:
        (asked,) = arguments
        if name == "keep":
            return _keep(asked["variables"], asked["every"])
        if len(asked) > 1:
            raise UsageError(f"expected on, ask or off, found {' '.join(asked)}")
        return _heal_when(asked[0]) if asked else _heal()


def _heal_when(when: str) -> str:
    session: Any = cluster.session
    session.heal_when(when)
    running = session.running
    fixed = when != "off" and running is not None and not running.roster.can_heal
    return _FIXED if fixed else _HEALING[when]


def _heal() -> str:
    session: Any = cluster.session
    ranks = session.running
    if ranks is None and (line := session.where()):
        raise UsageError(f"expected ranks of this notebook, found {line} Type it there")
    if ranks is None:
        raise UsageError("no ranks are running. Type: %distributed start")
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        print(text)

    if not ranks.cells.is_up(tell):
        return str(ranks.lost_because.splitlines()[0])
    if ranks.roster.dead:
        return str(ranks.heal(print))
    return "" if said else _ALIVE


def _keep(words: Sequence[str], every: float) -> str:
    names = [name for word in words for name in word.split(",") if name]
    session: Any = cluster.session
    if not names:
        raise UsageError(
            "expected the names of variables, found none. Type for example: %distributed keep x, y"
        )
    if names == ["off"]:
        session.keep_after_cells(None)
        return "No variables are kept after cells from now on; those kept before remain."
    unfit = [name for name in names if not name.isidentifier()]
    if unfit:
        raise UsageError(
            f"expected the names of variables, found {unfit[0]:.60}. "
            "Type for example: %distributed keep model, step"
        )
    session.keep_after_cells(AfterCells(names, every))
    often = f", at most once in {every:g} s," if every else ""
    return f"{listed(names)} kept after each cell{often} until: %distributed keep off"


FEATURE = NotebookHeal
