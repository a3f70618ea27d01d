"""The requests that the notebook sends to a rank after deaths, between two cells."""

from __future__ import annotations

from allranks.records.requests import HEAL as HEAL

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
#: have no such file. The answer has the ``problem``, which is empty if there is none.
LOAD = "load"
