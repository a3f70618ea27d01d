"""How ranks on several hosts agree on a call: in memory on each host, then between the hosts.

The ranks of a host write down their call and arrive, as on one host. When all have arrived, the
host's first rank, its leader, compares what they wrote, exchanges that with the other hosts'
leaders, and publishes the outcome in the host's `LeaderBuffer`. The values of small arrays travel
with that exchange: the host's sum to the other leaders, the sum of all back to the ranks.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls import mismatches, specs
from allranks.collectives.calls.call import Call, Members, Offer, Steps, cut, yield_core
from allranks.collectives.calls.rank_state import WAITING, RankState
from allranks.collectives.calls.sites import Site, with_source
from allranks.collectives.host.memory import fence, rounded
from allranks.collectives.host.shared_memory import OFFER_AT, TEXT_BYTES, Channel
from allranks.collectives.mpi.status_exchange import spread
from allranks.collectives.mpi.transport import complete, have_ended
from allranks.errors import CollectiveMismatch

_TAG, _DATA_TAG = 11, 12
_PIECE_BYTES = 60 << 10
"""MPI sends this much at once, and asks before it sends more. Between two hosts that send to each
other all the time, question and answer would each wait behind the other host's data."""
_LENGTH_BYTES = 8
_ROW_LENGTH = struct.Struct("=q")
_BYTE = np.dtype(np.uint8)


class HostMessage(NamedTuple):
    """One message of an exchange to another leader, and one from the leader at the same distance on
    the other side.
    """

    distance: int
    to: int
    source: int
    mine: list[int]
    """The leaders whose rows are sent."""
    into: memoryview
    first: list[Any]
    """The first piece of ``into``, as mpi4py takes it."""


