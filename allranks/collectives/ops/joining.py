"""join: ranks without data take part with zeros.

A rank that has joined answers the others' allreduces until all have joined. It reads their
arguments where they are published for comparison.
"""

from __future__ import annotations

import numpy as np

from allranks.collectives import world
from allranks.collectives.arrays.libraries import to_dtype
from allranks.collectives.arrays.reductions import Arithmetic, ReduceOp
from allranks.collectives.calls.call import Call, Offer, Steps
from allranks.collectives.calls.guard import JOIN, Spec
from allranks.collectives.host.shared_memory import one_block_bytes
from allranks.collectives.ops.inputs import read_inputs
from allranks.collectives.world.world import Group
from allranks.errors import UsageError


def join() -> int:
    """This rank has no more data: until all ranks have joined, it adds zeros to their allreduces.

    Average still divides by the number of all ranks. Only allreduce with Sum or Average continues;
    any other operation of a rank that has not joined raises `CollectiveMismatch` on all.

    Returns:
        The rank that joined last, the same on every rank.

    Raises:
        UsageError: the ranks share no memory, or checks are off.

    Collective over all ranks.
    """
    this = world.current()
    group = this.groups[0]
    if group.channel is None or this.window is None or not this.checks:
        raise UsageError(
            "join() needs ranks that share a host's memory, and checks: found "
            f"{len(set(this.hosts))} hosts, checks {'on' if this.checks else 'off'}. "
            "Give every rank the same number of batches instead: drop the remainder."
        )
    answered = 0
    while True:
        call = group.call(JOIN, "join")
        call.steps = _steps(group, call, answered)
        answered += 1
        last: int | None = this.run(call)
        if last is not None:
            return last


def _steps(group: Group, call: Call, answered: int) -> Steps[int | None]:
    """One call of the others; its result is the last rank to join, once all have."""
    channel = group.channel
    assert channel is not None
    before = channel.turn
    turn = before ^ 1
    # These bytes are zero in every dtype.
    channel.blocks[group.me][turn][:] = 0
    call.transport = "shared"
    yield from call.agreed(Offer(answered=answered))
    channel.turn = turn
    brought = channel.brought(call).values()
    theirs = next((spec for spec, _ in brought if spec != JOIN), None)
    if theirs is None:
        # The rank that joined last has answered the fewest calls.
        answers = [offer.answered for offer in call.agreement.offers(call)]
        return max(r for r, n in zip(group.ranks, answers, strict=True) if n == min(answers))
    yield from _contribute(group, call, theirs, before)
    return None


def _contribute(group: Group, call: Call, spec: Spec, before: int) -> Steps[None]:
    channel, dtype = group.channel, to_dtype(spec.dtype)
    assert channel is not None
    zeros = np.zeros(spec.elements, dtype)
    device = None
    if spec.device:
        inputs = read_inputs("join", [zeros], None, "/gpu:0")
        (zeros,), device = inputs.sources, inputs.gpu
    transport = group.choose(call, spec.transport, device)
    nbytes = spec.elements * dtype.itemsize
    if transport.name == "shared" and nbytes <= one_block_bytes(group.size, channel.block):
        return
    channel.turn = before
    reduction = Arithmetic(
        ReduceOp[spec.reduction], dtype, group.size, spec.prescale, spec.postscale
    )
    if transport.name == "shared":
        # These zeros are in no window, so the other ranks reduce through blocks too.
        yield from call.moved(transport.allreduce, zeros, reduction)
    else:
        _, rest = transport.allreduce(call, zeros, reduction)
        assert not callable(rest)
        yield from rest
