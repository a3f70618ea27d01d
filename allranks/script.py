"""A script, or a module, that a rank runs as Python does, to its end."""

from __future__ import annotations

import asyncio
import builtins
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any


class ScriptExited(Exception):
    """A script has ended with an exit code other than 0, as by ``sys.exit(3)``."""


class Script:
    """A function that runs a script as the main module, and has its name and code in reports.

    Args:
        arguments: the script's path and its arguments, or a module's name and its arguments.
        is_module: whether it is a module, as after ``python -m``.
    """

    #: The number of frames of a traceback above the script's.
    own_frames = 1

    def __init__(self, arguments: list[str], is_module: bool = False) -> None:
        self.arguments = arguments
        self.__name__ = arguments[0] if is_module else os.path.basename(arguments[0])
        # As Python names the main module: the script may change the current folder.
        self._path = "" if is_module else os.path.abspath(arguments[0])

    @property
    def __code__(self) -> CodeType:
        return self._compiled()[0]

    def _compiled(self) -> tuple[CodeType, ModuleSpec | None]:
        if not self._path:
            return _module(self.arguments[0])
        with open(self._path, "rb") as file:
            # Without the ``from __future__`` line of this file.
            code: CodeType = compile(file.read(), self._path, "exec", dont_inherit=True)
        return code, None

    def __call__(self) -> None:
        main = ModuleType("__main__")
        code, spec = self._compiled()
        main.__file__, vars(main)["__builtins__"] = code.co_filename, builtins
        arguments = list(self.arguments)
        if spec is None:
            sys.path.insert(0, os.path.dirname(self._path))
        else:
            main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
            arguments[0] = code.co_filename
        kept = sys.modules["__main__"], sys.argv
        sys.modules["__main__"], sys.argv = main, arguments
        earlier = {*threading.enumerate()}
        exit_code: object = None
        try:
            with _outside_of_loop(), _without_threads(earlier), _noting_ends() as ends:
                try:
                    exec(code, vars(main))
                except SystemExit as stop:
                    exit_code = stop.code
                for end in reversed(ends):
                    end()
                _wait_for_threads(earlier)
        finally:
            sys.modules["__main__"], sys.argv = kept
        # Not ``in``: a value may refuse to be compared, as an array.
        if exit_code is not None and not (isinstance(exit_code, int) and exit_code == 0):
            if isinstance(exit_code, int):
                raise ScriptExited(int.__repr__(exit_code))  # an Enum, or bool, has another text
            text = str(exit_code)
            # A text that looks like an exit code is none: Python prints it, and ends with 1.
            raise ScriptExited(repr(text) if text.removeprefix("-").isdecimal() else text)


def _module(name: str) -> tuple[CodeType, ModuleSpec]:
    """Returns the code of a module, or of a package's ``__main__``, and where it is from."""
    if sys.path[:1] != [here := os.getcwd()]:
        sys.path.insert(0, here)
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise ScriptExited(
            f"expected a module of Python, or a package with a __main__, found none named {name}. "
            "Type the name that follows python -m, or the path of a script."
        )
    return code, spec


@contextmanager
def _outside_of_loop() -> Iterator[None]:
    """Within, a script can run an event loop, although the rank runs the script in its own."""
    loop = asyncio._get_running_loop()
    task = asyncio.current_task() if loop is not None else None
    if loop is None or task is None:
        yield
        return
    asyncio._leave_task(loop, task)
    asyncio._set_running_loop(None)
    own = asyncio.new_event_loop()
    asyncio.set_event_loop(own)
    try:
        yield
    finally:
        if not own.is_running():  # in a thread of the script
            own.close()
        asyncio.set_event_loop(loop)
        asyncio._set_running_loop(loop)
        asyncio._enter_task(loop, task)


@contextmanager
def _without_threads(hidden: set[threading.Thread]) -> Iterator[None]:
    """Within, a script finds its own threads only: it may wait for all threads but its main one."""
    others = hidden - {threading.main_thread(), threading.current_thread()}
    names = vars(threading)
    kept = {name: names[name] for name in ("enumerate", "active_count")}

    def own() -> list[threading.Thread]:
        return [thread for thread in kept["enumerate"]() if thread not in others]

    names.update(enumerate=own, active_count=lambda: len(own()))
    try:
        yield
    finally:
        names.update(kept)


@contextmanager
def _noting_ends() -> Iterator[list[Callable[[], object]]]:
    """Notes what a script has Python call when the program ends, before it waits for threads, as
    mpi4py.futures does.
    """
    ends = list[Callable[[], object]]()
    register = vars(threading)["_register_atexit"]

    def noted(function: Callable[..., object], *args: Any, **options: Any) -> None:
        register(function, *args, **options)
        if not str(function.__module__).startswith("concurrent.futures."):
            ends.append(partial(function, *args, **options))

    vars(threading)["_register_atexit"] = noted
    try:
        yield ends
    finally:
        vars(threading)["_register_atexit"] = register


def _wait_for_threads(earlier: set[threading.Thread]) -> None:
    """Waits for the threads of a script, as Python does at the end of a program: executors end
    after the work that they were given. Not by Python's own functions: later no executor could be
    used, and those that the rank had before would not work any more.
    """
    found = [(vars(sys.modules[one[0]]), *one[1:]) for one in _EXECUTORS if one[0] in sys.modules]
    try:
        for module, over, _, _ in found:
            module[over] = True  # they take no more work
        for module, _, threads, wake in found:
            for thread, waker in list(module[threads].items()):
                if thread not in earlier:
                    wake(waker)
        while new := [one for one in threading.enumerate() if _is_awaited(one, earlier)]:
            for thread in new:
                thread.join()
    finally:
        for module, over, _, _ in found:
            module[over] = False


def _is_awaited(thread: threading.Thread, earlier: set[threading.Thread]) -> bool:
    return thread not in earlier and not thread.daemon


#: Of a module with executors: what marks the end of the program, the threads with what wakes them,
#: and how.
_EXECUTORS: tuple[tuple[str, str, str, Callable[[Any], object]], ...] = (
    ("concurrent.futures.thread", "_shutdown", "_threads_queues", lambda it: it.put(None)),
    ("concurrent.futures.process", "_global_shutdown", "_threads_wakeups", lambda it: it.wakeup()),
)