@dataclass(eq=False)
class HostLeaders:
    """The leaders of a group's hosts: a communicator of each epoch, and their transfers."""

    own: RankState
    ranks: tuple[int, ...]
    number: int
    user: MPI.Intracomm
    row_bytes: int

    def renew(self) -> None:
        """Begins a new epoch. Collective over these ranks, which are certain to take part."""
        if self.own.rank not in self.ranks:
            return
        group = self.user.Get_group().Incl(list(self.ranks))
        self.comm = MPI.Intracomm(self.user).Create_group(group, (1 << 22) + self.number)
        self.me = self.comm.Get_rank()
        whole = [memoryview(bytearray(_LENGTH_BYTES + self.row_bytes)) for _ in self.ranks]
        self.rows = [row[_LENGTH_BYTES:] for row in whole]
        """The row of each leader; this rank's own is written before the exchange begins."""
        self._whole = whole
        self._lengths = [row[:_LENGTH_BYTES].cast("q") for row in whole]
        self.others = [index for index in range(len(self.ranks)) if index != self.me]
        self._messages = [self._message(*step) for step in spread(len(whole))]
        self._exchange: Iterator[None] = iter(())
        self._exchanged = True
        # New in each epoch: MPI may still write to memory of a call that was left.
        self._scratch: dict[tuple[str, int], Array] = {}

    def _message(self, distance: int, rows: int) -> HostMessage:
        whole, me, most = self._whole, self.me, _LENGTH_BYTES + self.row_bytes
        to, source = (me + distance) % len(whole), (me - distance) % len(whole)
        # A single row is received in its place.
        room = whole[source] if rows == 1 else memoryview(bytearray(_LENGTH_BYTES + rows * most))
        mine = [(me - index) % len(whole) for index in range(rows)]
        return HostMessage(distance, to, source, mine, room, [room[:_PIECE_BYTES], MPI.BYTE])

    def begin_exchange(self, nbytes: int) -> None:
        self._lengths[self.me][0] = _LENGTH_BYTES + nbytes
        self._exchanged, self._exchange = False, self._exchange_rows()
        self.exchanged()

    def exchanged(self) -> bool:
        """Whether the exchange is complete: then `rows` are those of all leaders."""
        next(self._exchange, None)
        return self._exchanged  # an exchange that an interrupt has ended stays incomplete

    def _exchange_rows(self) -> Iterator[None]:
        """Yields until the rows of all leaders are here; each sends few messages (`spread`)."""
        comm, whole, lengths = self.comm, self._whole, self._lengths
        held: list[Any] = [whole, self._messages]
        self.own.held_requests[id(held)] = held
        for distance, to, source, mine, into, first in self._messages:
            if len(mine) == 1:
                out, nbytes = whole[self.me], lengths[self.me][0]
            else:
                parts = [whole[index][: lengths[index][0]] for index in mine]
                nbytes = _LENGTH_BYTES + sum(map(len, parts))
                out = memoryview(b"".join([_ROW_LENGTH.pack(nbytes), *parts]))
                held.append(out)
            # Sent first: the other leader may be waiting for it.
            if nbytes <= _PIECE_BYTES:
                going = [comm.Isend([out[:nbytes], MPI.BYTE], to, _TAG)]
            else:
                going = [comm.Isend(piece, to, _TAG) for piece in _pieces(out, 0, nbytes)]
            # The first piece begins with the length of all.
            coming = [comm.Irecv(first, source, _TAG)]
            # The other end may wait for the receipt of all its pieces: some networks ask before
            # they send this much, too.
            while not have_ended(coming):
                yield
            (nbytes,) = _ROW_LENGTH.unpack_from(into)
            if nbytes > _PIECE_BYTES:
                coming += [comm.Irecv(p, source, _TAG) for p in _pieces(into, _PIECE_BYTES, nbytes)]
                while not have_ended(coming):
                    yield
            while not have_ended(going):
                yield
            if len(mine) == 1:
                continue
            at = _LENGTH_BYTES
            for index in mine:
                row = whole[(index - distance) % len(whole)]
                (length,) = _ROW_LENGTH.unpack_from(into, at)
                row[:length] = into[at : at + length]
                at += length
        del self.own.held_requests[id(held)]
        self._exchanged = True

    def gather(self, call: Call, mine: Array, counts: Sequence[int], turn: int = 0) -> Steps[Array]:
        """The bytes of all leaders, in order. ``turn`` is 0 or 1 where two calls overlap."""
        parts = cut(self.scratch(turn, _BYTE, sum(counts), "gathered"), counts)
        parts[self.me][...] = mine
        yield from self._swap(call, dict.fromkeys(self.others, mine), parts, turn)
        return parts.whole  # type: ignore[no-any-return]

    def alltoall(
        self, call: Call, mine: Array, counts: Sequence[int], theirs: Sequence[int], turn: int
    ) -> Steps[Array]:
        """The bytes that each leader sends here (``theirs``); this one sends ``counts``."""
        parts = cut(self.scratch(turn, _BYTE, sum(theirs), "brought"), theirs)
        out = cut(mine, counts)
        parts[self.me][...] = out[self.me]
        yield from self._swap(call, out, parts, turn)
        return parts.whole  # type: ignore[no-any-return]

    def broadcast(self, call: Call, array: Array, root: int) -> Steps[None]:
        yield from complete(self.own.held_requests, call, self.comm.Ibcast, [array, MPI.BYTE], root)

    def reduce(
        self, call: Call, total: Array, reduction: Arithmetic, turn: int, out: Array | None = None
    ) -> Steps[Array]:
        """The reduction of all leaders' totals, the same bits on each. It may be in ``total``, or
        between two leaders in ``out``, and then ``total`` is only read.
        """
        many = len(self.ranks)
        # Two leaders swap their totals. More reduce a part each, and swap the results: MPI's own
        # reduction sends everything to one of them and back.
        parts = [total] * many if many == 2 else np.array_split(total, many)
        mine = parts[self.me]
        room = self.scratch(turn, total.dtype, mine.size * many, "brought")
        brought = list(room.reshape(many, mine.size))
        yield from self._swap(call, parts, brought, turn)
        brought[self.me] = mine
        merged = reduction.merged(brought, brought[0] if out is None else out)
        if many == 2:
            return merged
        mine[...] = merged
        yield from self._swap(call, dict.fromkeys(self.others, mine), parts, 2 + turn)
        return total

    def _swap(
        self,
        call: Call,
        out: Sequence[Array] | Mapping[int, Array],
        into: Sequence[Array],
        turn: int,
    ) -> Steps[None]:
        """Sends each of the other leaders its array, and ends when theirs have been received."""
        comm, tag, requests = self.comm, _DATA_TAG + turn, list[MPI.Request]()
        held: list[Any] = [requests, out, into]
        self.own.held_requests[id(held)] = held
        for index in self.others:
            for piece in _pieces(into[index], 0, into[index].nbytes):
                requests.append(comm.Irecv(piece, index, tag))
        for index in self.others:
            for piece in _pieces(out[index], 0, out[index].nbytes):
                requests.append(comm.Isend(piece, index, tag))
        call.stage += 1
        while not have_ended(requests):
            yield call
        del self.own.held_requests[id(held)]

    def scratch(self, turn: int, dtype: np.dtype[Any], count: int, what: str = "own") -> Array:
        """Memory of this epoch that MPI reads or writes; used again at every second turn."""
        nbytes, key = dtype.itemsize * count, (what, turn)
        known = self._scratch.get(key)
        if known is None or known.nbytes < nbytes:
            known = self._scratch[key] = np.empty(nbytes, np.uint8)
        return known[:nbytes].view(dtype)


