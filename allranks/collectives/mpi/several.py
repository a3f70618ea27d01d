"""Agreement of ranks on several hosts: in memory on each host, by one exchange between hosts.

The ranks of a host lay out what they bring and arrive, as on one host. When all have, the host's
first rank compares, tells the other hosts' first ranks, and lays out what all have come to. Small
arrays go with that: their host's sum there, the sum of all back.
"""

from __future__ import annotations

import mmap
import struct
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls import guard
from allranks.collectives.calls.board import WAITING
from allranks.collectives.calls.call import Call, Members, Offer
from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.wait import Steps
from allranks.collectives.host.channel import TEXT_BYTES
from allranks.collectives.host.desk import (
    AGREED,
    LAST,
    LAST_RANK,
    LENGTH,
    TEXT_MOST,
    Desk,
    HostChannel,
)
from allranks.collectives.host.memory import fence
from allranks.collectives.mpi.firsts import Firsts
from allranks.errors import CollectiveMismatch

Hosts = tuple[tuple[int, ...], ...]
_HEAD = struct.Struct("=QQ?7xdq")
"""A row of a host: the call's number, its fingerprint, whether all there have brought the same,
when the last one came and who; then what each member offers, and what is carried."""
_CARRIED_BYTES, _NEEDED_BYTES = 64 << 10, 256 << 10
"""As much as a first rank sends with an agreement in all: that is one wait instead of two. The
latter where it would have to send as much anyway."""

_TRIES = 100
"""Looks at what other hosts send, in a row; each lets others have the core."""


def _came(head: tuple[Any, ...]) -> float:
    """When the last member of a host has come."""
    return float(head[3])


