"""Reports the use of a rank's GPU, and its users when memory runs out; frees that memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from inspect import ismodule
from typing import Any

from allranks.collectives import world
from allranks.collectives.calls.rank_state import PID
from allranks.collectives.ops.keeping import VariableStore, pieces_of
from allranks.engine import libraries, namespace, saved_names
from allranks.engine.features import RankContext, RankFeature
from allranks.features.gpu import broken
from allranks.features.gpu.memory import PinnedGpu, is_out_of_memory, release

#: Memory and load that change by less are no news.
_LISTED = 8
_STEP_NBYTES, _STEP_PERCENT = 1 << 20, 5


class RankGpu(RankFeature):
    """Reports on the GPU that a rank was pinned to, if any, and frees its memory."""

    dormant = True  # without a GPU

    def started(self, rank: RankContext) -> None:
        self._rank = rank
        # Now, as a cell may change the variable.
        self._uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "") if rank.device != "cpu" else ""
        self._gpu = PinnedGpu(self._uuid)
        self._broken = self._told = ""
        if rank.device != "cpu":
            rank.activate(self)
            broken.mute_finalizers(self._note)

    def pulse_fields(self) -> dict[str, Any]:
        use = self._gpu.use()
        return {
            "gpu_own_nbytes": use.own_nbytes // _STEP_NBYTES * _STEP_NBYTES,
            "gpu_nbytes": use.used_nbytes // _STEP_NBYTES * _STEP_NBYTES,
            "gpu_total_nbytes": use.total_nbytes,
            "gpu_percent": max(-1, use.percent // _STEP_PERCENT * _STEP_PERCENT),
            "gpu_celsius": use.celsius,
        }

    def _note(self, why: str) -> None:
        self._broken = self._broken or why

    def error_details(self, error: BaseException) -> str:
        if why := broken.broken_by(error):
            self._note(why)
            return self._give_up_gpu()
        if not is_out_of_memory(error):
            return ""
        # Not `self._gpu`, which may have failed to reach the driver long ago.
        gpu = PinnedGpu(self._uuid)
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
        if self._broken and not self._told:  # only a finalizer has met it
            self._rank.notice(self._give_up_gpu())
        if error is not None and not self._broken:
            release(error)

    def _give_up_gpu(self) -> str:
        """Saves the variables for a new process, if there can be one; returns the news."""
        if self._told:
            return self._told
        self._told = f"CUDA refuses every further call of rank {self._rank.rank} ({self._broken})"
        kept: VariableStore | None = world.current().variable_store
        if not self._rank.config.can_replace or kept is None:
            self._told += (
                ". Copy what you need with %distributed pull, and type: %distributed restart"
            )
            return self._told
        shell = self._rank.shell
        own = saved_names.own_names(shell, namespace.names(self._rank.device))
        parts, left = saved_names.dump(own, shell.user_global_ns)
        kept.of_life.write(1, {self._rank.rank: pieces_of(parts)})
        problem = kept.of_life.settle()
        self._told += ": a new process takes its place"
        if problem:
            self._told += f". Its variables could not be saved: {problem}"
        else:
            values = {name for name, value in own.items() if not ismodule(value)}
            self._told += f", with {_listed(values - left.keys()) or 'no variables'}"
            if left:
                self._told += f". These cannot be read any more: {_listed(left)}"
        self._rank.ends(f"its CUDA context was broken ({self._broken})")
        return f"{self._told}."


def _listed(names: Iterable[str]) -> str:
    first, rest = sorted(names)[:_LISTED], sorted(names)[_LISTED:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")


FEATURE = RankGpu
