"""The hooks of features: in a rank, and in the host agent that starts the ranks of one host.

The hooks of a rank are called in this order:

1. ``starting``, before MPI starts; ``started``, when the rank has its shell, before its first cell.
2. ``cell_started``, after the history, interrupts and the capture of exceptions have been prepared
   and before the collectives' scope is entered.
3. While the cell runs: ``message_received`` and ``interrupted`` in the thread that receives
   records, ``output_sending`` in any thread.
4. ``error_raised``, after the repair of all that the cell has broken; it accepts no interrupts
   now. It may replace the error. The history and the report have the error that it returns.
5. ``cell_finished``, to end waits. Then the scope is left, which releases the other ranks.
6. ``cell_left``, to free memory. Then the value is pickled, the output sent, and the reply.
7. Between cells: ``epoch_ended``. After a death: ``rank_died``, when the survivors have left their
   collectives; ``rank_replaced``, when the replacement has joined and before the next cell.

There is no hook inside a collective call. There is none for the end of a rank either: the host
agent kills ranks, so a feature that has to tidy up does so in `HostFeature.stopping`.

The hooks that each cell calls are those of steps 2 to 6. A feature that few cells need is
`RankFeature.dormant`: it has none of these called, nor ``epoch_ended`` and ``rank_replaced``, until
it calls `RankContext.activate`.

A hook that raises fails the cell that runs, or else the next one, with an error that names the
feature. The rank stays.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from IPython.core.interactiveshell import InteractiveShell

from allranks.engine.transcript import Transcript
from allranks.engine.wire import RankWire
from allranks.errors import FeatureFailed, UsageError
from allranks.hooks import failure, implementations
from allranks.records.config import HostAgentConfig
from allranks.records.wire import Hello, Record, Reply, RunCell, RunMember

#: The content of an answer, and its payloads.
Answered = tuple[dict[str, Any], list[bytes]]
#: Records and their payloads, in the order in which they are sent.
Replies = tuple[tuple[Record, list[bytes]], ...]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class RankContext:
    """The part of its rank that a feature may use.

    Attributes:
        rank: this process's number among ``size``.
        device: as ``cuda:0 (GPU-…)``, or ``cpu``.
        hello: the record with which the rank introduces itself to a notebook.
        stays: whether it waits for another notebook when its own ends.
        config: the configuration of the host agent.
        shell: runs the cells; ``shell.user_ns`` has their variables.
        transcript: takes the output and the displays.
        wire: sends records to the notebook, from any thread.
        activate: has all hooks of a dormant feature called from now on.
        notice: shows a line beside the output of the cell.
        submit: runs a function in place of a cell, when the rank is idle. It returns the records to
            send after the output.
        execute: runs a cell; for submitted functions. The last argument is called first, as a part
            of the cell.
        begin_epoch: calls a function that moves the rank to another epoch, then ``epoch_ended`` of
            all features; returns the function's result.
        rank_replaced: calls that hook of all features; for the one that replaces ranks.
        cell: returns the number of the cell that runs, or 0.
        interrupts: returns how many interrupts that cell was sent.
        mpi_ports: on which MPI listens here; empty if dead ranks are not replaced.
    """

    rank: int
    size: int
    device: str
    hello: Hello
    stays: bool
    config: HostAgentConfig
    shell: InteractiveShell
    transcript: Transcript
    wire: RankWire
    activate: Callable[[RankFeature], None]
    notice: Callable[[str], None]
    submit: Callable[[RunMember, Callable[[], Awaitable[Replies]]], None]
    execute: Callable[
        [RunCell, list[bytes], Callable[[], None]], Awaitable[tuple[tuple[Reply, list[bytes]]]]
    ]
    begin_epoch: Callable[[Callable[[], Any]], Any]
    rank_replaced: Callable[[list[int]], str]
    cell: Callable[[], int]
    interrupts: Callable[[], int]
    mpi_ports: tuple[int, ...] = ()


class RankFeature:
    """One feature in one rank: override the hooks that it needs."""

    dormant = False
    """Whether the hooks of cells, epochs and replacements are left out until
    `RankContext.activate`.
    """
    records: tuple[type[Record], ...] = ()
    """Records from the notebook that ``message_received`` takes."""
    requests: frozenset[str] = frozenset()
    """Names of requests from the notebook that ``answer`` answers, between two cells."""
    requests_while_busy: frozenset[str] = frozenset()
    """Those that it answers at any time, in the thread that receives records."""

    def starting(self) -> None:
        """The process has become a rank's; MPI has not started.

        Raises:
            UsageError: a setting is wrong; the rank does not start.
        """

    def started(self, rank: RankContext) -> None:
        """The rank is up; cells run from now on."""

    def cell_started(self, cell: RunCell) -> None:
        """A cell is about to run."""

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        """One of ``records`` has come; called in the thread that receives them, before the core."""

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        """Returns the answer to one of the ``requests``.

        Raises:
            UsageError: the request cannot be met as it was made.
        """
        raise NotImplementedError

    def interrupted(self) -> None:
        """The cell is about to be interrupted; called in the thread that receives records."""

    def output_sending(self, final: bool) -> None:
        """Output is about to be sent; ``final`` if it is the cell's last."""

    def error_raised(self, error: BaseException) -> BaseException:
        """Returns the error itself, or the one with which the cell shall fail instead.

        Called when a traceback is shown and when the cell ends: several times for one error.
        """
        return error

    def hidden_frames(self) -> tuple[str, ...]:
        """Returns parts of file names: no traceback ends in frames of these files."""
        return ()

    def error_details(self, error: BaseException) -> str:
        """Returns details for the report of an error; empty for none."""
        return ""

    def pulse_fields(self) -> dict[str, Any]:
        """Returns fields of the `Pulse` that is sent about once a second while a cell runs."""
        return {}

    def cell_finished(self, error: BaseException | None) -> None:
        """The cell has ended and is reported; the other ranks are not released yet."""

    def cell_left(self, error: BaseException | None) -> None:
        """The other ranks are released; the cell's value is pickled next."""

    def epoch_ended(self, epoch: int) -> None:
        """The collectives have moved on from this epoch; called in the main thread."""

    def rank_died(self, rank: int, how: str) -> None:
        """Another rank has died; called in the thread that receives records."""

    def rank_replaced(self, dead: list[int]) -> str:
        """New processes have taken the places of these ranks.

        Returns:
            A warning about this rank for its user; empty for none.
        """
        return ""


