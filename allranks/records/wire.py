r"""The records that cross the wire between the notebook and its ranks, and how they are written.

A message is a list of frames: first one JSON text ``[name, fields]``, then any binary payloads
(pickled values).

Text crosses as UTF-8. Bytes of file names that are no UTF-8 cross as ``surrogateescape`` has them,
as between a notebook and its front end. Any other lone surrogate would stop the message there, so
it arrives as the six characters that Python writes for it, ``\ud83d``.

Large values lie in one block of bytes, in memory or in a file. It begins with eight-byte words: how
many parts there are, then the length of each. The first part is the pickle (protocol 5), the others
are its out-of-band buffers; each begins at a multiple of 64.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import cache
from itertools import accumulate
from typing import Any, Self

from allranks.errors import Report, WireError
from allranks.records.frozen import frozen

_RECORDS: dict[str, type[Record]] = {}
#: The types of a field, by the beginning of its annotation.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "bool": bool,
    "tuple": tuple,
    "list": list,
    "dict": dict,
}
_OUTERMOST = re.compile(r"\w+(?=\[|$)")
_LARGEST = 1 << 63
_DISPLAY = dict, dict, (str, type(None))
#: The types of what follows the kind of an entry of an `Output`.
_ENTRIES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("out", "err", "notice"), (str,)),
    **{"display": _DISPLAY, "update": _DISPLAY, "result": (dict, dict)},
    **{"clear": (bool,), "into": (str,), "hidden": (int, int)},
}


@frozen
class Record:
    """Base class of what crosses the wire: `frozen` dataclasses.

    A subclass is registered under its name when it is defined, so a feature's records are known
    on both sides as soon as its ``records`` module has been imported there.
    """

    def __init_subclass__(cls) -> None:
        _RECORDS[cls.__name__] = cls

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})

    def check(self, payloads: Sequence[bytes] = ()) -> None:
        """Raises TypeError if a field is of another type, or a payload is missing."""
        check_types(self)


def check_types(record: Any) -> None:
    """Raises TypeError if a field of a dataclass is of another type than its annotation."""
    for name, types in _types_of(type(record)):  # type: ignore[arg-type]
        value = getattr(record, name)
        # What is shown is computed with floats, which an integer of 400 digits does not fit.
        is_large = isinstance(value, int) and not -_LARGEST <= value < _LARGEST
        if is_large or not isinstance(value, types):
            raise TypeError(f"{name} is of another type: {value!r:.60}")


@cache
def _types_of(kind: type[Any]) -> tuple[tuple[str, type | tuple[type, ...]], ...]:
    outermost = {one.name: _OUTERMOST.match(str(one.type)) for one in dataclasses.fields(kind)}
    known = {name: found[0] for name, found in outermost.items() if found is not None}
    return tuple((name, _TYPES[word]) for name, word in known.items() if word in _TYPES)


def fits(row: object, types: Sequence[Any]) -> bool:
    """Whether it is a list with as many entries as there are types, each of its type."""
    return isinstance(row, list) and len(row) == len(types) and all(map(isinstance, row, types))


def _is_entry(entry: object) -> bool:
    known = isinstance(entry, list) and entry and isinstance(entry[0], str) and entry[0] in _ENTRIES
    return bool(known) and fits(entry, (str, *_ENTRIES[entry[0]]))  # type: ignore[index]


#: A record and its payloads.
Message = tuple[Record, list[bytes]]


@frozen
class RunCell(Record):
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


@frozen
class RunMember(Record):
    """Run this source as one member of an ensemble; payload frame 0 is its pickled values.

    ``cell``, ``source``, ``number``, ``label`` and ``limit_nbytes`` are a :class:`RunCell`'s.
    ``ranks_each`` ranks in a row run it together; they move to ``epoch`` of their own first.
    ``shared``: large values stay in shared memory instead of being sent. ``ensemble`` is the name
    under which a member finds what it has kept when it runs again.
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


#: The number of no cell, in an interrupt.
BETWEEN_CELLS = -2


@frozen
class Interrupt(Record):
    """Raise KeyboardInterrupt in the rank's main thread if it still runs this cell, or, for
    `BETWEEN_CELLS`, what it does between two cells; a request of a client only with
    ``requests_too``.
    """

    cell: int
    requests_too: bool = False


@frozen
class Died(Record):
    """A rank has died. ``how`` follows its name in errors of waiting ranks: ``was killed by …``."""

    rank: int
    how: str


@frozen
class Ends(Record):
    """A rank is about to end between cells. ``why`` follows its exit code in the report."""

    rank: int
    why: str


@frozen
class Query(Record):
    """Answer one request by name (see ``allranks.records.requests``)."""

    request: int
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@frozen
class Typed(Record):
    """The line that a person has typed at a rank's prompt; ``problem`` is why none can be typed."""

    cell: int
    number: int
    text: str
    problem: str


