"""What an error adds if its name exists on the other side, if a rank may have lost it, or if its
magic is not loaded.

Where a hint says that a name is there, this has been checked. A `NameError` of the notebook, and
IPython's error about an unknown magic, get it when they are shown; a failed cell of the ranks when
it has ended.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from difflib import get_close_matches
from traceback import walk_tb
from types import FunctionType, ModuleType
from typing import Any

from IPython.core.error import UsageError as UnknownMagic
from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster.options import GIVEN
from allranks.cluster.variables import sent_nbytes
from allranks.errors import AllranksError, CellFailed, Report
from allranks.magics.session import Session
from allranks.magics.shell import EveryCell
from allranks.records.config import size_text
from allranks.records.ranks import compact, label

#: Modules whose objects reach the ranks from the notebook.
_OF_NOTEBOOK = ("allranks.magics.", "allranks.cluster.", "allranks.lessons.explainer")
_WITHOUT = "Type it in a cell without %%distributed"
_LOCAL = "Begin the cell with: %%local   (or let all cells run in the notebook: %distributed off)"
#: Of what a view runs, in a cell of the notebook.
OF_VIEW = "Use it outside of what the view runs"
_BEGIN, _RUN = "Begin the cell with: {}", 'Import it there, or type: ranks.run("{}")'
#: The size of larger values is named before they are copied to each rank.
_LARGE_NBYTES = 100_000_000
_SHOW = "showtraceback"
_OURS = "distributed"
_UNDEFINED = re.compile(r"name '(\w+)' is not defined")
_NOT_FOUND = re.compile(r"`(%%?)(\w+)` not found")


class Hints:
    """Adds hints to the errors that a notebook's shell shows.

    Attributes:
        px: the magics that ``%load_ext allranks.px`` adds.
    """

    def __init__(
        self, shell: InteractiveShell, session: Session, toggle: EveryCell, undo: ExitStack
    ) -> None:
        self.px: frozenset[str] = frozenset()
        self._shell, self._session, self._toggle = shell, session, toggle
        self._before = vars(shell).get(_SHOW)
        self._show_as_before: Callable[..., None] = shell.showtraceback
        vars(shell)[_SHOW] = self._show
        undo.callback(self._undo)

    def _undo(self) -> None:
        own = vars(self._shell)
        if own.get(_SHOW) == self._show:  # else another extension has replaced it since
            del own[_SHOW]
            if self._before is not None:
                own[_SHOW] = self._before

    # The parameter has IPython's name, because a caller may use it.
    def _show(self, exc_tuple: Any = None, *arguments: Any, **options: Any) -> None:
        # Shown without a hint if an object of the user raises, or an interrupt ends the question.
        with suppress(Exception, KeyboardInterrupt):
            self._hint(exc_tuple[1] if exc_tuple else sys.exc_info()[1])
        self._show_as_before(exc_tuple, *arguments, **options)

    def _hint(self, error: BaseException | None) -> None:
        if type(error) is NameError:
            self._add_to(error)
        elif type(error) is UnknownMagic and (found := _NOT_FOUND.search(str(error))):
            magic = f"{found[1]}{found[2]}"
            if found[2] in self.px:
                error.args = (f"{error} {magic} runs on the ranks after: %load_ext allranks.px",)
            elif get_close_matches(found[2], [_OURS]):
                error.args = (f"{error} Did you mean {found[1]}{_OURS}?",)

    def _add_to(self, error: NameError) -> None:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        # A module's own mistake is no mistake of the cell.
        if not frames or frames[-1].f_globals is not self._shell.user_ns:
            return
        said = self._on_ranks(error.name or "")
        if said and said not in getattr(error, "__notes__", ()):
            error.add_note(said)

    def _on_ranks(self, name: str) -> str:
        begin = "begin the cell with %%distributed"
        if name in GIVEN:
            return f"{name} exists on the ranks: {begin}"
        if not name or self._session.running is None:
            return ""
        found: dict[int, dict[str, Any]] = {}
        with suppress(AllranksError):
            found = self._session.hooks.command("find", name)
        if not found:
            return ""
        ranks = label(found)
        if module := next(iter(found.values()))["module"]:
            have = "has" if len(found) == 1 else "have"
            imported = f"{name} is a module that {ranks} {have} imported"
            return f"{imported}, and not the notebook. {_import(module, name)}"
        some = _option(sorted(found)) if len(found) < self._session.running.size else ""
        copies = f"copy it, a value for each rank: {name} = %distributed pull {name}{some}"
        return f"{name} exists on {ranks}: {begin}{some}, or {copies}"

    def explain(self, error: CellFailed, ran: Iterable[int]) -> None:
        """Adds to a failed cell of the ranks where the names are that it has not found."""
        running = self._session.running
        replaced = running.roster.replaced if running is not None else ()
        here = _LOCAL if self._toggle.is_on else _WITHOUT
        # A variable's class may have a ``__module__`` of its own, and pickling takes time.
        with suppress(Exception, KeyboardInterrupt):
            names = variables_of(self._shell)
            found = where_names_are(error.reports, ran, names, here, replaced)
            error.text = "\n\n".join([error.text, *found])


def variables_of(shell: InteractiveShell) -> dict[str, Any]:
    """Returns the variables that a notebook's user has made; in any thread."""
    own, hidden = {**shell.user_ns}, shell.user_ns_hidden
    return {name: value for name, value in own.items() if value is not hidden.get(name, hidden)}


