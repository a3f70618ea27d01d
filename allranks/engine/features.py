"""The hooks of features in a rank.

They are called in this order:

1. ``spare``, while the process has no rank; ``starting``, before MPI starts; ``join``, to start it;
   ``kernel``, when all ranks are there; ``started``, when the rank has its shell, before its first
   cell.
2. ``cell_started``, after the history, interrupts and the capture of exceptions have been prepared
   and before the collectives' scope is entered.
3. While the cell runs: ``message_received``, ``interrupted`` and ``cell_running`` in the thread
   that receives records, ``output_sending`` in any thread.
4. ``error_raised``, after the repair of all that the cell has broken; it accepts no interrupts
   now. It may replace the error. The history and the report have the error that it returns.
5. ``cell_finished``, to end waits. Then the scope is left, which releases the other ranks.
6. ``cell_left``, to free memory. Then the value is pickled, the output sent, and the reply.
7. Between cells: ``epoch_ended``. After a death: ``rank_died``, when the survivors have left their
   collectives; ``rank_replaced``, when the replacement has joined and before the next cell.

There is no hook inside a collective call. There is none for the end of a rank either: the host
agent kills ranks, so a feature that has to tidy up does so in
`allranks.engine.host.features.HostFeature.stopping`.

The hooks that each cell calls are those of steps 2 to 6. A feature that few cells need is
`RankFeature.dormant`: it has none of these called, nor ``epoch_ended`` and ``rank_replaced``, until
it calls `RankContext.activate`.

A hook that raises fails the cell that runs, or else the next one, with an error that names the
feature. The rank stays.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from allranks.engine.epochs import RankEpochs
from allranks.engine.interrupts import Interrupts
from allranks.engine.kernel import KernelStart, RankKernel
from allranks.engine.transcript import Transcript
from allranks.engine.wire import RankWire
from allranks.errors import FeatureFailed, UsageError
from allranks.hooks import Hooks, declares_hooks, failure, implementations
from allranks.records.config import HostAgentConfig
from allranks.records.wire import Hello, Record, Reply, RunCell

#: The content of an answer, and its payloads.
Answered = tuple[dict[str, Any], list[bytes]]
#: Records and their payloads, in the order in which they are sent.
Replies = tuple[tuple[Record, list[bytes]], ...]


@dataclass(frozen=True)
class RankContext:
    """The part of its rank that a feature may use.

    Attributes:
        rank: this process's number among ``size``.
        device: as ``cuda:0 NVIDIA H200``, or ``cpu``.
        hello: the record with which the rank introduces itself to a notebook.
        stays: whether it waits for another notebook when its own ends.
        config: the configuration of the host agent.
        shell: runs the cells; ``shell.user_ns`` has their variables.
        transcript: takes the output and the displays.
        wire: sends records to the notebook, from any thread.
        activate: has all hooks of a dormant feature called from now on.
        notice: shows a line beside the output of the cell.
        submit: runs a function in place of a cell, when the rank is idle. It returns the records to
            send after the output. If all ranks take part, it first calls ``epochs.enter``.
        execute: runs a cell; for submitted functions. The last argument is called first, as a part
            of the cell.
        begin_epoch: calls a function that moves the rank to another epoch, then ``epoch_ended`` of
            all features; returns the function's result.
        rank_replaced: calls that hook of all features; for the one that replaces ranks.
        handover_fields: returns those of all features.
        cell: returns the number of the cell that runs, or 0.
        interrupts: those of the code that runs, and how many that cell was sent.
        epochs: begins and ends epochs outside of cells.
        cell_ends: waits until the last cell has ended.
        ends: has the notebook end this rank after the cell that runs, for this reason.
            The feature has written its variables to ``of_life`` of the variable store.
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
    submit: Callable[[RunCell, Callable[[], Awaitable[Replies]]], None]
    execute: Callable[
        [RunCell, list[bytes], Callable[[], None]], Awaitable[tuple[tuple[Reply, list[bytes]]]]
    ]
    begin_epoch: Callable[[Callable[[], Any]], Any]
    rank_replaced: Callable[[list[int]], str]
    handover_fields: Callable[[], dict[str, Any]]
    cell: Callable[[], int]
    interrupts: Interrupts
    epochs: RankEpochs
    cell_ends: Callable[[], Awaitable[None]]
    ends: Callable[[str], None]
    mpi_ports: tuple[int, ...] = ()


