"""The notebook's cluster: started when it is first needed, and again after it was lost."""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from types import FrameType, FunctionType, MethodType
from typing import Any

from allranks.cluster import devices
from allranks.cluster.cluster import Cluster
from allranks.cluster.connection import Connection
from allranks.cluster.features import NotebookHooks
from allranks.cluster.launchers.launcher import MultiHostLauncher
from allranks.cluster.options import TYPED, ClusterOptions
from allranks.cluster.state import ClusterState
from allranks.errors import UsageError, for_screen
from allranks.records.ranks import label

_NAMES = "rank, size, local_rank, local_size, comm, MPI, device, allreduce, broadcast, barrier …"
NOTHING = ClusterOptions()
DEFAULT = ClusterOptions(preload="")


class Session:
    """The one cluster of a notebook, and the options of the next one."""

    def __init__(self, hooks: NotebookHooks) -> None:
        self._cluster: Cluster | None = None
        #: The connection to the ranks that `_have` has had: each start makes another one.
        self._had: Callable[[], Connection | None] = lambda: None
        self.hooks = hooks
        self._default = self._asked = DEFAULT
        #: A sentence about the cells that run on the ranks; "" where no command has chosen them.
        self.which_cells: Callable[[], str] = str
        #: How many ranks started last on this machine, without a choice of GPUs.
        self.last_size: int | None = None

    @property
    def running(self) -> Cluster | None:
        # None unless the ranks are up.
        cluster = self._cluster
        return cluster if cluster is not None and cluster.roster.phase == "running" else None

    def cluster(self, options: ClusterOptions = NOTHING) -> Cluster:
        """Returns the running cluster, started now if necessary.

        Raises UsageError if the running one has another size, launcher, GPUs or modules than
        ``options``.
        """
        running = self.running
        if running is not None and running.cells.is_up(print):
            # A feature, or a program by `ranks`, may have started them again.
            is_new = running.cells.connection is not self._had()
            self._check(running, options)
            self._show_news(running)
            if is_new and not running.roster.busy:
                self._have(running)
            return running
        if running is not None:
            print(running.lost_because.splitlines()[0])
        if (found := self._elsewhere(running)) is not None:
            self._check(found, options)
            self._show_news(found)
            return found
        lost = self._cluster is not None and self._cluster.roster.phase == "lost"
        wanted = options.over(self._asked)
        as_before = wanted.n is None and self.last_size is not None and self._is_here(wanted)
        if as_before:
            wanted = replace(wanted, n=self.last_size)
        cluster = self._make(wanted)
        # The options last until a stop, also after a failed start or a loss; the number of ranks
        # that have started lasts longer.
        self._asked = replace(wanted, n=cluster.size)
        if not lost and (waiting := self._waiting()):
            print(for_screen(f"Starting new ranks. {waiting}"))
        started = time.monotonic()
        if lost and self._cluster is not None:
            cluster.cells.kept = self._cluster.cells.kept
        # The last call is cached: a state of the start is printed when it changes.
        cluster.start(lru_cache(maxsize=1)(partial(print, flush=True)))
        self._have(cluster)
        if self._is_here(wanted):
            self.last_size = cluster.size
        line = start_text(cluster, time.monotonic() - started, again=lost, as_before=as_before)
        print(_with_names(line + self.which_cells()))
        for line in self.hooks.start_texts(dict(wanted.settings)):
            print(for_screen(line))
        self._show_news(cluster)
        if not isinstance(cluster.launcher, MultiHostLauncher):  # else only the ranks see them
            for line in devices.notices(cluster.gpus, cluster.size):
                print(for_screen(line))
        return cluster

    def start(self, options: ClusterOptions = NOTHING) -> None:
        """Starts the ranks, or prints which ones are already running."""
        before = self.running
        cluster = self.cluster(options)
        if cluster is before:
            print(_with_names(f"allranks already runs {_place(cluster)}.{self.which_cells()}"))

    def _make(self, wanted: ClusterOptions) -> Cluster:
        cluster = wanted.make(Cluster)
        # The notebook's, not this cluster's: features prepare a cell before ranks run.
        cluster.cells.hooks = self.hooks
        return cluster

    # Ranks that other notebooks use as well: a feature's session has them.

    def _elsewhere(self, lost: Cluster | None) -> Cluster | None:
        """Returns this notebook's ranks if another one has used them; not if they are ``lost``."""
        return None

    def _waiting(self) -> str:
        """Returns a line about ranks that wait for a notebook; "" if there are none."""
        return ""

    def _have(self, cluster: Cluster) -> None:
        """These ranks are up, and the notebook's from now on."""
        self._cluster, self._had = cluster, weakref.ref(cluster.cells.connection)

    def where(self) -> str:
        """Returns a line about this notebook's ranks if another one has them; else ""."""
        return ""

    def users(self, cluster: Cluster) -> str:
        """Returns which other notebooks use these ranks, as the end of a line; "" if none does."""
        return ""

    @staticmethod
    def _is_here(options: ClusterOptions) -> bool:
        # Other hosts, and chosen GPUs, have room for other numbers of ranks.
        here = options.effective("launcher") == "local"
        return here and not options.gpus and not options.exclusive

    @staticmethod
    def _show_news(cluster: Cluster) -> None:
        for line in cluster.cells.news:
            print(for_screen(line))
        cluster.cells.news.clear()

    def start_with(self, options: ClusterOptions) -> None:
        # The default options, of this cluster and of later ones.
        self._default = self._asked = options.over(DEFAULT)

    def of_size(self, n: int | None) -> Cluster:
        return self.cluster(ClusterOptions(n))

    def _check(self, running: Cluster, options: ClusterOptions) -> None:
        for name, option in TYPED.items():
            asked = getattr(options, name)
            if asked is None:
                continue  # as in most cells: the default launcher is not looked up again
            have = self._asked.effective(name)
            if asked != have:
                # Do not offer a restart that cannot succeed.
                replace(options, exclusive=False).make(Cluster)
                what = f"{have} ranks are" if option == "-n" else f"{option} {have or 'none'} is"
                raise UsageError(
                    f"{option} {asked} was given, but {what} running. Leave out {option}, or "
                    f"type: %distributed restart {option} {asked}   (this deletes all variables "
                    "on the ranks)"
                )
        for name, value in options.settings:
            if dict(self._asked.settings).get(name) != value:
                raise UsageError(
                    f"--{name} {value} was given, but the ranks run without it. Leave it out, or "
                    f"type: %distributed restart --{name} {value}   (this deletes all variables "
                    "on the ranks)"
                )
        if options.exclusive:
            devices.check_exclusive(running.gpus, running.size)

    def restart(self, options: ClusterOptions = NOTHING) -> None:
        """Ends the ranks and starts others, by default with the same options."""
        wanted = options.over(self._asked)
        wanted.make(Cluster)  # raises before the old ranks are lost
        self.stop()
        self.cluster(wanted)

    def stop(self) -> str:
        """Ends the ranks. Returns a line about it."""
        # A cluster that is lost is stopped as well.
        running, held, self._cluster = self.running, self._cluster, None
        self._asked = self._default
        if held is not None:
            held.stop()
        lines = ["The ranks are stopped."] if running is not None else []
        if lines := [*lines, *self.hooks.ended()]:
            return "\n".join(lines)
        return f"No ranks are running. {self._waiting()}".rstrip()

    def close(self) -> str:
        """Ends the ranks. Returns a line about it if any ran."""
        running, said = self.running, self.stop()
        return "" if running is None else said


