"""Agreement of ranks that share memory: what one arrives with lies open to the others.

Runs in every rank.
"""

from __future__ import annotations

from allranks.collectives.calls import guard
from allranks.collectives.calls.call import Call, Members
from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.offer import Offer
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.wait import Steps
from allranks.collectives.host.channel import DONE, Channel
from allranks.errors import CollectiveMismatch


class MemoryAgreement:
    """`Agreement` over one channel."""

    def __init__(self, own: Standing, members: Members, channel: Channel) -> None:
        self.own, self.members, self.channel = own, members, channel
        self.sequence = 0
        channel.renew(own.epoch)

    def renew(self) -> None:
        """A new epoch has begun: calls are counted anew."""
        self.sequence = 0
        self.channel.renew(self.own.epoch)

    def agree(self, call: Call, offer: Offer) -> Steps[None]:
        """Ends when every member has arrived with the same fingerprint.

        Raises:
            CollectiveMismatch: they brought different things; nothing has moved.
        """
        fingerprint, text = guard.pack(call.spec)
        text = guard.pack_text(text, call.site) if self.own.checks else b""
        self.lay_out(call, fingerprint, text, offer)
        yield from self.channel.sync(call)
        call.offers = self.channel.offers(call.sequence)
        self.compare(call, fingerprint)

    def meet(self, call: Call) -> Steps[None]:
        """Ends when every member has arrived once more."""
        return self.channel.sync(call)

    def lay_out(self, call: Call, fingerprint: int, text: bytes, offer: Offer) -> None:
        """Shows the other members what this one brings, and in ``text`` from which line."""
        self.sequence += 1
        call.sequence, call.epoch, call.posted = self.sequence, self.own.epoch, True
        self.channel.post(call.sequence, fingerprint, call.started, offer, text)

    def compare(self, call: Call, fingerprint: int) -> None:
        """Looks at what the others have brought, once all have arrived."""
        channel = self.channel
        same, call.last, index = channel.compare(call.sequence, fingerprint)
        call.last_rank = self.members.ranks[index]
        if not same and self.own.checks:
            brought = self.brought(call)
            specs = {spec for spec, _ in brought.values()} - {guard.JOIN}
            # Not by these texts alone, as they may be cut.
            others = set(channel.fingerprints(call.sequence)) - {guard.pack(guard.JOIN)[0]}
            if len(others) > 1 or not guard.goes_with_joined(*specs):
                # Some have laid out a block, some have not: all go on from the same one.
                channel.turn = channel.count & 1
                raise CollectiveMismatch(guard.mismatch_text(brought))
        call.moving = True

    def brought(self, call: Call) -> dict[int, tuple[guard.Spec, Site]]:
        """What every member has laid out for a call."""
        return {
            rank: guard.unpack_text(self.channel.described(index, call.sequence))
            for index, rank in enumerate(self.members.ranks)
        }

    def missing(self, call: Call) -> tuple[int, ...]:
        """The ranks that have not arrived where this one is."""
        return tuple(self.members.ranks[index] for index in self.channel.behind())

    def unfinished(self, call: Call) -> tuple[int, ...]:
        """The ranks that have not said that they have done their part of a call."""
        if call.transport == "shared":
            return ()
        return tuple(
            rank
            for index, rank in enumerate(self.members.ranks)
            if index != self.members.me and self.channel.get(index, DONE) < call.number
        )

    def sites(self, call: Call) -> dict[int, Site]:
        """Where each member that has arrived called from."""
        if not self.own.checks or not call.posted:
            return {self.own.rank: call.site}
        behind = self.channel.behind()
        return {
            rank: guard.unpack_text(self.channel.described(index, call.sequence))[1]
            for index, rank in enumerate(self.members.ranks)
            if index not in behind
        }

    def finish(self, call: Call) -> None:
        """Notes that this rank has done its part of a call."""
        # Through shared memory it ends with an arrival: who has come that far is needed no more.
        if call.transport != "shared":
            self.channel.put(DONE, call.number)
