"""What the notebook tells the nursery, and what the nursery tells each rank, at start."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class NurseryConfig:
    """How to bring up the ranks of one host: one JSON line on the nursery's standard input.

    ``launch`` is the launcher's argument vector up to the program it starts in every rank.
    ``devices`` holds one ``CUDA_VISIBLE_DEVICES`` value for each local rank, or is empty.
    ``commands_url``, ``events_url`` and ``wire_key`` say where the notebook listens and with
    which CURVE public key.
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

    def to_json(self) -> str:
        """Return the configuration as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NurseryConfig:
        """Read back what :meth:`to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        for key in ("launch", "devices", "preload"):
            fields[key] = tuple(fields[key])
        return cls(**fields)
