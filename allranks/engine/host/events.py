"""Events and a command that several processes of a host have in common."""

from __future__ import annotations

from allranks.records import agent
from allranks.records.frozen import frozen


@frozen
class NotebookSaid:
    """A command of the notebook."""

    command: agent.Command


@frozen
class NobodyCame:
    """No notebook has attached in time."""


@frozen
class Terminated:
    """This process got SIGTERM."""


@frozen
class TimeCame:
    """It may be time to act. All that came before, as new connections, is known by then."""


@frozen
class SetStay:
    """A command: sets how long the ranks stay without a notebook, and what the next one gets."""

    stay: agent.Stay
