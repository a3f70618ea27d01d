"""allgather and gather of arrays on a GPU: their rows are told on the host. Runs in every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from allranks.collectives.gpu.side import tell

if TYPE_CHECKING:
    from allranks.collectives.calls.call import Call
    from allranks.collectives.calls.wait import Steps
    from allranks.collectives.ops.taking import Taken


def gather_on_gpu(call: Call, taken: Taken, root: int) -> Steps[list[Any]]:
    """The steps of a gather of one array or of several; ends with a list, or Nones off the root.

    Args:
        call: whose steps they are.
        taken: the arrays, (rows, ...) each.
        root: the index of the member that gets all; -1 for every member.
    """
    group = call.group
    way = group.choose(call.nbytes, call, taken.transport, on_gpu=True)
    yield from group.agree(call, sum(source.nbytes for source in taken.sources))
    mine = np.array([len(source) for source in taken.sources], np.int64)
    told = [np.frombuffer(one, np.int64) for one in (yield from tell(call, mine.tobytes()))]
    outs: list[Any] = []
    for index, source in enumerate(taken.sources):
        rows = [int(counts[index]) for counts in told]
        width = int(np.prod(source.shape[1:])) * source.itemsize
        data = source.reshape(-1).view(np.uint8)
        parts = yield from way.allgather(call, data, [count * width for count in rows], root)
        if root in (-1, group.me):
            whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
            shaped = whole.view(source.dtype).reshape(sum(rows), *source.shape[1:])
            outs.append(taken.restores[index](shaped))
        else:
            outs.append(None)
    return outs
