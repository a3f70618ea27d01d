"""Agreement and news between hosts, as messages that nobody waits for. Runs in every rank."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from allranks.collectives.calls import guard
from allranks.collectives.calls.peers import State
from allranks.collectives.mpi.transport import Mpi, complete
from allranks.errors import CollectiveMismatch

if TYPE_CHECKING:
    from allranks.collectives.calls.call import Call
    from allranks.collectives.calls.callsite import Site
    from allranks.collectives.calls.wait import Steps
    from allranks.collectives.world.group import Group
    from allranks.collectives.world.world import World

_TAG = 7
_DETAIL_BYTES = 1536
_ARRIVED, _STATE = "arrived", "state"


class Messages:
    """One rank's letters to the ranks of other hosts, over a communicator of their own."""

    def __init__(self, world: World, comm: MPI.Intracomm) -> None:
        self.world, self.comm = world, comm
        here = world.hosts[world.rank]
        self.remote = [rank for rank, host in enumerate(world.hosts) if host != here]
        self.finished: dict[int, tuple[int, int]] = {}
        self._sent: list[tuple[bytes, MPI.Request]] = []
        self._arrived: dict[tuple[int, int], dict[int, Site]] = {}
        self._announced: Call | None = None
        self._left: State = State()

    def agree(self, group: Group, call: Call, extent: int) -> Steps[None]:
        """Ends when every member has arrived with the same fingerprint."""
        transport = group.transports["mpi"]
        assert isinstance(transport, Mpi)
        comm = yield from transport.comm(call)
        number, text = guard.pack(call.spec)
        kept = self.world.kept
        offset = self.world.recorder.offset_seconds
        mine = np.array([number, extent, 0], np.uint64)
        mine[2:].view(np.float64)[0] = call.started + offset
        every = np.empty((group.size, 3), np.uint64)
        yield from complete(kept, call, comm.Iallgather, mine, every)
        times = [float(t) - offset for t in every[:, 2].copy().view(np.float64)]
        call.last = max(times)
        call.last_rank = group.ranks[times.index(call.last)]
        call.extents = [int(value) for value in every[:, 1]]
        if self.world.checks and (every[:, 0] != number).any():
            detail = np.zeros(_DETAIL_BYTES, np.uint8)
            data = guard.pack_text(text, call.site)[:_DETAIL_BYTES]
            detail[: len(data)] = np.frombuffer(data, np.uint8)
            details = np.empty((group.size, _DETAIL_BYTES), np.uint8)
            yield from complete(kept, call, comm.Iallgather, detail, details)
            brought = {}
            for rank, row in zip(group.ranks, details, strict=True):
                brought[rank] = guard.unpack_text(row.tobytes())
            raise CollectiveMismatch(guard.mismatch_text(brought))
        call.moving = True
        self.note(group, call, 0)

    def note(self, group: Group, call: Call, finished: int) -> None:
        """Keeps how far this rank has come in a group, for the letter it sends when it leaves."""
        agreed, before = group.full_sequence(call), self.finished.get(group.number, (0, 0))[1]
        self.finished[group.number] = agreed, finished or before

    def missing(self, group: Group, call: Call) -> tuple[int, ...]:
        """The members that have not been heard of in a call."""
        self._announce(group, call)
        full = group.full_sequence(call)
        heard = self._arrived.get((group.number, full), {})
        found = []
        for rank in group.ranks:
            if rank == self.world.rank or (rank in heard and not call.moving):
                continue
            agreed, finished = self.world.peers.state(rank).finished.get(group.number, (0, 0))
            if (finished if call.moving else agreed) < full:
                found.append(rank)
        return tuple(found)

    def sites(self, group: Group, call: Call) -> dict[int, Site]:
        """Where those who wait in a call have called from."""
        return {
            self.world.rank: call.site,
            **self._arrived.get((group.number, group.full_sequence(call)), {}),
        }

    def _announce(self, group: Group, call: Call) -> None:
        if call is self._announced:
            return
        self._announced = call
        full = group.full_sequence(call)
        letter = (_ARRIVED, self.world.rank, group.number, full, tuple(call.site))
        self._send(letter, [rank for rank in group.ranks if rank != self.world.rank])

    def tell(self) -> None:
        """Sends this rank's state to every rank of another host."""
        world = self.world
        state = world.own_state()
        state.finished = dict(self.finished)
        self._send((_STATE, world.rank, state), self.remote)

    def _send(self, letter: tuple[object, ...], ranks: list[int]) -> None:
        self._sent = [item for item in self._sent if not item[1].Test()]
        data = pickle.dumps(letter)
        for rank in ranks:
            self._sent.append((data, self.comm.Isend([data, MPI.BYTE], rank, _TAG)))

    def receive(self) -> None:
        """Reads what has come in."""
        while (
            message := self.comm.Improbe(MPI.ANY_SOURCE, _TAG, status := MPI.Status())
        ) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            request = message.Irecv([data, MPI.BYTE])
            while not request.Test():
                continue
            self._read(pickle.loads(bytes(data)))

    def _read(self, letter: tuple[Any, ...]) -> None:
        if letter[0] == _STATE:
            self.world.peers.remote[letter[1]] = letter[2]
            return
        from allranks.collectives.calls.callsite import Site

        _, rank, number, full, site = letter
        if len(self._arrived) > 64:
            self._arrived.pop(next(iter(self._arrived)))
        self._arrived.setdefault((number, full), {})[rank] = Site(*site)