@frozen
class Prompt(Record):
    """A rank waits for a line that a person types; ``number`` counts its prompts.

    ``hidden``: a password is typed. ``goes_on``: a debugger asks, and will ask again.
    ``interrupted``: the cell had been interrupted here before it asked.
    """

    rank: int
    cell: int
    number: int
    text: str
    hidden: bool
    goes_on: bool
    interrupted: bool


@frozen
class Widget(Record):
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


@frozen
class Hello(Record):
    """A rank is up: its numbers, and where it runs."""

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


@frozen
class Output(Record):
    """The output of a rank since its last batch, in order.

    Each entry is ``[kind, …]``: ``["out"|"err", text]``, ``["display", data, metadata, id]``,
    ``["update", data, metadata, id]``, ``["result", data, metadata]``, ``["clear", wait]``,
    ``["notice", text]``, ``["hidden", lines, nbytes]``, or ``["into", id]`` if what follows belongs
    in a widget. A hidden line is one of which nothing is shown.
    ``hidden_lines`` and ``hidden_nbytes`` count what is only in the log, over the whole cell.
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

    def check(self, payloads: Sequence[bytes] = ()) -> None:
        """Raises TypeError also if an entry has another form: views could not show it."""
        Record.check(self)
        for entry in self.entries:
            if not _is_entry(entry):
                raise TypeError(f"entries has one of another form: {entry!r:.60}")


@frozen
class Reply(Record):
    """A rank has left a cell.

    ``status`` is ``ok``, ``error``, ``interrupted``, or ``waiting`` if the rank only waited for one
    that had left.
    Payload frame 0, where ``has_value``, is the pickled value of the last expression, or the
    exception of a cell whose value was wanted;
    ``value_problem`` is why a wanted value could not be pickled.
    ``dirty``: the rank's communicators must be renewed before they are used again.
    ``epoch``: the rank's epoch, which the cell may have renewed.
    ``traffic``: whether the rank has used a communicator in this epoch.
    ``ends``: why the rank can run no further cell; it has saved its variables for its replacement.
    ``needs``: the rank whose end ends this one too, or -1.
    """

    rank: int
    cell: int
    status: str
    seconds: float
    dirty: bool
    has_value: bool
    value_problem: str
    report: Report | None
    epoch: int = 0
    traffic: bool = False
    ends: str = ""
    needs: int = -1

    def check(self, payloads: Sequence[bytes] = ()) -> None:
        """Raises TypeError also if the value is missing."""
        Record.check(self)
        if self.has_value and not payloads:
            raise TypeError("the value is missing")

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Returns the reply, its report as a `Report`."""
        report = fields["report"]
        if report is not None:
            report = Report(**{**report, "traceback": tuple(report["traceback"])})
        return cls(**{**fields, "report": report})


@frozen
class EpochBegun(Record):
    """A rank has begun an epoch between two cells, because a request of a client had failed."""

    rank: int
    epoch: int


@frozen
class EpochEnded(Record):
    """A request of a client has failed in this epoch, so the next cell needs another one."""

    rank: int
    epoch: int


@frozen
class Result(Record):
    """A member's variable ``result``; its :class:`Reply` follows.

    ``numbers`` holds every entry of it that is one number, by name; ``text`` describes it.
    The whole, packed by ``allranks.records.wire`` into ``nbytes``, is payload frame 0; or it is
    in shared memory, at ``address``.
    ``problem`` is why it is not available.
    """

    rank: int
    cell: int
    numbers: dict[str, float]
    text: str
    nbytes: int
    address: str
    problem: str


@frozen
class Answer(Record):
    """The answer to an :class:`Query`; ``problem`` is not empty where it failed."""

    request: int
    rank: int
    content: dict[str, Any]
    problem: str


_LONE = re.compile("[\ud800-\udfff]")


