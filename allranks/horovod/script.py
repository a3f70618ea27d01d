"""A script as it is, on a rank. Standard library only."""

from __future__ import annotations

import os
import sys
from types import CodeType, ModuleType

from allranks.horovod import tensorflow1


class Exited(Exception):
    """A script has ended itself with an exit code that is not 0, as ``sys.exit(3)`` does."""


class Script:
    """A function that runs a script as the main module, and looks like it in reports.

    Args:
        arguments: the script's path and its arguments.
    """

    own_frames = 1
    """Of a traceback, those above the script's."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.__name__ = os.path.basename(arguments[0])

    @property
    def __code__(self) -> CodeType:
        with open(self.arguments[0], "rb") as file:
            code: CodeType = compile(file.read(), self.arguments[0], "exec")
        return code

    def __call__(self) -> None:
        """Runs it in this process.

        Raises:
            Exited: it ended with an exit code, or with words for one.
        """
        tensorflow1.install()
        main = ModuleType("__main__")
        main.__file__ = self.arguments[0]
        kept = sys.modules["__main__"], sys.argv
        sys.path.insert(0, os.path.dirname(os.path.abspath(self.arguments[0])))
        sys.modules["__main__"], sys.argv = main, list(self.arguments)
        try:
            exec(self.__code__, vars(main))
        except SystemExit as end:
            if end.code not in (None, 0):
                raise Exited(str(end.code)) from None
        finally:
            sys.modules["__main__"], sys.argv = kept
