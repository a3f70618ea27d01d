"""The transport of a group whose arrays are on GPUs: it chooses NCCL, staging, or memory that the
ranks share on their GPU, for each call.

NCCL identifies GPUs by where they are plugged in, so the slices of one GPU (MIG) are one to it, and
it refuses a communicator with two ranks on one. Where every rank has NCCL 2.30 or newer and
NCCL_MULTI_RANK_GPU_ENABLE=1, it does not; that is experimental, so only a call that asks for NCCL
uses it.

Source: NCCL 2.30, src/init.cc, initTransportsRank.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, Array
from allranks.collectives.calls.call import (
    NOTHING,
    Call,
    Members,
    Move,
    Offer,
    Prepared,
    Steps,
    Transport,
    as_bytes,
    prepared,
)
from allranks.collectives.calls.rank_state import RankState
from allranks.collectives.gpu.cupy_api import load_nccl
from allranks.collectives.gpu.device import Device
from allranks.collectives.gpu.ipc import IpcTransport
from allranks.collectives.gpu.nccl import NcclTransport
from allranks.collectives.gpu.staged import StagedTransport
from allranks.errors import MissingDependency, UsageError
from allranks.records.ranks import label

_MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHARES_FROM = 23000
_ALLREDUCE = "ALLRANKS_ALLREDUCE"
"""nccl, staged, ipc or mpi: the transport of GPU arrays in allreduce without a ``transport``."""
ON_GPU = ("nccl", "staged", "ipc")
IPC_FROM_BYTES = 2 << 20
"""For each rank of a group: from this size on arrays go by ipc where no transport is asked for. On
an H200 staged and ipc took equally long at 3.5 MB with two ranks, and at 6 MB with four."""
_DEVICE = re.compile(r"/?(?:device:)?(cpu|gpu)(?::\d+)?", re.IGNORECASE)


class Placement(NamedTuple):
    """In which memory arrays move, and by which transport."""

    memory: str = ""
    """"cpu", "gpu", or "" for where each array is."""
    transport: str = ""
    """The transport's name, or "" for the fastest."""


_ANY = Placement()


def read_placement(kind: str, transport: str | None, device: str) -> Placement:
    """The placement that the two arguments ask for; `UsageError` if they contradict each other."""
    memory = ""
    if device:
        found = _DEVICE.fullmatch(device)
        if found is None:
            raise UsageError(
                f"{kind} needs a device such as '/cpu:0' or '/gpu:0', or '' for the array's own: "
                f"found {device!r}. Leave device= out."
            )
        memory = found[1].lower()
    if transport in ON_GPU and memory == "cpu":
        raise UsageError(
            f"{kind} needs one place for its arrays: found transport={transport!r}, which moves "
            f"arrays on a GPU, and device={device!r}. Leave one of them out."
        )
    if transport is not None and transport not in ON_GPU:
        # All other transports move data between host memories.
        return Placement("cpu", transport)
    return Placement(memory, transport or "")


def environment_placement(kind: str) -> Placement:
    """The placement that the environment asks for, for an operation on GPU arrays."""
    asked = os.environ.get(_ALLREDUCE)
    if not asked:
        return _ANY
    value = asked.strip().lower()
    if not value or kind not in ("allreduce", "grouped_allreduce"):
        return _ANY
    if value == "mpi":
        return Placement("cpu", "mpi")
    if value in ON_GPU:
        return Placement("gpu", value)
    raise UsageError(
        f"{_ALLREDUCE} needs nccl, staged, ipc or mpi: found {value!r}. Unset it for the fastest."
    )


def is_of_a_gpu(transport: str | None) -> bool:
    """Whether arrays on a GPU move by a transport of GPUs, without a word of the environment."""
    return transport in ON_GPU or (transport is None and not os.environ.get(_ALLREDUCE))


class RankDevice(NamedTuple):
    """One rank's GPU."""

    host: int
    bus: str
    uuid: str
    nccl: int
    """NCCL's version, as 22703; 0 without it."""
    why: str = ""
    """Why NCCL is missing."""
    shares: bool = False
    """Whether NCCL may put several ranks on one GPU: set by the user, and supported."""

    @classmethod
    def of(cls, device: Device, host: int) -> RankDevice:
        version, why = 0, ""
        try:
            version = load_nccl().get_version()
        except MissingDependency as error:
            why = str(error)
        bus = device.runtime.deviceGetPCIBusId(device.number)
        shares = version >= _SHARES_FROM and os.environ.get(_MULTI_RANK) == "1"
        return cls(host, bus, uuid_text(device.uuid()), version, why, shares)


def uuid_text(raw: bytes) -> str:
    """A GPU's UUID in the driver's notation."""
    if len(raw) != 16:
        return ""
    digits = raw.hex()
    return "GPU-" + "-".join(digits[a:b] for a, b in pairwise((0, 8, 12, 16, 20, 32)))


