"""The short way for the commonest call: allreduce of a numpy array among the ranks of one host.

Runs in every rank. It does what the long way does, all checks included, with everything that
does not change from call to call looked up in a plan.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.arrays.reductions import Adasum, Arithmetic, ReduceOp, check, name_of
from allranks.collectives.calls import guard
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.callsite import Site, here
from allranks.collectives.calls.wait import drive
from allranks.collectives.host.channel import NOWHERE, Place
from allranks.collectives.host.shared import Shared
from allranks.collectives.host.window import place
from allranks.collectives.host.windowed import (
    Block,
    blocks,
    chunk,
    reduce_blocks,
    straight,
)

if TYPE_CHECKING:
    from allranks.collectives.host.channel import Channel
    from allranks.collectives.world.group import Group
    from allranks.collectives.world.world import World

Array = NDArray[Any]
_PLANS = 1024
_PLACES = 64
_USERS_FRAME = 3
"""Frames from `here` up to the caller of `allreduce`."""


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
        self.dtype, self.shape = dtype, shape
        self.unscaled = self.how.prescale == 1.0
        bare = group.size == 2 and not self.how.half and not self.how.scaled
        self.pair = self.how.ufunc if bare else None
        """What makes one of two members' blocks, where that is all there is to do."""
        self._site: Site | None = None
        self._laid_out = b""

    def text_of(self, site: Site, world: World) -> bytes:
        """What this rank brings and from which line, packed; nothing where checks are off."""
        if not world.checks:
            return b""
        if site is not self._site:
            self._site, self._laid_out = site, guard.pack_text(self.text, site)
        return self._laid_out


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
        call = Express(group, plan.spec, here(_USERS_FRAME), name or "", plan.nbytes)
        try:
            if plan.straight:
                out = np.empty(plan.shape, plan.dtype)
                _through_block(call, plan, channel, array, out)
            else:
                out = group.empty(plan.shape, plan.dtype)
                call.held = array, out
                _in_windows(call, plan, channel, array, out)
                call.held = None
        except BaseException as error:
            world.watch.rest()
            world.fail(call, error)
            raise
        call.ended = perf_counter()
        world.recorder.add(call)
    return out


class Express(Call):
    """It ends with an arrival: nothing more has to be said of it."""

    transport = "shared"
    light = True


def _through_block(call: Call, plan: Plan, channel: Channel, array: Array, out: Array) -> None:
    group = call.group
    turn = channel.turn ^ 1
    parts = plan.turns[turn]
    if plan.unscaled:
        parts[channel.me][...] = array
    else:
        plan.how.staged(array, parts[channel.me])
    group.lay_out(call, plan.fingerprint, plan.text_of(call.site, group.world))
    channel.turn = turn
    if not channel.arrive(call, group.world.spins):
        _wait(call, channel)
    group.compare(call, plan.fingerprint)
    if plan.pair is not None:
        plan.pair(parts[0], parts[1], out=out)
    else:
        plan.how.combine(parts, out)


def _in_windows(call: Call, plan: Plan, channel: Channel, array: Array, out: Array) -> None:
    """As `Shared.allreduce`; where the members' arrays do not lie alike, as that goes on."""
    window, how, group = call.group.world.window, plan.how, call.group
    assert window is not None
    at, source_at = window.place_of(out), window.place_of(array)
    array, out = array.reshape(-1), out.reshape(-1)
    copied = not source_at[0] or not how.plain
    if copied and at[0]:
        how.staged(array[: plan.step], out[: plan.step])
    where = place(at if copied else source_at, at)
    text = plan.text_of(call.site, group.world)
    group.lay_out(call, plan.fingerprint, text, int(copied), where)
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
    if not channel.arrive(call, call.group.world.spins):
        _wait(call, channel)


def _wait(call: Call, channel: Channel) -> None:
    world = call.group.world
    drive(channel.others(call), world.watch.attend, world.spin_seconds)  # type: ignore[arg-type]
    world.watch.rest()
