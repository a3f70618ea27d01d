"""The magics of ipyparallel and nbdistributed, on allranks' ranks: ``%load_ext allranks.px``."""

from __future__ import annotations

import sys
import time
from argparse import SUPPRESS
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import finalize

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand

from allranks.cluster.options import below_magic, check_source, explain_syntax
from allranks.errors import InvalidCell, UsageError
from allranks.features.ipyparallel import px_names
from allranks.features.ipyparallel.px_results import (
    BackgroundCell,
    PxResult,
    raising_composite_errors,
)
from allranks.magics import extension
from allranks.magics.distributed import DistributedMagics, SentCell
from allranks.magics.options import CellOptions, HelpShown, Parser, chosen_ranks, split
from allranks.magics.session import Session, show_as_line
from allranks.magics.shell import is_awaited, nothing_to_run
from allranks.records.ranks import label
from allranks.records.wire import Output

_PX_COMMANDS = ("%autopx", "%px", "%dist_", "%sync", "%unload_ext")
_NOW_ON_RANKS = (
    "%%px, %px and %autopx now run on the ranks; before, on engines of ipyparallel. For these again"
    " type: %unload_ext allranks.px"
)
_PRESSED = "the cell in the background was interrupted, this one was not sent."
#: After this time a cell prints for what it waits.
_QUIET_SECONDS = 5.0
_INTERRUPT, _KILL, _LEAVE = ("SIGINT", "2"), ("SIGKILL", "9"), ("0",)


