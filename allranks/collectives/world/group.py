"""The ranks of one process set, seen from one of them. Runs in every rank."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.calls import guard
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.callsite import Site
from allranks.collectives.host.channel import DONE, NOWHERE, Channel, Place
from allranks.collectives.host.shared import Shared
from allranks.collectives.host.window import WARM_BYTES
from allranks.errors import CollectiveMismatch, UsageError

if TYPE_CHECKING:
    from allranks.collectives.calls.transport import Transport
    from allranks.collectives.calls.wait import Steps
    from allranks.collectives.gpu.side import GpuSide
    from allranks.collectives.ops.express import Plan
    from allranks.collectives.world.world import World


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
        self.plans: dict[object, Plan] = {}
        self.gpu: GpuSide | None = None
        """What is known of the members' GPUs, from the first array on one on; of this epoch."""
        if channel is not None:
            channel.renew(world.epoch)
            self.transports["shared"] = Shared(self, channel)

    @property
    def size(self) -> int:
        """Members."""
        return len(self.ranks)

    def renew(self) -> None:
        """Starts a new epoch: order, counters and communicators."""
        self.sequence = 0
        self.abandon()
        self.queue.clear()
        if self.channel is not None:
            self.channel.renew(self.world.epoch)
        for name in [name for name in self.transports if name != "shared"]:
            del self.transports[name]

    def abandon(self) -> None:
        """Leaves what is under way between GPUs."""
        if self.gpu is not None:
            self.gpu.abandon(self.queue)
            self.gpu = None

    @property
    def host(self) -> Transport:
        """The fastest way between the members' host memories."""
        return self.transports["shared" if "shared" in self.transports else "mpi"]

    def agree(self, call: Call, extent: int = 0, place: Place = NOWHERE) -> Steps[None]:
        """Ends when every member has arrived with the same fingerprint.

        Raises:
            CollectiveMismatch: they brought different things; nothing has moved.
        """
        channel = self.channel
        if channel is None:
            self.sequence += 1
            call.sequence, call.epoch, call.posted = self.sequence, self.world.epoch, True
            yield from self.world.agree_by_messages(self, call, extent)
            return
        fingerprint, text = guard.pack(call.spec)
        text = guard.pack_text(text, call.site) if self.world.checks else b""
        self.lay_out(call, fingerprint, text, extent, place)
        yield from channel.sync(call)
        call.extents = channel.extents(call.sequence)
        call.places = channel.places(call.sequence)
        self.compare(call, fingerprint)

    def lay_out(
        self, call: Call, fingerprint: int, text: bytes, extent: int = 0, place: Place = NOWHERE
    ) -> None:
        """Shows the other members what this one brings, and in ``text`` from which line."""
        assert self.channel is not None
        self.sequence += 1
        call.sequence, call.epoch, call.posted = self.sequence, self.world.epoch, True
        self.channel.post(call.sequence, fingerprint, call.started, extent, place, text)

    def compare(self, call: Call, fingerprint: int) -> None:
        """Looks at what the others have brought, once all have arrived."""
        channel = self.channel
        assert channel is not None
        same, call.last, index = channel.compare(call.sequence, fingerprint)
        call.last_rank = self.ranks[index]
        if not same and self.world.checks:
            brought = self.brought(call)
            specs = {spec for spec, _ in brought.values()} - {guard.JOIN}
            if len(specs) > 1 or not guard.goes_with_joined(*specs):
                # Some have laid out a block, some have not: all go on from the same one.
                channel.turn = channel.count & 1
                raise CollectiveMismatch(guard.mismatch_text(brought))
        call.moving = True

    def brought(self, call: Call) -> dict[int, tuple[guard.Spec, Site]]:
        """What every member has laid out for a call."""
        assert self.channel is not None
        return {
            rank: guard.unpack_text(self.channel.described(index, call.sequence))
            for index, rank in enumerate(self.ranks)
        }

    def missing(self, call: Call) -> tuple[int, ...]:
        """The ranks that have not arrived where this one is."""
        if self.channel is None:
            # Once data moves everybody has arrived; who has not finished is no reason to suspect
            # that ranks wait for each other.
            return () if call.moving else self.world.missing_by_messages(self, call)
        return tuple(self.ranks[index] for index in self.channel.behind())

    def unfinished(self, call: Call) -> tuple[int, ...]:
        """The ranks that have not said that they have done their part of a call."""
        channel = self.channel
        if channel is None:
            return self.world.missing_by_messages(self, call)
        if call.transport == "shared":
            return ()
        full = self.full_sequence(call)
        return tuple(
            rank
            for index, rank in enumerate(self.ranks)
            if index != self.me and channel.get(index, DONE) < full
        )

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An uninitialised array for a result, where the other members can reach it if it pays."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes <= WARM_BYTES:
            return np.empty(shape, dtype)
        window = self.world.window
        if window is not None and self.channel is not None:
            out = window.empty(shape, dtype, nbytes)
            if out is not None:
                return out
        return np.empty(shape, dtype)

    def empty_for(self, call: Call, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An uninitialised array for a result, in the memory that the call's arrays are in."""
        if not call.spec.device:
            return self.empty(shape, dtype)
        assert self.world.gpu is not None
        out: NDArray[Any] = self.world.gpu.empty(shape, dtype)
        return out

    def choose(
        self, nbytes: int, call: Call, wanted: str = "", *, on_gpu: bool = False
    ) -> Transport:
        """The transport of a call: the fastest that reaches every member, or the one asked for."""
        if on_gpu:
            from allranks.collectives.gpu.side import GpuSide, OnGpu

            if self.gpu is None:
                self.gpu = GpuSide(self)
            # Which of the GPU's it is, the members find out together.
            call.transport = "gpu"
            return OnGpu(self.gpu, wanted)
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
            rank: guard.unpack_text(channel.described(index, call.sequence))[1]
            for index, rank in enumerate(self.ranks)
            if index not in behind
        }

    def finish(self, call: Call) -> None:
        """Notes that this rank has done its part of a call."""
        if call.transport == "shared":
            # It ends with an arrival: who has come that far is needed no more.
            return
        if self.channel is not None:
            self.channel.put(DONE, self.full_sequence(call))
        else:
            self.world.finished_by_messages(self, call)
