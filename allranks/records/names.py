"""The names that members of an ensemble find: none of their values can have one of these."""

from __future__ import annotations

_PLACE = "rank size local_rank local_size cross_rank cross_size comm MPI device"
_OPERATIONS = """
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
RESERVED = frozenset(f"{_PLACE} {_OPERATIONS} log member result".split())
"""``tests/unit/test_namespace.py`` holds this against what a rank's cells really find."""
