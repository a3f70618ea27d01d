"""What shows a cell's output: a notebook that changes displays in place, or what only adds lines.

No front end says which it is, and one that takes no updates drops them without a word. So where
nothing tells that updates are shown, output is only added: that loses nothing anywhere.
"""

from __future__ import annotations

import sys
from typing import Any

from allranks.records import settings

VARIABLE = "ALLRANKS_FRONT_END"
NOTEBOOK, CONSOLE, TERMINAL = "notebook", "console", "terminal"
#: What JupyterLab, Notebook 7 and VS Code send with the source of a cell.
_OF_CELLS = {"cellId", "deletedCells"}


def front_end() -> str:
    """Returns what shows the output of what runs now.

    ``notebook`` changes displays in place; ``console`` is another front end of a kernel;
    ``terminal`` is no kernel's.

    Raises:
        UsageError: ALLRANKS_FRONT_END says something else.
    """
    kernel = of_this_process()
    if kernel is None:
        return TERMINAL
    said = settings.chosen(VARIABLE, ("auto", NOTEBOOK, CONSOLE), "auto")
    if said != "auto":
        return said
    return NOTEBOOK if shows_updates(kernel.get_parent("shell")) else CONSOLE


def of_this_process() -> Any:
    """Returns the kernel that this process is, or None."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None)


def shows_updates(request: dict[str, Any]) -> bool:
    """Whether what sent a kernel this request is known to change displays in place."""
    if request.get("header", {}).get("msg_type", "").startswith("comm_"):
        return True  # a button was clicked: where widgets are drawn, displays are updated
    # nbclient, and so papermill and nbconvert, keeps a notebook and lets nobody type.
    nobody_types = request.get("content", {}).get("allow_stdin") is False
    return nobody_types or bool(_OF_CELLS & request.get("metadata", {}).keys())
