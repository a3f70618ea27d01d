"""The exceptions that elastic training knows by Horovod's names."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective has failed on every rank, and may be tried again from the last commit."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts have changed; ``skip_sync`` says whether the state is still the same everywhere."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync
