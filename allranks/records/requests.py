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
HEAL = "heal"
"""Take new processes in for ranks that have died: every rank that is left, at once.

``dead`` are their numbers, ``epoch`` the number of the epoch that begins with the new ones. The
answer has a ``warning`` of what is to be known of the rank from then on."""
MEMBERS = "members"
"""Make ready to run members of ``ranks_each`` ranks: every rank at once; 0 ends that.

The answer has the epoch of the rank's part of the world, and whether it must be renewed."""

SETTLE = "settle"
"""Write to the end what is being kept.

The answer says by ``goes_on``, above 0, from which commit a training that a death has ended goes on
where its cell runs again."""
RESTORE = "restore"
"""Take back the variables that the rank in whose place this one is had kept.

The answer has their ``names``, none where nothing was kept, and how many ``seconds`` ago it was."""

SEND = "send"
"""Send what was written so far, before the answer. Answered while a cell runs."""

LOG = "log"
"""Return the last ``nbytes`` of the rank's log at ``path``, as text. Answered while a cell runs."""

STAY = "stay"
"""Wait for another notebook when this one goes, which will listen in the folder ``home``.

Where that is empty, wait for nobody. Answered while a cell runs, as are the next three."""
SEEN = "seen"
"""The notebook has shown ``cell``: another one need not."""
ATTACH = "attach"
"""Say hello again, to another notebook. The answer says which cell was the last to be sent:

its number (``cell``) and ``label``; whether it is a ``member`` of an ensemble, whether this rank is
``busy`` with it, or has ended it ``unseen``, and how many ``seconds`` it took so far; the
``epoch``, and whether it is ``dirty``."""
RESUME = "resume"
"""Send what that cell has shown so far, and from now on what follows."""
ABOUT_NOTEBOOKS = frozenset({STAY, SEEN, ATTACH, RESUME})

PROFILE = "profile"
"""Look where the rank spends its time, for ``seconds``, or 0 for all of the cell: of the one that
runs, else of the next. Answered while a cell runs."""
PROFILED = "profiled"
"""End that, and return what was seen (see ``allranks.records.profile``). Answered while a cell
runs."""

STRIPS = "strips"
"""Tell how the rank spends the time of the cell that runs, about once a second, in at most ``bins``
bins; 0 ends that, and so does the end of the cell. Answered while a cell runs."""

ANSWERED_WHILE_BUSY = frozenset({STATUS, STACK, SEND, LOG, PROFILE, PROFILED, STRIPS})

DEBUG = "%debug"
"""The source of a cell that looks at the last failure; where it fails itself, that one stays."""
