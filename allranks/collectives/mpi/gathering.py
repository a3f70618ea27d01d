"""Everyone's bytes on every rank of several hosts, or on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np

from allranks.collectives.arrays.reductions import Array
from allranks.collectives.calls.call import Call, Offer
from allranks.collectives.calls.wait import Steps
from allranks.collectives.mpi.chunks import Carry, Chunks, passed
from allranks.collectives.mpi.several import Several
from allranks.collectives.mpi.transport import Mpi


class Gathering:
    """allgather and gather over the channels of several hosts."""

    def __init__(self, several: Several, flat: Mpi) -> None:
        self.several, self._flat = several, flat
        # Bytes of each member's part of a chunk.
        self._share = max(1, several.block // several.members.size // 64 * 64)

    def begin(
        self, call: Call, source: Array, lengths: Sequence[int] | None, root: int
    ) -> tuple[Offer, Steps[list[Array]]]:
        """As `Transport.allgather`."""
        part = source[: self._share]
        self.several.mine(0, part.dtype)[: part.size] = part
        carried = not call.posted and lengths is None
        if carried:
            call.carry = self._gathered(call)
        return Offer(source.nbytes), self._gather(call, source, lengths, root, carried=carried)

    def _gathered(self, call: Call) -> Carry:
        """What goes with the agreement where little is gathered on each host."""
        several = self.several

        host, starts = several.host, several.carried_at

        def pack() -> int:
            sizes = several.channel.sizes(call)
            if sum(sizes) > several.carried or max(sizes) > self._share:
                return 0
            mine = self._laid(0, sizes)
            several.firsts.rows[host][starts[host] : starts[host] + mine.size] = mine.tobytes()
            return mine.size

        def unpack() -> None:
            brought = self._brought(several.desk.offers.tolist())
            if max(brought) <= several.carried:
                rows = zip(several.firsts.rows, starts, brought, strict=True)
                whole = b"".join([row[start : start + size] for row, start, size in rows])
                several.desk.slots[0][: len(whole)] = np.frombuffer(whole, np.uint8)

        return Carry(pack, unpack)

    def _brought(self, sizes: Sequence[int]) -> list[int]:
        """How many bytes each host brings, where members bring so many, host by host."""
        left = iter(sizes)
        return [sum(islice(left, len(ranks))) for ranks in self.several.hosts]

    def _laid(self, chunk: int, sizes: Sequence[int]) -> Array:
        """What the members on this host have laid out, one after the other."""
        blocks = [pair[chunk & 1] for pair in self.several.channel.blocks]
        parts = [block[:size] for block, size in zip(blocks, sizes, strict=False)]
        return np.concatenate(parts) if parts else blocks[0][:0]

    def _gather(
        self,
        call: Call,
        source: Array,
        lengths: Sequence[int] | None,
        root: int,
        *,
        carried: bool,
    ) -> Steps[list[Array]]:
        several, step = self.several, self._share
        sizes = list(lengths) if lengths else [o.nbytes for o in call.agreement.offers(call)]
        told = [sizes[place] for place in several.order]
        carried = carried and max(self._brought(told)) <= several.carried and max(sizes) <= step
        me = several.members.me
        if root >= 0 and not carried:
            # Nothing becomes less on the way: each sends its own, which is measured to be faster.
            return (yield from self._flat.gather(call, source, sizes, root))
        reads = root in (-1, me)
        outs = [np.empty(size if reads else 0, np.uint8) for size in sizes]

        def cut(chunk: int) -> list[list[int]]:
            return [
                [max(0, min(step, sizes[place] - chunk * step)) for place in places]
                for places in several.places
            ]

        def fill(chunk: int) -> None:
            part = source[chunk * step :][:step]
            several.mine(chunk, part.dtype)[: part.size] = part

        def post(chunk: int) -> Steps[None]:
            brought = cut(chunk)
            mine = self._laid(chunk, brought[several.host])
            whole = yield from several.firsts.gather(call, mine, list(map(sum, brought)), chunk & 1)
            several.desk.slots[chunk & 1][: whole.size] = whole

        def take(chunk: int) -> None:
            at = 0
            for place, size in zip(several.order, chain(*cut(chunk)), strict=True):
                if reads:
                    outs[place][chunk * step :][:size] = several.desk.slots[chunk & 1][at:][:size]
                at += size

        if carried:
            take(0)
            return outs
        chunks = Chunks(-(-max(sizes) // step), fill, post, take)
        return (yield from passed(several, call, chunks, outs))
