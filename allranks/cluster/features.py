"""What a feature can do in the notebook, and how the core calls it.

A feature's ``notebook.py`` sets ``FEATURE`` to a subclass of `NotebookFeature`. `allranks.notebook`
loads them once; each notebook, and each `Cluster` outside of one, makes one instance of each. The
hooks are called in this order:

0. ``loaded``, of the class: the extension has been loaded in a shell, which may be one of several
   in this process. What that has changed is undone when it is unloaded there.
1. ``started``, when the connection is open and before the first rank has come; again after each
   restart, and when the notebook gets ranks that another one has started. Then ``host_agents``, if
   they are on several hosts.
2. ``cell_started``, before the cell is sent to its ranks. ``cell`` is set from here on. Or
   ``ranks_reserved``, before a feature reserves all ranks for its own cells. ``cell_lasts``, once
   the cell has run for a moment, or is interrupted; most cells end before.
3. While ranks run: ``message_arriving``, in the thread that receives, with the records of
   ``arriving``; ``message_received``, in the main thread, with those of ``records``. A feature that
   has to act by itself has `CellContext.poll` call it.
4. When all ranks have left the cell: ``ranks_missing`` if some have died and are to be replaced,
   then ``cell_left``; and ``cell_finished``, when its output is shown. Then ``cell`` is None. Cells
   that a feature runs in the first two are part of this one: ``cell`` is set to each of them, and
   no hook is called at its beginning and end. Last, in a notebook, ``cell_shown``.
5. ``rank_died``, at any time while ``in_cells`` is true, with a rank that can be replaced.
6. ``stopped``, before the ranks are ended, or left to another notebook.
7. ``ended``, when the notebook stops its ranks, also if it has none.

A hook that raises fails the cell that runs, or else the next one, with an error that names the
feature. The other features' hooks are called all the same.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from types import MethodType
from typing import Any

from allranks.cluster.agents import HostAgents, HostsContext
from allranks.cluster.options import (
    CELL_OPTIONS,
    LINE_COMMANDS,
    START_OPTIONS,
    CellOption,
    ClusterOptions,
    LineCommand,
    StartOption,
)
from allranks.cluster.sockets import Answers, DeliverAnswer, RecordObserver
from allranks.cluster.state import ClusterState
from allranks.errors import AllranksError, FeatureFailed, UsageError
from allranks.hooks import Hooks, declares_hooks, failure
from allranks.records.agent import Event
from allranks.records.wire import Answer, Query, Record, Reply
from allranks.widgets import extensions
from allranks.widgets.dashboard.view import Buttons, PanelButton
from allranks.widgets.extensions import DisplayFolder, DisplayObserver, LineFolder

Listener = Callable[[Event, int | None], object]
Listeners = dict[type[Event], list[Listener]]


@dataclass(frozen=True)
class ClusterContext:
    """What a feature may use of its ranks.

    Attributes:
        size: the number of ranks.
        send: sends a record and its payloads to some ranks, from any thread.
        starts_ranks: whether this notebook starts them; else another one has.
        settings: the environment variables that the start's options have set in the ranks.
        log_dir: the folder of the ranks' logs.
        start_controller: has the first host start what `HostFeature.controller` has planned.
        listeners: by the class of an event of a host agent, what `listen` has added.
        observers: objects that get each record to and from the ranks, in any thread.
        session_dir: the folder by which other notebooks find the ranks.
        at_end: closed when the ranks are ended, or left to another notebook; from any thread.
        roster: which ranks run, and which have died.
        post: has the thread that receives from the ranks call a function; returns false if that
            thread has ended.
    """

    size: int
    send: Callable[..., object]
    starts_ranks: bool
    settings: Mapping[str, str] = field(default_factory=dict)
    log_dir: str = ""
    start_controller: Callable[[], object] = lambda: None
    listeners: Listeners = field(default_factory=dict)
    observers: list[RecordObserver] = field(default_factory=list)
    session_dir: str = ""
    at_end: ExitStack = field(default_factory=ExitStack)
    roster: ClusterState = field(default_factory=lambda: ClusterState(0))
    post: Callable[[Callable[[], object]], bool] = lambda call: False

    def listen(self, hear: Listener, *kinds: type[Event]) -> None:
        """Has a function get each event of these kinds and the agent's process, None if it is not
        on this machine, in the thread that reads them. `Again` comes before all ranks start again
        on other hosts.
        """
        for kind in kinds:
            self.listeners.setdefault(kind, []).append(hear)


@dataclass(frozen=True)
class CellContext:
    """What a feature may use of the cell that runs.

    Attributes:
        number: the cell's number in its cluster.
        ranks: those that run it.
        shown: whether the user sees its output.
        kernel: the notebook's kernel, None in a script.
        front_end: which kind shows the cell, see `allranks.widgets.text.front_end`.
        pending: returns the ranks that have not left it yet.
        interrupts: returns how often it was interrupted.
        notice: shows a line about the cell as a whole.
        name_cause: shows in the panel why the cell, which has ended, was slow, or wrong.
        show_output: shows all output so far; later output follows below it.
        ask: returns the answers to a request; ranks that do not answer in time are left out.
        ask_soon: makes a request; its answers are delivered as they come.
        poll: makes the core call a function several times a second until the cell has ended. While
            it returns true, the user is at a prompt: the cell's time limit does not count, and
            calls come more often. It may raise KeyboardInterrupt, which interrupts the cell.
        replies: returns the replies of the ranks that have left it, by rank.
        began: when it began, on Python's monotonic clock.
    """

    number: int
    ranks: tuple[int, ...]
    shown: bool
    kernel: Any
    front_end: str
    pending: Callable[[], tuple[int, ...]]
    interrupts: Callable[[], int]
    notice: Callable[[str], None]
    show_output: Callable[[], None]
    ask: Callable[[str, dict[str, Any], Iterable[int], float], Answers]
    ask_soon: Callable[[str, dict[str, Any], DeliverAnswer, Iterable[int]], None]
    poll: Callable[[Callable[[], bool]], None]
    name_cause: Callable[[str], None] = lambda text: None
    replies: Callable[[], Mapping[int, Reply]] = dict
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class CellRequest:
    """A cell with a feature's option; the feature's command returns its cluster and its run.

    ``number`` is the notebook's, ``options`` are the features' that were given, by name. The other
    attributes are options of the magic.
    """

    source: str
    number: int
    options: Mapping[str, Any]
    cluster: ClusterOptions
    ranks: str | None
    timeout: float | None
    view: str
    fold: bool
    want_value: bool


@declares_hooks
class NotebookFeature:
    """One feature in one notebook: override the hooks that it needs."""

    cell: CellContext | None = None
    """The cell that runs; the core sets it."""
    in_cells = True
    """Whether ``cell_started``, ``cell_left``, ``cell_finished`` and ``rank_died`` are called; the
    feature may change it at any time."""
    holds_cells = False
    """Whether ranks may have to answer clients of this notebook before a cell is sent to them; the
    feature may change it at any time.

    It has five commands. Three begin with the `Connection` and ranks of it: ``await_clients`` waits
    until these have answered, and shows lines by the function that follows; an interrupt raises
    KeyboardInterrupt, or CellInterrupted in another thread than the main one. ``unanswered``
    returns which have to answer. ``leave_held_cell`` gets, in place of ranks, the requests that
    they run, as `RankEpochs.in_request` has them; it interrupts those of this notebook, and returns
    what has ended. ``held_text`` returns for which of such requests a cell waits. Of a
    `Connection`, ``interrupt_clients`` interrupts what ranks do for clients of any notebook, and
    returns whether they did anything.
    """
    replaces_ranks: str = ""
    """What the user types to have it replace dead ranks; empty if it replaces none. If no feature
    does, all ranks end with the first that dies.

    It has three commands, whose first arguments are the `Connection` and a function that shows a
    line. ``replace_ranks`` replaces dead ranks; it raises ClusterLost after it has killed all.
    ``continue_recovery`` goes on with that, in place of another notebook that has ended, from the
    ``record`` that follows. Both return a line, and whether an interrupt came meanwhile.
    ``restore_ranks`` returns a line about what new ranks have again of what was kept: all ranks, or
    those that follow and have replaced others.
    """
    records: tuple[type[Record], ...] = ()
    """Records from ranks that ``message_received`` takes."""
    arriving: tuple[type[Record], ...] = (Record,)
    """Records from ranks that ``message_arriving`` takes; the feature may change it at any time."""
    commands: frozenset[str] = frozenset()
    """Names of commands that ``command`` does."""
    start_options: tuple[StartOption, ...] = ()
    """Options for the start of ranks."""
    cell_options: tuple[CellOption, ...] = ()
    """Options of a cell, which the feature then runs by a command with a `CellRequest`, or prepares
    by one with the options.
    """
    line_commands: tuple[LineCommand, ...] = ()
    """Commands of ``%distributed``, which ``command`` does with the list of their words."""
    panel_buttons: tuple[PanelButton, ...] = ()
    """Buttons of the panel of a cell, whose commands get a function that shows their results."""
    line_folders: tuple[LineFolder, ...] = ()
    display_folders: tuple[type[DisplayFolder], ...] = ()
    display_observers: tuple[DisplayObserver, ...] = ()
    """Parts of all views, see `allranks.widgets.extensions`."""

    @classmethod
    def loaded(cls, shell: Any, undo: ExitStack) -> None:
        """The extension has been loaded in this shell of IPython; there are no ranks yet.

        ``undo`` is closed when it is unloaded there. It enters a `ProcessChange` for what concerns
        all shells of this process.
        """

    def start_text(self, settings: Mapping[str, str]) -> str:
        """Returns a line for the user when ranks have started; empty for none.

        ``settings`` are the chosen values of the ``start_options`` of all features.
        """
        return ""

    def started(self, cluster: ClusterContext) -> None:
        """The connection is open; ranks come up next."""

    def ranks_reserved(self) -> None:
        """A feature is about to run cells of its own side by side, each on some of the ranks."""

    def cell_started(self) -> None:
        """A cell is about to be sent, or another notebook's cell is shown from now on."""

    def cell_lasts(self) -> None:
        """The cell has run for a tenth of a second, or is interrupted; called once."""

    def message_arriving(self, record: Record, payloads: list[bytes]) -> Record | None:
        """One of ``arriving`` comes: returns it, another in its place, or None for none.

        Called in the thread that receives from the ranks.
        """
        return record

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        """One of ``records`` has come; called in the main thread."""

    def ranks_missing(self, run: Any, cells: Any) -> None:
        """All ranks have left a `CellRun` of these `Cells`, or have died in it or since; those that
        have died are to be replaced without a command. As ``cell_left``, which follows.
        """

    def cell_left(self, run: Any, cells: Any) -> None:
        """All ranks have left a `CellRun` of these `Cells`, and its view still shows lines.

        The feature may run other cells, see above. What it raises is raised in place of the cell's
        error.
        """

    def cell_finished(self) -> None:
        """The cell has ended and its output is shown."""

    def cell_shown(self, number: int, view: Any, folder: str) -> None:
        """A cell of the notebook has ended, also with an error. ``number`` is the notebook's,
        ``view`` has shown it, and its logs are in ``folder``.
        """

    def rank_died(self, rank: int) -> None:
        """A rank has died and can be replaced."""

    def stopped(self) -> None:
        """The ranks are about to be ended, or left to another notebook."""

    def ended(self) -> str:
        """The notebook ends its ranks; returns a line if the feature has ended others."""
        return ""

    def host_agents(self, hosts: HostsContext) -> HostAgents:
        """Returns the agents of several hosts, which start the ranks or have them.

        The first feature that has this hook is asked, and built-in ones come first; what it raises
        fails the start.
        """
        raise NotImplementedError

    def command(self, name: str, *arguments: Any) -> Any:
        """Runs one of the ``commands``.

        Raises:
            UsageError: its arguments are wrong, or it is not possible now.
        """
        raise NotImplementedError


