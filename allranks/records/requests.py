"""The requests that the notebook sends to a rank."""

from __future__ import annotations

#: Host, pid, memory and the line the rank is at. Answered while a cell runs.
STATUS = "status"
#: The Python stack of every thread, as text. Answered while a cell runs.
STACK = "stack"
#: Set variables; payload frame 0 is a pickled dictionary.
PUSH = "push"
#: Return variables; the answer's payload frame 0 is a pickled dictionary.
PULL = "pull"
#: Move to a fresh communicator: every rank at once, with the new epoch's number.
RENEW = "renew"
#: Join with the processes that replace dead ranks. It goes to all survivors at once.
#: ``dead`` are their numbers, ``epoch`` the number of the epoch that begins with the replacements.
#: The answer may have a ``warning`` about this rank.
HEAL = "heal"
#: Prepare to run members of ``ranks_each`` ranks; 0 ends that. It goes to all ranks at once.
#: The answer has the epoch of the rank's part of the world, and whether it must be renewed.
MEMBERS = "members"

#: Send the output so far, before the answer. Answered while a cell runs.
SEND = "send"

#: Return the last ``nbytes`` of the rank's log at ``path``, as text. Answered while a cell runs.
LOG = "log"

#: Report about once a second how the rank spends the time of the running cell, in at most ``bins``
#: bins; 0 ends that, and so does the end of the cell. Answered while a cell runs.
STRIPS = "strips"

ANSWERED_WHILE_BUSY = frozenset({STATUS, STACK, SEND, LOG, STRIPS})

#: The source of a cell that inspects the last failure. If it fails, that failure is kept.
DEBUG = "%debug"
