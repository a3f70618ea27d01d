"""What a notebook that holds ranks sends to notebooks that watch them.

Each watcher has a bounded queue. Messages beyond the bound are counted and dropped; once there is
room again, the watcher gets the state of the cell. One thread sends everything and never blocks on
a watcher.

A watcher sends one line of JSON, ``{"want": "watch", "seen": 7}``, and receives messages from then
on (see :func:`pack`). If it has seen earlier cells, here the seventh, it receives the last cell
from its beginning, as far as that is kept. A notebook that wants to run a cell sends
``{"want": "lend"}`` and receives one line: ``{"lent": true}`` or ``{"refused": "…"}``.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from allranks import doors
from allranks.cluster.state import CellState, ClusterState, Epoch, Left
from allranks.features.attach.records import WATCHERS_DOOR
from allranks.records.ranks import label
from allranks.records.telemetry import Points, Pulse, Strip, Timings
from allranks.records.wire import (
    Died,
    Hello,
    Output,
    Prompt,
    Record,
    Reply,
    RunCell,
    RunMember,
    encode,
    read_object,
)


@dataclass(frozen=True)
class DetachedCell:
    """The last cell of ranks that another notebook has started.

    ``name`` is its name in reports; ``ranks`` received it, ``running`` have not ended it, and
    ``missed`` were to run it when its notebook ended before it had sent them the cell.
    ``unseen`` is true if its end may not have been shown; ``seconds`` is its time so far.
    ``members`` has the cells of an ensemble's members, by rank.
    """

    cell: int
    name: str
    ranks: tuple[int, ...]
    running: tuple[int, ...]
    missed: tuple[int, ...]
    unseen: bool
    seconds: float
    epoch: Epoch
    members: Mapping[int, int]

    @classmethod
    def of(cls, told: Mapping[int, Mapping[str, Any]]) -> DetachedCell:
        """Combines the ranks' answers to an attaching notebook."""
        cell = max((each["cell"] for each in told.values()), default=0)
        last = {rank: each for rank, each in told.items() if each["cell"] == cell and cell}
        running = tuple(rank for rank, each in last.items() if each["busy"])
        # Without ranks, a cell is for all.
        wanted = {rank for each in last.values() for rank in each["ranks"]} or told.keys()
        names = [each["label"] for each in last.values()]
        members = {rank: each["cell"] for rank, each in told.items() if each["member"]}
        of_all = told.values()
        epoch = Epoch(
            # The number of a replacement that has failed is not used again.
            number=max(
                (max(each["epoch"], each.get("heal", {}).get("epoch", 0)) for each in of_all),
                default=0,
            ),
            dirty=any(each["dirty"] and not each["busy"] for each in told.values()),
            traffic=any(each["traffic"] for each in told.values()),
        )
        if epoch.traffic and any(each["failed"] for each in told.values()):
            epoch.dirty = True
        return cls(
            cell=cell,
            name=names[0] if names else "",
            ranks=tuple(sorted(last)),
            running=tuple(sorted(running)),
            missed=tuple(sorted(wanted & told.keys() - last.keys())),
            unseen=not members and any(each["busy"] or each["unseen"] for each in last.values()),
            seconds=max((each["seconds"] for each in last.values()), default=0.0),
            epoch=epoch,
            members=members,
        )

    @property
    def text(self) -> str:
        """The state of the cell, in a line."""
        name = self.name.removeprefix("cell ")
        if self.running:
            are = "are" if len(self.running) > 1 else "is"
            return f"{label(self.running)} {are} still running {name}; its output so far:"
        return f"{name} finished while no notebook was attached:"


