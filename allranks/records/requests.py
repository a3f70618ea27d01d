"""The requests that the notebook makes of a rank, by name: the one place both sides agree on."""

from __future__ import annotations

STATUS = "status"
"""Host, pid, memory and the line the rank is at. Answered while a cell runs."""
STACK = "stack"
"""The Python stack of every thread, as text. Answered while a cell runs."""
PUSH = "push"
"""Set variables; payload frame 0 is a pickled dictionary."""
PULL = "pull"
"""Return variables; the answer's payload frame 0 is a pickled dictionary."""
COMPLETE = "complete"
"""Complete ``code`` at ``cursor``."""
INSPECT = "inspect"
"""Describe the name in ``code`` at ``cursor``."""
RENEW = "renew"
"""Move to a fresh communicator: every rank at once, with the new epoch's number."""
MEMBERS = "members"
"""Make ready to run members of ``ranks_each`` ranks: every rank at once; 0 ends that.

The answer has the epoch of the rank's part of the world, and whether it must be renewed."""

SEND = "send"
"""Send what was written so far, before the answer. Answered while a cell runs."""

LOG = "log"
"""Return the last ``nbytes`` of the rank's log at ``path``, as text. Answered while a cell runs."""

ANSWERED_WHILE_BUSY = frozenset({STATUS, STACK, SEND, LOG})

DEBUG = "%debug"
"""The source of a cell that looks at the last failure; where it fails itself, that one stays."""
