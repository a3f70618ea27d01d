"""What is known not to hold yet, in one place: these statements are left out of every deck."""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "an_update_of_a_rich_display": "one rank's figure is shown as everyone's",
    "a_repr_with_a_lone_surrogate": "the kernel cannot show it, and the cell fails there",
    "html_with_a_lone_surrogate": "the reply is dropped with the display",
    "a_bundle_with_wrong_metadata": "the reply is dropped with the display",
    "a_lone_surrogate_in_an_exception": "the kernel cannot serialise its own reply",
    "a_forked_child_that_leaves_the_cell": "the child runs the rank's loop",
    "json_replaced_by_another_signature": "the reply cannot be written",
    "json_loads_is_replaced": "the rank hears no more",
    "json_of_great_depth": "the kernel's reader thread ends",
    "an_interrupt_of_finalizers": "a finalizer drops it, again and again; a second press ends it",
    "a_timeout_in_a_blocking_call": "--timeout does not escalate",
    "an_enormous_value": "the last value stands outside the limit of a cell's output",
    "an_enormous_display": "a display stands outside the limit of a cell's output",
    "output_pointed_elsewhere": "a later cell is silent",
    "output_closed": "print raises in a later cell",
    "a_cluster_that_is_dropped": "its finalizer never runs",
    "a_pool_that_spawns": "a folder pymp-* stays",
    "a_pushed_value_that_exits": "unpickling SystemExit ends the rank",
    "an_exception_that_cannot_be_shown": "IPython's own failure is reported in its place",
    "a_cyclic_cause": "the exception is hidden",
    "failed_cells_do_not_keep_their_frames": "they stay",
    "output_is_not_kept_in_memory": "IPython and the transcript keep all that was printed",
    "asynchronous_calls_in_the_timings": "spans that overlap are added",
    "structures_in_opposite_order": "they are summed",
    "a_start_inside_a_job_of_a_scheduler": "the launcher tries to reach the job's nodes",
    "a_start_in_a_strange_environment": "no home, mpi4py's own settings, warnings as errors",
    "doors": "ranks listen on all addresses",
}
"""Names of statements, each with what happens today."""
