"""What the notebook tells the nursery, and what the nursery tells each rank, at start."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

EVERY_GPU = "all"
"""Instead of devices: all that there are, on another host those that it finds itself."""

SLOW_START_SECONDS = 30.0
"""A rank that has not come up by then writes into its log where it is."""

CLIENTS_RANKS = 128
"""With more ranks ipyparallel's controller comes when asked: it has six descriptors for each."""

COMMANDS_AT_HOME = "ipc://{}/commands"
EVENTS_AT_HOME = "ipc://{}/events"
"""Where a notebook listens that has not started the ranks, by their session folder."""
NOTEBOOKS_DOOR = "notebook"
"""The socket in that folder at which a notebook asks for the ranks."""
WATCHERS_DOOR = "watch"
"""The socket in that folder at which the notebook that holds the ranks tells others of them."""


@dataclass(frozen=True)
class Invitation:
    """Where the notebook listens for other hosts, and its CURVE public key, which is a secret.

    ``host`` is what the launcher calls the host that is invited; empty where the launcher's own
    variables tell.
    """

    commands_url: str
    events_url: str
    wire_key: str
    host: str = ""

    def to_json(self) -> str:
        """Return the invitation as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Invitation:
        """Read back what :meth:`to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class NurseryConfig:
    """How to bring up the ranks of one host: one JSON line on the nursery's standard input.

    ``launch`` is the launcher's argument vector up to the program it starts in every rank.
    ``devices`` holds one ``CUDA_VISIBLE_DEVICES`` value for each local rank, or is empty; or it is
    ``EVERY_GPU`` alone.
    ``commands_url``, ``events_url`` and ``wire_key`` say where the notebook listens and with
    which CURVE public key; without a key it is this host's relay that listens.

    Where ranks are on several hosts ``local_size`` of the ``size`` ranks are on this one. The
    first host is the ``head``: it runs the launcher, and ipyparallel's controller, which listens
    on ``interface``.

    Where the cluster ``heals``, the launcher lets the other ranks live when one dies.
    ``kept_dirs`` are the folders of what ranks keep, which outlive them and not the notebook.
    """

    size: int
    launch: tuple[str, ...]
    environment: dict[str, str]
    session_dir: str
    log_dir: str
    work_dir: str
    devices: tuple[str, ...]
    commands_url: str
    events_url: str
    wire_key: str
    preload: tuple[str, ...] = ()
    local_size: int = 0
    head: bool = True
    interface: str = ""
    heals: bool = False
    kept_dirs: tuple[str, ...] = ()

    @property
    def ranks_here(self) -> int:
        """How many of the ranks are on this host."""
        return self.local_size or self.size

    @property
    def several_hosts(self) -> bool:
        """Whether ranks are on other hosts as well."""
        return bool(self.interface)

    def to_json(self) -> str:
        """Return the configuration as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NurseryConfig:
        """Read back what :meth:`to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> NurseryConfig:
        """Read back what :func:`dataclasses.asdict` and JSON have made of a configuration."""
        for key in ("launch", "devices", "preload", "kept_dirs"):
            fields[key] = tuple(fields[key])
        return cls(**fields)
