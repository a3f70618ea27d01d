"""``%%distributed`` runs a cell on the ranks; ``%distributed`` starts, stops and asks them."""

from __future__ import annotations

import re
import sys
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from IPython.core import page
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from allranks.cluster import cluster as notebook
from allranks.cluster.cell_run import CellRun
from allranks.cluster.cluster import Cluster
from allranks.cluster.failures import status_tree
from allranks.cluster.features import CellRequest, NotebookHooks
from allranks.cluster.options import (
    CELL_OPTIONS,
    LINE_COMMANDS,
    below_magic,
    check_source,
    explain_syntax,
)
from allranks.errors import AllranksError, CellFailed, InvalidCell, RankDied, UsageError
from allranks.magics.hints import Hints
from allranks.magics.options import (
    CellOptions,
    CommandOptions,
    HelpShown,
    by_command,
    chosen_ranks,
    parse_cell,
    parse_command,
)
from allranks.magics.session import BEFORE_THE_CELL, Session, short_interrupts
from allranks.magics.shell import (
    AwaitedMagics,
    EveryCell,
    complete_lines,
    is_awaited,
    load_once,
    nothing_to_run,
)
from allranks.records import ranks as rank_lists
from allranks.records import requests
from allranks.records.ranks import label
from allranks.widgets.dashboard.view import cell_view
from allranks.widgets.displays import ShownValue
from allranks.widgets.notebook import NotebookView

_HELP = re.compile(r"(\?{1,2})([\w.]+)|([\w.]+)(\?{1,2})")


@dataclass
class SentCell:
    """A cell that the ranks run for a magic.

    Attributes:
        run: another one once the cell was sent again.
        values: those of ``-o`` once the cell has ended well.
    """

    options: CellOptions
    text: str
    cluster: Cluster
    run: CellRun
    ended: bool = False
    values: list[Any] | None = None
    #: Those from which its training has continued.
    commits: list[int] = field(default_factory=list)