#: Requests of the core are counted from 1.
_numbers = count(1 << 40)


@dataclass
class _Question:
    ranks: tuple[int, ...]
    deliver: Callable[[dict[int, Answer]], None]
    answers: dict[int, Answer] = field(default_factory=dict)


@declares_hooks
class AskingFeature(NotebookFeature):
    """A feature that makes requests of ranks in any thread, also while a cell runs."""

    arriving: tuple[type[Record], ...] = ()  # until it asks

    def __init__(self) -> None:
        self.context: ClusterContext | None = None
        """Set while there are ranks."""
        self._questions: dict[int, _Question] = {}

    def started(self, cluster: ClusterContext) -> None:
        self.context = cluster

    def stopped(self) -> None:
        self.context = None

    def ask(
        self,
        ranks: Iterable[int],
        name: str,
        arguments: dict[str, Any],
        deliver: Callable[[dict[int, Answer]], None],
        seconds: float,
        *,
        again: bool = False,
    ) -> int:
        """Delivers the answers of all ranks, or those that have come after some seconds.

        ``deliver`` is called once, in the thread that receives, or in a timer's if that one has
        ended. With ``again`` it is also called when the last answer comes later, unless `drop` is
        called with the number that is returned.
        """
        request = next(_numbers)
        context = self.context
        if context is None:
            return request  # they end
        asked = tuple(ranks)
        self._questions[request] = _Question(asked, deliver)
        self.arriving = (Answer,)
        context.send(asked, Query(request, name, arguments))
        end = partial(self._tell if again else self._finish, request)
        # A rank that computes in C does not answer.
        timer = threading.Timer(seconds, lambda: context.post(end) or end())
        timer.daemon = True
        timer.start()
        return request

    def drop(self, request: int) -> None:
        """Delivers no further answers to a request."""
        self._questions.pop(request, None)

    def begin_ask(
        self, ranks: Iterable[int], name: str, arguments: dict[str, Any], seconds: float
    ) -> Callable[[], dict[int, dict[str, Any]]]:
        """Makes a request; returns a function that waits for the answers, for some seconds.

        Ranks that refuse are left out, and so are those that have not answered by then.
        """
        found: dict[int, Answer] = {}
        # Not an event, whose wait is Python: an interrupt in it would leave the event's lock held,
        # for which the thread that receives would wait.
        come: SimpleQueue[None] = SimpleQueue()

        def take(answers: dict[int, Answer]) -> None:
            found.update(answers)
            come.put(None)

        def wait() -> dict[int, dict[str, Any]]:
            with suppress(Empty):
                come.get(timeout=2 * seconds)  # `ask` delivers before
            return {rank: one.content for rank, one in found.items() if not one.problem}

        if self.context is None:
            come.put(None)
        self.ask(ranks, name, arguments, take, seconds)
        return wait

    def message_arriving(self, record: Record, payloads: list[bytes]) -> Record | None:
        # Of another feature, of the core, or too late.
        question = self._questions.get(record.request) if isinstance(record, Answer) else None
        if question is None:
            return record
        assert isinstance(record, Answer)
        question.answers[record.rank] = record
        if len(question.answers) == len(question.ranks):
            self._finish(record.request)
        return None

    def _finish(self, request: int) -> None:
        question = self._questions.pop(request, None)
        if question is not None:
            question.deliver(question.answers)

    def _tell(self, request: int) -> None:
        question = self._questions.get(request)
        if question is not None:  # else all answers have come
            question.deliver(dict(question.answers))


