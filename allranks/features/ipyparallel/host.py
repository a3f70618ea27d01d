"""The process beside the ranks to which ipyparallel's clients and the ranks' engines connect."""

from __future__ import annotations

from collections.abc import Callable

from allranks.engine.host.features import HostFeature
from allranks.features.ipyparallel import controller
from allranks.records.config import HostAgentConfig


class PlannedController:
    """ipyparallel's controller for the ranks of one cluster (`ClientController`)."""

    def __init__(self, config: HostAgentConfig) -> None:
        self._size, self._folder = config.size, config.session_dir
        self.engine, self.client, self._secret, self._held = controller.connection_info(
            config.interface
        )

    def run(self, complete: Callable[[], object], deaths: int) -> None:
        ours = self.engine, self.client, self._secret, self._folder, self._size
        controller.run(*ours, complete, deaths)

    def free_ports(self) -> None:
        while self._held:
            self._held.pop().close()


class HostController(HostFeature):
    """Plans the controller on the first host."""

    def controller(self, config: HostAgentConfig) -> PlannedController:
        return PlannedController(config)


FEATURE = HostController