@magics_class
class DistributedMagics(Magics):
    """The magics of one notebook, and its cluster."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        hooks = NotebookHooks()
        has_own = "session" in hooks.commands  # a feature's
        self.session: Session = hooks.command("session", hooks) if has_own else Session(hooks)
        self.by_dist_init: Cluster | None = None
        """The ranks that nbdistributed's magic has started."""
        self.toggle = EveryCell(shell)
        self.session.which_cells = self.toggle.text
        self.undo = ExitStack()
        """What undoes all changes of this shell."""
        complete_lines(shell, self.undo)
        self.hints = Hints(shell, self.session, self.toggle, self.undo)
        load_once(shell, self.undo)
        kernel = getattr(shell, "kernel", None)
        if kernel is not None:
            AwaitedMagics(shell, self.undo)

    @property
    def _comm_manager(self) -> Cluster | None:
        """nbdistributed's name for its processes, by which notebooks find whether it has any."""
        running = self.session.running
        return running if running is self.by_dist_init else None

    def close(self) -> str:
        """Undoes what it has changed. Returns a line about ranks that have ended with it."""
        self.toggle.off()
        self.undo.close()
        return self.session.close()

    @cell_magic("distributed")  # type: ignore[arg-type]
    def run_cell(self, line: str, cell: str) -> Coroutine[Any, Any, Any] | None:
        """Runs the cell on every rank, or on those of ``-r``.

        ``%%distributed --help`` lists the options; see ``%distributed`` for more.
        """
        took = self.toggle.took_cell()
        try:
            options = parse_cell(line)
        except HelpShown:
            return nothing_to_run()
        if took and self._has_paged(cell):
            return nothing_to_run()
        # Where another magic runs the cell, it may show no value.
        options.returns_value = took and self.toggle.is_kernel and is_awaited()
        text = cell if took else below_magic(f"%%distributed {line}", cell)
        return self.send(options, text, cell)

    def _has_paged(self, cell: str) -> bool:
        """Whether a cell is ``name?``, and a rank's answer is now in the front end's pager."""
        asks = _HELP.fullmatch(cell.strip())
        kernel = getattr(self.shell, "kernel", None)
        if asks is None or kernel is None or self.session.running is None:
            return False
        name, marks = asks[2] or asks[3], asks[1] or asks[4]
        found: dict[str, Any] = {}
        with suppress(AllranksError):  # then the ranks print what they have
            found = self.session.hooks.command("describe", name, len(name), len(marks) - 1)
        if found.get("found"):
            page.page(found["data"])
        return bool(found.get("found"))

    @cell_magic("rank")  # type: ignore[arg-type]
    def run_on_ranks(self, line: str, cell: str) -> Coroutine[Any, Any, Any] | None:
        """Runs the cell on some ranks, as ``%%rank 0,2-3``: ``%%distributed -r 0,2-3``."""
        options = CellOptions(ranks=line or None, chosen_by="%%rank")
        return self.send(options, below_magic(f"%%rank {line}", cell))

    def send(
        self, options: CellOptions, text: str, local: str = ""
    ) -> Coroutine[Any, Any, Any] | None:
        """Runs a text on the ranks; with ``--local`` the notebook runs ``local`` after them."""
        return self.finish(self.submit(options, text), local)

    def submit(self, options: CellOptions, text: str) -> SentCell:
        """Sends a text to the ranks, for `finish`."""
        return SentCell(options, text, *self._submit(options, text))

    def finish(self, sent: SentCell, local: str = "") -> Coroutine[Any, Any, Any] | None:
        """Waits for the end of a cell, or returns what waits; see `send`."""
        if is_awaited():
            return self._awaited(sent, local)
        while not sent.ended:
            with self._attempt(sent):
                sent.cluster.cells.wait(sent.run)
        if sent.options.local:
            # The history has the magic's cell already.
            self._check_here(self.shell.run_cell(local, store_history=False))
        return None

    async def _awaited(self, sent: SentCell, local: str) -> ShownValue | None:
        while not sent.ended:
            with self._attempt(sent):
                await sent.cluster.cells.wait_awaited(sent.run)
        if sent.options.local:
            ready = self.shell.transform_cell(local)
            done = self.shell.run_cell_async(local, store_history=False, transformed_cell=ready)
            self._check_here(await done)
        view = sent.run.view
        return view.value if isinstance(view, NotebookView) else None

    @contextmanager
    def _attempt(self, sent: SentCell) -> Iterator[None]:
        """Within, the ranks run a cell; it is sent again if its training continues from a commit.

        Raises RankDied if it does not, was interrupted, or has continued too often from the same
        commit.
        """
        folder, died = sent.cluster.cells.connection.log_dir, None
        outer = sys.exception()
        try:
            yield
        except CellFailed as error:
            self.hints.explain(error, sent.run.ranks)
            if not isinstance(error, RankDied):
                raise
            died = error
        finally:
            number = len(self.shell.user_ns["In"]) - 1
            self.session.hooks.cell_shown(number, sent.run.view, folder, outer)
        # Sent again only now: the history has the ended run, and its log folder.
        if died is None:
            sent.ended = True
            if sent.options.out is not None:
                with short_interrupts(self.session, _UNREAD):
                    sent.values = self.shell.user_ns[sent.options.out] = sent.run.values()
            return
        commit = sent.cluster.roster.goes_on
        if not commit or sent.run.presses or sent.commits.count(commit) == _MOST_TIMES:
            raise died
        sent.commits.append(commit)
        sent.cluster.cells.news.append(f"{died}. {_GOES_ON}")
        sent.run = self._submit(sent.options, sent.text)[1]

    @staticmethod
    def _check_here(result: ExecutionResult) -> None:
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            raise CellFailed(f"the notebook itself raised {type(error).__name__}: {error}")

    def _submit(self, options: CellOptions, text: str) -> tuple[Cluster, CellRun]:
        # IPython has added the running cell to its history already.
        number = len(self.shell.user_ns["In"]) - 1
        try:
            # Before ranks are started: they are not needed then.
            check_source(text)
        except SyntaxError as error:
            raise InvalidCell(explain_syntax(error, number)) from None
        with short_interrupts(self.session, BEFORE_THE_CELL):
            if options.for_running():
                return self._submit_to_feature(options, text, number)
            return self._submit_to_ranks(options, text, number)

    def _submit_to_ranks(
        self, options: CellOptions, text: str, number: int
    ) -> tuple[Cluster, CellRun]:
        hooks, asked = self.session.hooks, by_command(options.for_preparing())
        # Wrong options start no ranks, which may wait in a queue.
        prepare = [hooks.command(command, one) for command, one in asked.items()]
        cluster = self.session.cluster(options.cluster)
        chosen = chosen_ranks(options, cluster.size)
        # Not earlier: without ranks, the next cell would be prepared.
        hooks.call_each(prepare)
        view = cell_view(
            options.view,
            [*map(cluster.roster.hellos.__getitem__, chosen)],
            cluster.cells.ask_soon,
            fold=options.fold,
            buttons=self.session.hooks.panel_buttons,
        )
        if isinstance(view, NotebookView):
            view.returns_value = options.returns_value
        run = cluster.cells.begin(
            text,
            name=f"cell In[{number}]",
            number=number,
            ranks=chosen,
            timeout=options.timeout,
            view=view,
            want_value=options.out is not None,
            checked=True,
            interrupt_kills=options.interrupt_kills,
        )
        return cluster, run

    def _submit_to_feature(
        self, options: CellOptions, text: str, number: int
    ) -> tuple[Cluster, CellRun]:
        request = CellRequest(
            source=text,
            number=number,
            options=options.for_running(),
            cluster=options.cluster,
            ranks=options.ranks,
            timeout=options.timeout,
            view=options.view,
            fold=options.fold,
            want_value=options.out is not None,
        )
        command = CELL_OPTIONS[next(iter(request.options))].command
        submitted: tuple[Cluster, CellRun] = self.session.hooks.command(command, request)
        return submitted

    @line_magic("distributed")  # type: ignore[arg-type]
    def command(self, line: str) -> Any:
        """Starts, stops and asks the ranks; ``%distributed`` alone lists the commands."""
        try:
            name, options = parse_command(line)
        except HelpShown:
            return None
        with short_interrupts(self.session, f"%distributed {name} was interrupted"):
            return self._command(name, options)

    def _command(self, name: str, options: CommandOptions) -> Any:
        session = self.session
        if name == "start":
            session.start(options.cluster)
        elif name == "restart":
            session.restart(options.cluster)
        elif name == "stop":
            print(session.stop())
        elif name == "launchers":
            from allranks.cluster.launchers import registry

            print(registry.text())
        elif name == "doctor":
            from allranks.cluster import doctor

            print(doctor.report(doctor.examine()))
        elif name in LINE_COMMANDS:
            # There features look for it; a shell within this one may have another.
            notebook.session = session
            if said := session.hooks.command(name, options.features or options.names):
                print(said)
        elif name == "on":
            self.toggle.on()
            print("Every following cell runs on the ranks, until: %distributed off")
        elif name == "off":
            self.toggle.off()
            print("The following cells run in the notebook.")
        else:
            return self._ask(name, options.names, options.ranks)
        return None

    def _debug(self, cluster: Cluster, chosen: tuple[int, ...]) -> None:
        # The other ranks are idle meanwhile.
        if cluster.cells.failed_first is None:
            raise UsageError(
                "expected a cell that has failed, found none since the ranks were started. To stop "
                "in a cell while it runs, write breakpoint() in it."
            )
        (rank,) = chosen or (cluster.cells.failed_first,)
        run = cluster.cells.begin(
            requests.DEBUG,
            name="%distributed debug",
            number=len(self.shell.user_ns["In"]) - 1,
            ranks=(rank,),
            view=cell_view("plain", [cluster.hellos[rank]], cluster.cells.ask_soon),
        )
        cluster.cells.wait(run)

    def _ask(self, name: str, names: list[str], ranks: str | None) -> Any:
        cluster = self.session.running
        if cluster is None and (line := self.session.where()):
            if name == "status":
                print(line)
                return None
            if name == "interrupt":
                raise UsageError(f"expected a cell of this notebook, found {line} Interrupt there")
            cluster = self.session.cluster()
        if cluster is None:
            raise UsageError("no ranks are running. Type: %distributed start")
        chosen = rank_lists.parse(ranks or "all", cluster.size)
        if name == "status":
            cluster.cells.is_up(print)  # replaces ranks that have died since the last cell
            title = f"{cluster.size} ranks, logs in {cluster.log_dir}{self.session.users(cluster)}"
            print(status_tree([s for s in cluster.status() if s.rank in chosen], title))
        elif name == "interrupt":
            print("Interrupted." if cluster.interrupt() else "No cell is running.")
        elif name == "push":
            missing = [name for name in names if name not in self.shell.user_ns]
            if missing:
                example = missing[0] if missing[0].isidentifier() else "x"
                raise UsageError(
                    "expected names of the notebook's variables, found none named "
                    f"{', '.join(missing)}. Type for example: {example} = 1, and then: "
                    f"%distributed push {example}"
                )
            values = {name: self.shell.user_ns[name] for name in names}
            cluster.push(values, chosen)
            are = "is" if len(values) == 1 else "are"
            print(f"{', '.join(values)} {are} on {label(chosen)}")
        elif name == "debug":
            if ranks and len(chosen) > 1:
                raise UsageError(
                    f"expected one rank to look at, found {len(chosen)}. "
                    f"Type for example: %distributed debug -r {chosen[0]}"
                )
            self._debug(cluster, chosen if ranks else ())
        elif name == "pull":
            return cluster.pull(names[0] if len(names) == 1 else names, chosen)
        elif name == "log":
            for rank in chosen:
                path = cluster.hellos[rank].log
                print(f"── rank {rank}: {path}\n{cluster.cells.log_end(rank, _LOG_NBYTES)}")
        return None


_LOG_NBYTES = 8192
_MOST_TIMES = 3
_UNREAD = "the cell has run, and reading its values was interrupted"
_GOES_ON = "The cell runs again, and its training continues from its last commit."
