"""What the two sides of the debugger say to each other. Standard library only."""

from __future__ import annotations

from typing import Any

from allranks.records.frozen import frozen
from allranks.records.wire import Record

#: A message of the Debug Adapter Protocol.
Dap = dict[str, Any]
#: Set in the arguments of ``attach``: the folder, with its separator at the end, in which the front
#: end believes the files of cells to be.
CELL_FOLDER = "cellFolder"
#: An event of a rank: whether it waits in a collective.
WAITING = "allranks_waiting"


@frozen
class DebugMessage(Record):
    """A request for a rank, its response, or an event of it.

    ``request`` is the number by which the notebook finds the response, 0 for an event.
    """

    rank: int
    request: int
    content: Dap


@frozen
class DebugSource(Record):
    """The source of a cell, for the file of this name in which its breakpoints are set.

    ``code_name`` is the name in tracebacks of a cell that has run, as ``In[3]``. ``cell`` is the
    number of a cell that is sent next.
    """

    file: str
    source: str
    code_name: str
    cell: int
