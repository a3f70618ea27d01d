"""Agreement of ranks on several hosts: in memory on each host, by one exchange between hosts.

The ranks of a host lay out what they bring and arrive, as on one host. When all have, the host's
first rank compares, tells the other hosts' first ranks, and lays out what all have come to. Small
arrays go with that: their host's sum there, the sum of all back.
"""

from __future__ import annotations

import mmap
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.calls import guard
from allranks.collectives.calls.board import WAITING
from allranks.collectives.calls.call import Call, Members
from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.offer import Offer
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

Array = NDArray[Any]
Hosts = tuple[tuple[int, ...], ...]
_HEAD = np.dtype(
    [("number", "u8"), ("fingerprint", "u8"), ("same", "u8"), ("last", "f8"), ("rank", "i8")]
)
CARRIED_BYTES = 1024
"""Of each host: more would make every agreement slower than it saves."""


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
        self.order = [members.ranks.index(rank) for ranks in self.hosts for rank in ranks]
        """The members' places, host by host."""
        most = max(map(len, self.hosts))
        row_bytes = _HEAD.itemsize + 8 * most + CARRIED_BYTES
        firsts = tuple(ranks[0] for ranks in self.hosts)
        self.firsts = Firsts(own, firsts, members.number, user, row_bytes)
        self._most, self._finished = most, 0
        self.renew()

    def renew(self) -> None:
        """A new epoch has begun: calls are counted anew. Collective over the first ranks."""
        self.channel.renew()
        self.ticks = self.channel.count
        """Counts chunks, as all members do."""
        self.firsts.renew()

    def come(self, call: Call, offer: Offer) -> bool:
        """Lays out what this rank brings; other hosts are not heard of at once."""
        self.channel.come(call, offer)
        self.own.board.note(self.members.number, call.number, self._finished)
        return False

    def agree(self, call: Call, offer: Offer) -> Steps[None]:
        """Ends when every member has arrived with the same fingerprint.

        Raises:
            CollectiveMismatch: they brought different things; nothing has moved.
        """
        yield from self.channel.wait(call)
        desk, number = self.desk, call.number
        if self.is_first:
            yield from self._between(call)
        else:
            call.stage += 1
            while desk.words[AGREED] < number:
                yield call
            fence()
        if desk.words[LENGTH]:
            # Whoever leaves the cell over this is not one that others wait for in vain.
            self.finish(call)
            raise CollectiveMismatch(desk.text[: desk.words[LENGTH]].tobytes().decode())
        call.last = desk.times[LAST] - self.own.offset_seconds
        call.last_rank = desk.words[LAST_RANK]

    def _between(self, call: Call) -> Steps[None]:
        """What the first rank does for those of its host."""
        desk, channel = self.desk, self.channel
        same, last, rank = channel.compared(call)
        head = np.zeros(1, _HEAD)
        offset = self.own.offset_seconds
        head[0] = call.number, call.packed.fingerprint, same, last + offset, rank
        offers = np.array([offer.nbytes for offer in channel.offers(call)], np.int64)
        carried = call.carry.pack() if call.carry is not None and same else head[:0]
        row = np.concatenate([part.reshape(-1).view(np.uint8) for part in (head, offers, carried)])
        rows = yield from self.firsts.exchange(call, row)
        heads = np.concatenate([row[: _HEAD.itemsize].view(_HEAD) for row in rows])
        alike = heads["same"].all() and (heads["fingerprint"] == heads["fingerprint"][0]).all()
        text = b""
        if self.own.checks and not alike:
            text = (yield from self._differences(call)).encode()[:TEXT_MOST]
            desk.text[: len(text)] = np.frombuffer(text, np.uint8)
        else:
            latest = int(heads["last"].argmax())
            desk.times[LAST] = float(heads["last"][latest])
            desk.words[LAST_RANK] = int(heads["rank"][latest])
            start, counts = _HEAD.itemsize, [8 * len(ranks) for ranks in self.hosts]
            told = [row[start : start + n].view(np.int64) for row, n in zip(rows, counts, strict=True)]
            desk.offers[self.order] = np.concatenate(told)
            if call.carry is not None:
                call.carry.unpack([row[start + n :] for row, n in zip(rows, counts, strict=True)])
        desk.words[LENGTH] = len(text)
        fence()
        desk.words[AGREED] = call.number

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
        return [Offer(nbytes) for nbytes in self.desk.offers.tolist()]

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
