"""The ranks of one process set, seen from one of them. Runs in every rank."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from allranks.collectives import guard
from allranks.collectives.call import Call
from allranks.collectives.callsite import Site
from allranks.collectives.channel import DONE, Channel
from allranks.collectives.transports.shared import Shared
from allranks.errors import CollectiveMismatch, UsageError

if TYPE_CHECKING:
    from allranks.collectives.transports import Transport
    from allranks.collectives.wait import Steps
    from allranks.collectives.world import World


class Group:
    """Members, their order of calls, and the ways between them.

    ``channel`` is None where the members have no memory in common; then they agree by messages.
    """

    def __init__(
        self, world: World, number: int, ranks: tuple[int, ...], channel: Channel | None
    ) -> None:
        self.world, self.number, self.ranks = world, number, ranks
        self.me = ranks.index(world.rank)
        self.channel = channel
        self.sequence = 0
        self.queue: deque[Call] = deque()
        self.transports: dict[str, Transport] = {}
        if channel is not None:
            channel.renew(world.epoch)
            self.transports["shared"] = Shared(channel)

    @property
    def size(self) -> int:
        """Members."""
        return len(self.ranks)

    def renew(self) -> None:
        """Starts a new epoch: order, counters and communicators."""
        self.sequence = 0
        self.queue.clear()
        if self.channel is not None:
            self.channel.renew(self.world.epoch)
        for name in [name for name in self.transports if name != "shared"]:
            del self.transports[name]

    def agree(self, call: Call, extent: int = 0, place: tuple[int, ...] = ()) -> Steps[None]:
        """Ends when every member has arrived with the same fingerprint.

        Raises:
            CollectiveMismatch: they brought different things; nothing has moved.
        """
        self.sequence += 1
        call.sequence = sequence = self.sequence
        call.posted = True
        channel = self.channel
        if channel is None:
            yield from self.world.agree_by_messages(self, call, extent)
            return
        fingerprint, text = guard.pack(call.spec)
        channel.post(sequence, (fingerprint, extent, *place), call.started)
        checks = self.world.checks
        if checks:
            channel.describe(sequence, text, guard.pack_site(call.site))
        yield from channel.sync(call)
        arrivals = channel.arrivals(sequence)
        call.last = max(arrivals)
        call.last_rank = self.ranks[arrivals.index(call.last)]
        call.extents = channel.numbers(sequence, 1)
        if checks:
            brought = channel.numbers(sequence, 0)
            if brought.count(fingerprint) != len(brought):
                raise CollectiveMismatch(guard.mismatch_text(self.brought(call)))
        call.moving = True

    def brought(self, call: Call) -> dict[int, tuple[guard.Spec, Site]]:
        """What every member has laid out for a call."""
        assert self.channel is not None
        found = {}
        for index, rank in enumerate(self.ranks):
            spec, site = self.channel.described(index, call.sequence)
            found[rank] = guard.unpack(spec), guard.unpack_site(site)
        return found

    def missing(self, call: Call) -> tuple[int, ...]:
        """The ranks that keep a call from going on."""
        channel = self.channel
        if channel is None:
            return self.world.missing_by_messages(self, call)
        behind = channel.behind()
        if not behind and call.moving:
            full = self.full_sequence(call)
            behind = tuple(
                i for i in range(self.size) if i != self.me and channel.get(i, DONE) < full
            )
        return tuple(self.ranks[index] for index in behind)

    def choose(self, nbytes: int, call: Call, wanted: str = "") -> Transport:
        """The transport of a call: the fastest that reaches every member, or the one asked for."""
        name = wanted or ("shared" if "shared" in self.transports else "mpi")
        if name not in self.transports:
            raise UsageError(
                f"transport={name!r} must reach every rank of the process set; here there is "
                f"{', '.join(sorted(self.transports))}. Leave transport= out."
            )
        call.transport = name
        return self.transports[name]

    def full_sequence(self, call: Call) -> int:
        """A call's number, unique over epochs."""
        return (self.world.epoch << 40) + call.sequence

    def sites(self, call: Call) -> dict[int, Site]:
        """Where each member that has arrived called from."""
        channel = self.channel
        if channel is None or not self.world.checks or not call.posted:
            return self.world.sites_by_messages(self, call)
        behind = channel.behind()
        return {
            rank: guard.unpack_site(channel.described(index, call.sequence)[1])
            for index, rank in enumerate(self.ranks)
            if index not in behind
        }

    def finish(self, call: Call) -> None:
        """Notes that this rank has done its part of a call."""
        if self.channel is not None:
            self.channel.put(DONE, self.full_sequence(call))
        else:
            self.world.finished_by_messages(self, call)
