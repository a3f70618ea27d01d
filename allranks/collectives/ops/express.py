"""The short way for the commonest call: allreduce of a numpy array among the ranks of one host.

Runs in every rank. It does what the long way does, all checks included, with everything that
does not change from call to call looked up in a plan.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.arrays.reductions import Adasum, Arithmetic, ReduceOp, check, name_of
from allranks.collectives.calls import guard
from allranks.collectives.calls.call import Call
from allranks.collectives.calls.callsite import Site, here
from allranks.collectives.calls.offer import NOTHING, NOWHERE, Offer, Place
from allranks.collectives.calls.wait import drive
from allranks.collectives.host.agreement import MemoryAgreement
from allranks.collectives.host.channel import Channel
from allranks.collectives.host.shared import Shared
from allranks.collectives.host.window import place
from allranks.collectives.host.windowed import (
    Block,
    blocks,
    chunk,
    reduce_blocks,
    straight,
)
from allranks.collectives.world import World
from allranks.collectives.world.group import Group

Array = NDArray[Any]
_PLANS = 1024
_PLACES = 64
_USERS_FRAME = 3
"""Frames from `here` up to the caller of `allreduce`."""


class Plan:
    """What calls of the same op, dtype and shape have in common."""

    def __init__(
        self,
        this: World,
        group: Group,
        array: Array,
        op: ReduceOp,
        factors: tuple[float, float],
        looks: tuple[object, ...],
    ) -> None:
        check(op, array.dtype)
        channel = group.channel
        assert channel is not None
        dtype, shape = array.dtype, array.shape
        self.spec = guard.Spec(
            "allreduce", op.name, name_of(dtype), looks, -1, *factors, elements=array.size
        )
        self.fingerprint, self.text = guard.pack(self.spec)
        self.how = Arithmetic(op, dtype, group.size, *factors)
        self.nbytes, self.step = array.nbytes, chunk(dtype)
        self.straight = straight(group.size, array.nbytes, channel.block)
        self.fits = dtype.isnative and (self.straight or this.window is not None)
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

    def text_of(self, site: Site) -> bytes:
        """What this rank brings and from which line, packed."""
        if site is not self._site:
            self._site, self._laid_out = site, guard.pack_text(self.text, site)
        return self._laid_out


def express(
    this: World,
    group: Group,
    array: Array,
    op: ReduceOp,
    factors: tuple[float, float],
    name: str | None,
    shapes: guard.Shapes | None = None,
) -> Array | None:
    """The reduced array; None where this call has to go the long way.

    ``shapes`` are those of the arrays that lie in this one, which the ranks compare then.
    """
    agreement = group.agreement
    if not isinstance(agreement, MemoryAgreement) or this.pending or this.dirty or op is Adasum:
        return None
    if not array.flags.c_contiguous:
        return None
    looks = shapes or array.shape
    key = op, array.dtype, looks, factors
    plan: Plan | None = group.plans.get(key)
    if plan is None:
        if len(group.plans) >= _PLANS:
            group.plans.clear()
        plan = group.plans[key] = Plan(this, group, array, ReduceOp(op), factors, looks)
    if not plan.fits:
        return None
    with this.lock:
        call = Express(agreement, plan.spec, here(_USERS_FRAME), name or "", plan.nbytes)
        try:
            if plan.straight:
                out = np.empty(plan.shape, plan.dtype)
                _through_block(this, call, plan, agreement, array, out)
            else:
                shared = group.transports["shared"]
                assert isinstance(shared, Shared)
                out = shared.empty(plan.shape, plan.dtype)
                call.held = array, out
                _in_windows(this, call, plan, shared, agreement, array, out)
                call.held = None
        except BaseException as error:
            this.watch.rest()
            this.fail(call, error)
            raise
        call.ended = perf_counter()
        this.journal.add(call)
    return out


class Express(Call):
    """It ends with an arrival: nothing more has to be said of it."""

    transport = "shared"
    light = True


def _through_block(
    this: World, call: Call, plan: Plan, agreement: MemoryAgreement, array: Array, out: Array
) -> None:
    channel = agreement.channel
    turn = channel.turn ^ 1
    parts = plan.turns[turn]
    if plan.unscaled:
        parts[channel.me][...] = array
    else:
        plan.how.staged(array, parts[channel.me])
    text = plan.text_of(call.site) if this.checks else b""
    agreement.lay_out(call, plan.fingerprint, text, NOTHING)
    channel.turn = turn
    if not channel.arrive(call, this.spins):
        _wait(this, call, channel)
    agreement.compare(call, plan.fingerprint)
    if plan.pair is not None:
        plan.pair(parts[0], parts[1], out=out)
    else:
        plan.how.combine(parts, out)


def _in_windows(
    this: World,
    call: Call,
    plan: Plan,
    shared: Shared,
    agreement: MemoryAgreement,
    array: Array,
    out: Array,
) -> None:
    """As `Shared.allreduce`; where the members' arrays do not lie alike, as that goes on."""
    window, how, channel = shared.window, plan.how, shared.channel
    assert window is not None
    at, source_at = window.place_of(out), window.place_of(array)
    array, out = array.reshape(-1), out.reshape(-1)
    copied = not source_at[0] or not how.plain
    if copied and at[0]:
        how.staged(array[: plan.step], out[: plan.step])
    offer = Offer(plan.nbytes, place(at if copied else source_at, at), copied)
    text = plan.text_of(call.site) if this.checks else b""
    agreement.lay_out(call, plan.fingerprint, text, offer)
    _arrive(this, call, channel)
    agreement.compare(call, plan.fingerprint)
    call.offers = channel.offers(call.sequence)
    places = tuple([offer.place for offer in call.offers])
    if NOWHERE in places or any(offer.copied is not copied for offer in call.offers):
        steps = shared.in_windows(call, array, out, how, copied=copied)
        drive(steps, this.watch.attend, this.spin_seconds)  # type: ignore[arg-type]
        this.watch.rest()
        return
    todo = plan.found.get(places)
    if todo is None:
        if len(plan.found) >= _PLACES:
            plan.found.clear()
        todo = blocks(window, shared.members, places, array.size, array.dtype, copied=copied)
        plan.found[places] = todo
    for index, found in enumerate(todo):
        if index and copied:
            start = index * plan.step
            how.staged(array[start : start + plan.step], out[start : start + plan.step])
            _arrive(this, call, channel)
        reduce_blocks(found, how)
    _arrive(this, call, channel)


def _arrive(this: World, call: Call, channel: Channel) -> None:
    if not channel.arrive(call, this.spins):
        _wait(this, call, channel)


def _wait(this: World, call: Call, channel: Channel) -> None:
    drive(channel.others(call), this.watch.attend, this.spin_seconds)  # type: ignore[arg-type]
    this.watch.rest()