def _pieces(data: Array | memoryview, low: int, high: int) -> Iterator[list[Any]]:
    """The bytes from ``low`` to ``high`` in pieces that MPI sends at once."""
    if isinstance(data, np.ndarray):
        data = data.view(np.uint8)
    for start in range(low, high, _PIECE_BYTES):
        yield [data[start : min(start + _PIECE_BYTES, high)], MPI.BYTE]


_AGREED, DONE, _LENGTH, _LAST_RANK, _LAST = 0, 8, 16, 17, 18
"""Words of the buffer: the number of the last call agreed on, the last chunk that is ready, and for
that call the length of its error text, the last rank to arrive, and when it arrived."""
_BUFFER_HEAD, _TEXT_MOST = 256, 16 << 10
_YIELDS = 200
"""Polls for another rank of the host before the call waits."""


Outcome = tuple[bool, float, int]
"""Whether all members make the same call, when the last one arrived, and its rank."""


def _comes_soon(words: memoryview, at: int, number: int, own: RankState) -> bool:
    """Whether a word of another rank reaches a number within a few polls, each of which yields the
    core: a message between hosts takes longer than a spin saves, and ranks may share cores.
    """
    tries = 0
    while words[at] < number:
        tries += 1
        # While posted calls are under way, the loop that drives them waits.
        if own.pending or tries > _YIELDS:
            return False
        yield_core()
    fence()
    return True


