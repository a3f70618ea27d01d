"""News between ranks that share no memory, as messages that nobody waits for."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

from mpi4py import MPI

from allranks.collectives.calls.call import Call
from allranks.collectives.calls.callsite import Site
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.wait import Pause

_TAG = 7
_ARRIVED, _STATE = "arrived", "state"


class Letters:
    """What one rank writes to the ranks of other hosts, over a communicator of their own."""

    def __init__(self, own: Standing, comm: MPI.Intracomm) -> None:
        self.own, self.comm = own, comm
        self.remote = [rank for rank in range(own.size) if rank not in own.board]
        self.finished: dict[int, tuple[int, int]] = {}
        """For each group the last call agreed on and the last one finished."""
        self._sent: list[tuple[bytes, MPI.Request]] = []
        self._arrived: dict[tuple[int, int], dict[int, Site]] = {}
        self._announced: Call | None = None

    def note(self, call: Call, *, finished: bool) -> None:
        """Keeps how far this rank has come in a group, for the letter it sends when it leaves."""
        group, number = call.members.number, call.number
        before = self.finished.get(group, (0, 0))[1]
        self.finished[group] = number, number if finished else before
        # For the ranks of this host, which read there that this one has left, and no letter.
        self.own.board.note(group, *self.finished[group])

    def missing(self, call: Call) -> tuple[int, ...]:
        """The members that have not been heard of in a call."""
        self._announce(call)
        group, heard, found = call.members.number, self.arrived(call), []
        for rank in call.members.ranks:
            if rank == self.own.rank or (rank in heard and not call.moving):
                continue
            agreed, finished = self.own.peers.progress(rank, group)
            if (finished if call.moving else agreed) < call.number:
                found.append(rank)
        return tuple(found)

    def arrived(self, call: Call) -> dict[int, Site]:
        """Where those who have written that they wait in a call have called from."""
        return self._arrived.get((call.members.number, call.number), {})

    def _announce(self, call: Call) -> None:
        if call is self._announced:
            return
        self._announced = call
        letter = (_ARRIVED, self.own.rank, call.members.number, call.number, tuple(call.site))
        self._send(letter, [rank for rank in call.members.ranks if rank != self.own.rank])

    def tell(self) -> None:
        """Sends this rank's state to every rank of another host."""
        state = replace(self.own.told, finished=dict(self.finished))
        self._send((_STATE, self.own.rank, state), self.remote)

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
            pause = Pause()
            while not request.Test():
                pause()
            self._read(pickle.loads(bytes(data)))

    def _read(self, letter: tuple[Any, ...]) -> None:
        if letter[0] == _STATE:
            self.own.peers.remote[letter[1]] = letter[2]
            return
        _, rank, number, full, site = letter
        if len(self._arrived) > 64:
            self._arrived.pop(next(iter(self._arrived)))
        self._arrived.setdefault((number, full), {})[rank] = Site(*site)
