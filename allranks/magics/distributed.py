"""``%%distributed`` runs a cell on the ranks; ``%distributed`` starts, stops and asks them."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from allranks.cluster import source
from allranks.cluster.cluster import Cluster
from allranks.cluster.run import Run
from allranks.cluster.status import tree
from allranks.errors import CellFailed, InvalidCell, UsageError
from allranks.magics.answering import Answering
from allranks.magics.awaiting import Awaiting, is_awaited, nothing_to_run
from allranks.magics.completion import Completion
from allranks.magics.line_help import LineHelp
from allranks.magics.options import CellOptions, HelpShown, parse_cell, parse_command
from allranks.magics.session import Session
from allranks.magics.toggle import Toggle
from allranks.records import ranks as rank_lists
from allranks.records import requests
from allranks.widgets import cell_view


@magics_class
class DistributedMagics(Magics):
    """The magics of one notebook, and its cluster."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.session = Session()
        self.toggle = Toggle(shell)
        self.completion = Completion(shell, self.session, self.toggle)
        self.line_help = LineHelp(shell)
        self.awaiting = Awaiting(shell)
        self.answering = Answering(shell)

    def close(self) -> None:
        """Ends the ranks and leaves the shell as it was."""
        self.toggle.off()
        self.completion.remove()
        self.line_help.remove()
        self.awaiting.remove()
        self.answering.remove()
        self.session.stop()

    @cell_magic("distributed")  # type: ignore[arg-type]
    def run_cell(self, line: str, cell: str) -> Coroutine[Any, Any, None] | None:
        """Runs the cell on every rank, or on those of ``-r``.

        ``%%distributed --help`` lists the options; see ``%distributed`` for more.
        """
        # The line of the magic stays as a comment, so that line numbers are the notebook's.
        toggled = self.toggle.took_cell() or cell.lstrip().startswith("%%")
        head = "" if toggled else f"# %%distributed {line}".rstrip() + "\n"
        try:
            options = parse_cell(line)
        except HelpShown:
            return nothing_to_run()
        return self.send(options, head + cell, cell)

    def send(
        self, options: CellOptions, text: str, local: str = ""
    ) -> Coroutine[Any, Any, None] | None:
        """Runs a text on the ranks; with ``--local`` the notebook runs ``local`` after them."""
        cluster, run = self._submit(options, text)
        if is_awaited():
            return self._awaited(options, cluster, run, local)
        cluster.wait(run)
        self._keep(options, run)
        if options.local:
            self._check_here(self.shell.run_cell(local, store_history=False))
        return None

    async def _awaited(self, options: CellOptions, cluster: Cluster, run: Run, local: str) -> None:
        await cluster.wait_awaited(run)
        self._keep(options, run)
        if options.local:
            ready = self.shell.transform_cell(local)
            done = self.shell.run_cell_async(local, store_history=False, transformed_cell=ready)
            self._check_here(await done)

    @staticmethod
    def _check_here(result: ExecutionResult) -> None:
        """Lets the cell fail that has failed in the notebook, which has shown the traceback."""
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            raise CellFailed(f"the notebook itself raised {type(error).__name__}: {error}")

    def _submit(self, options: CellOptions, text: str) -> tuple[Cluster, Run]:
        number = len(self.shell.user_ns["In"]) - 1
        try:
            source.check(text)
        except SyntaxError as error:
            raise InvalidCell(source.explain(error, number)) from None
        cluster = self.session.cluster(options.cluster)
        chosen = rank_lists.parse(options.ranks or "all", cluster.size)
        run = cluster.submit(
            text,
            name=f"cell In[{number}]",
            number=number,
            ranks=chosen,
            timeout=options.timeout,
            view=cell_view(
                options.view,
                [cluster.hellos[rank] for rank in chosen],
                cluster.ask_soon,
                fold=options.fold,
            ),
            want_value=options.out is not None,
        )
        return cluster, run

    def _keep(self, options: CellOptions, run: Run) -> None:
        """Puts the values of the last expression where ``-o`` says."""
        if options.out is not None:
            self.shell.user_ns[options.out] = run.values()

    @line_magic("distributed")  # type: ignore[arg-type]
    def command(self, line: str) -> Any:
        """Starts, stops and asks the ranks; ``%distributed`` alone lists the commands."""
        try:
            name, options = parse_command(line)
        except HelpShown:
            return None
        session = self.session
        if name == "start":
            session.cluster(options.cluster)
        elif name == "restart":
            session.restart(options.cluster)
        elif name == "stop":
            print("The ranks are stopped." if session.stop() else "No ranks are running.")
        elif name == "launchers":
            from allranks.cluster.launchers import listing

            print(listing.text())
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
        """Looks at where a cell has failed; the other ranks have nothing to do meanwhile."""
        if cluster.failed_first is None:
            raise UsageError(
                "expected a cell that has failed, found none since the ranks were started. To stop "
                "in a cell while it runs, write breakpoint() in it."
            )
        (rank,) = chosen or (cluster.failed_first,)
        run = cluster.submit(
            requests.DEBUG,
            name="%distributed debug",
            number=len(self.shell.user_ns["In"]) - 1,
            ranks=(rank,),
            view=cell_view("plain", [cluster.hellos[rank]], cluster.ask_soon),
        )
        cluster.wait(run)

    def _ask(self, name: str, names: list[str], ranks: str | None) -> Any:
        cluster = self.session.running
        if cluster is None:
            raise UsageError("no ranks are running. Type: %distributed start")
        chosen = rank_lists.parse(ranks or "all", cluster.size)
        if name == "status":
            title = f"{cluster.size} ranks, logs in {cluster.log_dir}"
            print(tree([s for s in cluster.status() if s.rank in chosen], title))
        elif name == "interrupt":
            print("Interrupted." if cluster.interrupt() else "No cell is running.")
        elif name == "push":
            missing = [name for name in names if name not in self.shell.user_ns]
            if missing:
                raise UsageError(
                    "expected names of the notebook's variables, found none named "
                    f"{', '.join(missing)}. Type for example: {missing[0]} = 1, and then: "
                    f"%distributed push {missing[0]}"
                )
            cluster.push({name: self.shell.user_ns[name] for name in names}, chosen)
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
                print(f"── rank {rank}: {path}\n{cluster.log_end(rank, _LOG_NBYTES)}")
        return None


_LOG_NBYTES = 8192
