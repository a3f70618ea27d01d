"""Agreement of ranks that share no memory: one allgather of their fingerprints."""

from __future__ import annotations

import numpy as np

from allranks.collectives.calls import guard
from allranks.collectives.calls.call import EPOCH_SHIFT, Call, Members, Offer
from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.wait import Steps
from allranks.collectives.mpi.letters import Letters
from allranks.collectives.mpi.transport import Mpi, complete
from allranks.errors import CollectiveMismatch

_DETAIL_BYTES = 1536
_ROW = np.dtype([("fingerprint", np.uint64), ("nbytes", np.int64), ("arrived", np.float64)])


class MessageAgreement:
    """`Agreement` over a group's communicator, with letters to those who are late."""

    def __init__(self, own: Standing, members: Members, transport: Mpi, letters: Letters) -> None:
        self.own, self.members = own, members
        self.transport, self.letters = transport, letters
        self._offers: list[Offer] = []
        self.renew()

    def renew(self) -> None:
        """A new epoch has begun: calls are counted anew."""
        self.number = self.own.epoch << EPOCH_SHIFT

    def come(self, call: Call, offer: Offer) -> bool:
        """Says that it has come; nobody is heard of at once."""
        self.number += 1
        call.number, call.posted = self.number, True
        return False

    def agree(self, call: Call, offer: Offer) -> Steps[None]:
        """As `Agreement.agree`: ends when every member has arrived with the same fingerprint."""
        own, fingerprint = self.own, call.packed.fingerprint
        comm = yield from self.transport.comm(call)
        mine = np.array((fingerprint, offer.nbytes, call.started + own.offset_seconds), _ROW)
        every = np.empty(self.members.size, _ROW)
        row, rows = mine.reshape(1).view(np.uint8), every.view(np.uint8)
        yield from complete(own.kept, call, comm.Iallgather, row, rows)
        times = every["arrived"].tolist()
        self._offers = [Offer(nbytes) for nbytes in every["nbytes"].tolist()]
        if own.checks and (every["fingerprint"] != fingerprint).any():
            detail = np.zeros(_DETAIL_BYTES, np.uint8)
            data = guard.pack_text(call.packed.text, call.site)[:_DETAIL_BYTES]
            detail[: len(data)] = np.frombuffer(data, np.uint8)
            details = np.empty((self.members.size, _DETAIL_BYTES), np.uint8)
            yield from complete(own.kept, call, comm.Iallgather, detail, details)
            brought = {}
            for rank, line in zip(self.members.ranks, details, strict=True):
                brought[rank] = guard.unpack_text(line.tobytes())
            raise CollectiveMismatch(guard.mismatch_text(brought))
        call.last = max(times) - own.offset_seconds
        call.last_rank = self.members.ranks[times.index(max(times))]
        self.letters.note(call, finished=False)

    def offers(self, call: Call) -> list[Offer]:
        """What each member has offered to the call that was agreed on last."""
        return self._offers

    def meet(self, call: Call) -> Steps[None]:
        """Nothing is laid out where all could read it."""
        yield from ()

    def missing(self, call: Call) -> tuple[int, ...]:
        """The members that have not been heard of in a call."""
        # Once data moves everybody has arrived; who has not finished is no reason to suspect
        # that ranks wait for each other.
        return () if call.moving else self.letters.missing(call)

    def unfinished(self, call: Call) -> tuple[int, ...]:
        """The members that have not said that they have done their part."""
        return self.letters.missing(call)

    def sites(self, call: Call) -> dict[int, Site]:
        """Where those who wait in a call have called from."""
        return {self.own.rank: call.site, **self.letters.arrived(call)}

    def finish(self, call: Call) -> None:
        """Keeps what other hosts must know when this rank leaves."""
        self.letters.note(call, finished=True)
