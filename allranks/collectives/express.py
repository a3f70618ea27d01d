"""The short way for the commonest call: a small numpy array among the ranks of one host.

Runs in every rank. It does what the long way does, all checks included, with everything that
does not change from call to call looked up in a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives import guard
from allranks.collectives.call import Call
from allranks.collectives.callsite import here
from allranks.collectives.reductions import Adasum, Arithmetic, ReduceOp, check, name_of
from allranks.collectives.transports.shared import WINDOW_BYTES, reduces_by_slice
from allranks.collectives.wait import drive

if TYPE_CHECKING:
    from allranks.collectives.group import Group

_PLANS = 1024


class Plan:
    """What calls of the same op, dtype and shape have in common."""

    def __init__(
        self, group: Group, array: NDArray[Any], op: ReduceOp, factors: tuple[float, float]
    ) -> None:
        check(op, array.dtype)
        channel = group.channel
        self.spec = guard.Spec(
            "allreduce",
            op.name,
            name_of(array.dtype),
            array.shape,
            -1,
            guard.options(*factors, ""),
            array.size,
        )
        self.fingerprint, self.text = guard.pack(self.spec)
        self.how = Arithmetic(op, array.dtype, group.size, *factors)
        self.nbytes = array.nbytes
        self.fits = (
            channel is not None
            and array.nbytes <= channel.block
            and array.dtype.isnative
            and array.nbytes < WINDOW_BYTES
            and not reduces_by_slice(group.size, array.nbytes)
        )
        if channel is not None and self.fits:
            self.turns = [
                [part.reshape(array.shape) for part in channel.blocks_as(array.dtype, array.size, t)]
                for t in (0, 1)
            ]


def express(
    group: Group, array: NDArray[Any], op: ReduceOp, factors: tuple[float, float], name: str | None
) -> NDArray[Any] | None:
    """The reduced array; None where this call has to go the long way."""
    channel, world = group.channel, group.world
    if channel is None or world.pending or world.dirty or op is Adasum or not array.flags.c_contiguous:
        return None
    key = op, array.dtype, array.shape, factors
    plan = group.plans.get(key)
    if plan is None:
        if len(group.plans) >= _PLANS:
            group.plans.clear()
        plan = group.plans[key] = Plan(group, array, ReduceOp(op), factors)
    if not plan.fits:
        return None
    call = Call(group, plan.spec, here(), name or "", plan.nbytes)
    call.transport, call.light = "shared", True
    out = np.empty(array.shape, array.dtype)
    with world.lock:
        try:
            turn = channel.turn = channel.turn ^ 1
            parts = plan.turns[turn]
            plan.how.staged(array, parts[channel.me])
            group.lay_out(call, plan.fingerprint, plan.text)
            if not channel.arrive(call, world.spins):
                drive(channel.others(call), world.watch.attend, world.spin_seconds)  # type: ignore[arg-type]
                world.watch.rest()
            group.compare(call, plan.fingerprint)
            plan.how.combine(parts, out)
        except BaseException as error:
            world.watch.rest()
            world.fail(call, error)
            raise
        world.finish(call)
    return out
