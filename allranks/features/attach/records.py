"""What notebooks, host agents and the caretaker send each other about ranks that stay.

The events and commands are lines of JSON (`allranks.records.agent`).
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from allranks.records.agent import Command, Event
from allranks.records.frozen import frozen

#: The socket in that folder at which the notebook that has the ranks serves those that watch.
WATCHERS_DOOR = "watch"


@frozen
class Running(Event):
    """The ranks of the host run this cell; 0 for none."""

    cell: int


@frozen
class Watched(Event):
    """A notebook watches the ranks from now on."""


@frozen
class Ready(Event):
    """The caretaker can be visited."""


@frozen
class Stay(Command):
    """After the notebook's end the ranks stay for a time; ``memo`` is for the next notebook."""

    seconds: float
    memo: dict[str, Any]


# For the caretaker, beside `Stay` and `Stop`.


@frozen
class Keep(Command):
    """What the next notebook has to know."""

    state: dict[str, Any]


@frozen
class HostRuns(Command):
    """The cell that the ranks of a host run."""

    host: str
    cell: int


@frozen
class CaretakerConfig:
    """What the caretaker of ranks on several hosts gets, as a line of JSON.

    ``ranks`` is the configuration of the ranks, whose ``commands_url`` and ``events_url`` say where
    the notebook listens. The caretaker inherits these two sockets, with the numbers ``listening``;
    with ``key`` and ``secret_key`` it can be the notebook's end of the connections. Other notebooks
    find it by ``folder``.
    """

    folder: str
    ranks: dict[str, Any]
    key: str
    secret_key: str
    lease_seconds: float
    listening: tuple[int, int]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CaretakerConfig:
        return cls(**json.loads(text))


def own_notebook() -> str:
    """Returns the path of the notebook whose kernel this process is, or that has started it.

    Jupyter Server sets ``JPY_SESSION_NAME``. Elsewhere it is the folder in which this runs.
    """
    return os.environ.get("JPY_SESSION_NAME") or os.getcwd()
