"""What a view does with news that it does not show."""

from __future__ import annotations

from allranks.records.telemetry import Telemetry


class Quiet:
    """Takes in what ranks tell beside their output, and shows nothing of it."""

    def telemetry(self, record: Telemetry, payloads: list[bytes]) -> None:
        """Forgets a rank's curves, timings or pulse."""

    def left(self, rank: int, status: str) -> None:
        """Forgets that a rank has left the cell."""

    def make_way(self) -> None:
        """Does nothing: lines that are added stand above a prompt by themselves."""