def start_text(
    cluster: Cluster, seconds: float, again: bool = False, as_before: bool = False
) -> str:
    what = "started again" if again else "started"
    count = ", as many as before" * as_before
    return f"allranks {what} {_place(cluster)} in {seconds:.1f} s{count}."


def _place(cluster: Cluster) -> str:
    hellos = list(cluster.hellos.values())
    hosts = ", ".join(sorted({hello.host for hello in hellos}))
    gpus = {(hello.host, hello.device) for hello in hellos if hello.device != "cpu"}
    where = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}" if gpus else "CPU"
    return f"{label(range(cluster.size))} on {hosts} ({where}, {hellos[0].mpi})"


def _with_names(line: str) -> str:
    return f"{line}\nEach has: {_NAMES}"


@contextmanager
def short_interrupts(session: Session, line: str) -> Iterator[None]:
    """Within, an interrupt is shown as one line: ``line``, and whether ranks run."""
    try:
        yield
    except KeyboardInterrupt as pressed:
        running = session.running
        kept = _NONE if running is None else _what_runs(running.roster)
        if running is not None and running.roster.busy:
            kept = "The ranks still run another call. To interrupt it, type: ranks.interrupt()"
        # What it has ended beside the cell.
        show_as_line(pressed, f"{'; '.join(filter(None, [line, str(pressed)]))}. {kept}")
        raise