class WatchedState:
    """Ranks and the last cell that all or some of them have got, from the records that notebooks
    get which watch them.
    """

    def __init__(self) -> None:
        self.hellos: dict[int, Hello] = {}
        self.dead: dict[int, Died] = {}
        self.cell: CellState | None = None

    def apply(self, event: Hello | RunCell | Reply | Died) -> tuple[Left, ...]:
        """Returns the ranks that have left the cell now."""
        match event:
            case Hello(rank=rank):
                # A process that replaces a rank runs no cell: the rank has left it.
                self.hellos[rank] = event
                self.dead.pop(rank, None)
                return ()
            case RunCell():
                if self.cell is None or self.cell.cell != event.cell:
                    self.cell = CellState(event.cell, event.ranks or sorted(self.hellos))
                    return tuple(left for one in self.dead.values() for left in self._left(one))
                return ()
            case Died(rank=rank):
                self.dead[rank] = event
                return self._left(event)
            case Reply():
                return self._left(event)
        raise TypeError(f"expected an event of the ranks, found {event!r:.80}")

    def _left(self, event: Reply | Died) -> tuple[Left, ...]:
        return self.cell.apply(event) if self.cell is not None else ()


#: The reason of a refusal if the kernel answers nothing between cells.
CANNOT_ASK = "it cannot be asked. Type there: %distributed detach 30m"
_MOST_NBYTES = 16 << 20
_KEPT_NBYTES = 1 << 20
_LINE_NBYTES = 4096
_MOST_VISITORS = 30
_LENGTH = struct.Struct("<I")
#: Records of the ranks that are noted also where no notebook has ever watched, and those that
#: watchers get.
_RANKS = (Hello, Died)
_WATCHED = (*_RANKS, RunCell, Reply, Output, Prompt, Points, Pulse, Strip, Timings, RunMember)

Frames = Sequence[bytes]


