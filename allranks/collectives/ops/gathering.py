"""allgather and gather of arrays on a GPU: their rows are told on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from allranks.collectives.calls.call import Call
from allranks.collectives.calls.wait import Steps
from allranks.collectives.ops.taking import Taken
from allranks.collectives.world.group import Group


def gather_on_gpu(group: Group, call: Call, taken: Taken, root: int) -> Steps[list[Any]]:
    """The steps of a gather of one array or of several; ends with a list, or Nones off the root.

    Args:
        group: the members.
        call: whose steps they are.
        taken: the arrays, (rows, ...) each.
        root: the index of the member that gets all; -1 for every member.
    """
    transport = group.choose(call, taken.transport, taken.gpu)
    gpus = group.gpu
    assert gpus is not None
    yield from call.agreed()
    mine = np.array([len(source) for source in taken.sources], np.int64)
    told = [np.frombuffer(one, np.int64) for one in (yield from gpus.tell(call, mine.tobytes()))]
    outs: list[Any] = []
    for index, source in enumerate(taken.sources):
        rows = [int(counts[index]) for counts in told]
        width = int(np.prod(source.shape[1:])) * source.itemsize
        data = source.reshape(-1).view(np.uint8)
        lengths = [count * width for count in rows]
        parts = yield from call.moved(transport.allgather, data, lengths, root)
        if root in (-1, group.me):
            whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
            shaped = whole.view(source.dtype).reshape(sum(rows), *source.shape[1:])
            outs.append(taken.restores[index](shaped))
        else:
            outs.append(None)
    return outs
