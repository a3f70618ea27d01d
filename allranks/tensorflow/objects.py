"""Any picklable object between ranks, by Horovod's names. Runs in every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allranks import collectives
from allranks.collectives import ProcessSet, global_process_set
from allranks.tensorflow.failures import published


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Every rank gets a copy of the root's object; the root gets the object itself.

    Args:
        obj: anything that pickle or cloudpickle takes; it counts on the root only.
        root_rank: a rank of the world, the same on every rank.
        session: accepted: objects do not pass through TensorFlow.
        name: for the timeline.
        process_set: whose ranks take part.

    Collective over the process set.
    """
    with published():
        return collectives.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function of one object that is `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every rank gets the list of all ranks' objects, in the order of the ranks.

    Collective over the process set.
    """
    with published():
        return collectives.allgather_object(obj, name=name, process_set=process_set)