@magics_class
class PxMagics(Magics):
    """``%%px`` and the other magics of ipyparallel and nbdistributed, on the notebook's ranks."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, distributed: DistributedMagics) -> None:
        super().__init__(shell)
        self._distributed = distributed
        #: The options of ``%pxconfig``.
        self._defaults = ""
        self._view = px_names.variables(distributed.session)["view"]
        self._last: BackgroundCell | None = None
        #: What other magics had these names before, by "line" and "cell" and by name.
        self.replaced: dict[str, dict[str, Any]] = {}

    @property
    def view(self) -> Any:
        """ipyparallel's name for the view on which ``%%px`` runs. None if nbdistributed's magic has
        started the ranks: notebooks with both choose by this.
        """
        return None if self._distributed._comm_manager is not None else self._view

    # IPython would evaluate what is in braces with the notebook's variables, not the ranks'.
    @no_var_expand
    @line_cell_magic("px")  # type: ignore[arg-type]
    def px(self, line: str, cell: str | None = None) -> Any:
        """Runs a line or a cell on the ranks, as ``%%distributed`` does.

        ``%%px [--targets T] [--local] [-o NAME] [--noblock] [--group-outputs type|engine|order]``.
        ``--noblock`` returns a `PxResult`, and ``-o`` stores one. With ``--signal-on-interrupt
        SIGKILL`` an interrupt ends the ranks that are in the cell, with ``0`` it ends the wait
        only. A cell that waits always shows its output while it runs, whatever ipyparallel's other
        options say.
        """
        if cell is not None:  # then the line has options only, as that of %%distributed
            line = self.shell.var_expand(line, 2)
        try:
            options, waits, leaves = self._parse(f"{self._defaults} {'' if cell is None else line}")
        except HelpShown:
            return nothing_to_run()
        text = line if cell is None else below_magic(f"%%px {line}", cell)
        px_names.say_which_start(self._distributed.session)
        if self._last is not None:
            self._wait_for(self._last)
        if not waits:
            return self._returned(self._in_background(options, text))
        if leaves:
            return self._left_running(options, text)
        if options.out is not None:
            return self._stored(options, text, cell or "")
        with raising_composite_errors():
            return self._distributed.send(options, text, cell or "")

    def _wait_for(self, last: BackgroundCell) -> None:
        told = f"{label(last.ranks)} still run the cell in the background; an interrupt ends it"
        try:
            last.wait_for_end(_QUIET_SECONDS, partial(print, told, file=sys.stderr, flush=True))
        except KeyboardInterrupt as pressed:
            show_as_line(pressed, _PRESSED)
            raise

    def _stored(
        self, options: CellOptions, text: str, local: str
    ) -> Coroutine[Any, Any, None] | None:
        """Runs a cell as `send` does; its result is a variable then, also if it has failed."""
        output, began = list[Output](), time.monotonic()
        with ExitStack() as at_end:
            keep = self._distributed.session.hooks.command("keep_output", output.append)
            at_end.enter_context(keep)
            sent = self._distributed.submit(options, text)
            at_end.push(partial(self._store, sent, output, began))
            at_end.enter_context(raising_composite_errors())
            waits = self._distributed.finish(sent, local)
            if waits is None:
                return None
            awaited = self._awaited(waits, until := at_end.pop_all())
            finalize(awaited, until.close)  # an interrupt may come before it begins
            return awaited

    @staticmethod
    async def _awaited(waits: Coroutine[Any, Any, Any], at_end: ExitStack) -> None:
        with at_end:
            await waits

    def _store(
        self,
        sent: SentCell,
        output: list[Output],
        began: float,
        _kind: Any,
        error: BaseException | None,
        _trace: Any,
    ) -> None:
        outcome = error if sent.values is None else sent.values
        if outcome is None or sent.options.out is None:
            return
        result = PxResult(sent.cluster, sent.run.ranks, sent.options.fold, began)
        for batch in output:
            if batch.cell == sent.run.cell:
                result.take(batch)
        result.end(outcome)
        self.shell.user_ns[sent.options.out] = result

    @staticmethod
    def _returned(value: Any) -> Any:
        async def given() -> Any:
            return value

        return given() if is_awaited() else value

    def _left_running(self, options: CellOptions, text: str) -> Any:
        """Shows a cell until its end, or until an interrupt, which leaves its ranks running."""
        last = self._in_background(options, text)
        last.follow()
        if not last.ready():
            print(
                f"no longer waiting: {label(last.ranks)} continue with the cell. "
                "To wait for it again, type: %pxresult",
                file=sys.stderr,
            )
            return self._returned(None)
        last.get()
        return self._returned(None)

    def _in_background(self, options: CellOptions, text: str) -> BackgroundCell:
        if options.local:
            raise UsageError(
                "expected a cell that the notebook waits for with --local, which runs it there "
                "after the ranks, found --noblock or --signal-on-interrupt 0. Leave one out"
            )
        number = len(self.shell.user_ns["In"]) - 1
        try:
            check_source(text)
        except SyntaxError as error:
            raise InvalidCell(explain_syntax(error, number)) from None
        cluster = self._distributed.session.cluster()
        ranks = chosen_ranks(options, cluster.size)
        last = self._last = BackgroundCell(cluster, text, number, ranks, options.fold)
        if options.out is not None:
            self.shell.user_ns[options.out] = last
        return last

    def _parse(self, line: str) -> tuple[CellOptions, bool, bool]:
        """Returns a cell's options, whether the notebook waits, and whether an interrupt ends that
        wait only.
        """
        about = "Runs the cell on the ranks, as %%distributed does."
        parser = Parser("%%px", about, abbreviates=True)
        add = parser.add_argument
        add("-t", "--targets")
        add("-o", "--out", metavar="NAME")
        add("--local", action="store_true")
        add("-a", "--noblock", dest="block", action="store_false", default=True)
        add("-b", "--block", action="store_true", default=True)
        for flag in ("--stream", "--no-stream", "--verbose", "--no-verbose"):
            add(flag, action="store_true")
        add("--progress-after", type=float, metavar="SECONDS")
        add("--signal-on-interrupt", default="SIGINT", metavar="SIGNAL")
        add("--group-outputs", choices=("type", "engine", "order"), default="type")
        add("-e", dest="group_outputs", action="store_const", const="engine")
        add("-r", dest="group_outputs", action="store_const", const="order")
        add("-n", dest="size", type=int, help=SUPPRESS)
        said = parser.parse_args(split(line))
        if said.size is not None:
            raise UsageError(self._how_to_start(said.size))
        signal = said.signal_on_interrupt
        if signal not in (*_INTERRUPT, *_KILL, *_LEAVE):
            raise UsageError(
                f"expected --signal-on-interrupt SIGINT, SIGKILL or 0, found {signal!r}. For other "
                "signals type: rc.send_signal(...)"
            )
        options = CellOptions(
            ranks=None if said.targets is None else self._targets(said.targets),
            chosen_by="--targets",
            out=said.out,
            local=said.local,
            fold=said.group_outputs != "engine",
            interrupt_kills=signal in _KILL,
        )
        return options, said.block, signal in _LEAVE

    def _how_to_start(self, n: int) -> str:
        running = self._distributed.session.running
        if running is None:
            what, advice = "no ranks run yet", f"Type first: %distributed start -n {n}"
        elif running.size == n:
            what, advice = f"{n} ranks are running", "Leave out -n"
        else:
            what = f"{running.size} ranks are running"
            advice = (
                f"Type first: %distributed restart -n {n}   (this deletes all variables on the "
                "ranks)"
            )
        return (
            f"expected an option of ipyparallel's %%px, found -n {n}: %%px runs on the ranks that "
            f"the notebook has, and {what}. {advice}"
        )

    def _targets(self, text: str) -> str:
        """Returns engines, as ``0``, ``-1``, ``[0, 2]``, ``::2`` or ``all``, as we list ranks."""
        from_end = text.startswith("-") and text[1:].isdecimal()
        if not from_end and ":" not in text:
            return text
        px_names.say_which_start(self._distributed.session)
        size = self._distributed.session.cluster().size
        if from_end:
            return str(size + int(text)) if -size <= int(text) < 0 else text
        try:
            parts = [int(part) if part else None for part in text.strip("[]").split(":")]
            chosen = range(size)[slice(*parts)]
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"expected targets, found {text!r}. Type for example: --targets 0:2"
            ) from error
        return ",".join(map(str, chosen)) or text

    @line_magic("autopx")  # type: ignore[arg-type]
    def autopx(self, line: str) -> None:
        """Sends every following cell to the ranks, or no longer does."""
        self._distributed.command("off" if self._distributed.toggle.is_on else "on")

    @line_magic("pxresult")  # type: ignore[arg-type]
    def pxresult(self, line: str) -> None:
        """Waits for the last cell of ``%%px --noblock`` and shows its output; ``-o`` stores it."""
        try:
            options, *_ = self._parse(line)
        except HelpShown:
            return
        if self._last is None:
            raise UsageError(
                "expected a cell in the background, found none: all other cells have shown their "
                "output. Type for example: %%px --noblock"
            )
        if options.out is not None:
            self.shell.user_ns[options.out] = self._last
            return
        self._last.wait()
        self._last.display_outputs("type" if options.fold else "engine")
        self._last.get()

    @line_magic("pxconfig")  # type: ignore[arg-type]
    def pxconfig(self, line: str) -> None:
        """Sets options for all following cells with ``%%px`` and lines with ``%px``."""
        defaults = f"{self._defaults} {line}"
        try:
            self._parse(defaults)
        except HelpShown:
            return
        self._defaults = defaults

    @line_magic("dist_init")  # type: ignore[arg-type]
    def dist_init(self, line: str) -> None:
        """Starts the ranks, which run every following cell: ``%distributed start`` and ``on``."""
        about = "Starts the ranks, which run every following cell."
        parser = Parser("%dist_init", about, abbreviates=True)
        parser.add_argument("-n", "--num-processes", type=int)
        parser.add_argument("-g", "--gpu-ids")
        try:
            said = parser.parse_args(split(line))
        except HelpShown:
            return
        words = ["start"]
        if said.num_processes is not None:
            words += ["-n", str(said.num_processes)]
        if said.gpu_ids is not None:
            words += ["--gpus", said.gpu_ids]
        self._distributed.command(" ".join(words))
        self._distributed.by_dist_init = self._distributed.session.running
        # As there, all following cells run on the ranks.
        self._distributed.command("on")

    @line_magic("dist_status")  # type: ignore[arg-type]
    def dist_status(self, line: str) -> None:
        """Shows every rank: ``%distributed status``."""
        self._distributed.command("status")

    @line_magic("dist_mode")  # type: ignore[arg-type]
    def dist_mode(self, line: str) -> None:
        """Sends every following cell to the ranks, or with ``-d`` none: ``%distributed on``."""
        self._distributed.command("off" if line.strip() in ("-d", "--disable") else "on")

    @line_magic("dist_shutdown")  # type: ignore[arg-type]
    def dist_shutdown(self, line: str) -> None:
        """Ends the ranks: ``%distributed stop``. The following cells run in the notebook."""
        self._distributed.command("stop")
        if self._distributed.toggle.is_on:
            self._distributed.command("off")

    @line_magic("dist_reset")  # type: ignore[arg-type]
    def dist_reset(self, line: str) -> None:
        """Ends the ranks and starts others: ``%distributed restart``."""
        self._distributed.command("restart")
        self._distributed.by_dist_init = self._distributed.session.running

    @line_magic("sync")  # type: ignore[arg-type]
    def sync(self, line: str) -> Coroutine[Any, Any, None] | None:
        """Waits for every rank: ``barrier()``, which no cell needs at its end."""
        return self._distributed.send(CellOptions(), "barrier()")


def hint(shell: InteractiveShell) -> None:
    """Has a cell that fails for want of these magics name the command that adds them."""
    if (magics := extension.loaded(shell)) is not None:
        magics.hints.px = frozenset().union(*PxMagics.magics.values())


def load(shell: InteractiveShell) -> None:
    """Adds the magics, and the variables of notebooks for ipyparallel."""
    extension.load(shell)
    magics = extension.loaded(shell)
    assert magics is not None
    # Registering them again would give the toggle its commands twice.
    if PxMagics.__name__ not in shell.magics_manager.registry:
        added = PxMagics(shell, magics)
        added.replaced = _replaced(shell, added)
        client = _client_of(added.replaced)
        if client is not None and not _is_of_ranks(client, magics.session):
            print(_NOW_ON_RANKS)
        shell.register_magics(added)
        magics.toggle.commands += _PX_COMMANDS
        for name, value in px_names.variables(magics.session).items():
            shell.user_ns.setdefault(name, value)


def _replaced(shell: InteractiveShell, added: PxMagics) -> dict[str, dict[str, Any]]:
    before = shell.magics_manager.magics
    return {
        kind: {name: before[kind][name] for name in added.magics[kind] if name in before[kind]}
        for kind in ("line", "cell")
    }


def _client_of(replaced: dict[str, dict[str, Any]]) -> Any:
    """Returns the client on whose engines ``%%px`` of ipyparallel runs; None if it cannot."""
    view = getattr(getattr(replaced["cell"].get("px"), "__self__", None), "view", None)
    client = getattr(view, "client", None)
    return None if getattr(client, "_closed", True) else client


def _is_of_ranks(client: Any, session: Session) -> bool:
    ours = {} if session.running is None else session.hooks.command("connection_information")
    return bool(ours) and client._config.get("key") == ours.get("key")


def unload(shell: InteractiveShell) -> None:
    magics = extension.loaded(shell)
    if magics is not None and PxMagics.__name__ in shell.magics_manager.registry:
        for command in _PX_COMMANDS:
            magics.toggle.commands.remove(command)
        added: Any = shell.magics_manager.registry[PxMagics.__name__]
        extension.take_away(shell, PxMagics)
        if _client_of(added.replaced) is not None:
            for kind, replaced in added.replaced.items():
                for name, magic in replaced.items():
                    shell.magics_manager.magics[kind].setdefault(name, magic)
        for name in px_names.variables(magics.session):
            if isinstance(shell.user_ns.get(name), px_names.ClientProxy | px_names.PxCluster):
                del shell.user_ns[name]
