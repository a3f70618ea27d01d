"""An allreduce that the ranks run, to be played round by round, inspected and run again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from allranks.errors import AllranksError, ClusterLost, UsageError
from allranks.records.lessons import Explained
from allranks.widgets import offered
from allranks.widgets.explainer.frames import chunks, cost, frames, shown, text, title
from allranks.widgets.explainer.quiz import questions
from allranks.widgets.explainer.still import bundle
from allranks.widgets.offered import Ranks

if TYPE_CHECKING:
    from allranks.widgets.explainer.widget import ExplainerWidget

ALGORITHMS = ("ring", "recursive doubling", "tree")
_IDLE_SECONDS = 0.2
MOST_RANKS = 16
MOST_VALUES = 32
#: So many ranks can each have a digit of their own.
_DIGITS = 4

_EXPECTED = "expected one array of numbers a rank, all of one length"
_EXAMPLE = "Type for example: ring(values=[[1, 2], [10, 20]])"

Arrays = list[list[float]]


class Explainer:
    """One allreduce, round by round; in a notebook a player, elsewhere text.

    The player may ask for another algorithm, other ranks or another size: then the ranks run it,
    as soon as they are idle.

    Args:
        told: what the ranks have run.
        ranks: returns the ranks to run on again, or raises what there is to say.

    Attributes:
        told: the run that is shown now.
    """

    def __init__(self, told: Explained, ranks: Callable[[], Ranks]) -> None:
        self.told = told
        self._ranks = ranks
        self._place = f"allranks-ring-{uuid.uuid4().hex}"
        self._widget: ExplainerWidget | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._most = ranks().size
        self._problem = ""
        self._answers = 0
        #: What the ranks have run, by algorithm, ranks and values: to be played when they are gone.
        self._kept = {(told.run.algorithm, told.run.size, *told.run.shape): told}
        self._asked: dict[str, Any] | None = None

    def __str__(self) -> str:
        return text(self.told, frames(self.told.run))

    def __repr__(self) -> str:
        return str(self)

    def _ipython_display_(self) -> None:
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        if getattr(get_ipython(), "kernel", None) is None:
            print(self)
            return
        show: Any = display
        show(self._bundle(), raw=True, display_id=self._place)
        if self._widget is None:
            from allranks.widgets.explainer.widget import ExplainerWidget

            self._loop = asyncio.get_running_loop()
            self._widget = ExplainerWidget(self.state(), self._clicked)

    def _bundle(self) -> dict[str, str]:
        return bundle(self.told, frames(self.told.run), self._place)

    def state(self) -> dict[str, Any]:
        """Returns what a player needs, as JSON carries it."""
        told = frames(self.told.run)
        rounds = len(told) - 1
        return {
            "place": self._place,
            "title": title(self.told),
            "cost": cost(self.told),
            "problem": self._problem,
            "answers": self._answers,
            "algorithms": ALGORITHMS,
            "algorithm": self.told.run.algorithm,
            "mostRanks": min(self._most, MOST_RANKS),
            "chunks": chunks(self.told.run),
            "mostValues": MOST_VALUES,
            "questions": [[asdict(one) for one in asked] for asked in questions(told)],
            "frames": [
                {
                    "phase": frame.phase,
                    "values": [[shown(value) for value in row] for row in frame.values],
                    "shares": frame.shares,
                    "messages": [_message(asdict(message)) for message in frame.messages],
                    "words": frame.words(number, rounds),
                }
                for number, frame in enumerate(told)
            ],
        }

    def _clicked(self, click: dict[str, Any]) -> None:
        # Perhaps in another thread, and perhaps while a cell runs: ranks are led from one thread.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ask, click)

    def _ask(self, click: dict[str, Any]) -> None:
        waiting, self._asked = self._asked is not None, click
        if not waiting:
            self._run_when_idle()

    def _run_when_idle(self) -> None:
        assert self._loop is not None
        try:
            if self._ranks().busy:
                self._say("The ranks are running a cell: this will run when it has ended.")
                self._loop.call_later(_IDLE_SECONDS, self._run_when_idle)
                return
        except AllranksError:
            pass  # said below
        click, self._asked = self._asked or {}, None
        try:
            self.run(str(click["algorithm"]), int(click["ranks"]), int(click["size"]))
        except (AllranksError, KeyError, TypeError, ValueError) as error:
            self._say(str(error))

    def run(self, algorithm: str, ranks: int, size: int) -> None:
        """Has the ranks run another allreduce, and shows that one.

        Args:
            algorithm: ``ring``, ``recursive doubling`` or ``tree``.
            ranks: how many.
            size: how many values each has.

        What they have run before is shown when they are gone.

        Raises:
            UsageError: there is no such algorithm, or there are not so many ranks.
        """
        from IPython.display import update_display

        asked, found = (algorithm, ranks, size), None
        try:
            found = self._ranks()
            self._kept[asked] = found.explain(algorithm, example_arrays(ranks, size))
            self._most = found.size
        except AllranksError as error:
            if asked not in self._kept:
                if found is not None and not isinstance(error, ClusterLost):
                    raise
                raise UsageError(f"{error} {self._recorded()}") from None
        self.told = self._kept[asked]
        self._say("")
        update: Any = update_display
        update(self._bundle(), raw=True, display_id=self._place)

    def _recorded(self) -> str:
        found = [f"{name} of {size} over {ranks} ranks" for name, ranks, size in self._kept]
        return f"What they have run can still be played: {', '.join(found)}."

    def _say(self, problem: str) -> None:
        self._problem = problem
        self._answers += 1  # an answer like the last one is one, too
        if self._widget is not None:
            self._widget.state = self.state()


def _message(message: dict[str, Any]) -> dict[str, Any]:
    said = {name: [shown(one) for one in message[name]] for name in ("before", "received", "after")}
    return {**message, **said}


def wanted(cluster: Ranks | None, ranks: int | None) -> Ranks:
    """Returns the ranks to run on; the notebook's are started now, as a cell would start them.

    Raises:
        UsageError: there is neither a cluster nor a session that could start one.
    """
    if cluster is not None:
        return cluster
    if offered.session is None:
        raise UsageError(
            "an explainer needs ranks to run on, and this notebook has none. Type: "
            "%load_ext allranks   (or pass cluster=allranks.Cluster(4).start())"
        )
    return offered.session.of_size(None if offered.session.running else ranks)


def present(cluster: Ranks | None) -> Ranks:
    """Returns the ranks to run on again; nothing is started.

    Raises:
        UsageError: they are not running.
    """
    found = cluster or (offered.session.running if offered.session else None)
    if found is None:
        raise UsageError("no ranks are running. Type: %distributed start")
    return found


def ring(
    cluster: Ranks | None, algorithm: str, ranks: int | None, size: int, values: Any
) -> Explainer:
    """Returns what :func:`allranks.widgets.ring` returns, which says what the arguments are."""
    if algorithm not in ALGORITHMS:
        raise UsageError(
            f"expected one of {', '.join(ALGORITHMS)}, found {algorithm!r}. Type for example: "
            'ring(algorithm="tree")'
        )
    own = None if values is None else checked_arrays(values)
    if own is None:
        example_arrays(ranks or 2, size)  # refuses before anything is started
    found = wanted(cluster, ranks if own is None else len(own))
    if own is None:
        own = example_arrays(ranks or min(max(2, found.size), MOST_RANKS), size)
    return Explainer(found.explain(algorithm, own), lambda: present(cluster))


def example_arrays(ranks: int, size: int) -> Arrays:
    """Returns arrays whose sums show who has contributed: for up to four ranks a digit each.

    Args:
        ranks: how many arrays.
        size: how many values each has.

    Raises:
        UsageError: there are too many to be drawn.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise UsageError(
            f"expected between 2 and {MOST_RANKS} ranks to be drawn, found {ranks}. "
            "Type for example: ring(ranks=4)"
        )
    if not 1 <= size <= MOST_VALUES:
        raise UsageError(
            f"expected between 1 and {MOST_VALUES} values a rank to be drawn, found {size}. "
            "Type for example: ring(size=8)"
        )
    weight = [10**rank if ranks <= _DIGITS else rank + 1 for rank in range(ranks)]
    return [[(place % 9 + 1) * one for place in range(size)] for one in weight]


def checked_arrays(values: Any) -> Arrays:
    """Returns a reader's own arrays, one a rank: lists, or an array of shape (ranks, size).

    Raises:
        UsageError: they are no numbers, not of one length, or too many to be drawn.
    """
    rows = values.tolist() if hasattr(values, "tolist") else values
    try:
        arrays = [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
    except TypeError:
        raise UsageError(f"{_EXPECTED}, found {values!r}. {_EXAMPLE}") from None
    every = [one for array in arrays for one in array]
    if not all(isinstance(one, int | float) for one in every):
        wrong = next(one for one in every if not isinstance(one, int | float))
        raise UsageError(f"{_EXPECTED}, found {wrong!r} among them. {_EXAMPLE}")
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) > 1:
        raise UsageError(f"{_EXPECTED}, found arrays of {lengths} values. {_EXAMPLE}")
    example_arrays(len(arrays), lengths[0] if lengths else 0)
    return arrays
