"""Gives torch's process groups to allranks, and ends waits in torch's own collectives and in JAX's,
once one of them is imported.
"""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType

from allranks.collectives import world
from allranks.engine.features import RankContext, RankFeature
from allranks.features.torch_jax import (
    hook,
    host,
    jax_display,
    jax_hook,
    launcher,
    lightning_ranks,
    other_ranks,
)
from allranks.features.torch_jax.jax_waits import JaxWaits
from allranks.features.torch_jax.torch_waits import TorchWaits
from allranks.post_import import PostImportHook
from allranks.records.wire import RunCell

#: `torch_state` and `jax_waits` read these if they have been imported.
_MODULES = ("torch.distributed.distributed_c10d", "jax._src.distributed")


class RankWaits(RankFeature):
    """Ends waits in a library's own collectives that can never complete."""

    dormant = True  # until a library with collectives is imported

    def __init__(self) -> None:
        self._all = TorchWaits(), JaxWaits()

    def starting(self) -> None:
        host.prepare_forked()

    def started(self, rank: RankContext) -> None:
        # Also without an import: other ranks read the progress of this one in torch.
        self._rank = rank
        line_reporter = world.current().line_reporter
        if line_reporter is not None and rank.mpi_ports:
            line_reporter.also.append(self._show_mpi_ports)
        for waits in self._all:
            waits.start()
        PostImportHook(_MODULES, self._imported).install()
        PostImportHook([hook.COMPILER], hook.exclude_from_compiler).install()
        PostImportHook([launcher.MODULE], launcher.install).install()
        if rank.device != "cpu":
            PostImportHook(lightning_ranks.MODULES, lightning_ranks.install).install()
        PostImportHook(
            ["jax._src.array"], lambda module: jax_display.install(module, rank.shell)
        ).install()

    def _imported(self, module: ModuleType) -> None:
        if module.__name__ == _MODULES[0]:
            hook.wrap(module)
        else:
            jax_hook.wrap(module)
        for waits in self._all:
            waits.begin()  # the cell that imports it began before
        self._rank.activate(self)

    def _show_mpi_ports(self) -> None:
        # The current world may be that of some ranks, with a board of its own.
        with suppress(Exception):
            other_ranks.show_mpi_ports(self._rank.mpi_ports)

    def cell_started(self, cell: RunCell) -> None:
        self._show_mpi_ports()
        for waits in self._all:
            waits.begin()

    def interrupted(self) -> None:
        # No signal reaches a wait in C++.
        for waits in self._all:
            waits.press()

    def hidden_frames(self) -> tuple[str, ...]:
        return tuple(part for waits in self._all for part in waits.not_to_blame)

    def error_raised(self, error: BaseException) -> BaseException:
        for waits in self._all:
            error = waits.instead_of(error)
        return error

    def cell_finished(self, error: BaseException | None) -> None:
        # Other ranks may still wait for this one.
        for waits in self._all:
            waits.leave(error)
        world.current().drop_ended_memory()

    def epoch_ended(self, epoch: int) -> None:
        for waits in self._all:
            waits.renew(epoch)

    def rank_replaced(self, dead: list[int]) -> str:
        return " ".join(filter(None, (waits.after_death() for waits in self._all)))


FEATURE = RankWaits
