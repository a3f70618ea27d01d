"""An interrupt that ends a ``!command`` on a rank ends the cell too.

IPython ends the command and goes on with the cell's next line. A cell of several commands would
then have to be interrupted several times, and the second time ends the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import ipykernel.zmqshell
import IPython.core.interactiveshell
from IPython.core.interactiveshell import InteractiveShell


def end_cells_too(shell: InteractiveShell, interrupts: Callable[[], int]) -> None:
    """Has ``!command``, ``x = !command`` and ``%%bash`` raise the KeyboardInterrupt they caught.

    Args:
        shell: the engine's IPython shell.
        interrupts: returns how many interrupts this cell has been sent so far.
    """

    def loud(quiet: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(quiet)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = interrupts()
            result = quiet(*args, **kwargs)
            if interrupts() > before:
                raise KeyboardInterrupt
            return result

        return run

    # The shell's own methods look at their caller's frame, so that what they call is wrapped.
    for module, name in (
        (ipykernel.zmqshell, "system"),
        (IPython.core.interactiveshell, "getoutput"),
    ):
        setattr(module, name, loud(getattr(module, name)))
    scripts = shell.magics_manager.registry.get("ScriptMagics")
    if scripts is not None:
        scripts.shebang = loud(scripts.shebang)
