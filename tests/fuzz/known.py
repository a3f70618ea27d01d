"""What is left out of every deck: what does not hold yet, and what was just mended."""

from __future__ import annotations

_UNPLAYED = "mended, with a test of its own, and not yet played for hours beside the others"

KNOWN: dict[str, str] = {
    "an_interrupt_of_finalizers": "a finalizer drops it, again and again; a second press ends it",
    "an_update_of_a_rich_display": _UNPLAYED,
    "a_repr_with_a_lone_surrogate": _UNPLAYED,
    "html_with_a_lone_surrogate": _UNPLAYED,
    "a_bundle_with_wrong_metadata": _UNPLAYED,
    "a_lone_surrogate_in_an_exception": _UNPLAYED,
    "a_forked_child_that_leaves_the_cell": _UNPLAYED,
    "json_replaced_by_another_signature": _UNPLAYED,
    "json_loads_is_replaced": _UNPLAYED,
    "a_function_of_time_is_replaced": _UNPLAYED,
    "json_of_great_depth": _UNPLAYED,
    "a_timeout_in_a_blocking_call": _UNPLAYED,
    "an_enormous_value": _UNPLAYED,
    "an_enormous_display": _UNPLAYED,
    "output_pointed_elsewhere": _UNPLAYED,
    "output_closed": _UNPLAYED,
    "a_cluster_that_is_dropped": _UNPLAYED,
    "a_pool_that_spawns": _UNPLAYED,
    "a_pushed_value_that_exits": _UNPLAYED,
    "an_exception_that_cannot_be_shown": _UNPLAYED,
    "a_cyclic_cause": _UNPLAYED,
    "failed_cells_do_not_keep_their_frames": _UNPLAYED,
    "output_is_not_kept_in_memory": _UNPLAYED,
    "asynchronous_calls_in_the_timings": _UNPLAYED,
    "structures_in_opposite_order": _UNPLAYED,
    "a_start_inside_a_job_of_a_scheduler": _UNPLAYED,
    "a_start_in_a_strange_environment": _UNPLAYED,
    "doors": _UNPLAYED,
}
"""Names of statements, each with why."""
