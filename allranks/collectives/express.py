"""The short way for the commonest call: allreduce of a numpy array among the ranks of one host.

Runs in every rank. It does what the long way does, all checks included, with everything that
does not change from call to call looked up in a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from allranks.collectives import guard
from allranks.collectives.call import Call
from allranks.collectives.callsite import here
from allranks.collectives.channel import NOWHERE, Place
from allranks.collectives.reductions import Adasum, Arithmetic, ReduceOp, check, name_of
from allranks.collectives.transports.shared import Shared
from allranks.collectives.transports.windowed import (
    Block,
    blocks,
    chunk,
    reduce_blocks,
    straight,
)
from allranks.collectives.wait import drive
from allranks.collectives.window import place

if TYPE_CHECKING:
    from allranks.collectives.channel import Channel
    from allranks.collectives.group import Group

Array = NDArray[Any]
_PLANS = 1024
_PLACES = 64


class Plan:
    """What calls of the same op, dtype and shape have in common."""

    def __init__(
        self, group: Group, array: Array, op: ReduceOp, factors: tuple[float, float]
    ) -> None:
        check(op, array.dtype)
        channel = group.channel
        assert channel is not None
        options = guard.options(*factors, "")
        dtype, shape = array.dtype, array.shape
        self.spec = guard.Spec("allreduce", op.name, name_of(dtype), shape, -1, options, array.size)
        self.fingerprint, self.text = guard.pack(self.spec)
        self.how = Arithmetic(op, dtype, group.size, *factors)
        self.nbytes, self.step = array.nbytes, chunk(dtype)
        self.straight = straight(group.size, array.nbytes, channel.block)
        self.fits = dtype.isnative and (self.straight or group.world.window is not None)
        self.turns: list[list[Array]] = []
        if self.straight:
            self.turns = [
                [part.reshape(shape) for part in channel.blocks_as(dtype, array.size, turn)]
                for turn in (0, 1)
            ]
        self.found: dict[tuple[Place, ...], list[list[Block]]] = {}


def express(
    group: Group, array: Array, op: ReduceOp, factors: tuple[float, float], name: str | None
) -> Array | None:
    """The reduced array; None where this call has to go the long way."""
    channel, world = group.channel, group.world
    if channel is None or world.pending or world.dirty or op is Adasum:
        return None
    if not array.flags.c_contiguous:
        return None
    key = op, array.dtype, array.shape, factors
    plan = group.plans.get(key)
    if plan is None:
        if len(group.plans) >= _PLANS:
            group.plans.clear()
        plan = group.plans[key] = Plan(group, array, ReduceOp(op), factors)
    if not plan.fits:
        return None
    with world.lock:
        call = Call(group, plan.spec, here(), name or "", plan.nbytes)
        call.transport, call.light = "shared", True
        out = group.empty(array.shape, array.dtype)
        try:
            if plan.straight:
                _through_block(call, plan, channel, array, out)
            else:
                _in_windows(call, plan, channel, array.reshape(-1), out.reshape(-1))
        except BaseException as error:
            call.held = array, out
            world.watch.rest()
            world.fail(call, error)
            raise
        world.finish(call)
    return out


def _through_block(call: Call, plan: Plan, channel: Channel, array: Array, out: Array) -> None:
    turn = channel.turn = channel.turn ^ 1
    parts = plan.turns[turn]
    plan.how.staged(array, parts[channel.me])
    call.group.lay_out(call, plan.fingerprint, plan.text)
    _arrive(call, channel)
    call.group.compare(call, plan.fingerprint)
    plan.how.combine(parts, out)


def _in_windows(call: Call, plan: Plan, channel: Channel, array: Array, out: Array) -> None:
    """As `Shared.allreduce`; where the members' arrays do not lie alike, as that goes on."""
    window, how, group = call.group.world.window, plan.how, call.group
    assert window is not None
    at, source_at = window.place_of(out), window.place_of(array)
    copied = not source_at[0] or not how.plain
    if copied and at[0]:
        how.staged(array[: plan.step], out[: plan.step])
    where = place(at if copied else source_at, at)
    group.lay_out(call, plan.fingerprint, plan.text, int(copied), where)
    _arrive(call, channel)
    group.compare(call, plan.fingerprint)
    places = tuple(channel.places(call.sequence))
    extents = channel.extents(call.sequence)
    if NOWHERE in places or extents.count(int(copied)) != len(extents):
        call.places, call.extents = list(places), extents
        world, shared = group.world, group.transports["shared"]
        assert isinstance(shared, Shared)
        steps = shared.in_windows(call, array, out, how, copied=copied)
        drive(steps, world.watch.attend, world.spin_seconds)  # type: ignore[arg-type]
        world.watch.rest()
        return
    todo = plan.found.get(places)
    if todo is None:
        if len(plan.found) >= _PLACES:
            plan.found.clear()
        todo = blocks(group, list(places), array.size, array.dtype, copied=copied)
        plan.found[places] = todo
    for index, found in enumerate(todo):
        if index and copied:
            start = index * plan.step
            how.staged(array[start : start + plan.step], out[start : start + plan.step])
            _arrive(call, channel)
        reduce_blocks(found, how)
    _arrive(call, channel)


def _arrive(call: Call, channel: Channel) -> None:
    world = call.group.world
    if not channel.arrive(call, world.spins):
        drive(channel.others(call), world.watch.attend, world.spin_seconds)  # type: ignore[arg-type]
        world.watch.rest()
