"""Who is there and what is built in, by Horovod's names. Runs in every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.errors import UsageError
from allranks.tensorflow import turns
from allranks.tensorflow.crossing import cross

_timeline: list[str] = []


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None) -> None:
    """This process is a rank, as `allranks.collectives.init` has it; a second call does nothing.

    Args:
        comm: None for all processes of the job, a list of their ranks, or a communicator.
        process_sets: sets to register, the same on every rank.

    Collective over the ranks of ``comm``.
    """
    collectives.init(comm, process_sets)


def shutdown() -> None:
    """Collectives are over for this rank; the others hear that it has left."""
    turns.forget()
    collectives.shutdown()


def mpi_threads_supported() -> bool:
    """True where MPI may be called from several threads at once."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """True: ranks find each other by MPI."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """True: ranks find each other by MPI."""
    return True


def gloo_enabled() -> bool:
    """False: there is no Gloo."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """False: there is no Gloo."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """The version of the NCCL that is installed, as 22203 for 2.22.3; 0 where there is none."""
    try:
        from cupy.cuda import nccl
    except ImportError:
        return 0
    return int(nccl.get_version()) if getattr(nccl, "available", False) else 0


def ddl_built(verbose: bool = False) -> bool:
    """False: there is no DDL."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: there is no oneCCL."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """True where TensorFlow was built for CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built(verbose: bool = False) -> bool:
    """True where TensorFlow was built for ROCm."""
    return bool(tf.test.is_built_with_rocm())


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """True where TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def rank_op(name: str | None = None) -> Any:
    """This rank's number when the graph runs, int32."""
    return _asked(collectives.rank, name or "rank")


def local_rank_op(name: str | None = None) -> Any:
    """This rank's place on its host when the graph runs, int32."""
    return _asked(collectives.local_rank, name or "local_rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks, or of a process set's members, when the graph runs, int32."""
    return _asked(lambda: len(_members(process_set_id)), name or "size")


def local_size_op(name: str | None = None) -> Any:
    """The number of ranks on this host when the graph runs, int32."""
    return _asked(collectives.local_size, name or "local_size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 where this rank is in a process set when the graph runs, else 0, int32."""
    return _asked(
        lambda: int(collectives.rank() in _members(process_set_id)), name or "process_set_included"
    )


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """The calls from now on will be in the timeline that `stop_timeline` writes.

    Args:
        file_path: on the first rank's host.
        mark_cycles: accepted: there are no cycles.

    Raises:
        ValueError: one has been started and not stopped.
    """
    if _timeline:
        raise ValueError(f"a timeline has been started already: {_timeline[0]}. Stop it first.")
    _timeline.append(str(Path(file_path)))


def stop_timeline() -> None:
    """Writes the timeline: a trace of all ranks' calls for Perfetto.

    Raises:
        ValueError: none has been started.

    Collective over all ranks.
    """
    if not _timeline:
        raise ValueError("no timeline has been started. Call start_timeline(path) first.")
    collectives.timeline(_timeline.pop())


def _asked(question: Any, name: str) -> Any:
    return cross(lambda: [np.int32(question())], [], [tf.TensorSpec([], tf.int32)], name)[0]


def _members(process_set_id: int) -> Sequence[int]:
    from allranks.collectives import world

    if process_set_id == 0:
        return range(collectives.size())
    known = world.current().sets
    if process_set_id not in known:
        raise UsageError(
            f"process set {process_set_id} does not exist or has not been registered: there are "
            f"{[0, *sorted(known)]}. Register it on every rank: add_process_set(ranks)."
        )
    return known[process_set_id]
