"""Any picklable object between ranks, as bytes over a group's transport."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.collectives.calls.call import Call
from allranks.collectives.calls.guard import Spec
from allranks.collectives.calls.wait import Steps
from allranks.collectives.world.group import Group

Bytes = NDArray[np.uint8]


def dumps(value: object) -> Bytes:
    """An object as bytes; lambdas and classes of a notebook too, where cloudpickle is there."""
    try:
        from cloudpickle import dumps as pickled
    except ImportError:
        from pickle import dumps as pickled
    return np.frombuffer(pickled(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)


def loads(data: Bytes) -> Any:
    """The object that `dumps` was given."""
    return pickle.loads(data.tobytes())


def gather(
    group: Group,
    op: str,
    value: object,
    name: str | None = None,
    root: int = -1,
    alike: tuple[Any, ...] = (),
) -> Call:
    """A call that ends with the list of all members' objects, on all or on ``root`` (an index).

    ``alike``: what every member must bring the same of.
    """
    data = dumps(value)

    def steps(call: Call) -> Steps[list[Any] | None]:
        parts = yield from call.moved(group.choose(call).allgather, data, root=root)
        return [loads(part) for part in parts] if root in (-1, group.me) else None

    spec = Spec(op, root=_rank(group, root), shape=alike)
    return group.call(spec, name, data.nbytes * group.size, steps)


def broadcast(group: Group, op: str, value: object, name: str | None = None, root: int = 0) -> Call:
    """A call that ends with the root's object; ``root`` is a member's index."""
    data = dumps(value) if group.me == root else np.empty(0, np.uint8)

    def steps(call: Call) -> Steps[Any]:
        parts = yield from call.moved(group.choose(call).allgather, data)
        call.nbytes = parts[root].nbytes  # other members learn it here
        return value if group.me == root else loads(parts[root])

    return group.call(Spec(op, root=_rank(group, root)), name, data.nbytes, steps)


def alltoall(
    group: Group, op: str, values: list[Any], name: str | None = None, root: int = -1
) -> Call:
    """A call that ends with the objects meant for this member, from all or from ``root`` only."""
    pieces = [dumps(value) for value in values]
    data = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)

    def steps(call: Call) -> Steps[list[Any]]:
        lengths = [piece.nbytes for piece in pieces]
        parts = yield from call.moved(group.choose(call).alltoall, data, lengths, root)
        call.nbytes = max(data.nbytes, sum(part.nbytes for part in parts))
        return [loads(part) if part.size else None for part in parts]

    return group.call(Spec(op, root=_rank(group, root)), name, data.nbytes, steps)


def _rank(group: Group, root: int) -> int:
    return group.ranks[root] if root >= 0 else -1
