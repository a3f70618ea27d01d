"""Values and functions on their way between the notebook and the ranks."""

from __future__ import annotations

import pickle
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol, cast

import cloudpickle

from allranks.cluster.wire import Answers
from allranks.errors import UsageError
from allranks.records.wire import Output

_MPI = "mpi4py.MPI"


def pack(values: dict[str, Any], to: str) -> bytes:
    """Returns variables as ranks take them.

    Args:
        values: by their names.
        to: where they are to go, as ``the ranks``.

    Raises:
        UsageError: one of them cannot be pickled.
    """
    try:
        packed: bytes = cloudpickle.dumps(values, protocol=5)
    except Exception as error:
        raise UsageError(f"{', '.join(values)} cannot be sent to {to}: {error}") from error
    return packed


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Within, a value of a rank's is unpickled in the notebook, where that may start no MPI.

    Args:
        place: where it comes from, as ``on rank 0``.

    Raises:
        UsageError: it can only be unpickled on a rank, or where its modules are.
    """
    barred = sys.modules.setdefault(_MPI, cast(ModuleType, None)) is None
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # it may raise anything
        why = f"{type(error).__name__}: {error}"
        if barred and isinstance(error, ImportError) and error.name == _MPI:
            why = "it is MPI's, which runs on the ranks only"
        raise UsageError(
            f"expected a value that the notebook can read, found {place}: {why}. "
            "Send a plain value, as list(...) or an array."
        ) from error
    finally:
        if barred:
            del sys.modules[_MPI]


def load(packed: bytes, rank: int) -> Any:
    """Returns a value of a rank's, as the notebook has it.

    Raises:
        UsageError: it cannot be read here.
    """
    with reading(f"on rank {rank}"):
        return pickle.loads(packed)


def unpack(answers: Answers, names: str | Sequence[str]) -> dict[int, Any]:
    """Returns ``{rank: value}`` of ranks' answers; with several names ``{rank: {name: value}}``.

    Raises:
        UsageError: a value cannot be read here.
    """
    pulled = {rank: load(payloads[0], rank) for rank, (_, payloads) in answers.items()}
    if isinstance(names, str):
        return {rank: got[names] for rank, got in pulled.items()}
    return pulled


_EXPLAIN_SECONDS = 30.0


class OnRank:
    """A function of the rank side, by name: what is pickled is the function itself.

    The notebook's side never imports it.
    """

    def __init__(self, module: str, name: str) -> None:
        self.__name__ = name
        self._where = f"{module}:{name}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return pkgutil.resolve_name, (self._where,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; on a rank only."""
        return pkgutil.resolve_name(self._where)(*args, **kwargs)


explain_here = OnRank("allranks.lessons.ring.on_ranks", "explain_here")


class ExplainingRanks(Protocol):
    """What is asked of a cluster here."""

    @property
    def busy(self) -> bool:
        """Whether its ranks run a cell."""

    @property
    def size(self) -> int:
        """How many ranks it has."""

    def run(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> list[Any]:
        """What a function returns on each rank."""


class HiddenView:
    """The view of what is no cell of the reader's: it shows nothing.

    Args:
        keep: called with the ranks' output, as a thread's, which the next cell shows.
        tell: called with lines about the cell as a whole, as that a rank is new.
    """

    def __init__(
        self, keep: Callable[[Output], object], tell: Callable[[str], object] = lambda text: None
    ) -> None:
        self._keep = keep
        self._tell = tell

    def output(self, batch: Output) -> None:
        """Keeps what a rank wrote."""
        if batch.entries:
            self._keep(batch)

    def telemetry(self, record: object, payloads: object) -> None:
        """Forgets timings: what it is for has its own."""

    def left(self, rank: int, status: str) -> None:
        """Shows nothing: how it ended is returned or raised."""

    def notice(self, text: str) -> None:
        """Passes on a line about the cell as a whole."""
        self._tell(text)

    def make_way(self) -> None:
        """Shows nothing."""

    def refresh(self) -> None:
        """Shows nothing."""

    def finish(self) -> None:
        """Shows nothing."""


def explain(
    cluster: ExplainingRanks,
    algorithm: str,
    values: Sequence[Sequence[float]],
    keep: Callable[[Output], object],
) -> Any:
    """Runs and records an allreduce on the first ranks, as ``Cluster.explain`` says.

    Args:
        keep: called with the ranks' output.
    """
    if cluster.busy:
        raise UsageError("the ranks are running a cell. Try again when it has ended.")
    if not 2 <= len(values) <= cluster.size:
        raise UsageError(
            "an allreduce needs 2 ranks or more, and no more than are running: found "
            f"{len(values)}, and {cluster.size} {'is' if cluster.size == 1 else 'are'} running. "
            f"Type for example: %distributed restart -n {max(2, len(values))}"
        )
    first, *_ = cluster.run(
        explain_here,
        algorithm,
        values,
        ranks=range(len(values)),
        timeout=_EXPLAIN_SECONDS,
        view=HiddenView(keep),
    )
    return first