class WatcherFeed:
    """Sends watchers the cells of the ranks, whose state is the ``roster``, and their messages."""

    def __init__(self, roster: ClusterState) -> None:
        self._roster = roster
        #: Called in the thread with the socket of a notebook that asks for the ranks; see `answer`.
        self.lend: Callable[[socket.socket], object] | None = None
        #: What `take` has to get.
        self.records: tuple[type[Record], ...] = _RANKS
        self._lock = threading.Lock()
        self._ranks = WatchedState()
        self._cell: RunCell | None = None
        self._cell_frames: Frames = ()
        self._began = 0.0
        #: All messages of the cell; None if they are unknown or too many.
        self._messages: list[bytes] | None = None
        self._messages_nbytes = 0
        self._watchers: dict[socket.socket, _Watcher] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def open(self, folder: str) -> None:
        """Listens from now on in the session's folder.

        In the thread that receives from the ranks: no reply of theirs comes meanwhile.
        """
        with self._lock:
            if self._thread is not None or self._closed:
                return
            path = os.path.join(folder, WATCHERS_DOOR)
            listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                with suppress(FileNotFoundError):
                    os.unlink(path)  # left by the notebook that held the ranks before
                listener.bind(path)
                listener.listen(8)
            except OSError:  # the ranks have just ended
                listener.close()
                return
            # The thread waits for sockets only: a byte on this pair wakes it.
            self._wake, self._woken = socket.socketpair()
            for end in (self._listener, self._wake, self._woken):
                end.setblocking(False)
            self.records = _WATCHED  # first: another thread may be about to send a cell
            self._read_cell()
            self._thread = threading.Thread(target=self._serve, name="allranks-share", daemon=True)
            self._thread.start()

    def _read_cell(self) -> None:
        """Reads what runs, and which ranks have left it, from the state that the core has."""
        running, sent = self._roster.cell, self._roster.sent
        if running is None:
            self._cell = self._ranks.cell = None
            return
        if sent is not None and sent[0].cell == running.cell:
            self._cell, self._began = sent
            self._cell_frames = encode(self._cell)
            self._ranks.apply(self._cell)
        for reply in running.replies.values():
            self._ranks.apply(reply)

    def close(self) -> None:
        """Ends the thread and its connections."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._wake_thread()
            thread.join()

    def take(self, record: Record, frames: Frames, ago: float = 0.0) -> None:
        """Handles one of ``records``, from any thread; it was sent ``ago`` seconds ago."""
        with self._lock:
            if isinstance(record, Reply) and record.cell != getattr(self._cell, "cell", None):
                return
            if isinstance(record, Hello | RunCell | Reply | Died):
                self._ranks.apply(record)
            if isinstance(record, RunCell):
                frames = frames[:1]  # no pickled call
                self._cell, self._cell_frames = record, frames
                self._began = time.monotonic() - ago
                self._messages = None if self._thread is None or ago else []
                self._messages_nbytes = 0
            if self._thread is None:
                return
            message = pack({"ago": ago}, _for_watchers(record, frames))
            if self._messages is not None:
                self._messages.append(message)
                self._messages_nbytes += len(message)
                if self._messages_nbytes > _KEPT_NBYTES:
                    self._messages = None
            for watcher in self._watchers.values():
                watcher.add(message)
        self._wake_thread()

    def follow(self, left: DetachedCell) -> None:
        # Another notebook has sent this cell.
        cell = RunCell(left.cell, "", 0, left.ranks, left.name, False, 0)
        self.take(cell, encode(cell), left.seconds)

    @property
    def running(self) -> str:
        """The name of the cell that some of its ranks have not left; "" if there is none."""
        cell, state = self._cell, self._ranks.cell
        if cell is None or state is None or not state.pending:
            return ""
        return cell.label.removeprefix("cell ")

    def _state(self, seen: int | None = None) -> list[bytes]:
        """Messages for a new watcher about the past. ``seen`` is the last cell that it has seen;
        None if it has seen a part of this one.
        """
        messages = [pack({}, encode(hello)) for hello in self._ranks.hellos.values()]
        if self._cell is None or self._ranks.cell is None:
            return messages
        new = seen is not None and self._cell.cell > seen
        if self._messages is not None and new and (self.running or seen):
            return messages + self._messages
        if self.running:
            messages.append(pack({"ago": time.monotonic() - self._began}, self._cell_frames))
        left = [*self._ranks.cell.replies.values(), *self._ranks.dead.values()]
        return messages + [pack({}, _for_watchers(record, encode(record))) for record in left]

    def _wake_thread(self) -> None:
        with suppress(OSError):  # the thread is awake already, or has ended
            self._wake.send(b".")

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, self._admit)
            selector.register(self._woken, selectors.EVENT_READ, self._drain_wake)
            self._selector = selector
            while not self._closed:
                for key, _ in selector.select():
                    try:
                        key.data()
                    except OSError:
                        self._drop(key.fileobj)  # type: ignore[arg-type]
                self._send()
            for end in list(selector.get_map().values()):
                end.fileobj.close()  # type: ignore[union-attr]
        with self._lock:
            self._watchers.clear()
        self._wake.close()

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(_LINE_NBYTES)

    def _admit(self) -> None:
        try:
            visitor = doors.accept(self._listener)
        except OSError:
            return  # it has gone, or this process has no descriptor left
        # Besides the visitors, the selector has the listener and the pair that wakes the thread.
        if len(self._selector.get_map()) >= _MOST_VISITORS + 2:
            visitor.close()
            return
        visitor.setblocking(False)
        self._selector.register(visitor, selectors.EVENT_READ, lambda: self._read_request(visitor))

    def _read_request(self, visitor: socket.socket) -> None:
        asked = read_object(visitor.recv(_LINE_NBYTES))  # one short packet
        wants, seen = asked.get("want"), asked.get("seen")
        if wants == "watch" and isinstance(seen, int) and visitor not in self._watchers:
            with self._lock:
                watcher = self._watchers[visitor] = _Watcher()
                # Under the lock, so that no record comes between the state and what follows.
                for message in self._state(seen):
                    watcher.add(message)
        elif wants == "lend" and visitor not in self._watchers:
            self._selector.unregister(visitor)  # the main thread may answer, and close it
            if self.running:
                answer(visitor, f"it runs {self.running}. Wait for its end there")
            elif self.lend is None:
                answer(visitor, CANNOT_ASK)
            else:
                self.lend(visitor)
        else:  # it has most likely disconnected
            self._drop(visitor)

    def _drop(self, visitor: socket.socket) -> None:
        with suppress(KeyError):
            self._selector.unregister(visitor)
        with self._lock:
            self._watchers.pop(visitor, None)
        visitor.close()

    def _send(self) -> None:
        for visitor, watcher in list(self._watchers.items()):
            try:
                while True:
                    with self._lock:
                        part = watcher.next(self._state)
                    if not part:
                        break
                    nbytes = visitor.send(part)
                    with self._lock:  # other threads add messages
                        watcher.sent(nbytes)
            except BlockingIOError:
                pass
            except OSError:
                self._drop(visitor)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if watcher.waits else 0)
            key = self._selector.get_key(visitor)
            self._selector.modify(visitor, events, key.data)


class _Watcher:
    """The messages that one watcher has not received yet."""

    def __init__(self) -> None:
        self._queue: deque[memoryview] = deque()
        self._nbytes = 0
        self._lost, self._lost_nbytes = 0, 0

    def add(self, message: bytes) -> None:
        """Appends a message, if there is room."""
        # After a loss everything is dropped until the state has been sent.
        if self._lost or self._nbytes + len(message) > _MOST_NBYTES:
            self._lost += 1
            self._lost_nbytes += len(message)
        else:
            self._append(message)

    def _append(self, message: bytes) -> None:
        self._queue.append(memoryview(message))
        self._nbytes += len(message)

    def next(self, state: Callable[[], list[bytes]]) -> memoryview:
        """Returns the bytes to send now; those of ``state`` if something was lost before."""
        if not self._queue and self._lost:
            for message in (pack({"lost": self._lost, "nbytes": self._lost_nbytes}, ()), *state()):
                self._append(message)
            self._lost, self._lost_nbytes = 0, 0
        return self._queue[0] if self._queue else memoryview(b"")

    def sent(self, nbytes: int) -> None:
        # Drops the bytes that were sent.
        self._nbytes -= nbytes
        if left := self._queue.popleft()[nbytes:]:
            self._queue.appendleft(left)

    @property
    def waits(self) -> bool:
        return bool(self._queue or self._lost)


def _for_watchers(record: Record, frames: Frames) -> Frames:
    # No pickled value, which a watcher would miss.
    if isinstance(record, Reply) and record.has_value:
        return encode(replace(record, has_value=False))
    return frames


def pack(head: dict[str, float], frames: Frames) -> bytes:
    """Returns a message: the number of parts, their lengths, and the parts.

    The first part is JSON: the age of the record in seconds (``ago``); without other parts, the
    number of ``lost`` messages and their ``nbytes``.
    """
    parts = [json.dumps(head).encode(), *frames]
    lengths = [_LENGTH.pack(len(part)) for part in parts]
    return b"".join([_LENGTH.pack(len(parts)), *lengths, *parts])


async def unpack(
    read: Callable[[int], Awaitable[bytes]],
) -> tuple[dict[str, Any], list[bytes]]:
    """Returns the head and the frames of a message of :func:`pack`; ``read`` takes nbytes."""
    (count,) = _LENGTH.unpack(await read(_LENGTH.size))
    lengths = [_LENGTH.unpack(await read(_LENGTH.size))[0] for _ in range(count)]
    head, *frames = [await read(length) for length in lengths]
    return json.loads(head), frames


def answer(visitor: socket.socket, refused: str = "") -> None:
    """Answers a notebook that asks for the ranks; ``refused`` is the reason of a refusal."""
    said = {"refused": refused} if refused else {"lent": True}
    with visitor, suppress(OSError):
        visitor.sendall(json.dumps(said).encode() + b"\n")


def has_gone(visitor: socket.socket) -> bool:
    """Whether the notebook that asks has closed its connection."""
    try:
        return not visitor.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
