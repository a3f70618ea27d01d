"""Agreement of ranks that share memory: what one arrives with lies open to the others."""

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

    def come(self, call: Call, offer: Offer) -> bool:
        """Lays out what this rank brings; True where all have come, and agree, within moments."""
        own, packed = self.own, call.packed
        sequence = call.sequence = self.sequence = self.sequence + 1
        call.epoch, call.posted = own.epoch, True
        site, text = packed.last
        if site is not call.site:
            text = packed.text_at(call.site)
        channel = self.channel
        channel.post(sequence, packed.fingerprint, call.started, offer, text if own.checks else b"")
        if channel.arrive(call):
            self.compare(call)
            return True
        return False

    def agree(self, call: Call, offer: Offer) -> Steps[None]:
        """Ends when every member has arrived with the same fingerprint.

        Raises:
            CollectiveMismatch: they brought different things; nothing has moved.
        """
        yield from self.channel.others(call)
        self.compare(call)

    def meet(self, call: Call) -> Steps[None]:
        """Ends when every member has arrived once more."""
        return self.channel.sync(call)

    def offers(self, call: Call) -> list[Offer]:
        """What each member has offered: it lies there until this rank comes to the next call."""
        return self.channel.offers(call.sequence)

    def compare(self, call: Call) -> None:
        """Looks at what the others have brought, once all have arrived."""
        channel = self.channel
        same, latest, index = channel.compare(call.sequence, call.packed.fingerprint, call.started)
        call.last, call.last_rank, call.moving = latest, self.members.ranks[index], True
        if not same and self.own.checks:
            call.moving = False
            brought = self.brought(call)
            specs = {spec for spec, _ in brought.values()} - {guard.JOIN}
            # Not by these texts alone, as they may be cut.
            others = set(channel.fingerprints(call.sequence)) - {guard.pack(guard.JOIN).fingerprint}
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