def obstacle(ranks: Sequence[int], devices: Sequence[RankDevice], *, sharing: bool = False) -> str:
    """Why NCCL, perhaps ``sharing`` GPUs, cannot serve a group, as a clause; "" if it can."""
    found: dict[tuple[int, str], tuple[RankDevice, list[int]]] = {}
    for rank, device in zip(ranks, devices, strict=True):
        found.setdefault((device.host, device.bus), (device, []))[1].append(rank)
    for device, sharers in found.values():
        if len(sharers) == 1 or sharing:
            continue
        slices = {s.uuid for r, s in zip(ranks, devices, strict=True) if r in sharers}
        what = "slices of one GPU" if len(slices) == len(sharers) else "one GPU"
        return f"{label(sharers)} share {what} ({device.uuid or device.bus})"
    without = [rank for rank, device in zip(ranks, devices, strict=True) if not device.nccl]
    if without:
        why = next(device.why for device in devices if not device.nccl)
        return f"{label(without)} {'has' if len(without) == 1 else 'have'} none ({why})"
    # Releases of one major version speak to each other only if they are the same.
    versions = {device.nccl for device in devices}
    if len(versions) > 1:
        return f"its versions differ: {', '.join(map(str, sorted(versions)))}"
    return ""


def apart(ranks: Sequence[int], devices: Sequence[RankDevice]) -> str:
    """The ranks of each GPU, if there are several; "" if all members use one, or slices of it."""
    found: dict[tuple[int, str], list[int]] = {}
    for rank, device in zip(ranks, devices, strict=True):
        found.setdefault((device.host, device.bus), []).append(rank)
    return " and ".join(map(label, found.values())) if len(found) > 1 else ""


def choose(wanted: str, ranks: Sequence[int], devices: Sequence[RankDevice]) -> str:
    """The transport of a group: the same on every member, or the same `UsageError`."""
    if wanted == "ipc":
        if each := apart(ranks, devices):
            raise UsageError(
                f"transport='ipc' needs ranks that share one GPU: {each} use different ones. Leave "
                "transport= and ALLRANKS_ALLREDUCE out."
            )
        return wanted
    asked = wanted == "nccl" and all(device.shares for device in devices)
    against = obstacle(ranks, devices, sharing=asked)
    if wanted == "nccl" and against:
        raise UsageError(
            f"transport='nccl' needs NCCL and a GPU for each rank: {against}. Leave transport= "
            "and ALLRANKS_ALLREDUCE out: the arrays are then staged through the host. With "
            f"{_MULTI_RANK}=1 on every rank, ranks share a GPU in NCCL 2.30 and newer, which is "
            "experimental there."
        )
    return wanted or ("staged" if against else "nccl")


T = TypeVar("T")
DeviceTransport = NcclTransport | StagedTransport | IpcTransport
"""The transports of GPU arrays, used once all members have agreed and all lengths are known."""