def where_names_are(
    reports: Iterable[Report],
    ran: Iterable[int],
    names: Mapping[str, Any],
    here: str = _WITHOUT,
    replaced: Collection[int] = (),
) -> list[str]:
    """Returns a line for each name that ranks have not found, and that exists in the notebook, or
    that a replaced rank may have lost.

    ``ran`` are the ranks that ran the cell, ``names`` the notebook's variables, ``replaced`` the
    ranks that have taken the place of dead ones. ``here`` is how to run a cell in the notebook.
    """
    missing: dict[str, list[int]] = {}
    for report in reports:
        found = _UNDEFINED.fullmatch(report.message.partition("\n")[0])
        if found is None or report.etype != NameError.__name__:
            continue
        # Not the mistake of a library that the cell calls.
        if re.search(rf"\b{found[1]}\b", report.source_line):
            missing.setdefault(found[1], []).append(report.rank)
    everyone = len(list(ran))
    lines = []
    for name, ranks in missing.items():
        if name in names:
            some = ranks if len(ranks) < everyone else []
            lines.append(_to_ranks(name, names[name], some, here))
        elif set(ranks) <= set(replaced):
            was = "was replaced, and lacks" if len(ranks) == 1 else "were replaced, and lack"
            lines.append(
                f"{label(ranks)} {was} what cells had made before. If a cell made {name} then, "
                "run it again."
            )
    return lines


def _import(module: str, name: str, how: str = _BEGIN) -> str:
    known = f" as {name}" if module != name else ""
    return how.format(f"import {module}{known}")


def _option(ranks: list[int]) -> str:
    return f" -r {compact(ranks, '-').replace(' ', '')}"


def _to_ranks(name: str, value: Any, ranks: list[int], here: str) -> str:
    made = value if isinstance(value, FunctionType) else type(value)
    if str(made.__module__).startswith(_OF_NOTEBOOK):
        return f"{name} runs in the notebook. {here}"
    if isinstance(value, ModuleType):
        return (
            f"{name} is a module that the notebook has imported, and not the ranks. "
            f"{_import(value.__name__, name, _RUN if here == OF_VIEW else _BEGIN)}"
        )
    nbytes = sent_nbytes(value)
    if nbytes is None:
        return f"{name} exists in the notebook, and cannot be copied to the ranks. {here}"
    some = _option(ranks) if ranks else ""
    each = f" ({size_text(nbytes)} each)" if nbytes >= _LARGE_NBYTES else ""
    copy = f"To copy it to the ranks{each}: %distributed push {name}{some}"
    # Where every cell runs on the ranks, this one may be meant for the notebook.
    of_cells = here not in (_WITHOUT, OF_VIEW)
    more = f"\nTo use it in the notebook: {here[0].lower()}{here[1:]}" if of_cells else ""
    return f"{name} exists in the notebook. {copy}{more}"
