# ruff: noqa: E501  a row of the page is a row here
"""Every name of Horovod 0.28, what it is here, and how `horovod_suite` tries it.

The tables of docs/horovod.md are made from this:

    python tests/mpi/ranks/horovod_names.py docs/horovod.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

EAGER, FUNCTION, SESSION = "eager", "tf.function", "session"
ALL = (EAGER, FUNCTION, SESSION)
TWO = (EAGER, FUNCTION)


class Row(NamedTuple):
    """Names that are alike.

    Attributes:
        names: divided by blanks.
        tried: where `horovod_suite` has a case for each of them; nowhere where they are not here.
        note: how they differ from Horovod's, or what to use; empty where they are the same.
        differs: whether the note says that they differ.
    """

    names: str
    tried: tuple[str, ...]
    note: str = ""
    differs: bool = False

    @property
    def here(self) -> str:
        """As the table has it."""
        if not self.tried:
            return "not here"
        return "differs" if self.differs else "works"

    def line(self) -> str:
        """The row of the table."""
        names = ", ".join(f"`{name}`" for name in self.names.split())
        where = ", ".join(f"`{one}`" if "." in one else one for one in self.tried)
        return f"| {names} | {self.here} | {where or '–'} | {self.note} |".replace("|  |", "| |")


SETS = (
    'sets may be added at any time; `process_sets="dynamic"` is accepted; ranks or a communicator'
)
MODULES: dict[str, tuple[Row, ...]] = {
    "horovod.tensorflow": (
        Row(
            "init is_initialized",
            ALL,
            "a further `init(process_sets=…)`, in a cell for example, registers these",
            True,
        ),
        Row("rank size local_rank local_size cross_rank cross_size is_homogeneous", ALL),
        Row("shutdown", ALL, "in a cell it does nothing: the next cell needs the ranks", True),
        Row(
            "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built gpu_available",
            ALL,
            "there is MPI; there is no Gloo, DDL or oneCCL",
        ),
        Row(
            "start_timeline stop_timeline",
            (EAGER,),
            "the file is written by `stop_timeline`; no variable has to be set before; there are no cycles to mark",
            True,
        ),
        Row("Average Sum Adasum Min Max Product", ALL),
        Row("Compression", ALL),
        Row(
            "allreduce grouped_allreduce allgather grouped_allgather broadcast alltoall reducescatter grouped_reducescatter",
            ALL,
            'calls that disagree raise `CollectiveMismatch`, which is a `tf.errors.FailedPreconditionError` too, and arguments that are wrong `UsageError`, a `tf.errors.InvalidArgumentError` and a `ValueError`; `device_dense` and `device_sparse` are "/cpu:0" for host memory, "" for where the tensor is, GPU or not: there is nothing to build in for it; more dtypes',
            True,
        ),
        Row("join", ALL, "needs ranks that share a host; in a session when all ranks run it", True),
        Row("broadcast_ broadcast_variables", ALL, "Keras' variables too"),
        Row("broadcast_object allgather_object broadcast_object_fn", (EAGER, SESSION)),
        Row(
            "broadcast_global_variables BroadcastGlobalVariablesHook",
            (SESSION,),
            "in graphs of TensorFlow 1",
        ),
        Row("rank_op local_rank_op size_op local_size_op process_set_included_op", ALL),
        Row("ProcessSet global_process_set add_process_set remove_process_set", ALL, SETS, True),
        Row(
            "DistributedOptimizer",
            ALL,
            "the optimizer itself becomes distributed and keeps its state; gradients are averaged before they are clipped; all move together, so that `groups` changes nothing",
            True,
        ),
        Row("PartialDistributedOptimizer", TWO),
        Row("DistributedGradientTape PartialDistributedGradientTape", ALL),
        Row(
            "SyncBatchNormalization",
            TWO,
            "counts each rank's rows, so that batches may differ in length",
            True,
        ),
        Row("elastic", TWO, "see [below](#horovodtensorflowelastic)", True),
        Row(
            "check_num_rank_power_of_2 handle_average_backwards_compatibility vars_to_refs refs_to_vars util",
            (EAGER,),
        ),
        Row("LocalGradientAggregationHelper", (), "a part of Horovod's inside"),
    ),
    "horovod.tensorflow.keras": (
        Row(
            "init shutdown is_initialized rank size local_rank local_size cross_rank cross_size start_timeline stop_timeline",
            (EAGER,),
            "as in `horovod.tensorflow`",
        ),
        Row(
            "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built",
            (EAGER,),
        ),
        Row("ProcessSet global_process_set add_process_set remove_process_set", (EAGER,)),
        Row("Average Sum Adasum Compression", (EAGER,)),
        Row(
            "DistributedOptimizer PartialDistributedOptimizer",
            TWO,
            "as in `horovod.tensorflow`; a step is not compiled by XLA, whatever `jit_compile` says",
            True,
        ),
        Row("allreduce allgather broadcast reducescatter", TWO, "of numbers, lists and arrays"),
        Row(
            "broadcast_global_variables",
            (SESSION,),
            "in graphs of TensorFlow 1; with Keras 3 use the callback",
            True,
        ),
        Row(
            "load_model",
            TWO,
            "the optimizer keeps its state; `legacy_opts=True` is for Keras 2",
            True,
        ),
        Row("callbacks elastic", TWO),
    ),
    "horovod.tensorflow.keras.callbacks": (
        Row(
            "BroadcastGlobalVariablesCallback",
            TWO,
            "broadcasts before the first step where the model is built by then; says where ranks would train for different numbers of steps",
            True,
        ),
        Row("MetricAverageCallback", TWO),
        Row(
            "LearningRateScheduleCallback LearningRateWarmupCallback",
            TWO,
            "`initial_lr` may be left out",
        ),
        Row("BestModelCheckpoint", TWO, "needs a `filepath`; the first rank writes", True),
        Row("LiveCurvesCallback", TWO, "not Horovod's: metrics as [live curves](dashboard.md)"),
    ),
    "horovod.tensorflow.elastic": (
        Row(
            "run",
            TWO,
            "goes back to the last commit when a collective has failed on every rank, at most three times without a commit between; where a rank has left, the state is restored and the exception goes on; in a notebook [the cell runs again](failures.md#continuing-a-training) where a rank has died",
            True,
        ),
        Row("TensorFlowState TensorFlowKerasState", TWO),
    ),
    "horovod.tensorflow.keras.elastic": (
        Row("run KerasState CommitStateCallback UpdateEpochStateCallback", TWO),
        Row(
            "UpdateBatchStateCallback",
            TWO,
            "Keras 3 does not let a callback shorten an epoch: pass `steps_per_epoch=steps - state.batch`",
            True,
        ),
    ),
    "horovod": (
        Row(
            "run",
            (EAGER,),
            "see [above](#a-function-on-ranks); arguments for changing numbers of ranks, and for other hosts, are refused",
            True,
        ),
        Row("__version__", (EAGER,), "`0.28.1`, whose functions these are"),
    ),
    "horovod.common.exceptions": (
        Row("HorovodInternalError HostsUpdatedInterrupt", (EAGER,)),
        Row(
            "HorovodVersionMismatchError get_version_mismatch_message",
            (EAGER,),
            "nothing raises it: nothing was compiled that could be of another version",
        ),
    ),
    "horovod.common.elastic": (
        Row(
            "State ObjectState run_fn",
            (EAGER,),
            "`bcast_object` and `get_rank` may be left out",
            True,
        ),
    ),
    "horovod.common.util": (
        Row(
            "extension_available gpu_available mpi_built gloo_built nccl_built ddl_built ccl_built env is_iterable split_list num_rank_is_power_2 is_version_greater_equal_than check_extension get_ext_suffix",
            (EAGER,),
        ),
    ),
}
_BETWEEN = re.compile(r"(^### (horovod\S*)\n.*?)(^\| name \|.*?)(?=\n\n)", re.MULTILINE | re.DOTALL)


def table(module: str) -> str:
    """The table of a module, as Markdown."""
    head = ["| name | here | tried | note |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *(row.line() for row in MODULES[module])])


def page(text: str) -> str:
    """The page with its tables made anew."""
    return _BETWEEN.sub(lambda found: found[1] + table(found[2]), text)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
