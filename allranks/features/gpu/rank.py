"""Reports the use of a rank's GPU, and its users when memory runs out; frees that memory."""

from __future__ import annotations

import os
from typing import Any

from allranks.collectives import world
from allranks.collectives.calls.rank_state import PID
from allranks.engine import libraries
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
        return gpu.out_of_memory(self._rank.rank, os.getpid(), self._sharers())

    def _sharers(self) -> dict[int, int]:
        """The other ranks of this host by pid, now: a rank may have been replaced. On one host
        with fewer GPUs than ranks, only those that are pinned to the same GPU.
        """
        this, devices = world.current(), self._rank.config.devices
        if not devices or self._rank.size <= len(devices) or self._rank.config.several_hosts:
            return {}
        same = libraries.sharers(devices, this.rank, this.size)
        return {this.board.get(rank, PID): rank for rank in same if rank != this.rank}

    def cell_left(self, error: BaseException | None) -> None:
        if error is not None:
            release(error)


FEATURE = RankGpu
