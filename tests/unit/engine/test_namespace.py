"""The names that every rank's cells find, pinned: a cell of a year ago must find them too."""

from allranks.engine.namespace import OPERATIONS, PLACE
from allranks.ensemble.grid import RESERVED

NAMES = """
    rank size local_rank local_size cross_rank cross_size
    init shutdown is_initialized is_homogeneous
    allreduce grouped_allreduce reducescatter grouped_reducescatter reduce
    allgather grouped_allgather gather scatter broadcast alltoall barrier send recv join
    allreduce_async grouped_allreduce_async reducescatter_async grouped_reducescatter_async
    reduce_async allgather_async grouped_allgather_async gather_async scatter_async
    broadcast_async alltoall_async poll synchronize
    broadcast_object allgather_object
    ReduceOp Average Sum Min Max Product Adasum Compression
    ProcessSet global_process_set add_process_set remove_process_set
    empty records timeline keep
"""


def test_cells_find_every_operation_by_its_bare_name() -> None:
    assert sorted([*PLACE, *OPERATIONS]) == sorted(NAMES.split())


def test_no_value_of_a_member_can_have_the_name_of_something_it_finds() -> None:
    assert {*PLACE, *OPERATIONS, "comm", "MPI", "device", "log", "member", "result"} == RESERVED
