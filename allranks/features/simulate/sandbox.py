"""What each simulated rank has for itself while it runs, and what all of them find changed.

Namespaces, the modules of the user's files, ``random``, ``numpy.random``, figures of matplotlib,
bars of tqdm, ``sys.stdout`` and the filters of warnings are a rank's own. All other modules, and
their state, are shared: they are those of one process.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, NoReturn

import mpi4py
import numpy as np
from mpi4py import MPI

from allranks import collectives
from allranks.collectives.calls.sites import USER, kind_of
from allranks.collectives.world import current, exists, process_sets, set_thread
from allranks.engine import namespace
from allranks.engine.telemetry import Metrics
from allranks.errors import UsageError
from allranks.features.simulate import mpi_module, requests, world
from allranks.features.simulate.comm import WORLD
from allranks.features.simulate.network import Network
from allranks.features.simulate.scheduler import Scheduler, Task
from allranks.features.simulate.world import SharedState, Silent, SimulatedWorld
from allranks.post_import import PostImportHook
from allranks.records.deferred import Deferred

_mtrand: Any = np.random
_REGISTERS = {
    "matplotlib._pylab_helpers": ("Gcf", "figs"),
    "tqdm.std": ("tqdm", "_instances"),
}
"""Where libraries keep what a rank has opened: a class of a module, and its attribute."""
_OWN: tuple[tuple[Any, str], ...] = ((sys, "stdout"), (sys, "stderr"), (warnings, "filters"))
"""What a ``with`` block of one rank replaces, while other ranks run."""
_LONGEST_SECONDS = 9e9
"""As of ``time.sleep``."""
_REAL = "Leave out --simulate to use real ranks: %%distributed -n 4"
_REFUSED = {
    **dict.fromkeys(("tensorflow", "keras", "horovod"), "a graph and a session for each process"),
    **dict.fromkeys(("cupy", "cupyx"), "a GPU for each process"),
    **dict.fromkeys(("petsc4py", "h5py.h5p"), "MPI's own communicators"),
}
"""Modules that cannot be imported, and what they need."""
_INLINE = "%matplotlib inline"
_MAGICS = {
    "run_line_magic",
    "run_cell_magic",
    "system",
    "getoutput",
}


class SimulateCommands:
    """``simulate`` in a cell: the simulated time of this rank."""

    def compute(self, seconds: float) -> None:
        """Takes so much simulated time, and no real time; on shared cores more of it."""
        if not 0 <= seconds <= _LONGEST_SECONDS:
            raise UsageError(
                f"simulate.compute expected seconds from 0 to {_LONGEST_SECONDS:,.0f}, found "
                f"{seconds!r:.60}. "
                "Type for example: simulate.compute(0.01)"
            )
        requests.running().computed(float(seconds))

    @property
    def time(self) -> float:
        """The simulated seconds since this rank began the cell."""
        return mpi_module.wtime()

    def __repr__(self) -> str:
        return "<simulate: compute(seconds), time>"


class Space:
    """A simulated rank between cells: its variables, and its state of libraries."""

    def __init__(self, rank: int, hosts: tuple[int, ...], shared: SharedState) -> None:
        self.world = SimulatedWorld(rank, hosts, shared)
        self.world.journal = Silent()  # type: ignore[assignment]
        self.world.mpi = types.SimpleNamespace(user=WORLD, lost_by=lambda error: None)  # type: ignore[assignment]
        self.module = types.ModuleType("__main__")
        self.metrics = Metrics()
        # A seed of its own: real ranks draw different numbers as well.
        self.random: Any = random.Random(rank).getstate()
        self.bits: Any = None
        self.registers: dict[str, Any] = {}
        """The values of `_REGISTERS`, by module."""
        self.modules: dict[str, types.ModuleType] = {}
        """Those of the user's files, by name."""
        self.own: tuple[Any, ...] = ()
        """The values of `_OWN` in its cell."""

    @property
    def names(self) -> dict[str, Any]:
        return vars(self.module)