class GpuTransport:
    """`Transport` over a group's GPUs: lengths go by the host, data by NCCL, staged or ipc."""

    name = "gpu"
    exact = False

    def __init__(self, own: RankState, members: Members, device: Device, host: Transport) -> None:
        self.own, self.members, self.device, self.host = own, members, device, host
        self._device_map: list[RankDevice] = []
        self._transports: dict[str, DeviceTransport] = {}
        self._chosen: dict[tuple[str, bool], DeviceTransport] = {}
        """The transport in this epoch, by the one that a call asks for, and whether it is large."""
        self._large = members.size * IPC_FROM_BYTES

    def _transport(self, call: Call, nbytes: int) -> Steps[DeviceTransport]:
        """The transport of a call, which all members have agreed on. Collective over the group.
        Raises `UsageError` on every member if the wanted transport cannot be used.

        ``nbytes`` is the same on all members.
        """
        if not self._device_map:
            mine = RankDevice.of(self.device, self.own.hosts[self.own.rank])
            every = yield from self._told(call, mine)
            self._device_map = [RankDevice(*each) for each in every]
        asked = call.transport
        wanted = "" if asked == self.name else asked
        name = choose(wanted, self.members.ranks, self._device_map)
        if name == "staged" and not wanted and nbytes >= self._large:
            name = "staged" if apart(self.members.ranks, self._device_map) else "ipc"
        found = self._made(name)
        if isinstance(found, IpcTransport) and (why := (yield from found.open(call, self._told))):
            if self.members.me == 0 and not self.device.windows.reported:
                self.device.windows.reported = True
                more = " Leave transport= and ALLRANKS_ALLREDUCE out." if wanted else ""
                self.device.notice(why + more)
            found.abandon()
            found = self._transports[name] = self._made("staged")
        self._chosen[asked, nbytes >= self._large] = found
        call.transport = found.name
        return found

    def _made(self, name: str) -> DeviceTransport:
        """The transport of this name, which is made the first time."""
        found = self._transports.get(name)
        if found is None:
            if name == "nccl":
                found = NcclTransport(self.own, self.members, self.device, self.host)
            elif name == "ipc":
                found = IpcTransport(self.own, self.members, self.device)
            else:
                found = StagedTransport(self.members, self.device, self.host)
            # Stored before it is connected, so that a half connected one can be abandoned too.
            self._transports[name] = found
        return found

    def _told(self, call: Call, value: Any) -> Steps[list[Any]]:
        """Every member's value on every member, as JSON through host memory."""
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = yield from self.table(call, [mine.size])
        every = yield from call.moved(self.host.allgather, mine, [size for (size,) in sizes])
        return [json.loads(one.tobytes()) for one in every]

    def table(self, call: Call, mine: Sequence[int]) -> Steps[list[list[int]]]:
        """Every member's numbers on every member, through host memory."""
        row = as_bytes(np.array(mine, np.int64))
        rows = yield from call.moved(self.host.allgather, row, [row.size] * self.members.size)
        return [one.view(np.int64).tolist() for one in rows]

    def park(self) -> None:
        """Gives up NCCL's communicator, without a call of CUDA."""
        for transport in self._transports.values():
            if isinstance(transport, NcclTransport):
                transport.abandon()

    def abandon(self, calls: Iterable[Call]) -> None:
        """Ends the calls under way, and keeps their arrays while the GPU may use them."""
        for transport in self._transports.values():
            transport.abandon()
        for call in calls:
            self.device.hold(call)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        out: Array = self.device.empty(shape, dtype)
        return out

    def renew(self) -> None:
        """Does nothing: `Group` makes a new one for each epoch."""

    def allreduce(
        self, call: Call, source: Array, reduction: Arithmetic, out: Array | None = None
    ) -> Prepared[Array]:
        found = self.device.empty(source.shape, source.dtype) if out is None else out
        into = found.reshape(-1)
        flat = into if source is found else source.reshape(-1)

        def move(way: DeviceTransport) -> Steps[Array]:
            yield from way.allreduce(call, flat, into, reduction)
            return found

        return NOTHING, self._agreed(call, source.nbytes, move, source, found)

    def reducescatter(
        self, call: Call, source: Array, bounds: Sequence[int], out: Array, reduction: Arithmetic
    ) -> Prepared[None]:
        def move(way: DeviceTransport) -> Steps[None]:
            return way.reducescatter(call, source, bounds, out, reduction)

        return self._moved(call, source.nbytes, move, source, out)

    def broadcast(self, call: Call, array: Array, root: int) -> Prepared[None]:
        return self._moved(call, array.nbytes, lambda way: way.broadcast(call, array, root), array)

    def allgather(
        self, call: Call, source: Array, lengths: Sequence[int] | None = None, root: int = -1
    ) -> Prepared[list[Array]]:
        def move(way: DeviceTransport) -> Steps[list[Array]]:
            sizes = lengths or [offer.nbytes for offer in call.agreement.offers(call)]
            return way.allgather(call, source, sizes, root)

        return self._moved(call, sum(lengths or ()), move, source)

    def alltoall(
        self, call: Call, source: Array, lengths: Sequence[int], root: int = -1
    ) -> Prepared[list[Array]]:
        def move(way: DeviceTransport) -> Steps[list[Array]]:
            table = yield from self.table(call, lengths or [0] * self.members.size)
            return (yield from way.alltoall(call, source, table))

        # The others' bytes are not known yet.
        return self._moved(call, 0, move, source)

    @prepared
    def _moved(
        self,
        call: Call,
        nbytes: int,
        move: Callable[[DeviceTransport], Steps[T]],
        source: Array,
        *out: Array,
    ) -> Move[T]:
        """A move, once all have agreed; through NCCL at its turn among the calls of all sets.

        The transport may depend on ``nbytes``, which are the same on all members.
        """
        yield Offer(source.nbytes)
        return (yield from self._agreed(call, nbytes, move, source, *out))

    def _agreed(
        self,
        call: Call,
        nbytes: int,
        move: Callable[[DeviceTransport], Steps[T]],
        source: Array,
        *out: Array,
    ) -> Steps[T]:
        """The steps of a move after all have agreed."""
        way = self._chosen.get((call.transport, nbytes >= self._large))
        if way is None:
            way = yield from self._transport(call, nbytes)
        else:
            call.transport = way.name
        call.held = [call.held, source, *out]
        # All ranks have the same process sets: making one is a call of all ranks.
        several = self.members.number or self.device.sets or self.own.divided
        ordered = call.transport == "nccl" and several and self.members.size > 1
        try:
            if ordered:
                yield from self.device.call_order.enter(call, self.host)
            yield from way.connect(call)
            result = yield from move(way)
            yield from way.confirm(call)
            return result
        finally:
            if ordered:
                self.device.call_order.leave(call)
