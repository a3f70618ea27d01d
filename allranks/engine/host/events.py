"""Events that several processes of a host have in common."""

from __future__ import annotations

from allranks.records import agent
from allranks.records.frozen import frozen


@frozen
class NotebookSaid:
    """A command of the notebook."""

    command: agent.Command


@frozen
class Terminated:
    """This process got SIGTERM."""


@frozen
class TimeCame:
    """It may be time to act. All that came before, as new connections, is known by then."""
