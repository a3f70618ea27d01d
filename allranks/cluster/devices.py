"""Which GPUs this machine's ranks may use, found without touching CUDA."""

from __future__ import annotations

import os

from allranks.errors import UsageError


def visible_gpus() -> tuple[str, ...]:
    """Returns the UUIDs of the GPUs that this process may use; none without a driver.

    ``CUDA_VISIBLE_DEVICES``, a scheduler's or the user's, is respected.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and not chosen.strip():
        return ()
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # no package, or no driver: there are no GPUs to speak of
        return ()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
    if chosen is None:
        return tuple(uuids)
    names = [name.strip() for name in chosen.split(",")]
    found = [uuids[int(n)] if n.isdecimal() and int(n) < len(uuids) else n for n in names]
    return tuple(name for name in found if name in uuids or name.startswith("MIG-"))


def choose(gpus: str | None) -> tuple[str, ...]:
    """Returns the GPUs that ranks are pinned to, in order of local rank.

    Args:
        gpus: as ``0,2`` (indices among the visible ones), ``none``, or None for all.

    Raises:
        UsageError: one of them is not there.
    """
    if gpus == "none":
        return ()
    visible = visible_gpus()
    if gpus is None:
        return visible
    indices = gpus.replace(" ", "").split(",")
    if not all(index.isdecimal() and int(index) < len(visible) for index in indices):
        raise UsageError(
            f"expected --gpus with indices below {len(visible)}, the number of GPUs visible here, "
            f"found {gpus!r}. Type for example: --gpus none"
        )
    return tuple(visible[int(index)] for index in indices)
