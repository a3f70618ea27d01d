"""Lets other notebooks find the ranks of one machine, and attach to them once theirs has ended."""

from __future__ import annotations

import dataclasses

from allranks.engine.host.features import HostContext, HostFeature
from allranks.features.attach.attachment import Attachment
from allranks.features.attach.records import Running, Stay, Watched
from allranks.records.agent import Command


class HostAttach(HostFeature):
    """Keeps the ranks of this host agent for another notebook.

    If ranks are on several hosts, their notebook's caretaker finds that notebook.
    """

    def __init__(self) -> None:
        #: The locks of kept variables, which stay if all ranks are started again.
        self._kept: list[int] = []

    def started(self, host: HostContext) -> None:
        self._host, self._cell = host, 0
        self._attachment = Attachment(host.config, host.running, self._kept)
        if not host.config.several_hosts:
            host.call_when_readable(self._attachment.listen(), self._visited)

    def command_received(self, command: Command) -> bool:
        if isinstance(command, Stay):
            self._attachment.stay(command.seconds, command.memo)
        return isinstance(command, Stay)

    def poll(self) -> None:
        if self._attachment.left:
            self._host.notebook_left()
        if self._attachment.open and self._attachment.over:
            self._host.end()
        if self._host.config.several_hosts and self._attachment.stays:
            cell = max(self._host.running)
            if cell != self._cell:  # for the list of clusters on the notebook's machine
                self._cell = cell
                self._host.tell(Running(cell))

    def ranks_stay(self) -> bool:
        return self._attachment.stays

    def notebook_left(self) -> None:
        self._attachment.begin()

    def _visited(self) -> None:
        about = self._attachment.visited(lambda: self._host.tell(Watched()))
        if about is None:
            return
        config = dataclasses.asdict(self._host.config)
        self._host.notebook_came({"event": "attached", "config": config, **about})
        if about["watchers"]:
            self._host.tell(Watched())


FEATURE = HostAttach