class Told(Site):
    """A line on another host, as its rank tells of it while it waits."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.filename or "a line that it has not told yet"


class Several:
    """`Agreement` over the channels of several hosts.

    Args:
        own: the rank that it is of.
        members: the group's.
        hosts: the members of each host.
        memory: what the members on this host share.
        user: the communicator of all ranks.
    """

    def __init__(
        self, own: Standing, members: Members, hosts: Hosts, memory: mmap.mmap, user: Any
    ) -> None:
        self.own, self.members, self.hosts = own, members, hosts
        here = next(ranks for ranks in hosts if own.rank in ranks)
        self.host = hosts.index(here)
        self.channel = HostChannel(own, Members(members.number, here, own.rank), memory)
        self.is_first = self.channel.members.me == 0
        self.desk = Desk(memory, len(here), members.size)
        self.places = [[members.ranks.index(rank) for rank in ranks] for ranks in hosts]
        """The members' places of each host."""
        self.order = [place for places in self.places for place in places]
        self.most = max(map(len, self.hosts))
        """As many members does a host have at most."""
        self.block = HostChannel.block_bytes(self.most)
        """Bytes of a block, of which every host has as many."""
        self.spread = min(_CARRIED_BYTES // (len(hosts) - 1), self.block // len(hosts))
        """As many bytes of each host go with an agreement at most, where not all need all of it."""
        two = min(_NEEDED_BYTES, self.block // 2)
        self.carried = two if len(hosts) == 2 else self.spread
        """As many do where all need all of it: more than two hosts would send each other less."""
        row_bytes = _HEAD.size + 8 * self.most + self.carried
        ends = accumulate((len(ranks) for ranks in hosts), initial=0)
        self._sizes = struct.Struct(f"={len(here)}q")
        self.carried_at = [_HEAD.size + 8 * len(ranks) for ranks in hosts]
        """Where in each host's row that begins which is carried."""
        self._offers = [slice(8 * low, 8 * high) for low, high in pairwise(ends)]
        firsts = tuple(ranks[0] for ranks in self.hosts)
        self.firsts = Firsts(own, firsts, members.number, user, row_bytes)
        self._finished = 0
        self._telling: Call | None = None
        self.renew()

    def renew(self) -> None:
        """A new epoch has begun: calls are counted anew. Collective over the first ranks."""
        self.channel.renew()
        self.ticks = self.channel.count
        """Counts chunks, as all members do."""
        self.firsts.renew()
        self._telling = None

    def come(self, call: Call, offer: Offer) -> bool:
        """Lays out what this rank brings; True where all have come, and agree, within moments."""
        here = self.channel.come(call, offer)
        self.own.board.note(self.members.number, call.number, self._finished)
        if not self.is_first:
            if not self.desk.comes(call.number, self.own):
                return False
        elif self.own.pending or not here:
            return False
        else:
            self._tell(call)
            tries = 0
            while not self.firsts.told():
                tries += 1
                if tries > _TRIES:
                    return False
            if not self._lay_out(call):
                return False
        self._conclude(call)
        return True

    def agree(self, call: Call, offer: Offer) -> Steps[None]:
        """Ends when every member has arrived with the same fingerprint.

        Raises:
            CollectiveMismatch: they brought different things; nothing has moved.
        """
        if self.is_first:
            yield from self._between(call)
        else:
            call.stage += 1
            while self.desk.words[AGREED] < call.number:
                yield call
            fence()
        self._conclude(call)

    def _conclude(self, call: Call) -> None:
        desk = self.desk
        if desk.words[LENGTH]:
            # Whoever leaves the cell over this is not one that others wait for in vain.
            self.finish(call)
            raise CollectiveMismatch(desk.text[: desk.words[LENGTH]].tobytes().decode())
        call.last = desk.times[LAST] - self.own.offset_seconds
        call.last_rank = desk.words[LAST_RANK]

    def _between(self, call: Call) -> Steps[None]:
        """What the first rank does for those of its host, as far as it has not been done."""
        if self._telling is not call:
            yield from self.channel.wait(call)
            self._tell(call)
        call.stage += 1
        while not self.firsts.told():
            yield call
        if not self._lay_out(call):
            text = (yield from self._differences(call)).encode()[:TEXT_MOST]
            self.desk.text[: len(text)] = np.frombuffer(text, np.uint8)
            self._end(call, len(text))

    def _tell(self, call: Call) -> None:
        """Tells the other first ranks what those of this host have brought: all have come."""
        channel, row, offset = self.channel, self.firsts.rows[self.host], self.own.offset_seconds
        same, last, rank = channel.compared(call)
        _HEAD.pack_into(row, 0, call.number, call.packed.fingerprint, same, last + offset, rank)
        self._sizes.pack_into(row, _HEAD.size, *channel.sizes(call))
        end = self.carried_at[self.host]
        if call.carry is not None and same:
            end += call.carry.pack()
        self._telling = call
        self.firsts.tell(end)

    def _lay_out(self, call: Call) -> bool:
        """Lays out what all first ranks have told; False where they have brought different things.

        Where nothing is checked, that is not looked at.
        """
        desk, rows = self.desk, self.firsts.rows
        heads = [_HEAD.unpack_from(row) for row in rows]
        first = heads[0][:3]
        if self.own.checks and not (first[2] and all(head[:3] == first for head in heads)):
            return False
        *_, desk.times[LAST], desk.words[LAST_RANK] = max(heads, key=_came)
        for row, end, where in zip(rows, self.carried_at, self._offers, strict=True):
            desk.offered[where] = row[_HEAD.size : end]
        if call.carry is not None:
            call.carry.unpack()
        self._end(call, 0)
        return True

    def _end(self, call: Call, length: int) -> None:
        """Lets the ranks of this host go on; ``length`` is that of what is wrong."""
        self._telling = None
        self.desk.words[LENGTH] = length
        fence()
        self.desk.words[AGREED] = call.number

    def _differences(self, call: Call) -> Steps[str]:
        """What members of all hosts have brought, in words."""
        mine = np.frombuffer(b"".join(self.channel.texts(call)), np.uint8)
        counts = [TEXT_BYTES * len(ranks) for ranks in self.hosts]
        every = yield from self.firsts.gather(call, mine, counts)
        ranks = [self.members.ranks[place] for place in self.order]
        texts = [guard.unpack_text(text.tobytes()) for text in every.reshape(len(ranks), -1)]
        return guard.mismatch_text(dict(zip(ranks, texts, strict=True)))

    def offers(self, call: Call) -> list[Offer]:
        """What each member has offered: it lies there until this rank comes to the next call."""
        told = self.desk.offers.tolist()
        return [offer for _, offer in sorted(zip(self.order, map(Offer, told), strict=True))]

    def mine(self, chunk: int, dtype: np.dtype[Any]) -> Array:
        """This rank's block for a chunk."""
        block: Array = self.channel.blocks[self.channel.members.me][chunk & 1].view(dtype)
        return block

    def meet(self, call: Call) -> Steps[None]:
        """Ends when every member on this host has arrived once more."""
        yield from self.channel.meet(call)

    def missing(self, call: Call) -> tuple[int, ...]:
        """The members that have not come; once all have, first ranks that will not tell of it."""
        if call.moving or not call.posted or self.desk.words[AGREED] >= call.number:
            return ()
        behind = self._behind(call, 0, self.members.ranks)
        return behind or tuple(
            rank
            for rank in self._behind(call, 1, self.firsts.ranks)
            if self.own.peers.departure(rank, self.own.scope, self.own.epoch) is not None
        )

    def unfinished(self, call: Call) -> tuple[int, ...]:
        """The members that have not said that they have done their part."""
        return self._behind(call, 1, self.members.ranks)

    def _behind(self, call: Call, what: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        progress, group, me = self.own.peers.progress, self.members.number, self.own.rank
        return tuple(r for r in ranks if r != me and progress(r, group)[what] < call.number)

    def sites(self, call: Call) -> dict[int, Site]:
        """Where each member that has come called from."""
        if not self.own.checks or not call.posted:
            return {self.own.rank: call.site}
        came = set(self.members.ranks) - set(self._behind(call, 0, self.members.ranks))
        here = {rank: site for rank, (_, site) in self.channel.brought(call).items()}
        tell = partial(self.own.board.text, kind=WAITING)
        return {r: here[r] if r in here else Told(tell(r).partition(" at ")[2], 0) for r in came}

    def finish(self, call: Call) -> None:
        """Notes that this rank has done its part of a call."""
        self._finished = call.number
        self.own.board.note(self.members.number, call.number, call.number)
