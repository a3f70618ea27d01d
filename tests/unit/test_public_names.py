"""The public names of the package."""

import importlib
import inspect
from collections.abc import Iterator

import pytest

import allranks
from allranks.engine.namespace import OPERATIONS, PLACE
from allranks.features.ensemble.grid import RESERVED


def test_a_cluster_has_no_other_public_names():
    found = [name for name in dir(allranks.Cluster(2)) if not name.startswith("_")]
    assert found == [
        "call", "cells", "client", "connection_information", "gpus", "heal", "heal_when", "hellos",
        "interrupt", "launch", "launcher", "log_dir", "lost_because", "map", "map_async",
        "preload", "pull", "push", "raises_own", "restart", "roster", "run",
        "run_async", "show_output", "size", "starmap", "start", "state", "status", "stop", "submit",
    ]  # fmt: skip


PUBLIC = (
    "allranks",
    "allranks.collectives",
    "allranks.errors",
    "allranks.grading",
    "allranks.lessons.model",
    "allranks.lessons.ring",
    "allranks.widgets",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [one for one in vars(module) if not one.startswith("_")])
    public = [getattr(module, one) for one in names]
    without = [one for value in public for one in undocumented(value)]
    assert without == []


def undocumented(value: object) -> Iterator[str]:
    """Yields the name of a function or class, and of its public methods, without a docstring."""
    if not (inspect.isclass(value) or inspect.isfunction(value)) or not is_ours(value):
        return
    if not inspect.getdoc(value):
        yield value.__qualname__
    if inspect.isclass(value):
        for name, method in inspect.getmembers(value, inspect.isroutine):
            if not name.startswith("_") and is_ours(method) and not inspect.getdoc(method):
                yield f"{value.__qualname__}.{name}"


def is_ours(value: object) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("allranks")


NAMES = """
    rank size local_rank local_size cross_rank cross_size
    init shutdown is_initialized is_homogeneous
    allreduce grouped_allreduce reducescatter grouped_reducescatter reduce
    allgather grouped_allgather gather scatter broadcast alltoall barrier send recv join
    allreduce_async grouped_allreduce_async reducescatter_async grouped_reducescatter_async
    reduce_async allgather_async grouped_allgather_async gather_async scatter_async
    broadcast_async alltoall_async poll synchronize
    broadcast_object allgather_object same_on_all_ranks
    ReduceOp Average Sum Min Max Product Adasum Compression
    ProcessSet global_process_set add_process_set remove_process_set
    empty records timeline keep
"""


def test_cells_find_every_operation_by_its_name_and_no_value_of_a_member_hides_one():
    assert sorted([*PLACE, *OPERATIONS]) == sorted(NAMES.split())
    assert {*PLACE, *OPERATIONS, "comm", "MPI", "device", "log", "member", "result"} == RESERVED
