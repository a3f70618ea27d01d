"""Every exception allranks raises on purpose. Both sides; standard library only.

AllranksError
├── UsageError                what was typed cannot be run: nothing was sent, nothing is lost
│   └── InvalidCell           the cell is not valid Python: nothing has run, on any rank
├── MissingDependency         a package or program is missing: the message has the install command
├── ClusterError
│   ├── StartFailed           the ranks did not come up: the message has the launcher's last lines
│   ├── ClusterLost           ranks died and took the cluster with them
│   └── WireError             a record that crossed the wire cannot be read or written
├── CellFailed                a cell raised on at least one rank (carries one report a rank)
│   ├── CellInterrupted       the cell was left because of an interrupt
│   ├── CellTimeout           the cell ran past ``--timeout``
│   └── MapFailed             items of ``map`` failed (carries what the others returned)
│       └── MapInterrupted    it was left because of an interrupt (a CellInterrupted as well)
└── CollectiveError
    ├── CollectiveMismatch    the ranks of one collective brought different things
    ├── RankLeft              a collective can never complete: a rank it needs has left the cell
    │   └── RankLost          the host of a rank it needs cannot be reached any more
    ├── StaleHandle           an asynchronous handle outlived its epoch
    ├── TransportFailed       what moves the data has failed: NCCL, or the GPU itself
    └── NotInitialized        a collective was called before ``init()``

A message has three beats: what was expected, what was found, what to type next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allranks.records.report import Report


class AllranksError(Exception):
    """The base of every exception that allranks raises on purpose."""


class _SaidInFull(AllranksError):
    """Its message says all there is to know: the frames above it are ours, and not to blame."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(_SaidInFull, ValueError):
    """What was typed cannot be run; nothing was sent to the ranks and nothing is lost."""


class InvalidCell(UsageError):
    """The cell is not valid Python; nothing has run, on any rank."""


class MissingDependency(_SaidInFull, ImportError):
    """A package or a program is missing; the message ends with the command that installs it."""


class ClusterError(_SaidInFull):
    """The cluster of ranks could not be started, reached or kept."""


class StartFailed(ClusterError):
    """The ranks did not come up; the message ends with the launcher's last lines."""


class ClusterLost(ClusterError):
    """One or more ranks died and took the cluster with them."""


class WireError(ClusterError):
    """A record that crossed the wire cannot be read or written."""


class CellFailed(AllranksError):
    """A cell raised on at least one rank.

    Attributes:
        reports: one :class:`allranks.records.report.Report` for each rank that did not finish.
        text: the whole report as a person reads it, with colour codes.
    """

    def __init__(self, message: str, text: str = "", reports: Sequence[Report] = ()) -> None:
        super().__init__(message)
        self.text = text or message
        self.reports = tuple(reports)

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of the notebook's own frames, which are not to blame."""
        return [self.text]


class CellInterrupted(CellFailed):
    """A cell was left because of an interrupt; ranks and variables are kept."""


class CellTimeout(CellFailed):
    """A cell ran past its ``--timeout``; ranks that hear an interrupt are kept."""


class MapFailed(CellFailed):
    """Items of ``Cluster.map`` failed; all others have run.

    Attributes:
        results: what was returned for each item, in their order; None where nothing was.
        failed: the report of each item that failed, by its number.
    """

    def __init__(
        self,
        message: str,
        text: str = "",
        results: Sequence[Any] = (),
        failed: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message, text)
        self.results = list(results)
        self.failed = dict(failed or {})


class MapInterrupted(MapFailed, CellInterrupted):
    """``Cluster.map`` was interrupted; what had finished is in ``results``."""


class CollectiveError(AllranksError):
    """A collective operation could not be carried out."""


class CollectiveMismatch(CollectiveError):
    """The ranks of one collective brought different operations, dtypes, shapes or roots."""


class RankLeft(CollectiveError):
    """A collective can never complete because a rank that it needs has left the cell."""


class RankLost(RankLeft):
    """The host of a rank that a collective needs cannot be reached any more."""


class StaleHandle(CollectiveError):
    """An asynchronous handle belongs to an epoch that has ended."""


class TransportFailed(CollectiveError):
    """What moves a collective's data has failed: NCCL, or the GPU itself."""


class NotInitialized(CollectiveError, ValueError):
    """A collective was called before ``init()``, or after ``shutdown()``."""
