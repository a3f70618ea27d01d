# ruff: noqa: E501  one line for each row of the page
"""Every name of Horovod 0.28, its differences in allranks, and how `names_suite` tests it.

This command writes the tables of docs/horovod.md from the rows below:

    python tests/horovod/names.py docs/horovod.md
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
    """A row of a table: names with the same properties.

    Attributes:
        names: separated by blanks.
        tried: the modes in which `names_suite` tests each of them; empty for missing names.
        note: the differences from Horovod, or an alternative; may be empty.
        differs: whether the names differ from Horovod's.
    """

    names: str
    tried: tuple[str, ...]
    note: str = ""
    differs: bool = False

    @property
    def here(self) -> str:
        """The text of the column "here"."""
        if not self.tried:
            return "not here"
        return "differs" if self.differs else "works"

    def line(self) -> str:
        """The row of the table."""
        names = ", ".join(f"`{name}`" for name in self.names.split())
        where = ", ".join(f"`{one}`" if "." in one else one for one in self.tried)
        return f"| {names} | {self.here} | {where or '–'} | {self.note} |".replace("|  |", "| |")


SETS = 'sets can be added at any time; `process_sets="dynamic"` is accepted; a set is made of ranks or of a communicator; for ranks that are registered already, the existing set is returned'
MODULES: dict[str, tuple[Row, ...]] = {
    "horovod.tensorflow": (
        Row(
            "init is_initialized",
            ALL,
            "a second `init(process_sets=…)`, in a cell for example, registers these sets",
            True,
        ),
        Row("rank size local_rank local_size cross_rank cross_size is_homogeneous", ALL),
        Row("shutdown", ALL, "does nothing in a cell, because the next cell needs the ranks", True),
        Row(
            "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built gpu_available",
            ALL,
            "MPI is available; Gloo, DDL and oneCCL are not",
        ),
        Row(
            "start_timeline stop_timeline",
            (EAGER,),
            "`stop_timeline` writes the file; no environment variable is needed; `mark_cycles` is ignored",
            True,
        ),
        Row("Average Sum Adasum Min Max Product", ALL),
        Row("Compression", ALL),
        Row(
            "allreduce grouped_allreduce allgather grouped_allgather broadcast alltoall reducescatter grouped_reducescatter",
            ALL,
            'different calls raise `CollectiveMismatch`, which is also a `tf.errors.FailedPreconditionError`; wrong arguments raise `UsageError`, which is also a `tf.errors.InvalidArgumentError` and a `ValueError`; `device_dense` and `device_sparse` work without a special build: "/cpu:0" is host memory, "" is the device of the tensor; more dtypes',
            True,
        ),
        Row("join", ALL, "all ranks must be on one host; in a session all ranks must run it", True),
        Row("broadcast_ broadcast_variables", ALL, "also for variables of Keras"),
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
            "the optimizer itself becomes distributed and keeps its state; gradients are averaged before they are clipped; all gradients move together, so `groups` has no effect; a rank outside `process_set` keeps its own gradients with an optimizer of TensorFlow 1 or Keras 2, and raises an error with Keras 3",
            True,
        ),
        Row("PartialDistributedOptimizer", TWO),
        Row(
            "DistributedGradientTape PartialDistributedGradientTape",
            ALL,
            "a rank outside `process_set` keeps its own gradients",
        ),
        Row(
            "SyncBatchNormalization",
            TWO,
            "batches may have different lengths, because each rank's rows are counted",
            True,
        ),
        Row("elastic", TWO, "see [below](#horovodtensorflowelastic)", True),
        Row(
            "check_num_rank_power_of_2 handle_average_backwards_compatibility vars_to_refs refs_to_vars util",
            (EAGER,),
        ),
        Row("LocalGradientAggregationHelper", (), "internal to Horovod"),
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
            "as in `horovod.tensorflow`; XLA does not compile a step, also with `jit_compile=True`",
            True,
        ),
        Row(
            "allreduce allgather broadcast reducescatter",
            TWO,
            "for numbers, lists and arrays; they return a tensor",
        ),
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
            "broadcasts before the first step if the model is built; raises if the numbers of steps differ between ranks",
            True,
        ),
        Row("MetricAverageCallback", TWO),
        Row(
            "LearningRateScheduleCallback LearningRateWarmupCallback",
            TWO,
            "`initial_lr` may be left out",
        ),
        Row("BestModelCheckpoint", TWO, "needs a `filepath`; the first rank writes", True),
        Row(
            "LiveCurvesCallback",
            TWO,
            "not in Horovod; draws metrics as [live curves](dashboard.md)",
        ),
    ),
    "horovod.tensorflow.elastic": (
        Row(
            "run",
            TWO,
            "goes back to the last commit if a collective fails on every rank, at most three times without a commit between; if a rank has left, the state is restored and the exception is raised; in a notebook [the cell runs again](failures.md#continuing-a-training) after a rank has died",
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
            "see [above](#a-function-on-ranks); arguments for a changing number of ranks and for other hosts are refused",
            True,
        ),
        Row("__version__", (EAGER,), "`0.28.1`, the version with the same functions"),
    ),
    "horovod.common.exceptions": (
        Row("HorovodInternalError HostsUpdatedInterrupt", (EAGER,)),
        Row(
            "HorovodVersionMismatchError get_version_mismatch_message",
            (EAGER,),
            "never raised, because allranks compiles nothing",
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
    """Returns the table of a module in Markdown."""
    head = ["| name | here | tried | note |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *(row.line() for row in MODULES[module])])


def page(text: str) -> str:
    """Returns the page with new tables."""
    return _BETWEEN.sub(lambda found: found[1] + table(found[2]), text)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