_registered: list[type[NotebookFeature]] = []


def register(classes: Sequence[type[NotebookFeature]]) -> None:
    """Sets which features all following notebooks and clusters have."""
    _registered[:] = classes
    START_OPTIONS.clear()
    START_OPTIONS.update({o.name: o for kind in classes for o in kind.start_options})
    CELL_OPTIONS.clear()
    CELL_OPTIONS.update({o.name: o for kind in classes for o in kind.cell_options})
    LINE_COMMANDS.clear()
    LINE_COMMANDS.update({c.name: c for kind in classes for c in kind.line_commands})
    extensions.LINE_FOLDERS[:] = [f for kind in classes for f in kind.line_folders]
    extensions.DISPLAY_FOLDERS[:] = [f for kind in classes for f in kind.display_folders]
    extensions.DISPLAY_OBSERVERS[:] = [o for kind in classes for o in kind.display_observers]


class ProcessChange(AbstractContextManager[None]):
    """A change of this process, in place from the first shell that enters until the last has left.

    ``make`` makes it, and adds to the stack that it gets what undoes it.
    """

    def __init__(self, make: Callable[[ExitStack], object]) -> None:
        self._make = make
        self._shells, self._undo = 0, ExitStack()

    def __enter__(self) -> None:
        if not self._shells:
            self._make(self._undo)
        self._shells += 1

    def __exit__(self, *_: object) -> None:
        self._shells -= 1
        if not self._shells:
            self._undo.close()


