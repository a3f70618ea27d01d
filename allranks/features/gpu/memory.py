"""Frees the memory of a GPU that a failed cell has used, for the next cell."""

from __future__ import annotations

import gc
import sys
import traceback
from contextlib import suppress
from typing import Any

from allranks.collectives.gpu import dlpack

_LIBRARIES = ("cupy", "torch", "tensorflow", "jax")
#: How long to wait for arrays that another library has dropped: its kernels may still read them.
_LENT_SECONDS = 5.0


def release(error: BaseException) -> None:
    """Forgets the local variables of a failed cell's calls, and gives unused GPU memory back.

    Variables of the cell itself stay. Libraries keep freed memory in pools for themselves: the
    other ranks of a shared GPU need it, and so do the other libraries of this rank.
    """
    if not any(name in sys.modules for name in _LIBRARIES):
        return
    for failed in _chain(error):
        traceback.clear_frames(failed.__traceback__)
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        # The last exception has the frames, and these have the variables.
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
    # Before the pools are emptied, into which it returns.
    dlpack.wait_for_exports(_LENT_SECONDS)
    # A GPU that has failed has no memory to give back.
    with suppress(Exception):
        _empty_pools()


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    return chain


def _empty_pools() -> None:
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and cupy.is_available():
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