def _what_runs(roster: ClusterState) -> str:
    # An interrupt may have ended ranks.
    if roster.ends:
        return _NONE
    if not roster.dead:
        return "The ranks keep running."
    keep = "keeps" if len(roster.alive) == 1 else "keep"
    return f"{label(roster.alive).capitalize()} {keep} running."


def show_as_line(pressed: KeyboardInterrupt, text: str) -> None:
    """Has IPython show an interrupt as one line in place of a traceback."""
    lines = [for_screen(f"KeyboardInterrupt: {text}")]
    setattr(pressed, "_render_traceback_", lambda: lines)  # noqa: B010  unknown to mypy


BEFORE_THE_CELL = "the cell was interrupted before the ranks began it"
_NONE = "No ranks are running; the next cell starts them."

RANKS = "ranks"


#: IPython's function that finds the object of ``ranks.run?``.
_FINDS = "IPython.core.interactiveshell", "_ofind"
_DESCRIBE = ("IPython.core.oinspect", "IPython.core.completer")


def is_looked_at() -> bool:
    """Whether this is called for a completion, or a description as that of ``ranks.run?``.

    These read attributes of an object, and do not show what a start of ranks prints.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module in _DESCRIBE or module.startswith("jedi."):
            return True
        if (module, frame.f_code.co_name) == _FINDS:
            return True
        frame = frame.f_back
    return False


def described(kind: type, name: str, stands_in: object) -> Any:
    """Returns an attribute of a class for a look at an object that stands in for one of its
    objects; raises AttributeError if there is none.
    """
    found = inspect.getattr_static(kind, name)
    return MethodType(found, stands_in) if isinstance(found, FunctionType) else found


#: What a cluster has since it was made, not its class.
_PARTS = ("cells", "roster", "size")
_SET_IT = "Set the variable in a cell that begins with %%distributed, which starts ranks."


class RanksProxy:
    """The ranks of this notebook, an `allranks.Cluster`. The first use starts them.

    Example::

        ranks.run("10 * rank")          # code on all ranks: the list of their values
        ranks.run(function, 3)          # function(3) on all ranks, in the same way
        ranks.map(function, [1, 2, 3])  # function(1), function(2), ..., each on a free rank
        ranks["x"]                      # the variable x of each rank: {0: ..., 1: ...}
        ranks["x"] = 3                  # x = 3 on all ranks
        ranks.status()                  # the state of each rank
        ranks.interrupt()               # ends what they run
        ranks.stop()                    # ends them; the next use starts new ones

    Type ``ranks.run?`` for the arguments of a method, and ``ranks.<Tab>`` for all methods. Cells
    run on the same ranks if they begin with ``%%distributed``.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getitem__(self, name: str) -> dict[int, Any]:
        running = self._session.running
        if running is None and self._session.where():
            running = self._session.cluster()  # another notebook has them: as for pull
        if running is None:
            raise UsageError("expected ranks, whose variables to copy, found none. " + _SET_IT)
        return running[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._session.cluster()[name] = value

    def __bool__(self) -> bool:
        return True  # as before they have started, when their number is 0

    def __len__(self) -> int:
        return running.size if (running := self._session.running) is not None else 0

    def __getattr__(self, name: str) -> Any:
        # IPython asks every object for _repr_html_ and the like: that starts nothing.
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _PARTS or hasattr(Cluster, name) or hasattr(self._session.running, name):
            if not is_looked_at():
                return getattr(self._session.cluster(), name)
            if (running := self._session.running) is not None:
                return getattr(running, name)
            return described(Cluster, name, self)
        raise AttributeError(
            f"ranks has no {name!r}. For a variable of the ranks type: ranks[{name!r}]   "
            "(ranks? lists what there is)"
        )

    def stop(self) -> None:
        # Without ranks it starts none.
        if self._session.running is not None:
            self._session.running.stop()

    def __dir__(self) -> list[str]:
        return [*_PARTS, *(name for name in dir(Cluster) if not name.startswith("_"))]

    def __repr__(self) -> str:
        running = self._session.running
        return repr(running) if running is not None else "<ranks, not started yet>"