class Ranks:
    """The simulated ranks of one size."""

    def __init__(self, size: int, network: Network) -> None:
        self.shared = SharedState()
        hosts = network.hosts(size)
        self.hosts = hosts
        self.spaces = [Space(rank, hosts, self.shared) for rank in range(size)]
        self.epoch = 0
        self.names: dict[str, Any] = {}
        self.mail: Any = None
        """The messages that its last cell has left."""
        self.failed = False
        """Whether its last cell has failed or was interrupted."""
        self.user_modules: set[str] = set()

    def place(self, rank: int) -> dict[str, int]:
        """The numbers of a rank in its cells, as `namespace.place` has them."""
        host, here = self.hosts[rank], self.spaces[rank].world.local_ranks
        local = here.index(rank)
        hosts, largest = self.hosts[-1] + 1, len(self.spaces[0].world.local_ranks)
        # Only the last host may have fewer ranks.
        last = len(self.hosts) - (hosts - 1) * largest
        return {
            "rank": rank,
            "size": len(self.hosts),
            "local_rank": local,
            "local_size": len(here),
            "cross_rank": host,
            "cross_size": hosts if local < last else hosts - 1,
        }

    def move(self, hosts: tuple[int, ...]) -> None:
        """Distributes the ranks over other hosts, if the network of a cell is another one."""
        if hosts == self.hosts:
            return
        self.hosts = hosts
        self.shared.texts.clear()
        for space in self.spaces:
            space.world.hosts = hosts
        for space in self.spaces:
            if space.names.get("MPI") is not None:
                space.names.update(self.place(space.world.rank))

    def renew(self) -> None:
        """Begins a new epoch if a cell has left calls unfinished, or has failed after messages."""
        failed = self.failed and self.mail is not None and self.mail.used
        if failed or self.shared.slots or any(space.world.unfinished for space in self.spaces):
            self.epoch += 1
            self.mail, self.failed = None, False
            self.shared.slots.clear()
            for space in self.spaces:
                space.world.renewed(self.epoch)


