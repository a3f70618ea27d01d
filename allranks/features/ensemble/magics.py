"""``%%ensemble`` runs a cell once for each member of a grid, on the next free rank."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class

from allranks.cluster.features import ProcessChange
from allranks.cluster.options import below_magic, check_source, explain_syntax
from allranks.errors import InvalidCell, UsageError
from allranks.features.ensemble.early import Early
from allranks.features.ensemble.grid import Options, add_to, check_size, parse_line
from allranks.features.ensemble.member import FINISHED, STOPPED_EARLY, WAITING, Member
from allranks.features.ensemble.runner import EnsembleRunner
from allranks.features.ensemble.runs import Runs
from allranks.features.ensemble.store import Store, key_of, normal
from allranks.features.ensemble.view import ensemble_view
from allranks.magics import extension
from allranks.magics.options import HelpShown, Parser
from allranks.magics.session import BEFORE_THE_CELL, Session, short_interrupts
from allranks.magics.shell import CELL_MAGICS, is_awaited, nothing_to_run

_NAME = "ensemble"


def options_parser() -> Parser:
    parser = Parser(f"%%{_NAME}", "Runs the cell once for each member of a grid.")
    add_to(parser)
    return parser


def load(shell: InteractiveShell, undo: ExitStack) -> None:
    """Adds ``%%ensemble``, and the completion of its options."""
    if (magics := extension.loaded(shell)) is not None:
        shell.register_magics(EnsembleMagics(shell, magics.session))
        undo.callback(extension.take_away, shell, EnsembleMagics)
        undo.enter_context(_OPTIONS)


def _complete_options(undo: ExitStack) -> None:
    CELL_MAGICS[_NAME] = options_parser
    undo.callback(CELL_MAGICS.pop, _NAME)


_OPTIONS = ProcessChange(_complete_options)


@magics_class
class EnsembleMagics(Magics):
    """The ensembles of one notebook."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell)
        self.session = session

    @cell_magic(_NAME)  # type: ignore[arg-type]
    def run_cell(self, line: str, cell: str) -> Coroutine[Any, Any, None] | None:
        """Runs the cell once for each member of a grid, each on the next free rank.

        ``%%ensemble --help`` lists the options.
        """
        try:
            runner = self._prepare(line, cell)
        except HelpShown:
            return nothing_to_run()
        if is_awaited():
            return self._awaited(runner)
        with self._kept(runner):
            runner.run()
        return None

    async def _awaited(self, runner: EnsembleRunner) -> None:
        with self._kept(runner):
            await runner.run_awaited()

    @contextmanager
    def _kept(self, runner: EnsembleRunner) -> Iterator[None]:
        folder, outer = runner.cluster.log_dir, sys.exception()
        try:
            yield
        finally:
            self.session.hooks.cell_shown(runner.number, runner.view, folder, outer)

    def _prepare(self, line: str, cell: str) -> EnsembleRunner:
        options = parse_line(line, options_parser())
        number = len(self.shell.user_ns["In"]) - 1
        text = below_magic(f"%%ensemble {line}", cell)
        try:
            check_source(text)
        except SyntaxError as error:
            raise InvalidCell(explain_syntax(error, number)) from None
        wanted = options.wanted()
        runs = Runs(self._members(options, cell), cell, wanted)
        early = None
        if options.stop is not None and wanted is not None:
            early = Early(options.stop, wanted[1], options.grace)
        store = None
        if options.store is not None:
            # Its lock is taken before ranks are started, which takes longer.
            store = Store(options.store, cell, options.trust_store)
        try:
            if store is not None and options.retry_failed:
                store.forget_failed()
            with short_interrupts(self.session, BEFORE_THE_CELL):
                cluster = self.session.cluster(options.cluster)
            check_size(options, cluster.size)
        except BaseException:
            if store is not None:
                store.close()
            raise
        # Now, not at the end: widgets and other cells use it while the ensemble runs.
        self.shell.user_ns[options.name] = runs
        view = ensemble_view(
            options.view,
            lambda kind, what: _act(runs, kind, what),
            cluster.cells.ask_soon,
            fold=options.fold,
        )
        return EnsembleRunner(cluster, runs, options, view, text, number, store, early)

    def _members(self, options: Options, cell: str) -> list[Member]:
        # With --retry-failed some have ended already.
        before = self.shell.user_ns.get(options.name)
        if before is not None and not isinstance(before, Runs) and not options.out:
            raise UsageError(
                f"expected to put the table into {options.name}, found {type(before).__name__} "
                f"there already. Type for example: -o {options.name}2"
            )
        values = options.members(self.shell.user_ns)
        members = [Member(number, one) for number, one in enumerate(values)]
        if options.retry_failed and options.store is None:
            if not isinstance(before, Runs):
                raise UsageError(
                    f"--retry-failed expected an ensemble in {options.name}, found none. "
                    "Run the cell without it first, or with the --store it was run with."
                )
            kept = _keep_ended(members, before)
            if kept and normal(cell) != normal(before.source):
                print(f"the cell has changed since {kept} members ended; they do not run again")
        return members


def _keep_ended(members: Sequence[Member], before: Runs) -> int:
    """Moves the members that ended well in an earlier run to their places; returns their number."""
    ended: dict[str, list[Member]] = {}
    for member in before:
        if member.state in (FINISHED, STOPPED_EARLY):
            ended.setdefault(key_of(member.values), []).append(member)
    for member in members:
        same = ended.get(key_of(member.values))
        if same:
            member.become(same.pop(0))
    return sum(member.state != WAITING for member in members)


def _act(runs: Runs, kind: str, what: Any) -> str:
    try:
        if kind == "stop":
            runs.stop(None if what is None else int(what))
            return ""
        return f"added {len(runs.add(str(what)))}"
    except UsageError as error:
        return str(error)
