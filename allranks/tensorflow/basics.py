"""Horovod's functions for ranks, sizes and built-in features. Runs in every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.collectives import ReduceOp, world
from allranks.errors import UsageError
from allranks.horovod import common
from allranks.tensorflow.graph_function import forget_orders
from allranks.tensorflow.ops import op_or_average
from allranks.tensorflow.tf_bridge import call_on_arrays

_timeline: list[str] = []


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None) -> None:
    """Makes this process a rank, like `allranks.collectives.init`; a second call does nothing.

    Args:
        comm: None for all processes of the job, a list of their ranks, or a communicator.
        process_sets: sets to register, the same on every rank.

    Collective over the ranks of ``comm``.
    """
    collectives.init(comm, process_sets)


def shutdown() -> None:
    """Ends this rank's collectives; collectives on other ranks raise `RankLeft`."""
    forget_orders()
    collectives.shutdown()


def mpi_threads_supported() -> bool:
    """Returns whether MPI may be called from several threads at once."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Returns True: ranks find each other by MPI."""
    return True


def gloo_enabled() -> bool:
    """Returns False: allranks does not use Gloo."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """Returns the version of the installed NCCL, as 22203 for 2.22.3; 0 without cupy or NCCL."""
    return common.nccl_version()


def cuda_built(verbose: bool = False) -> bool:
    """Returns whether TensorFlow was built for CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built(verbose: bool = False) -> bool:
    """Returns whether TensorFlow was built for ROCm."""
    return bool(tf.test.is_built_with_rocm())


def rank_op(name: str | None = None) -> Any:
    """Returns this rank's number when the graph runs, int32."""
    return _when_run(collectives.rank, name or "rank")


def local_rank_op(name: str | None = None) -> Any:
    """Returns this rank's place on its host when the graph runs, int32."""
    return _when_run(collectives.local_rank, name or "local_rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns the number of ranks, or of a process set's members, when the graph runs, int32."""
    return _when_run(lambda: len(_members(process_set_id)), name or "size")


def local_size_op(name: str | None = None) -> Any:
    """Returns the number of ranks on this host when the graph runs, int32."""
    return _when_run(collectives.local_size, name or "local_size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns 1 if this rank is in a process set when the graph runs, else 0, int32."""
    return _when_run(
        lambda: int(collectives.rank() in _members(process_set_id)), name or "process_set_included"
    )


def _when_run(function: Callable[[], int], name: str) -> Any:
    outputs = [tf.TensorSpec([], tf.int32)]
    return call_on_arrays(lambda: [np.int32(function())], [], outputs, name)[0]


def _members(process_set_id: int) -> Sequence[int]:
    if process_set_id == 0:
        return range(collectives.size())
    known = world.current().sets
    if process_set_id not in known:
        raise UsageError(
            f"process set {process_set_id} does not exist or has not been registered: there are "
            f"{[0, *sorted(known)]}. Register it on every rank: add_process_set(ranks)."
        )
    return known[process_set_id]


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts the timeline that `stop_timeline` writes.

    Args:
        file_path: a file on the first rank's host.
        mark_cycles: ignored, because there are no cycles.

    Raises:
        ValueError: a timeline has been started and not stopped.
    """
    if _timeline:
        raise ValueError(f"a timeline has been started already: {_timeline[0]}. Stop it first.")
    _timeline.append(str(Path(file_path)))


def stop_timeline() -> None:
    """Writes the timeline: a trace of all ranks' calls for Perfetto.

    Raises:
        ValueError: no timeline has been started.

    Collective over all ranks.
    """
    if not _timeline:
        raise ValueError("no timeline has been started. Call start_timeline(path) first.")
    collectives.timeline(_timeline.pop())


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Any:
    return tf.function(f)


def vars_to_refs(vars: Any) -> Any:
    """Returns the references of variables; a list becomes a tuple."""
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in vars)
    return vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Returns the variables of references; a tuple becomes a list."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Returns whether a number of ranks is 1, 2, 4, 8, …."""
    return common.num_rank_is_power_2(num_rank)


def handle_average_backwards_compatibility(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Returns the reduction that ``op`` or the deprecated ``average`` names; else Average.

    Raises:
        ValueError: both are given.
    """
    made: ReduceOp = op_or_average(op, average)
    return made
