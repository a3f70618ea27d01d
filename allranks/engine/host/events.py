"""Events and a command that several processes of a host have in common."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.records import agent


@dataclass(frozen=True)
class NotebookSaid:
    """A command of the notebook."""

    command: agent.Command


@dataclass(frozen=True)
class NobodyCame:
    """No notebook has attached in time."""


@dataclass(frozen=True)
class Terminated:
    """This process got SIGTERM."""


@dataclass(frozen=True)
class TimeCame:
    """It may be time to act. All that came before, as new connections, has been told."""


@dataclass(frozen=True)
class SetStay:
    """A command: sets how long the ranks stay without a notebook, and what the next one gets."""

    stay: agent.Stay
