"""keep: the variables that a process which replaces this rank starts with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allranks.collectives import world
from allranks.collectives.ops import operations
from allranks.collectives.world.variable_store import VersionedFiles, snapshot
from allranks.errors import UsageError
from allranks.records.ranks import label


def keep(*names: str, **values: Any) -> None:
    """Keeps these variables as they are now: a process that replaces this rank starts with them.

    They are copied at once. Up to 1 MiB a rank is written before this returns, more in the
    background. What was kept before counts until all ranks have written; then it is forgotten. So
    either all ranks' variables of one call are kept, or none of them, whenever a rank dies.

    Args:
        *names: of the cells' variables: ``keep("model", "step")``.
        **values: the same with their values: ``keep(model=model, step=step)``. Names must be the
            same on every rank; anything that can be pickled may be kept.

    Raises:
        UsageError: a variable is not there or cannot be pickled, ranks name others, what was kept
            by the call before could not be written, or ranks are not replaced here. It is raised
            on all ranks.

    Collective over all ranks.
    """
    this = world.current()
    kept = this.variable_store
    if kept is None:
        raise UsageError(
            "keep() needs all ranks of a notebook, on one host: elsewhere dead ranks are not "
            "replaced. Save what you must not lose to a file."
        )

    def collect() -> dict[str, Any]:
        given: tuple[object, ...] = names
        for other in given:
            if isinstance(other, str):
                continue
            raise UsageError(
                f"keep() needs names of variables, found {type(other).__name__}. "
                "Type for example: keep('model'), or keep(model=model)"
            )
        missing = [name for name in names if name not in kept.namespace]
        if missing:
            raise UsageError(
                f"keep() needs variables of the cells: rank {kept.rank} has none named "
                f"{', '.join(missing)}. Type for example: keep({missing[0]}=1)"
            )
        found = {name: kept.namespace[name] for name in names} | values
        if not found:
            raise UsageError("keep() needs variables, found none. Type for example: keep('step')")
        return found

    keep_in(kept.of_cells, collect)


def keep_in(
    series: VersionedFiles, collect: Callable[[], dict[str, Any]], *, copy: bool = True
) -> None:
    """Makes the result of ``collect`` the next version of a series. Collective over all ranks.
    Without ``copy`` the values must not change before the next call.
    """
    this = world.current()
    problem, values, parts = series.settle(), {}, []
    if problem:
        problem = f"the last keep() kept nothing: rank {this.rank}: {problem}"
    else:
        try:
            values = collect()
            parts = snapshot(values, this.rank, copy=copy)
        except UsageError as error:
            problem = str(error)
    own = (problem, tuple(sorted(values)), series.number)
    told = this.run(operations.begin_object_gather(this.groups[0], "keep", own))
    for said, _, _ in told:
        if said:
            raise UsageError(said)
    if len({names for _, names, _ in told}) > 1:
        found = "; ".join(f"rank {r} has {', '.join(told[r][1])}" for r in range(this.size))
        raise UsageError(f"keep() needs the same names on {label(range(this.size))}: {found}")
    series.write(1 + max(number for _, _, number in told), parts)
