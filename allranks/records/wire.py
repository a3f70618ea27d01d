r"""The records that cross the wire between the notebook and its ranks, and how they are written.

A message is a list of frames: first one JSON text ``[name, fields]``, then any binary payloads
(pickled values). Both sides import this file and nothing else of each other.

Text crosses as UTF-8, with the bytes of file names that are none (``surrogateescape``), as between
a notebook and its front end. Any other lone surrogate would stop that message there: it arrives
as the six characters that Python writes for it, ``\ud83d``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.errors import WireError
from allranks.records.report import Report as Report
from allranks.records.telemetry import Points, Pulse, Strip, Telemetry, Timings

Bundle = dict[str, Any]
"""A Jupyter mime bundle: mime type to JSON-able data."""


# ── from the notebook to a rank ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RunCell:
    """Run this source; payload frame 0, where present, is a pickled call instead of source.

    ``cell`` counts the cells of a cluster; ``number`` is the notebook's ``In [number]``.
    ``limit_nbytes`` bounds the text that one rank sends for the screen.
    """

    cell: int
    source: str
    number: int
    ranks: tuple[int, ...]
    label: str
    want_value: bool
    limit_nbytes: int


@dataclass(frozen=True, slots=True)
class RunMember:
    """Run this source as one member of an ensemble; payload frame 0 is its pickled values.

    ``cell``, ``source``, ``number``, ``label`` and ``limit_nbytes`` are a :class:`RunCell`'s.
    ``ranks_each`` ranks in a row run it together; they move to ``epoch`` of their own first.
    ``shared``: what is large is left in shared memory instead of being sent. ``ensemble`` names the
    one that it is of: what a member has kept is found again when it runs again.
    """

    cell: int
    member: int
    ensemble: str
    source: str
    number: int
    label: str
    limit_nbytes: int
    ranks_each: int
    epoch: int
    shared: bool


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Raise KeyboardInterrupt in the rank's main thread if it still runs this cell."""

    cell: int


@dataclass(frozen=True, slots=True)
class Died:
    """A rank has died; ``how`` follows its name in what waits for it: ``was killed by …``."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Answer one request by name (see ``allranks.records.requests``)."""

    request: int
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Typed:
    """What a person has typed at a rank's prompt; ``problem`` says why nobody can."""

    cell: int
    number: int
    text: str
    problem: str


# ── from a rank to the notebook ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank is up: who it is and where."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    pid: int
    device: str
    engine: str
    mpi: str
    log: str


@dataclass(frozen=True, slots=True)
class Output:
    """What a rank wrote since its last batch, in order.

    Each entry is ``[kind, …]``: ``["out"|"err", text]``, ``["display", data, metadata, id]``,
    ``["update", data, metadata, id]``, ``["result", data, metadata]``, ``["clear", wait]``,
    ``["notice", text]``, or ``["into", id]`` where what follows belongs in a widget.
    ``hidden_lines`` and ``hidden_nbytes`` count what stands in the log only, over the whole cell.
    ``log_nbytes`` is the length of the log file up to which this batch is complete.
    ``err_spans`` holds which bytes of the log, since the batch before, are standard error.
    """

    rank: int
    cell: int
    entries: tuple[list[Any], ...]
    hidden_lines: int
    hidden_nbytes: int
    log_nbytes: int
    err_spans: tuple[list[int], ...] = ()


@dataclass(frozen=True, slots=True)
class Widget:
    """A message between a widget on a rank and its view; either way. Buffers are the payloads.

    ``kind`` is ``comm_open``, ``comm_msg`` or ``comm_close``, ``comm`` the widget's id, ``target``
    what opens it.
    """

    rank: int
    kind: str
    comm: str
    data: dict[str, Any]
    metadata: dict[str, Any]
    target: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rank waits for a line that a person types; ``number`` tells its prompts apart.

    ``hidden``: what is typed is a password. ``goes_on``: a debugger asks, and will ask again.
    ``interrupted``: the cell had been interrupted here before it asked.
    """

    rank: int
    cell: int
    number: int
    text: str
    hidden: bool
    goes_on: bool
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """A rank has left a cell. ``status`` is ``ok``, ``error`` or ``interrupted``.

    Payload frame 0, where ``has_value``, is the pickled value of the last expression;
    ``value_problem`` says why a wanted value could not be pickled.
    ``dirty`` says that the rank's communicators must be renewed before they are used again.
    """

    rank: int
    cell: int
    status: str
    seconds: float
    dirty: bool
    has_value: bool
    value_problem: str
    report: Report | None


@dataclass(frozen=True, slots=True)
class Result:
    """What a member has left in ``result``; its :class:`Reply` follows.

    ``numbers`` holds every entry of it that is one number, by name; ``text`` says what it is.
    The whole, ``nbytes`` as ``allranks.records.packing`` packs it, is payload frame 0; or it lies
    in the shared memory that can be opened at ``address``.
    ``problem`` says why it cannot be had.
    """

    rank: int
    cell: int
    numbers: dict[str, float]
    text: str
    nbytes: int
    address: str
    problem: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an :class:`Ask`; ``problem`` is not empty where it failed."""

    request: int
    rank: int
    content: dict[str, Any]
    problem: str


Record = (
    RunCell
    | RunMember
    | Interrupt
    | Died
    | Ask
    | Typed
    | Hello
    | Output
    | Prompt
    | Widget
    | Reply
    | Result
    | Answer
    | Telemetry
)
_RECORDS: dict[str, type[Record]] = {
    cls.__name__: cls
    for cls in (
        *(RunCell, RunMember, Interrupt, Died, Ask, Typed),
        *(Hello, Output, Prompt, Widget, Reply, Result, Answer, Points, Timings, Pulse, Strip),
    )
}
_LONE = re.compile("[\ud800-\udfff]")


def encode(record: Record, *payloads: bytes) -> list[bytes]:
    """Return the frames of one message.

    Raises:
        WireError: a field is not JSON-able.
    """
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    try:
        text = _dumps([type(record).__name__, fields])
        return [_as_bytes(text), *payloads]
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"{type(record).__name__} cannot be sent: {error}") from error


def _as_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # Inside JSON a backslash is written as two.
        return _LONE.sub(lambda found: rf"\\u{ord(found[0]):04x}", text).encode()


def _plain(value: object) -> object:
    if isinstance(value, Report):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} is not JSON-able")


# Made here, because a cell on a rank may replace what json holds.
_dumps = json.JSONEncoder(default=_plain, ensure_ascii=False).encode
_loads = json.JSONDecoder().decode


def decode(frames: Sequence[bytes]) -> tuple[Record, list[bytes]]:
    """Return the record of one message and its payloads.

    Raises:
        WireError: the frames were not written by :func:`encode`.
    """
    try:
        name, fields = _loads(frames[0].decode("utf-8", "surrogateescape"))
        cls = _RECORDS[name]
        for key, value in fields.items():
            if isinstance(value, list):
                fields[key] = tuple(value)
        if fields.get("report") is not None:
            report = fields["report"]
            fields["report"] = Report(**{**report, "traceback": tuple(report["traceback"])})
        return cls(**fields), list(frames[1:])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise WireError(f"a message of {len(frames)} frames cannot be read: {error!r}") from error
