"""The exceptions that elastic training knows by Horovod's names."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective has failed on every rank, and may be tried again from the last commit."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts have changed; ``skip_sync`` says whether the state is still the same everywhere."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Says that something was built for another version than the one that is installed."""
    return (
        f"{name} was built for version {version}, and {installed_version} is installed. "
        f"Install {name} {version}."
    )


class HorovodVersionMismatchError(ImportError):
    """Nothing raises it here: nothing is built."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version
