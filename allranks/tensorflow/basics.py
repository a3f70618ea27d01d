"""Horovod's functions for ranks, variables and objects. Runs in every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.collectives import ProcessSet, ReduceOp, global_process_set, world
from allranks.errors import UsageError
from allranks.horovod import common
from allranks.keras.variables import broadcast_arrays, check_alike, describe
from allranks.tensorflow.graph_errors import with_tensorflows_errors
from allranks.tensorflow.ops import op_or_average
from allranks.tensorflow.tf_bridge import Array, call_on_arrays, forget_orders, spec_of

# The end of messages about functions that need a graph of TensorFlow 1.
FOR_VERSION_1 = (
    "A script for TensorFlow 1 runs after %env ALLRANKS_TENSORFLOW=1 and %distributed restart in "
    "the notebook, or with ALLRANKS_TENSORFLOW=1 before the command in a shell."
)

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


def handle_average_backwards_compatibility(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Returns the reduction that ``op`` or the deprecated ``average`` names; else Average.

    Raises:
        ValueError: both are given.
    """
    made: ReduceOp = op_or_average(op, average)
    return made


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Assigns the root's values to the variables of every rank.

    Args:
        variables: of TensorFlow or Keras; the same number, shapes and dtypes on every rank.
        root_rank: a rank of the world, the same on every rank.
        process_set: the ranks that take part.
        inplace: ignored, because variables always keep their identity.

    Returns:
        None when eager; in a graph the operation that broadcasts.

    Raises:
        CollectiveMismatch: the variables differ between ranks; the message names them.
        UsageError: an argument is not a variable.

    Collective over the process set.
    """
    return _broadcast_variables(_checked(variables), int(root_rank), process_set, None)


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Like `broadcast_variables`; returns the variables.

    Args:
        name: the name of the operation; in a session the ranks match operations by name.
    """
    found = _checked(variables)
    done = _broadcast_variables(found, int(root_rank), process_set, name)
    if done is None:
        return found
    with tf.control_dependencies([done]):
        return [tf.identity(variable) for variable in found]


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation that broadcasts all variables of a TensorFlow 1 graph.

    Raises:
        RuntimeError: TensorFlow executes eagerly, so there is no graph.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() needs a graph of TensorFlow 1, and TensorFlow executes "
            "eagerly: there are no global variables. Use "
            "broadcast_variables(model.variables, root_rank=0), or in model.fit() the callback "
            f"BroadcastGlobalVariablesCallback(0). {FOR_VERSION_1}"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables when a session has been created.

    Args:
        root_rank: a rank of the world, the same on every rank.
        device: ignored.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._operation: Any = None
        self._graph: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph, once per graph."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._graph is not graph:
            self._graph = graph
            self._operation = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the broadcast. Collective over all ranks."""
        session.run(self._operation)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns a copy of the root's object; on the root the object itself.

    Args:
        obj: any object that pickle or cloudpickle supports; only the root's is used.
        root_rank: a rank of the world, the same on every rank.
        session: ignored, because objects do not pass through TensorFlow.
        name: for the timeline.
        process_set: the ranks that take part.

    Collective over the process set.
    """
    with with_tensorflows_errors():
        return collectives.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function of one object that calls `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the list of all ranks' objects, in the order of the ranks.

    Collective over the process set.
    """
    with with_tensorflows_errors():
        return collectives.allgather_object(obj, name=name, process_set=process_set)


def _checked(variables: Any) -> list[Any]:
    # A single variable is iterable, but yields its rows, so it is an error.
    one = hasattr(variables, "assign") or not isinstance(variables, Iterable)
    found = [] if one else list(variables)
    wrong = [variables] if one else [each for each in found if not hasattr(each, "assign")]
    if wrong:
        raise UsageError(
            f"broadcast_variables needs a list of variables: found {type(wrong[0]).__name__}"
            f"{'' if one else ' in it'}. Type for example: "
            "broadcast_variables(model.variables, root_rank=0)"
        )
    return found


def _broadcast_variables(
    found: list[Any], root: int, process_set: ProcessSet, name: str | None
) -> Any:
    described = [describe(variable) for variable in found]

    def move(*arrays: Array) -> list[Array]:
        # Variables of other shapes may have the same total size, and their values would be mixed.
        check_alike(described, process_set)
        return broadcast_arrays(arrays, root, process_set)

    sources = [tf.convert_to_tensor(variable) for variable in found]
    if not sources:
        if tf.executing_eagerly():
            check_alike(described, process_set)
            return None
        return tf.no_op()
    specs = [spec_of(source) for source in sources]
    if name is None:
        # In a session the ranks match operations by name, so the name is the variable's.
        name = "broadcast_" + (
            described[0][0] if len(found) == 1 and described[0][0] else "variables"
        )
    pairs = zip(found, call_on_arrays(move, sources, specs, name, process_set), strict=True)
    if tf.executing_eagerly() or tf.inside_function():
        for variable, value in pairs:
            variable.assign(value)
        return None
    return tf.group(*(tf.compat.v1.assign(variable, value) for variable, value in pairs))
