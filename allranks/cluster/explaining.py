"""What the notebook has its ranks do to explain an allreduce."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from allranks.errors import UsageError
from allranks.records.lessons import Explained
from allranks.records.wire import Output

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


class Ranks(Protocol):
    """What is asked of a cluster here."""

    @property
    def busy(self) -> bool:
        """Whether its ranks run a cell."""

    @property
    def size(self) -> int:
        """How many ranks it has."""

    def run(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> list[Any]:
        """What a function returns on each rank."""


class Aside:
    """The view of what is no cell of the reader's: it shows nothing.

    Args:
        keep: takes in what ranks write meanwhile, from a thread for example, for the next cell.
        tell: takes in lines about the whole, as that a rank is new.
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
        """Tells a line about the whole."""
        self._tell(text)

    def make_way(self) -> None:
        """Shows nothing."""

    def refresh(self) -> None:
        """Shows nothing."""

    def finish(self) -> None:
        """Shows nothing."""


def explain(
    cluster: Ranks,
    algorithm: str,
    values: Sequence[Sequence[float]],
    keep: Callable[[Output], object],
) -> Explained:
    """Has the first ranks do what ``Cluster.explain`` says.

    Args:
        keep: takes in what ranks write meanwhile.
    """
    if cluster.busy:
        raise UsageError("the ranks are running a cell. Try again when it has ended.")
    if not 2 <= len(values) <= cluster.size:
        raise UsageError(
            "an allreduce needs 2 ranks or more, and no more than are running: found "
            f"{len(values)}, and {cluster.size} {'is' if cluster.size == 1 else 'are'} running. "
            f"Type for example: %distributed restart -n {max(2, len(values))}"
        )
    told, *_ = cluster.run(
        explain_here,
        algorithm,
        values,
        ranks=range(len(values)),
        timeout=_EXPLAIN_SECONDS,
        view=Aside(keep),
    )
    return Explained.from_dict(told)
