"""The record that starts a simulated cell. Both sides."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from allranks.records.frozen import frozen
from allranks.records.wire import Record


@frozen
class RunSimulated(Record):
    """Run this source on ``size`` simulated ranks.

    ``cell``, ``source``, ``number``, ``label``, ``want_value`` and ``limit_nbytes`` are those of a
    `RunCell`; ``options`` are the options of the magic, by name. Each rank sends its own `Output`
    and `Reply`, with its number.
    """

    cell: int
    source: str
    number: int
    size: int
    label: str
    want_value: bool
    limit_nbytes: int
    options: dict[str, Any] = field(default_factory=dict)


@frozen
class SimulatedTime(Record):
    """The simulated time of a cell on ``network``.

    It ended on rank ``last`` after ``seconds``. ``rank_seconds`` are the times of all ranks
    together, of which ``wait_seconds`` were spent waiting and ``transfer_seconds`` moving data.
    """

    cell: int
    network: str
    size: int
    seconds: float
    last: int
    rank_seconds: float
    wait_seconds: float
    transfer_seconds: float


@frozen
class SimulatedReport(Record):
    """What the schedules of a cell have shown, as ``text``, and what its pictures show.

    The payloads are the pictures, see `sketches`, each with a name in ``names``. ``tokens`` are the
    schedules that ``text`` names.
    """

    cell: int
    text: str
    names: tuple[str, ...]
    tokens: tuple[str, ...] = ()