_OF_EACH_CELL: tuple[Callable[..., Any], ...] = (
    RankFeature.cell_started,
    RankFeature.output_sending,
    RankFeature.cell_finished,
    RankFeature.cell_left,
)


class RankHooks:
    """Calls the hooks of a rank's features; an attribute or method is named as its hook.

    Attributes:
        failed: the first failure of a hook that no cell has failed with yet, if any.
        in_cells: whether any feature has a hook that each cell calls. Callers check it, so that a
            cell which uses no feature passes none of the methods here.
    """

    def __init__(self, classes: Iterable[type[RankFeature]] = ()) -> None:
        self.failed: FeatureFailed | None = None
        found: list[RankFeature] = []
        for kind in classes:
            try:
                found.append(kind())
            except Exception as error:
                self._keep(failure(kind, error))

        self._features = found
        self._dormant = [feature for feature in found if feature.dormant]
        self._find_active_hooks()
        self._starting = implementations(found, RankFeature.starting)
        self.started = self._hook(found, RankFeature.started)
        self.rank_died = self._hook(found, RankFeature.rank_died)
        self._takers: dict[type[Record], list[Callable[[Record, list[bytes]], None]]] = {}
        self._answers: dict[str, Callable[..., Answered]] = {}
        for feature in found:
            for record in feature.records:
                self._takers.setdefault(record, []).append(feature.message_received)
            for name in feature.requests | feature.requests_while_busy:
                self._answers[name] = feature.answer
        self.requests_while_busy = frozenset[str]().union(*(f.requests_while_busy for f in found))

    def _find_active_hooks(self) -> None:
        active = [feature for feature in self._features if feature not in self._dormant]
        self.cell_started = self._hook(active, RankFeature.cell_started)
        self._interrupted = implementations(active, RankFeature.interrupted)
        self._output_sending = implementations(active, RankFeature.output_sending)
        self._error_raised = implementations(active, RankFeature.error_raised)
        self._hidden_frames = implementations(active, RankFeature.hidden_frames)
        self._error_details = implementations(active, RankFeature.error_details)
        self._pulse_fields = implementations(active, RankFeature.pulse_fields)
        self.cell_finished = self._hook(active, RankFeature.cell_finished)
        self.cell_left = self._hook(active, RankFeature.cell_left)
        self.epoch_ended = self._hook(active, RankFeature.epoch_ended)
        self._rank_replaced = implementations(active, RankFeature.rank_replaced)
        self.in_cells = any(implementations(active, hook) for hook in _OF_EACH_CELL)

    def activate(self, feature: RankFeature) -> None:
        if feature in self._dormant:
            # May run in any thread, and more than once.
            self._dormant.remove(feature)
            # New lists: another thread may be in a loop over the old ones.
            self._find_active_hooks()

    def _hook(
        self, features: list[RankFeature], hook: Callable[Concatenate[RankFeature, P], R]
    ) -> Callable[P, list[R]]:
        return partial(self._call, implementations(features, hook))

    def _keep(self, failed: FeatureFailed) -> None:
        self.failed = self.failed or failed

    def _call(self, hooks: Iterable[Callable[P, R]], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls every implementation of a hook, also those after one that fails."""
        found = []
        for hook in hooks:
            try:
                found.append(hook(*args, **kwargs))
            except Exception as error:
                self._keep(failure(hook, error))
        return found

    def take_failure(self) -> FeatureFailed:
        failed, self.failed = self.failed, None
        assert failed is not None
        return failed

    def starting(self) -> None:
        for hook in self._starting:
            try:
                hook()
            except UsageError:
                raise
            except Exception as error:
                self._keep(failure(hook, error))

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        # A record that no feature takes is dropped.
        takers = self._takers.get(type(record))
        if takers is not None:
            self._call(takers, record, payloads)

    def answer(self, name: str, arguments: Mapping[str, Any], payloads: list[bytes]) -> Answered:
        """Returns a feature's answer to a request; raises UsageError or FeatureFailed."""
        hook = self._answers.get(name)
        if hook is None:
            raise UsageError(f"a rank answers no request named {name!r}")
        try:
            return hook(name, arguments, payloads)
        except UsageError:
            raise
        except Exception as error:
            raise failure(hook, error) from error

    def interrupted(self) -> None:
        self._call(self._interrupted)

    def output_sending(self, final: bool) -> None:
        self._call(self._output_sending, final)

    def error_raised(self, error: BaseException) -> BaseException:
        for hook in self._error_raised:
            try:
                error = hook(error)
            except Exception as problem:
                self._keep(failure(hook, problem))
        return error

    def hidden_frames(self) -> tuple[str, ...]:
        return tuple(part for parts in self._call(self._hidden_frames) for part in parts)

    def error_details(self, error: BaseException) -> str:
        return "\n".join(filter(None, self._call(self._error_details, error)))

    def pulse_fields(self) -> dict[str, Any]:
        return {
            name: value
            for fields in self._call(self._pulse_fields)
            for name, value in fields.items()
        }

    def rank_replaced(self, dead: list[int]) -> str:
        return " ".join(filter(None, self._call(self._rank_replaced, dead)))


class HostFeature:
    """One feature in the host agent: override the hooks that it needs.

    The agent has no cell to fail, so errors of hooks are written to the agent's log.
    """

    def started(self, config: HostAgentConfig) -> None:
        """The agent has its folders; the launcher has been started, and no rank has come yet."""

    def rank_died(self, rank: int, code: int) -> None:
        """A rank of this host has ended, with an exit code or minus a signal's number."""

    def stopping(self) -> None:
        """All processes have ended; the session's folder is removed next."""


class HostHooks:
    """Calls the hooks of the features in a host agent; each attribute is named as its hook."""

    def __init__(self, classes: Iterable[type[HostFeature]] = ()) -> None:
        found: list[HostFeature] = []
        for kind in classes:
            try:
                found.append(kind())
            except Exception as error:
                print(failure(kind, error), file=sys.stderr, flush=True)
        self.started = partial(_log, implementations(found, HostFeature.started))
        self.rank_died = partial(_log, implementations(found, HostFeature.rank_died))
        self.stopping = partial(_log, implementations(found, HostFeature.stopping))


def _log(hooks: Iterable[Callable[..., None]], *args: Any) -> None:
    for hook in hooks:
        try:
            hook(*args)
        except Exception as error:
            print(failure(hook, error), file=sys.stderr, flush=True)
