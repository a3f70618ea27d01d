"""The ranks of one process set, seen from one of them: their order of calls, their transports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from allranks.collectives.calls.call import Agreement, Call
from allranks.collectives.calls.guard import Spec, pack
from allranks.collectives.calls.standing import Standing
from allranks.collectives.calls.transport import Transport
from allranks.collectives.calls.wait import Steps
from allranks.collectives.gpu.device import Device
from allranks.collectives.gpu.transport import GpuTransport
from allranks.collectives.host.channel import Channel
from allranks.errors import UsageError
from allranks.records.ranks import label


class Group:
    """A group's members, how they agree, the calls that wait for their turn, and its transports."""

    def __init__(
        self, own: Standing, agreement: Agreement, transports: dict[str, Transport]
    ) -> None:
        self.own, self.agreement, self.transports = own, agreement, transports
        self.members = agreement.members
        self.number, self.ranks = self.members.number, self.members.ranks
        self.me, self.size = self.members.me, self.members.size
        self.through_host = transports["shared" if "shared" in transports else "mpi"]
        """The fastest transport between the members' host memories."""
        self.queue: deque[Call] = deque()
        self.plans: dict[object, Any] = {}
        """What calls of one kind have in common, kept by whoever makes them."""
        self.gpu: GpuTransport | None = None
        """What is known of the members' GPUs, from the first array on one on; of this epoch."""

    @property
    def channel(self) -> Channel | None:
        """The memory that the members share; None where they have none."""
        return self.agreement if isinstance(self.agreement, Channel) else None

    def call(
        self,
        spec: Spec,
        name: str | None = None,
        nbytes: int = 0,
        steps: Callable[[Call], Steps[Any]] = Call.agreed,
    ) -> Call:
        """A call of this group, ready to be driven."""
        call = Call(self.agreement, pack(spec), name, nbytes)
        call.steps = steps(call)
        return call

    def index(self, root: int, op: str) -> int:
        """The root's place among the members; raises `UsageError` where it is none of them."""
        if root in self.ranks:
            return self.ranks.index(root)
        raise UsageError(
            f"{op} needs a root that is in the process set: found {root}, and it has "
            f"{label(self.ranks)}. The root is a rank of the world."
        )

    def renew(self) -> None:
        """Starts a new epoch: order, counters and communicators."""
        self.abandon()
        self.queue.clear()
        self.agreement.renew()
        for transport in self.transports.values():
            transport.renew()

    def abandon(self) -> None:
        """Leaves what is under way between GPUs."""
        if self.gpu is not None:
            self.gpu.abandon(self.queue)
            self.gpu = None

    def choose(self, call: Call, wanted: str = "", device: Device | None = None) -> Transport:
        """The transport of a call: the fastest that reaches every member, or the one ``wanted``.

        ``device`` is this rank's GPU, where the call's arrays are on it.

        Raises:
            UsageError: the one that is asked for does not reach every member.
        """
        if device is not None:
            if self.gpu is None:
                host = self.own.hosts[self.own.rank]
                self.gpu = GpuTransport(self.members, device, self.through_host, host)
            # Which of the GPU's it is, the members find out together, where none is asked for.
            call.transport = wanted or self.gpu.name
            return self.gpu
        name = wanted or self.through_host.name
        if name not in self.transports:
            raise UsageError(
                f"transport={name!r} must reach every rank of the process set; here there is "
                f"{', '.join(sorted(self.transports))}. Leave transport= out."
            )
        found = self.transports[name]
        call.transport = found.name
        return found
