"""``python -m allranks.horovod train.py …`` runs a script unchanged, also under ``mpiexec``."""

from __future__ import annotations

import os
import runpy
import sys

from allranks.errors import UsageError
from allranks.horovod import alias

_USAGE = "mpiexec -n 4 python -m allranks.horovod train.py"


def main() -> None:
    """Runs the script that the command line names, with the arguments after it.

    Raises:
        UsageError: there is no script, or no such file.
    """
    arguments = sys.argv[1:]
    if not arguments or not os.path.isfile(arguments[0]):
        found = f"found {arguments[0]!r}" if arguments else "found none"
        raise UsageError(f"expected a script, {found}. Type for example: {_USAGE}")
    alias.install_tensorflow()
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