@declares_hooks
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
    notebook_magics: tuple[str, ...] = ()
    """Names of its cell magics in the notebook, which a cell of ranks refuses."""

    @classmethod
    def spare(cls, config: HostAgentConfig, wake: int) -> Any:
        """Returns what waits for a rank in this process, which has none: its ``wait`` returns the
        rank, all dead ranks and the rank's variables. At most one feature has this hook.

        ``wake`` is the read end of a pipe with a line of JSON for each replacement: the ``rank``
        that this process becomes, -1 for none, the ``dead`` ranks, and the ``variables``.
        """
        return None

    def starting(self) -> None:
        """The process has become a rank's; MPI has not started.

        Raises:
            UsageError: a setting is wrong; the rank does not start.
        """

    def join(self, config: HostAgentConfig, rank: int, dead: Sequence[int], spare: Any) -> bool:
        """Starts MPI in this process if it replaces one of the ``dead`` ranks, was a ``spare`` one,
        or has some beside it; else returns false.
        """
        return False

    def kernel(self, start: KernelStart) -> RankKernel | None:
        """Returns a kernel, which clients of the feature reach, whose shell shall run the cells.

        The first that any feature returns is used; a rank where none does has one of its own.
        """
        return None

    def started(self, rank: RankContext) -> None:
        """The rank is up; cells run from now on."""

    def cell_started(self, cell: RunCell) -> None:
        """A cell is about to run."""

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        """One of ``records`` has come; called in the thread that receives them, before the core."""

    def request_received(self, name: str, arguments: dict[str, Any]) -> bool:
        """A request has come between two cells; called in the thread that receives records.

        Returns whether ``answer`` is called there. Else the main thread calls it once it is free.
        """
        return False

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        """Returns the answer to one of the ``requests``.

        Raises:
            UsageError: the request cannot be met as it was made.
        """
        raise NotImplementedError

    def interrupted(self) -> None:
        """The cell is about to be interrupted; called in the thread that receives records."""

    def cell_running(self) -> None:
        """A cell is running; called about 20 times a second."""

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

    def handover_fields(self) -> dict[str, Any]:
        """Returns fields for a notebook that continues in place of another one; called in the
        thread that receives records.
        """
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


#: The hooks that are called once a feature is no longer dormant.
_IN_CELLS = {
    *("cell_started", "cell_running", "interrupted", "output_sending", "error_raised"),
    *("hidden_frames", "error_details", "pulse_fields", "cell_finished", "cell_left"),
    *("epoch_ended", "rank_replaced"),
}


class RankHooks(Hooks[RankFeature]):
    """Calls the hooks of a rank's features.

    Attributes:
        failure: the first failure of a hook that no cell has failed with yet, if any.
        in_cells: whether any feature has a hook that each cell calls. Callers check it, so that a
            cell which uses no feature passes none of the methods here.
    """

    def __init__(self, classes: Iterable[type[RankFeature]] = ()) -> None:
        self.failure: FeatureFailed | None = None
        super().__init__(classes, self._keep)
        self._dormant = [feature for feature in self.features if feature.dormant]
        self._answers: dict[str, Callable[..., Answered]] = {
            name: feature.answer
            for feature in self.features
            for name in feature.requests | feature.requests_while_busy
        }
        self.requests_while_busy = frozenset(
            name for feature in self.features for name in feature.requests_while_busy
        )
        self._find()

    def _find(self) -> None:
        active = [feature for feature in self.features if feature not in self._dormant]
        # A new dictionary: another thread may be in a loop over a list of the old one.
        self._found = {
            name: implementations(active, getattr(RankFeature, name)) for name in _IN_CELLS
        }
        called = ("cell_started", "output_sending", "cell_finished", "cell_left")
        self.in_cells = any(self._found[name] for name in called)

    def activate(self, feature: RankFeature) -> None:
        if feature in self._dormant:
            # May run in any thread, and more than once.
            self._dormant.remove(feature)
            self._find()

    def _keep(self, failed: FeatureFailed) -> None:
        self.failure = self.failure or failed

    def take_failure(self) -> FeatureFailed:
        failed, self.failure = self.failure, None
        assert failed is not None
        return failed

    def starting(self) -> None:
        for hook in self.of(RankFeature.starting):
            try:
                hook()
            except UsageError:
                raise
            except Exception as error:
                self._keep(failure(hook, error))

    def join(self, *place: Any) -> bool:
        return any(hook(*place) for hook in self.of(RankFeature.join))

    def kernel(self, start: KernelStart) -> RankKernel | None:
        return next(filter(None, self.call(RankFeature.kernel, start)), None)

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

    def request_received(self, name: str, arguments: dict[str, Any]) -> bool:
        return any(self.call(RankFeature.request_received, name, arguments))

    def error_raised(self, error: BaseException) -> BaseException:
        for hook in self.of(RankFeature.error_raised):
            error = next(iter(self.call_each([hook], error)), error)
        return error

    def hidden_frames(self) -> list[str]:
        return [part for parts in self.call(RankFeature.hidden_frames) for part in parts]

    def error_details(self, error: BaseException) -> str:
        return "\n".join(filter(None, self.call(RankFeature.error_details, error)))

    def pulse_fields(self) -> dict[str, Any]:
        return dict(ChainMap(*reversed(self.call(RankFeature.pulse_fields))))

    def handover_fields(self) -> dict[str, Any]:
        return dict(ChainMap(*reversed(self.call(RankFeature.handover_fields))))

    def rank_replaced(self, dead: list[int]) -> str:
        return " ".join(filter(None, self.call(RankFeature.rank_replaced, dead)))
