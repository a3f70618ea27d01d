"""Runs accelerate's ``notebook_launcher`` on the ranks that exist, instead of in new processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from allranks import collectives

MODULE = "accelerate.launchers"
_PRECISION = "ACCELERATE_MIXED_PRECISION"


def install(launchers: ModuleType) -> None:
    launchers.notebook_launcher = notebook_launcher  # type: ignore[attr-defined]


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    **_ignored: Any,
) -> None:
    """Calls ``function(*args)`` on this rank, and prints on how many ranks it runs.

    Args:
        function, args, mixed_precision: as for accelerate.
        num_processes: the number of ranks; another number is named and ignored, as are all
            arguments about ports and hosts.
    """
    from accelerate.state import AcceleratorState

    size = collectives.size()
    said = f"notebook_launcher: {getattr(function, '__name__', 'the function')} runs on the "
    said += f"{size} ranks that exist"
    if num_processes not in (None, size):
        said += (
            f", not on {num_processes} new processes. For {num_processes} ranks type: "
            f"%distributed restart -n {num_processes}"
        )
    print(said, flush=True)  # noqa: T201
    # New processes would have no state of an earlier launch.
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state(reset_partial_state=True)
    # As accelerate sets it for the processes that it would start.
    before = os.environ.get(_PRECISION)
    os.environ[_PRECISION] = str(mixed_precision).lower()
    try:
        function(*args)
    finally:
        if before is None:
            os.environ.pop(_PRECISION, None)
        else:
            os.environ[_PRECISION] = before
