"""Hides the handles of communicators from calls that are not recorded. Runs in every rank.

`CallRecorder` replaces methods of `comm`. A program could still call the method of the base class,
``MPI.Intracomm.allgather(comm, value)``, which is written in C and cannot be replaced. So while a
program is recorded, each communicator object stands for MPI.COMM_NULL, except within its own
methods and within calls of allranks. MPI then refuses the base classes' methods. Methods that
communicate and are not recorded are refused by name.

A communicator that a program has copied before, as ``MPI.Intracomm(comm)``, is not hidden if it is
in no variable of the cells.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from mpi4py import MPI

from allranks.collectives.mpi.transport import rebind
from allranks.collectives.ops.point_to_point import PointToPoint
from allranks.collectives.world.world import World

_LOCAL = ("Get_", "Is_", "Shift", "Compare", "Set_", "Iprobe", "iprobe", "Delete_attr", "Abort")
"""How the names of inherited methods begin that send nothing."""
_CALLS = ("run", "join", "submit", "poll", "progress")
"""The methods of a world in which allranks itself communicates."""
_SPECIAL = ("__eq__", "__ne__", "__bool__", "__reduce__")
"""Python looks these up on the class."""


class HiddenHandles:
    """Hides the handles from `start` to `stop`.

    ``replace`` sets an attribute of a class until then; ``refusing`` makes a method that raises.
    """

    def __init__(
        self,
        replace: Callable[[Any, str, Any], None],
        refusing: Callable[[str], Callable[..., Any]],
    ) -> None:
        self._replace, self._refusing = replace, refusing
        self._communicators: list[MPI.Comm] = []
        self._handles: dict[int, MPI.Comm] = {}
        self._running = 0
        self._lock = threading.Lock()
        self._restore = ExitStack()

    def start(self, variables: dict[str, Any]) -> None:
        """Hides all handles; ``variables`` are those of the cells."""
        self._communicators = [
            one for one in gc.get_objects() if issubclass(type(one), PointToPoint)
        ]
        # Copies are objects of C, which the garbage collector does not list.
        self._communicators += [
            one
            for one in variables.values()
            if issubclass(type(one), MPI.Comm) and not issubclass(type(one), PointToPoint)
        ]
        bind = PointToPoint.bind

        def bind_hidden(comm: PointToPoint, *arguments: Any) -> None:
            bind(comm, *arguments)
            self._communicators.append(comm)

        self._replace(PointToPoint, "bind", bind_hidden)
        self._replace(PointToPoint, "__getattribute__", self._attribute())
        for name in _SPECIAL:
            self._replace(PointToPoint, name, self._opened(getattr(PointToPoint, name)))
        for name in _CALLS:
            self._replace(World, name, self._opened(getattr(World, name)))
        self._restore.callback(self._show)
        self._hide()

    def stop(self) -> None:
        self._restore.close()
        self._communicators = []

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            self._running += 1
            self._show()
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._hide()

    def _opened(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def call(*arguments: Any, **options: Any) -> Any:
            with self._open():
                return plain(*arguments, **options)

        return call

    def _attribute(self) -> Callable[[PointToPoint, str], Any]:
        def attribute(comm: PointToPoint, name: str) -> Any:
            owner = next((kind for kind in type(comm).__mro__ if name in vars(kind)), None)
            if owner is None or owner is object:
                return object.__getattribute__(comm, name)
            if name == "handle":
                self._refusing("comm.handle")()
            with self._open():
                found = object.__getattribute__(comm, name)
            if callable(found) and not (issubclass(owner, PointToPoint) or name.startswith(_LOCAL)):
                return self._refusing(f"comm.{name}")
            return self._opened(found) if callable(found) else found

        return attribute

    def _hide(self) -> None:
        for comm in self._communicators:
            # In this order: an interrupt may come between any two lines.
            self._handles.setdefault(id(comm), MPI.Comm(comm))
            rebind(comm, MPI.COMM_NULL)

    def _show(self) -> None:
        for comm in self._communicators:
            if id(comm) in self._handles:
                rebind(comm, self._handles[id(comm)])
                del self._handles[id(comm)]
