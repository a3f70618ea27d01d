"""``runs``: the table that an ensemble leaves in the notebook, and its controls while it runs."""

from __future__ import annotations

import queue
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from allranks.errors import MissingDependency, UsageError
from allranks.features.ensemble import grid
from allranks.features.ensemble.grid import lower_is_better, words
from allranks.features.ensemble.member import FAILED, FINISHED, Member, comparable
from allranks.features.ensemble.view import (
    MemberRow,
    Picture,
    direction,
    plot,
    plot_parallel,
    table_html,
    table_text,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas
    from numpy.typing import NDArray


def gather(results: Sequence[tuple[int, Any]], name: str | None) -> NDArray[Any]:
    """Returns the members' predictions, (members, …); all have the same shape.

    ``name`` is an entry of the result; None if the result itself is the prediction.
    """
    import numpy as np

    if not results:
        raise UsageError(
            "expected at least one member that has finished, found none. See runs.failed"
        )
    arrays = {}
    for number, result in results:
        if name is not None:
            if not isinstance(result, dict) or name not in result:
                has = ", ".join(map(str, result)) if isinstance(result, dict) else repr(result)
                raise UsageError(
                    f"expected {name!r} in the result of every member, found in member {number}: "
                    f"{has[:200]}. Type one of those, or put it into the result: "
                    f"result = {{{name!r}: …}}"
                )
            result = result[name]
        arrays[number] = np.asarray(result)
    shapes = {number: array.shape for number, array in arrays.items()}
    first = next(iter(shapes))
    other = next((number for number in shapes if shapes[number] != shapes[first]), None)
    if other is not None:
        raise UsageError(
            f"expected predictions of one shape, found {shapes[first]} in member {first} and "
            f"{shapes[other]} in member {other}. Predict for the same inputs in every member."
        )
    return np.stack(list(arrays.values()))


def vote(labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Returns the label of most members, (…), and their share, (…). Of equal labels, the least.

    ``labels`` are whole numbers, text or booleans: (members, …).
    """
    import numpy as np

    if labels.dtype.kind not in "iubUSO":
        raise UsageError(
            f"a vote expected labels, found {labels.dtype} numbers. "
            "Leave labels in the result, for example probabilities.argmax(axis=-1)."
        )
    kinds, codes = np.unique(labels, return_inverse=True)
    codes = codes.reshape(labels.shape)
    best = np.zeros(labels.shape[1:], int)
    most = np.zeros(labels.shape[1:], int)
    for code in range(len(kinds)):
        count = (codes == code).sum(axis=0)
        best = np.where(count > most, code, best)
        most = np.maximum(most, count)
    return kinds[best], most / len(labels)


def _unlike(column: str, taken: Collection[str]) -> str:
    while column in taken:
        column = f"member_{column}"
    return column


#: A request to a running ensemble: ``("add", values)`` or ``("stop", number or None)``.
Request = tuple[str, Any]


class Runs(Sequence[Member]):
    """The members of an ensemble, in their order.

    Args:
        members: the members.
        source: the source of the cell that they run.
        metric: the metric that orders them, and whether lower is better; None if not given.
    """

    def __init__(
        self, members: Sequence[Member], source: str = "", metric: tuple[str, bool] | None = None
    ) -> None:
        self._members = list(members)
        self.source = source
        self._metric = metric
        #: The runner reads it; None when no ensemble runs.
        self.requests: queue.SimpleQueue[Request] | None = None

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Member | Runs:
        if isinstance(index, slice):
            return self._of(self._members[index])
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def _of(self, members: Sequence[Member]) -> Runs:
        return Runs(members, self.source, self._metric)

    @property
    def finished(self) -> Runs:
        """The members that have finished."""
        return self._of([member for member in self if member.state == FINISHED])

    @property
    def failed(self) -> Runs:
        """The members that raised, exceeded the timeout, or lost their rank twice."""
        return self._of([member for member in self if member.state == FAILED])

    def where(self, **values: Any) -> Runs:
        """Returns the members with these values, as ``runs.where(lr=0.1)``.

        Raises:
            UsageError: no member has such a parameter.
        """
        known = {name for member in self for name in member.values}
        for name in values:
            if known and name not in known:
                raise UsageError(f"expected a parameter, {', '.join(sorted(known))}, found {name}.")
        return self._of(
            [
                member
                for member in self
                if all(name in member.values and member.values[name] == value
                       for name, value in values.items())
            ]
        )  # fmt: skip

    def metric(self, name: str | None = None, mode: str | None = None) -> tuple[str, bool] | None:
        """Returns the chosen metric, and whether lower is better; None if there is no metric.

        Raises:
            UsageError: ``mode`` is neither ``min`` nor ``max``.
        """
        if mode not in (None, "min", "max"):
            raise UsageError(f"expected mode='min' or mode='max', found {mode!r}.")
        if name is None and self._metric is not None:
            name, lower = self._metric
        elif name is None:
            known = [name for member in self for name in member.metrics]
            # Numbers in the result come before logged values.
            said = [name for member in self for name in member.numbers]
            name = next(iter([*said, *known]), None)
            if name is None:
                return None
            lower = lower_is_better(name)
        else:
            told = self._metric is not None and self._metric[0] == name
            lower = self._metric[1] if told and self._metric else lower_is_better(name)
        return name, lower if mode is None else mode == "min"

    def order(self) -> str:
        """Returns the metric that orders the members, and how to choose another; empty if chosen.

        As ``by the highest result; another order: --metric loss, or runs.best('loss')``.
        """
        wanted = self.metric()
        if wanted is None or self._metric is not None:
            return ""
        others = (name for member in self for name in member.metrics if name != wanted[0])
        other = next(others, None)
        said = f"by {direction(*wanted)}"
        if other is None:
            return said
        return f"{said}; another order: --metric {shlex.quote(other)}, or runs.best({other!r})"

    def best(self, metric: str | None = None, mode: str | None = None) -> Member:
        """Returns the finished member with the best value of a metric.

        Args:
            metric: a number in the result, or a logged name, whose last value counts. By default
                that of ``--metric``, else the first one that exists.
            mode: ``max`` or ``min``; by default ``min`` if the name is that of a loss or an
                error, else ``max``.

        Raises:
            UsageError: no finished member has such a number.
        """
        wanted = self.metric(metric, mode)
        found = []
        if wanted is not None:
            name, lower = wanted
            for member in self.finished:
                value = member.metrics.get(name)
                if value is not None and value == value:
                    found.append(member)
        if not found or wanted is None:
            known = sorted({n for m in self.finished for n, v in m.metrics.items() if v == v})
            has = f"found {', '.join(known)}" if known else "found none"
            named = f" named {wanted[0]!r}" if wanted is not None else ""
            raise UsageError(
                f"expected a number{named} in a finished member, {has}. "
                "Log it, or put it into the result: result = {'accuracy': …}"
            )
        return (min if lower else max)(found, key=lambda member: member.metrics[name])

    def rows(self) -> list[dict[str, Any]]:
        """Returns one dictionary per member: parameters, metrics, state, seconds, rank, error.

        A parameter or a metric with the name of another column, as ``error``, keeps it. The other
        column is then ``member_error``.
        """
        names = list(dict.fromkeys(name for member in self for name in member.values))
        metrics = list(dict.fromkeys(name for member in self for name in member.metrics))
        taken = {*names, *metrics}
        return [
            {_unlike("member", taken): member.number}
            | {name: member.values.get(name) for name in names}
            | {name: member.metrics.get(name) for name in metrics if name not in names}
            | {_unlike("state", taken): member.state}
            | {_unlike("seconds", taken): member.seconds, _unlike("rank", taken): member.rank}
            | {_unlike("result", taken): member.text, _unlike("error", taken): member.error}
            for member in self
        ]

    def plot(self, name: str | None = None, by: str | None = None) -> Picture:
        """Returns a picture of the logged values: a line per member, or per value of a parameter.

        Args:
            name: a logged name; by default the metric of :meth:`best`.
            by: a parameter, as ``"lr"``: members of the same value are one line, their mean.

        Raises:
            UsageError: no member has logged it, or there is no such parameter.
        """
        return plot(list(self), name or (self.metric() or ("",))[0], by)

    def parallel(self, metric: str | None = None, mode: str | None = None) -> Picture:
        """Returns a picture with a line per member, through its parameters to a metric.

        Args:
            metric: a number in the result, or a logged name; by default as for :meth:`best`.
            mode: ``max`` or ``min``: which value is the best.

        Raises:
            UsageError: no member has such a number, or no parameter differs.
        """
        wanted = self.metric(metric, mode)
        rows = [self.row(member, wanted) for member in self]
        return plot_parallel(rows, *(wanted or ("", False)))

    def to_pandas(self) -> pandas.DataFrame:
        """Returns :meth:`rows` as a table, by the member's number.

        Raises:
            MissingDependency: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingDependency(
                "runs.to_pandas() needs pandas, and it is not installed. Type: pip install pandas, "
                "or use runs.rows()"
            ) from error
        rows = self.rows()
        return pandas.DataFrame(rows).set_index(next(iter(rows[0]))) if rows else pandas.DataFrame()

    def gather(self, name: str | None = None) -> NDArray[Any]:
        """Returns an entry of every finished member's result: (finished members, …).

        Raises:
            UsageError: no member has finished, one has no such entry, or their shapes differ.
        """
        return gather([(m.number, m.result) for m in self.finished], name)

    def mean(self, name: str | None = None) -> NDArray[Any]:
        """Returns the mean prediction over the finished members: (…)."""
        found: NDArray[Any] = self.gather(name).mean(axis=0)
        return found

    def spread(self, name: str | None = None) -> NDArray[Any]:
        """Returns the standard deviation of the members' predictions: (…)."""
        found: NDArray[Any] = self.gather(name).std(axis=0)
        return found

    def vote(self, name: str | None = None) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Returns the label that most members chose, the least of several, and their share: (…)."""
        return vote(self.gather(name))

    def add(
        self, *lists: Sequence[grid.Values] | grid.Values | str, **values: Any
    ) -> list[grid.Values]:
        """Adds members while the ensemble runs; they wait behind the others.

        Args:
            lists: a dictionary of values, a list of them, or a grid as text: ``"lr=0.3 seed=0:4"``.
            values: those of one member, as ``runs.add(lr=0.3, seed=1)``.

        Returns:
            The values of each added member.

        Raises:
            UsageError: the ensemble has ended, or a member cannot have these values.
        """
        made: list[grid.Values] = []
        for one in lists:
            if isinstance(one, str):
                made += grid.parse(words(one), {}).members() if words(one) else []
            else:
                made += grid.check_list([one] if isinstance(one, dict) else one, "what is added")
        if values:
            made += grid.check_list([values], "what is added")
        if not made:
            raise UsageError("expected values, found none. Type for example: runs.add(lr=0.3)")
        known = set().union(*(member.values for member in self))
        for one in made:
            if known and known != set(one):
                raise UsageError(
                    f"expected values for {', '.join(sorted(known))}, "
                    f"found {', '.join(sorted(one))}. "
                    "Give every parameter that the other members have."
                )
        self._request("add", made)
        return made

    def stop(self, number: int | None = None) -> None:
        """Stops a member, or all of them; those that have finished stay.

        Raises:
            UsageError: the ensemble has ended, or it has no such member.
        """
        if number is not None and number not in range(len(self)):
            raise UsageError(f"expected a member between 0 and {len(self) - 1}, found {number!r}.")
        self._request("stop", number)

    def _request(self, kind: str, what: Any) -> None:
        if self.requests is None:
            raise UsageError(
                f"the ensemble has ended, so nothing can be {kind}{'p' * (kind == 'stop')}ed. "
                "Run the cell again with another grid; with --store, finished members are kept."
            )
        self.requests.put((kind, what))

    def append(self, values: Sequence[grid.Values]) -> list[Member]:
        # Only the runner calls this.
        new = [Member(len(self._members) + n, dict(one)) for n, one in enumerate(values)]
        self._members += new
        return new

    def row(self, member: Member, wanted: tuple[str, bool] | None) -> MemberRow:
        # `wanted` is the result of metric().
        return MemberRow(
            number=member.number,
            values=member.label,
            state=member.state,
            rank=member.rank,
            metric=member.metrics.get(wanted[0]) if wanted else None,
            seconds=member.seconds,
            error=member.error,
            parameters={name: comparable(value) for name, value in member.values.items()},
        )

    def _shown(self, render: Callable[..., str]) -> str:
        wanted = self.metric()
        rows = [self.row(member, wanted) for member in self]
        return render(rows, *(wanted or ("", False)), self.order())

    def __repr__(self) -> str:
        return self._shown(table_text)

    def _repr_html_(self) -> str:
        return self._shown(table_html)
