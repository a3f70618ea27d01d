"""Reports the use of a rank's GPU, and its users when memory runs out; frees that memory."""

from __future__ import annotations

import os
import socket
from typing import Any

from allranks.engine.features import RankContext, RankFeature
from allranks.features.gpu.memory import PinnedGpu, is_out_of_memory, release

#: Memory and load that change by less are no news.
_STEP_NBYTES, _STEP_PERCENT = 1 << 20, 5


class RankGpu(RankFeature):
    """Reports on the GPU that a rank was pinned to, if any, and frees its memory."""

    dormant = True  # without a GPU

    def started(self, rank: RankContext) -> None:
        self._rank = rank
        self._gpu = PinnedGpu(rank.device)
        self._sharers = _find_sharers(rank)
        if rank.device != "cpu":
            rank.activate(self)

    def pulse_fields(self) -> dict[str, Any]:
        use = self._gpu.use()
        return {
            "gpu_nbytes": use.used_nbytes // _STEP_NBYTES * _STEP_NBYTES,
            "gpu_total_nbytes": use.total_nbytes,
            "gpu_percent": max(-1, use.percent // _STEP_PERCENT * _STEP_PERCENT),
            "gpu_celsius": use.celsius,
        }

    def error_details(self, error: BaseException) -> str:
        if not is_out_of_memory(error):
            return ""
        # Not `self._gpu`, which may have failed to reach the driver long ago.
        gpu = PinnedGpu(self._rank.device)
        return gpu.out_of_memory(self._rank.rank, os.getpid(), self._sharers)

    def cell_left(self, error: BaseException | None) -> None:
        if error is not None:
            release(error)


def _find_sharers(rank: RankContext) -> dict[int, int]:
    # Collective if ranks share GPUs.
    config = rank.config
    # On several hosts some may have no GPU, and every rank would have to call allgather.
    alone = not config.devices or rank.size <= len(config.devices) or config.several_hosts
    if alone or config.heals:  # ranks heal only where none has a GPU
        return {}
    from mpi4py import MPI

    own = socket.gethostname(), rank.device
    pids = MPI.COMM_WORLD.allgather((*own, os.getpid()))
    return {
        pid: other
        for other, (*where, pid) in enumerate(pids)
        if tuple(where) == own and other != rank.rank
    }


FEATURE = RankGpu