class HostChannel(Channel):
    """The channel of one host's members where the group has members on other hosts.

    It reports whether its members agree; `MultiHostAgreement` ends the call.
    """

    most_block_bytes, most_bytes = 512 << 10, 16 << 20
    """Larger than on one host: the transfer between hosts takes longer than the caches save."""

    def _compare(self, call: Call) -> bool:
        return False  # the first rank compares all calls; these wait for the first rank

    def publish_count(self) -> None:
        self.words[self._mine] = self.count
        self.wake_waiting()

    def all_arrived(self) -> bool:
        return all(self.words[page] >= self.count for _, page, _ in self._others)

    def blocks_as(self, dtype: np.dtype[Any], count: int, turn: int) -> list[Array]:
        """Every member's block of one turn: its first ``count`` elements as ``dtype``."""
        nbytes = count * dtype.itemsize
        return [pair[turn][:nbytes].view(dtype) for pair in self.blocks]

    def sizes(self, call: Call) -> list[int]:
        return [self.words[head + OFFER_AT // 8] for head in self._heads[call.number & 1]]

    def compared(self, call: Call) -> Outcome | None:
        """The outcome on this host; None if one of the members does not arrive soon."""
        words, times, count = self.words, self.times, self.count
        fingerprint, turn = call.packed.fingerprint, call.number & 1
        same, last, last_rank = True, call.started, self.members.rank
        for rank, page, heads in self._others:
            if words[page] < count and not _comes_soon(words, page, count, self.own):
                return None
            head = heads[turn]
            if words[head] != fingerprint:
                same = False
            arrived = times[head + 1]
            if arrived > last:
                last, last_rank = arrived, rank
        return same, last, last_rank


class LeaderBuffer:
    """Memory in which a host's leader writes what it has received from the other hosts."""

    def __init__(self, memory: mmap.mmap, here: int, members: int) -> None:
        start, slot = rounded(HostChannel.nbytes(here)), HostChannel.block_bytes(here)
        self.words = memoryview(memory).cast("Q")[start // 8 : (start + _BUFFER_HEAD) // 8]
        self.times = memoryview(memory).cast("d")[start // 8 : (start + _BUFFER_HEAD) // 8]
        self.offers = np.frombuffer(memory, np.int64, members, start + _BUFFER_HEAD)
        """The bytes that each member offers, host by host; `offered` is the same memory."""
        self.offered = memoryview(memory)[start + _BUFFER_HEAD : start + _BUFFER_HEAD + 8 * members]
        at = start + rounded(_BUFFER_HEAD + 8 * members)
        self.text = np.frombuffer(memory, np.uint8, _TEXT_MOST, at)
        at += _TEXT_MOST
        self.slots = [np.frombuffer(memory, np.uint8, slot, at + turn * slot) for turn in (0, 1)]

    @staticmethod
    def nbytes(here: int, members: int) -> int:
        slots = 2 * HostChannel.block_bytes(here)
        return rounded(_BUFFER_HEAD + 8 * members) + _TEXT_MOST + slots


Hosts = tuple[tuple[int, ...], ...]
_ROW = struct.Struct("=QQ?7xdq")
"""The head of a host's row: the call's number, its fingerprint, whether all ranks there make the
same call, when the last one arrived, and its rank. What each member offers and the carried values
follow."""
_CARRIED_BYTES, _NEEDED_BYTES = 64 << 10, 256 << 10
"""The most bytes that a leader sends with an agreement, which saves a second wait. The larger limit
is for two hosts, where a leader would have to send as much anyway."""

_TRIES = 100
"""Polls of the exchange between hosts before the call waits; each yields the core."""


class RemoteSite(Site):
    """A line on another host, as its rank shows it while it waits."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.filename or "a line that is not known yet"


class MultiHostAgreement:
    """`Agreement` over the channels of several hosts."""

    def __init__(
        self, own: RankState, members: Members, hosts: Hosts, memory: mmap.mmap, user: Any
    ) -> None:
        self.own, self.members, self.hosts = own, members, hosts
        here = next(ranks for ranks in hosts if own.rank in ranks)
        self.host = hosts.index(here)
        self.channel = HostChannel(own, Members(members.number, here, own.rank), memory)
        self.is_first = self.channel.members.me == 0
        self.buffer = LeaderBuffer(memory, len(here), members.size)
        self.places = [[members.ranks.index(rank) for rank in ranks] for ranks in hosts]
        """For each host the places of its members in the group."""
        self.order = [place for places in self.places for place in places]
        self.largest_host = max(map(len, self.hosts))
        """The largest number of members on one host."""
        self.block = HostChannel.block_bytes(self.largest_host)
        """Bytes of a block, the same on every host."""
        self.carried_by_part = min(_CARRIED_BYTES // (len(hosts) - 1), self.block // len(hosts))
        """The most bytes of a host that go with an agreement, if not all hosts need all of them."""
        two = min(_NEEDED_BYTES, self.block // 2)
        self.carried_by_all = two if len(hosts) == 2 else self.carried_by_part
        """The same if all hosts need all of them: otherwise more than two hosts would send less."""
        row_bytes = _ROW.size + 8 * self.largest_host + self.carried_by_all
        ends = accumulate((len(ranks) for ranks in hosts), initial=0)
        self._sizes = struct.Struct(f"={len(here)}q")
        self.carried_at = [_ROW.size + 8 * len(ranks) for ranks in hosts]
        """Where the carried values begin in each host's row."""
        self._offers = [slice(8 * low, 8 * high) for low, high in pairwise(ends)]
        leaders = tuple(ranks[0] for ranks in self.hosts)
        self.leaders = HostLeaders(own, leaders, members.number, user, row_bytes)
        self._finished = 0
        self._exchanging: Call | None = None
        self._here: Outcome = True, 0.0, -1
        """The outcome of that call on this host, by the clock of all hosts."""
        self.renew()

    @staticmethod
    def nbytes(here: int, members: int) -> int:
        """Bytes of shared memory of a group with this number of members on a host, and in all."""
        return rounded(HostChannel.nbytes(here)) + LeaderBuffer.nbytes(here, members)

    def renew(self) -> None:
        self.channel.renew()
        self.ticks = self.channel.count
        """Counts chunks, the same on all members."""
        self.leaders.renew()
        self._exchanging = None

    def arrive(self, call: Call, offer: Offer) -> bool:
        self.channel.arrive(call, offer)
        self.own.board.note(self.members.number, call.number, self._finished)
        if not self.is_first:
            if not _comes_soon(self.buffer.words, _AGREED, call.number, self.own):
                return False
        else:
            here = self.channel.compared(call)
            if here is None or self.own.pending:
                return False
            self._begin_exchange(call, here)
            tries = 0
            while not self.leaders.exchanged():
                tries += 1
                if tries > _TRIES:
                    return False
            if not self._publish(call):
                return False
        self._conclude(call)
        return True

    def wait(self, call: Call, offer: Offer) -> Steps[None]:
        if self.is_first:
            yield from self._exchange(call)
        else:
            call.stage += 1
            while self.buffer.words[_AGREED] < call.number:
                yield call
            fence()
        self._conclude(call)

    def _conclude(self, call: Call) -> None:
        buffer = self.buffer
        if buffer.words[_LENGTH]:
            # Other ranks need not wait for one that leaves the cell because of this.
            self.finish(call)
            raise CollectiveMismatch(buffer.text[: buffer.words[_LENGTH]].tobytes().decode())
        call.last = buffer.times[_LAST] - self.own.offset_seconds
        call.last_rank = buffer.words[_LAST_RANK]

    def _exchange(self, call: Call) -> Steps[None]:
        """The leader's part between hosts, as far as `arrive` has not done it."""
        if self._exchanging is not call:
            yield from self.channel.wait_for_all(call)
            here = self.channel.compared(call)
            assert here is not None
            self._begin_exchange(call, here)
        call.stage += 1
        while not self.leaders.exchanged():
            yield call
        if not self._publish(call):
            text = (yield from self._differences(call)).encode()[:_TEXT_MOST]
            self.buffer.text[: len(text)] = np.frombuffer(text, np.uint8)
            self._release(call, len(text))

    def _begin_exchange(self, call: Call, here: Outcome) -> None:
        """Begins the leaders' exchange: all members of this host have arrived."""
        row, carry, (same, last, rank) = self.leaders.rows[self.host], call.carry, here
        last += self.own.offset_seconds
        _ROW.pack_into(row, 0, call.number, call.packed.fingerprint, same, last, rank)
        if carry is None or carry.reads_offers:
            self._sizes.pack_into(row, _ROW.size, *self.channel.sizes(call))
        end = self.carried_at[self.host]
        if carry is not None and same:
            end += carry.pack()
        self._exchanging, self._here = call, (same, last, rank)
        self.leaders.begin_exchange(end)

    def _publish(self, call: Call) -> bool:
        """Publishes the exchanged rows to this host; False if the hosts make different calls."""
        buffer, rows, carry = self.buffer, self.leaders.rows, call.carry
        mine, (same, last, last_rank) = call.packed.fingerprint, self._here
        for index in self.leaders.others:
            number, fingerprint, one, arrived, rank = _ROW.unpack_from(rows[index])
            same = same and one and number == call.number and fingerprint == mine
            if arrived > last:
                last, last_rank = arrived, rank
        if self.own.checks and not same:
            return False
        buffer.times[_LAST], buffer.words[_LAST_RANK] = last, last_rank
        if carry is None or carry.reads_offers:
            for row, end, where in zip(rows, self.carried_at, self._offers, strict=True):
                buffer.offered[where] = row[_ROW.size : end]
        if carry is not None:
            carry.unpack()
        self._release(call, 0)
        return True

    def _release(self, call: Call, length: int) -> None:
        """Lets the ranks of this host go on; ``length`` is that of the error text."""
        self._exchanging = None
        self.buffer.words[_LENGTH] = length
        fence()
        self.buffer.words[_AGREED] = call.number

    def _differences(self, call: Call) -> Steps[str]:
        """The text of the mismatch, with the calls of all members."""
        mine = np.frombuffer(b"".join(self.channel.texts(call)), np.uint8)
        counts = [TEXT_BYTES * len(ranks) for ranks in self.hosts]
        every = yield from self.leaders.gather(call, mine, counts)
        ranks = [self.members.ranks[place] for place in self.order]
        texts = [specs.unpack_text(text.tobytes()) for text in every.reshape(len(ranks), -1)]
        return mismatches.mismatch_text(dict(zip(ranks, texts, strict=True)))

    def offers(self, call: Call) -> list[Offer]:
        """The offers of all members, until this rank arrives at the next call."""
        offered = self.buffer.offers.tolist()
        return [offer for _, offer in sorted(zip(self.order, map(Offer, offered), strict=True))]

    def mine(self, chunk: int, dtype: np.dtype[Any]) -> Array:
        block: Array = self.channel.blocks[self.channel.members.me][chunk & 1].view(dtype)
        return block

    def barrier(self, call: Call) -> Steps[None]:
        """Ends when every member on this host has arrived once more."""
        return self.channel.barrier(call)

    def missing(self, call: Call) -> tuple[int, ...]:
        """The members that have not arrived; then the leaders that left before the exchange."""
        if call.moving or not call.posted or self.buffer.words[_AGREED] >= call.number:
            return ()
        behind = self._behind(call.number, 0, self.members.ranks)
        return behind or tuple(
            rank
            for rank in self._behind(call.number, 1, self.leaders.ranks)
            if self.own.departure(rank) is not None
        )

    def unfinished(self, number: int) -> tuple[int, ...]:
        return self._behind(number, 1, self.members.ranks)

    def _behind(self, number: int, what: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        progress, group, me = self.own.board.progress, self.members.number, self.own.rank
        return tuple(r for r in ranks if r != me and progress(r, group)[what] < number)

    def sites(self, call: Call) -> dict[int, Site]:
        if not self.own.checks or not call.posted:
            return {self.own.rank: call.site}
        came = set(self.members.ranks) - set(self._behind(call.number, 0, self.members.ranks))
        here = {rank: site for rank, (_, site) in self.channel.brought(call).items()}
        board = self.own.board
        texts = {rank: with_source(board.text(rank, WAITING)) for rank in came - here.keys()}
        away = {rank: RemoteSite(text.partition(" at ")[2], 0) for rank, text in texts.items()}
        return {rank: here[rank] if rank in here else away[rank] for rank in came}

    def finish(self, call: Call) -> None:
        self._finished = call.number
        self.own.board.note(self.members.number, call.number, call.number)