class Sandbox:
    """The changes to this process while simulated ranks run; ``spaces`` are those of its tasks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.scheduler: Scheduler
        self._main = sys.modules["__main__"]
        self._space: Space | None = None

    def switch(self, task: Task | None) -> None:
        """Another task runs from now on, or none."""
        if self._space is not None:
            self._leave(self._space)
        self._space = space = self._ranks.spaces[task.rank] if task is not None else None
        if space is not None:
            self._enter(space)

    def _enter(self, space: Space) -> None:
        set_thread(space.world)
        for (owner, name), value in zip(_OWN, space.own, strict=True):
            setattr(owner, name, value)
        sys.modules["__main__"] = space.module
        random.setstate(space.random)
        if space.bits is None:
            space.bits = np.random.MT19937(space.world.rank)
        _mtrand.set_bit_generator(space.bits)
        for name, (kind, register) in _REGISTERS.items():
            if name in sys.modules:
                owner = getattr(sys.modules[name], kind)
                if name not in space.registers:
                    space.registers[name] = type(getattr(owner, register))()
                setattr(owner, register, space.registers[name])
        sys.modules.update(space.modules)

    def _leave(self, space: Space) -> None:
        for name in self._ranks.user_modules:
            # An import may be under way: a rank may wait in the code of its module.
            if (module := sys.modules.pop(name, None)) is not None:
                space.modules[name] = module
        space.own = _own()
        space.random = random.getstate()
        space.bits = _mtrand.get_bit_generator()

    def names(self, space: Space) -> None:
        """Gives a rank the names of its cells, once."""
        if "MPI" in space.names:
            return
        if not self._ranks.names:
            # Not for each rank: some of the numbers take a loop over all ranks.
            self._ranks.names = namespace.names("cpu")
        found = self._ranks.names | self._ranks.place(space.world.rank)
        found |= {
            "log": space.metrics.log,
            "simulate": SimulateCommands(),
            "keep": _refusing("keep()", "keep variables, which are kept anyway"),
            "get_ipython": _refusing("get_ipython()", "magics belong to a process"),
        }
        space.names.update(found, __builtins__=builtins)

    @contextmanager
    def active(self, fakes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
        """Within, the process is that of simulated ranks; ``fakes`` are further replacements."""
        module = mpi_module.SimulatedMPI()
        replaced: list[tuple[Any, str, Any]] = [
            (mpi4py, "MPI", module),
            (builtins, "input", _refusing("input()", "type the value into the cell")),
            *((time, name, function) for name, function in CLOCK.functions.items()),
            (warnings, "filters", warnings.filters),
            (process_sets, "open_group", world.open_group),
            (process_sets, "deferred", _not_deferred),
            *((collectives, name, function) for name, function in _calls().items()),
            *(
                (collectives, name, _refusing(f"{name}()", "--view full shows the times of calls"))
                for name in ("records", "timeline")
            ),
            *fakes,
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
        state, bits = random.getstate(), _mtrand.get_bit_generator()
        modules, finders = dict(sys.modules), [*sys.meta_path]
        refused = _Imports(self._ranks.user_modules)
        hooks = [
            PostImportHook({"torch.distributed"}, _refuse_torch),
            PostImportHook({"allranks.grading"}, _refuse_expect),
        ]
        for hook in hooks:
            hook.install()
        sys.meta_path.insert(0, refused)
        sys.modules["mpi4py.MPI"] = module
        for owner, name, value in replaced:
            setattr(owner, name, value)
        for space in self._ranks.spaces:
            space.own = _own()
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            if sys.modules.get("sys") is not sys:  # a cell has emptied it: the process needs it
                sys.modules.update(modules)
            sys.modules["mpi4py.MPI"] = MPI
            sys.modules["__main__"] = self._main
            found = sys.meta_path or finders
            sys.meta_path[:] = [one for one in found if one not in (refused, *hooks)]
            random.setstate(state)
            _mtrand.set_bit_generator(bits)
            set_thread(None)


@cache
def _calls() -> dict[str, Callable[..., Any]]:
    """The functions of `collectives` that communicate, as simulated ranks call them."""
    found: dict[str, Callable[..., Any]] = {
        name: function
        for name in collectives.__all__
        if isinstance(function := getattr(collectives, name), types.FunctionType)
        and function.__module__.startswith(("allranks.collectives.ops", process_sets.__name__))
    }
    found |= {"join": world.join, "send": mpi_module.send, "recv": mpi_module.recv}
    return {name: requests.timed_by_network(function) for name, function in found.items()}


@contextmanager
def _not_deferred() -> Iterator[Deferred]:
    # An interrupt ends all simulated ranks at once.
    yield Deferred()


def _refusing(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(f"simulated ranks have no {what}: {instead}. {_REAL}")

    return refuse


def _refuse_torch(module: types.ModuleType) -> None:
    refuse = _refusing(
        "process groups of torch", "use allreduce, broadcast and the other functions"
    )
    setattr(module, "init_process_group", refuse)  # noqa: B010  unknown to mypy


def _refuse_expect(module: types.ModuleType) -> None:
    refuse = _refusing("expect()", "its record is that of a process's own calls")
    setattr(module, "expect", refuse)  # noqa: B010  unknown to mypy


class _Imports(importlib.abc.MetaPathFinder):
    """Refuses modules, and finds which ones are of the user's files."""

    def __init__(self, user_modules: set[str]) -> None:
        self._user_modules = user_modules

    def find_spec(
        self, name: str, path: Any = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _REFUSED:
            raise ImportError(
                f"simulated ranks cannot import {name}, which needs {_REFUSED[name]}: they share "
                f"one process. {_REAL}"
            )
        if name in self._user_modules:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.has_location and kind_of(str(spec.origin)) == USER:
            self._user_modules.add(name)
        return None  # also for other finders, such as hooks, to find


def _own() -> tuple[Any, ...]:
    return tuple(getattr(owner, name) for owner, name in _OWN)


class _Clock:
    """The functions of ``time`` on simulated ranks. A cell may import them for later cells."""

    def __init__(self) -> None:
        names = ("time", "perf_counter", "monotonic")
        self._real = {name: getattr(time, name) for name in names}
        self._began = dict.fromkeys(names, 0.0)
        self.functions: dict[str, Callable[..., Any]] = {"sleep": self._sleeping()}
        for name in names:
            self.functions[name] = self._reading(name, getattr(time, name))
            self.functions[f"{name}_ns"] = self._reading_ns(name, getattr(time, f"{name}_ns"))

    def begin(self) -> None:
        """A cell begins, with all its schedules."""
        for name, real in self._real.items():
            self._began[name] = real()

    def _sleeping(self) -> Callable[[float], None]:
        real = time.sleep

        def sleep(seconds: float) -> None:
            """Takes simulated time only."""
            scheduler = _scheduler()
            if scheduler is not None and 0 <= seconds <= _LONGEST_SECONDS:
                scheduler.slept(float(seconds))
            else:
                real(seconds)

        return sleep

    def _reading(self, name: str, real: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            simulated = _scheduler() is not None
            return self._began[name] + mpi_module.read_clock() if simulated else real()

        return read

    def _reading_ns(self, name: str, real: Callable[[], int]) -> Callable[[], int]:
        def read() -> int:
            simulated = _scheduler() is not None
            began = round(self._began[name] * 1e9)
            return began + round(mpi_module.read_clock() * 1e9) if simulated else real()

        return read


def _scheduler() -> Scheduler | None:
    """That of the rank that runs in this thread; None outside of simulated ranks."""
    found = current() if exists() else None
    if not isinstance(found, SimulatedWorld) or found.scheduler.current is None:
        return None
    return found.scheduler


CLOCK = _Clock()


def check_magics(tree: ast.Module) -> None:
    """Raises UsageError for the magics and commands in a cell; removes ``%matplotlib inline``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _magic(node.value) == _INLINE:
            node.value = ast.copy_location(ast.Constant(None), node.value)
        elif isinstance(node, ast.Call) and (text := _magic(node)) and text != _INLINE:
            raise UsageError(
                f"expected Python on simulated ranks, found {text:.60} in line {node.lineno}: "
                f"magics and commands belong to a process. Type it in a cell of the notebook. "
                f"{_REAL}"
            )


def _magic(node: ast.AST) -> str:
    """The magic or command that IPython has made this call of; empty if it is none."""
    if not (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _MAGICS
        and isinstance(node.func.value, ast.Call)
        and getattr(node.func.value.func, "id", "") == "get_ipython"
    ):
        return ""
    words = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
    if words[:2] == ["matplotlib", "inline"]:
        return _INLINE
    magic = node.func.attr.startswith("run_")
    return f"%{words[0]}" if magic and words else f"!{words[0] if words else ''}"