def loaded(shell: Any, undo: ExitStack) -> None:
    """Calls ``loaded`` of the registered features; ``undo`` gets what undoes their changes."""
    for kind in _registered:
        own = ExitStack()
        undo.callback(_call, MethodType(undo_changes, kind), own)
        _call(kind.loaded, shell, own)


def undo_changes(kind: type[NotebookFeature], undo: ExitStack) -> None:
    # Bound to the feature's class, so that an error names the feature.
    undo.close()


def _call(hook: Callable[..., None], *arguments: Any) -> None:
    try:
        hook(*arguments)
    except AllranksError as refused:
        warnings.warn(str(refused), stacklevel=3)
    except Exception as error:
        warnings.warn(str(failure(hook, error)), stacklevel=3)


class NotebookHooks(Hooks[NotebookFeature]):
    """Calls the hooks of a notebook's features; a cell fails with what they raise.

    ``classes`` are by default the registered features.
    """

    def __init__(self, classes: Iterable[type[NotebookFeature]] | None = None) -> None:
        self._first: FeatureFailed | None = None
        super().__init__(_registered if classes is None else classes, self._keep)
        # At each cell and record: found here once.
        self._interceptors = self._having("message_arriving")
        self._starting = self._having("cell_started")
        self._leaving = self._having("cell_left")
        self._finishing = self._having("cell_finished")
        self._dying = self._having("rank_died")
        self._showing = self._having("cell_shown")
        self.commands: dict[str, Callable[..., Any]] = {
            name: feature.command
            for feature in self.features
            for name in (
                *feature.commands,
                *(one.name for one in feature.line_commands),
                *(one.command for one in feature.panel_buttons),
            )
        }
        self.replaces_ranks = next(filter(None, (one.replaces_ranks for one in self.features)), "")
        self.polls: list[Callable[[], bool]] = []
        """The functions that ``polled`` calls, as long as the cell runs."""
        self._cell: CellContext | None = None
        #: The cell that all ranks have left, while features act on that.
        self._left: CellContext | None = None

    def _having(self, hook: str) -> list[NotebookFeature]:
        plain = getattr(NotebookFeature, hook)
        return [one for one in self.features if getattr(type(one), hook) is not plain]

    def _keep(self, failed: FeatureFailed) -> None:
        self._first = self._first or failed

    def take_failure(self) -> FeatureFailed | None:
        """Returns what a feature has raised since the last call, once the cell itself ends."""
        if self._left is not None:
            return None
        failed, self._first = self._first, None
        return failed

    def started(self, cluster: ClusterContext) -> None:
        self.call(NotebookFeature.started, cluster)

    def start_texts(self, settings: Mapping[str, str]) -> list[str]:
        return [text for text in self.call(NotebookFeature.start_text, settings) if text]

    def ended(self) -> list[str]:
        return [text for text in self.call(NotebookFeature.ended) if text]

    def check_hosts(self, typed: str) -> None:
        """Raises UsageError if no feature starts ranks on several hosts, as ``--on`` asks."""
        if not self.of(NotebookFeature.host_agents):
            raise UsageError(
                f"expected a feature that starts ranks on several hosts, for --on {typed}, found "
                "none: a part of allranks was removed. Install it again, or start the ranks on "
                "this machine: --on local"
            )

    def host_agents(self, hosts: HostsContext) -> HostAgents:
        self.check_hosts(hosts.launcher.typed)
        return self.of(NotebookFeature.host_agents)[0](hosts)

    def panel_buttons(self) -> Buttons:
        return {
            button: partial(self.command, button.command)
            for feature in self.features
            for button in feature.panel_buttons
        }

    @property
    def holds_cells(self) -> bool:
        return any(one.holds_cells for one in self.features)

    def cell_started(self, cell: CellContext) -> None:
        self.set_cell(cell)
        hooks = [one.cell_started for one in self._starting if one.in_cells]
        if hooks and self._left is None:
            self.call_each(hooks)

    def cell_lasts(self) -> None:
        if self._left is None:
            self.call(NotebookFeature.cell_lasts)

    def cell_left(self, run: Any, cells: Any) -> None:
        outer = self._left
        try:
            self._left = outer or self._cell
            if cells.roster.replaces_now:
                for hook in self.of(NotebookFeature.ranks_missing):
                    hook(run, cells)
            for feature in self._leaving:
                if feature.in_cells:
                    feature.cell_left(run, cells)
        finally:
            self._left = outer

    def cell_finished(self) -> None:
        try:
            hooks = [one.cell_finished for one in self._finishing if one.in_cells]
            if hooks and self._left is None:
                self.call_each(hooks)
        finally:  # the user may interrupt one
            self.set_cell(None)

    def cell_shown(
        self, number: int, view: Any, folder: str, outer: BaseException | None = None
    ) -> None:
        """Calls that hook; a feature that raises fails this cell, not the next one.

        ``outer`` is the exception that the user's code handles where it runs this cell, if any.
        """
        own, failed = sys.exception(), list[FeatureFailed]()
        own = None if own is outer else own
        for feature in self._showing:
            try:
                feature.cell_shown(number, view, folder)
            except Exception as error:
                failed.append(failure(feature.cell_shown, error))
        if own is not None:
            for one in failed:
                own.add_note(str(one))
        elif failed:
            raise failed[0]

    def set_cell(self, cell: CellContext | None) -> None:
        """Sets the cell whose output is shown, if any; after one that a feature has run at the end
        of another one, it is that one again.
        """
        if self._left is None:
            self.polls.clear()
        self._cell = cell or self._left
        for feature in self.features:
            feature.cell = self._cell

    def rank_died(self, rank: int) -> None:
        self.call_each([one.rank_died for one in self._dying if one.in_cells], rank)

    def stopped(self) -> None:
        self.call(NotebookFeature.stopped)
        self._left = None
        self.set_cell(None)

    def polled(self) -> bool:
        """Calls the polls of features; returns whether a prompt is open. KeyboardInterrupt
        interrupts the cell.
        """
        asked = False
        for poll in self.polls:
            try:
                asked = poll() or asked
            except Exception as error:
                self._keep(failure(poll, error))
        return asked

    def receive(self, record: Record, payloads: list[bytes]) -> Record | None:
        """Returns a record, what features have put in its place, or None if one has kept it."""
        for feature in self._interceptors:
            if not isinstance(record, feature.arriving):
                continue
            try:
                left = feature.message_arriving(record, payloads)
            except Exception as error:
                self._keep(failure(feature.message_arriving, error))
                continue
            if left is None:
                return None
            record = left
        return record

    def command(self, name: str, *arguments: Any) -> Any:
        """Runs a command of a feature; returns its result.

        Raises UsageError if no feature has it; FeatureFailed for any other exception of the
        feature.
        """
        hook = self.commands.get(name)
        if hook is None:
            raise UsageError(f"expected a feature that does {name!r}, found none loaded")
        try:
            return hook(name, *arguments)
        except AllranksError:
            raise
        except Exception as error:
            raise failure(hook, error) from error
