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

#: Finish writing the variables that are being kept.
#: A ``goes_on`` above 0 in the answer is the commit from which a training that a death has ended
#: continues when its cell runs again; ``new`` is whether the rank replaces one and was not asked
#: yet to restore what was kept.
SETTLE = "settle"
#: Restore the variables that the rank that this one replaces had kept, and, of the ranks in
#: ``saved``, those that it had saved before it was ended.
#: The answer has their ``names``, none if nothing was kept, and how many ``seconds`` ago it was.
RESTORE = "restore"
#: Save all variables that can be pickled in a file of this host: all ranks start again, because a
#: host is lost or dead ranks cannot be replaced. The answer has the process ``sets``, ``goes_on``
#: and ``new`` as of SETTLE, and the names that are ``left`` out, with the reason.
SAVE = "save"
#: Load them, and make the process ``sets`` again. It goes to all ranks at once, also to those that
#: have no such file. The answer has the names that are ``left`` out, with the reason.
LOAD = "load"

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
