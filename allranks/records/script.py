"""A script that a rank runs unchanged. Both sides: a `Script` is pickled on its way to the rank."""

from __future__ import annotations

import os
import sys
from types import CodeType, ModuleType


class ScriptExited(Exception):
    """A script has ended with an exit code other than 0, as by ``sys.exit(3)``."""


class Script:
    """A function that runs a script as the main module, and has its name and code in reports.

    Args:
        arguments: the script's path and its arguments.
    """

    own_frames = 1
    """The number of frames of a traceback above the script's."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.__name__ = os.path.basename(arguments[0])

    @property
    def __code__(self) -> CodeType:
        with open(self.arguments[0], "rb") as file:
            code: CodeType = compile(file.read(), self.arguments[0], "exec")
        return code

    def __call__(self) -> None:
        """Runs the script in this process.

        Raises:
            ScriptExited: the script ended with an exit code, or with a text in its place.
        """
        main = ModuleType("__main__")
        main.__file__ = self.arguments[0]
        kept = sys.modules["__main__"], sys.argv
        sys.path.insert(0, os.path.dirname(os.path.abspath(self.arguments[0])))
        sys.modules["__main__"], sys.argv = main, list(self.arguments)
        try:
            exec(self.__code__, vars(main))
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ScriptExited(str(end.code)) from None
        finally:
            sys.modules["__main__"], sys.argv = kept
