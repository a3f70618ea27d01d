"""Sections of the panel that features and other distributions add.

A section is a class that turns records into tables and pictures. The live panel, the saved notebook
and the terminal show these alike, so a section needs no JavaScript.
"""

from __future__ import annotations

from collections.abc import Sequence

from allranks.records.telemetry import Telemetry
from allranks.widgets.dashboard.tables import Table


class PanelSection:
    """One section of a cell's panel; an object is made for each cell.

    Args:
        ranks: the ranks that run the cell.

    Attributes:
        title: the heading of the section; no other section has the same.
    """

    title = ""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)

    def take(self, record: Telemetry, payloads: Sequence[bytes]) -> None:
        """Handles a record of one rank.

        Args:
            record: a pulse, logged values, or totals of calls (``allranks.records.telemetry``).
            payloads: the arrays that belong to it, as bytes.
        """

    def worth_showing(self) -> bool:
        """Returns whether the section alone is a reason to show the panel."""
        return False

    def tables(self) -> Sequence[Table]:
        """Returns the section's tables; a section without tables and pictures is hidden."""
        return ()

    def pictures(self) -> Sequence[tuple[str, str]]:
        """Returns the section's pictures: SVG without scripts, and the text that replaces it."""
        return ()


#: A list, not a lookup of entry points: it is read at the begin of every cell.
_sections: list[type[PanelSection]] = []


def add_section(section: type[PanelSection]) -> None:
    """Adds a section to the panels of all cells that begin from now on.

    A section that has the title of an earlier one replaces it, so that a cell which defines a
    section can be run again.

    Raises:
        ValueError: the section has no title.
    """
    if not section.title:
        raise ValueError(f"expected a title of {section.__name__}, found none. Set: title = ...")
    _sections[:] = [one for one in _sections if one.title != section.title]
    _sections.append(section)


def remove_section(section: type[PanelSection]) -> None:
    """Removes a section from the panels of later cells, if it was added."""
    _sections[:] = [one for one in _sections if one is not section]


def made_sections(ranks: Sequence[int]) -> list[PanelSection]:
    """Returns one object of each section that was added, for a cell."""
    return [section(ranks) for section in _sections]