def encode(record: Record, *payloads: bytes) -> list[bytes]:
    """Return the frames of one message. Raises WireError if a field is not JSON-able."""
    try:
        text = _dumps([type(record).__name__, vars(record)])
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

    Raises WireError if the frames were not written by :func:`encode`.
    """
    name: Any = None
    fields: Any = None
    try:
        name, fields = _parse(frames[0])
        record = _RECORDS[name].from_fields(fields)
        record.check(frames[1:])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        failed = WireError(f"a message of {len(frames)} frames cannot be read: {error!r:.300}")
        failed.is_unknown = isinstance(name, str) and name not in _RECORDS
        rank = fields.get("rank") if isinstance(fields, dict) else None
        failed.rank = rank if isinstance(rank, int) else -1
        raise failed from error
    return record, list(frames[1:])


def _parse(frame: bytes) -> Any:
    return _loads(frame.decode("utf-8", "surrogateescape"))


def check_text(frame: bytes) -> None:
    """Raises WireError if a message's first frame is no record's text, of a known name or not."""
    try:
        name, fields = _parse(frame)
        fits = isinstance(name, str) and isinstance(fields, dict)
    except (TypeError, ValueError, RecursionError):
        fits = False
    if not fits:
        raise WireError(f"expected a record, found {bytes(frame[:60])!r}")


#: ZeroMQ's address of a process of this machine: host, account, group and process.
_LOCAL_PEER = re.compile(r"[^:]*:\d+:\d+:(\d+)")


def process_of(frame: Any) -> int:
    """Returns the process that has sent a ZeroMQ frame over a socket of this machine; else 0."""
    try:
        found = _LOCAL_PEER.fullmatch(frame.get("Peer-Address"))
    except Exception:  # ZeroMQ's own: it has no address
        return 0
    return int(found[1]) if found is not None else 0


def read_object(line: bytes) -> dict[str, Any]:
    """Returns the object of a line of JSON that another process has sent; {} if it has none."""
    try:
        found = _loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


#: The first frame; the second one has the number of frames of each message, as JSON.
BATCH = b"batch"
#: What a relay puts before messages of its ranks; the next frame has the process of each, as JSON.
SENDERS = b"senders"


def join_messages(messages: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns the frames of one message that holds several; a single message stays as it is.

    A rank sends the end of a cell so, and a host's relay the messages of its ranks.
    """
    if len(messages) == 1:
        return list(messages[0])
    counts = _dumps([len(frames) for frames in messages]).encode()
    return [BATCH, counts, *(frame for frames in messages for frame in frames)]


def with_senders(frames: Sequence[Any], pids: Sequence[int]) -> list[Any]:
    """Returns the frames of joined messages with the processes that have sent them."""
    return [SENDERS, _dumps(pids).encode(), *frames]


def read_senders(frame: bytes) -> list[int]:
    """Returns the processes of `with_senders`; [] if they cannot be read."""
    try:
        found = _loads(frame.decode())
    except (ValueError, RecursionError):
        return []
    is_list = isinstance(found, list) and all(type(pid) is int for pid in found)
    return found if is_list else []


def decode_all(frames: list[bytes]) -> list[tuple[list[bytes], Record | WireError]]:
    """Returns the messages that :func:`join_messages` has joined, each with its record.

    A message that cannot be read has a WireError in its place.
    """
    found: list[tuple[list[bytes], Record | WireError]] = []
    for message in split_messages(frames):
        try:
            found.append((message, decode(message)[0]))
        except WireError as error:
            found.append((message, error))
    return found


def split_messages(frames: list[Any]) -> list[list[Any]]:
    """Returns the messages that :func:`join_messages` has joined, in order.

    Raises WireError if the frames were not joined by :func:`join_messages`.
    """
    if bytes(frames[0]) != BATCH:
        return [frames]
    try:
        counts = _loads(bytes(frames[1]).decode())
        fit = all(type(count) is int and count > 0 for count in counts)
    except (IndexError, TypeError, ValueError, RecursionError) as error:
        raise WireError(
            f"a batch of {len(frames)} frames cannot be read: {error!r:.300}"
        ) from error
    rest = frames[2:]
    if not fit or not counts or sum(counts) != len(rest):
        raise WireError(f"expected messages of {counts!r:.60} frames, found {len(rest)} frames")
    ends = [*accumulate(counts)]
    return [rest[end - count : end] for count, end in zip(counts, ends, strict=True)]


#: Unpacked arrays lie in the packed bytes and are not copied: each begins at a multiple of this.
_ALIGNED = 64


def lay_out(parts: Sequence[memoryview | bytes]) -> tuple[bytes, list[int], int]:
    """Returns the head, where each part begins, and how many bytes there are in all."""
    lengths = [len(part) for part in parts]
    head = struct.pack(f"<{len(parts) + 1}Q", len(parts), *lengths)
    starts, at = [], len(head)
    for length in lengths:
        at = -(-at // _ALIGNED) * _ALIGNED
        starts.append(at)
        at += length
    return head, starts, at


def fill(target: bytearray | memoryview, parts: Sequence[memoryview | bytes]) -> None:
    """Writes the parts into a target, whose size :func:`lay_out` returns."""
    head, starts, _ = lay_out(parts)
    target[: len(head)] = head
    for start, part in zip(starts, parts, strict=True):
        target[start : start + len(part)] = part


def unpack(packed: bytearray) -> Any:
    """Returns the value; its arrays lie in ``packed`` and can be written to.

    Raises:
        Exception: unpickling it fails, for example because a package of the ranks is missing here.
    """
    first, *others = parts(packed)
    return pickle.loads(first, buffers=others)


def parts(data: bytearray) -> Iterator[memoryview]:
    """Returns what `fill` has written."""
    packed = memoryview(data)
    (count,) = struct.unpack_from("<Q", packed)
    lengths = struct.unpack_from(f"<{count}Q", packed, 8)
    at = 8 * (count + 1)
    for length in lengths:
        at = -(-at // _ALIGNED) * _ALIGNED
        yield packed[at : at + length]
        at += length
