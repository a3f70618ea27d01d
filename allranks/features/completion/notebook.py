"""Asks the chosen rank what Tab, Shift-Tab and ``name?`` want to know, and all ranks which of them
have a name. It never waits for long.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster import cluster
from allranks.cluster.features import AskingFeature, ClusterContext
from allranks.cluster.options import LineCommand
from allranks.errors import UsageError
from allranks.records import ranks as rank_lists

#: How long the kernel waits. JupyterLab waits one second for completions, also on a busy machine.
_SECONDS = {"complete": 0.5, "describe": 2.0, "find": 0.5}
#: What the ranks of a cell are named by, in its first line.
_RANKS = re.compile(
    r"\s*%%(?:rank\s+|(?:distributed|px)\b.*?\s(?:-r|--ranks|-t|--targets)[\s=]*)"
    r"(\[[\d,\s-]*\]|[\d,-]+)"
)
_HELP = re.compile(
    r"(?P<before>(?:await )?get_ipython\(\)\.run_cell_magic\('distributed', ')"
    r"(?P<after>', '(?:\?{1,2}[\w.]+|[\w.]+\?{1,2})(?:\\n)*'\)\s*)"
)


class NameCompletion(AskingFeature):
    """Chooses the rank, and asks it."""

    commands = frozenset({"complete", "describe", "find"})
    line_commands = (
        LineCommand(
            "inspect",
            "chooses the rank that Tab, Shift-Tab and NAME? ask, for example: inspect 2",
            "RANK",
            "a rank's number; without it, shows the chosen one",
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._chosen = 0

    @classmethod
    def loaded(cls, shell: InteractiveShell, undo: ExitStack) -> None:
        # Here: scripts need no magics.
        from allranks.features.completion.names import RankNames

        RankNames(shell, undo)

    def started(self, cluster: ClusterContext) -> None:
        super().started(cluster)
        shell = get_ipython()
        if shell is not None and self._ask_one_rank not in shell.input_transformers_post:
            shell.input_transformers_post.append(self._ask_one_rank)

    def stopped(self) -> None:
        super().stopped()
        shell = get_ipython()
        if shell is not None and self._ask_one_rank in shell.input_transformers_post:
            shell.input_transformers_post.remove(self._ask_one_rank)

    def command(self, name: str, *arguments: Any) -> Any:
        """Runs a command; may run in another thread, as the subshell of a notebook.

        ``complete`` and ``describe`` take a cell, the cursor's position, and the detail of the
        description; they return the ``rank``, and what it has found. ``find`` takes the name of a
        variable, and returns what the ranks that have it have found, by rank, without code of the
        user's. ``inspect`` takes the words that the user has typed.
        """
        if name == "inspect":
            (words,) = arguments
            return f"Tab, Shift-Tab and NAME? ask rank {self._choose(words)}."
        if name == "find":
            return self._find(*arguments)
        code, cursor, *detail = arguments
        rank = self._rank_for(code)
        if rank is None:
            return {}
        content = {"code": code, "cursor": cursor, "detail": detail[0] if detail else 0}
        # A busy rank refuses the first question. It answers the second one at once, from what it
        # can find without code of the user's; so does a rank whose user's code does not return.
        requests = [name, f"{name}_busy"]
        waits = [self.begin_ask((rank,), each, content, _SECONDS[name]) for each in requests]
        return {"rank": rank} | next((found for wait in waits if (found := wait().get(rank))), {})

    def _find(self, variable: str) -> dict[int, dict[str, Any]]:
        running = cluster.running()
        if running is None:
            return {}
        # IPython's description of a name would also be that of a magic, as ``time``.
        content = {"code": variable, "cursor": len(variable), "detail": 0}
        ranks = [rank for rank in range(running.size) if rank not in running.roster.dead]
        found = self.begin_ask(ranks, "describe_busy", content, _SECONDS["find"])()
        return {rank: one for rank, one in found.items() if one["found"]}

    def _choose(self, words: list[str]) -> int:
        if words:
            context = self.context
            if len(words) > 1 or not words[0].isdecimal():
                raise UsageError(
                    f"expected one rank, found {' '.join(words):.60}. "
                    "Type for example: %distributed inspect 2"
                )
            if context is not None:
                rank_lists.parse(words[0], context.size)
            self._chosen = int(words[0])
        return self._chosen

    def _rank_for(self, code: str) -> int | None:
        """Returns the chosen rank, or the first one that runs the cell and lives."""
        running = cluster.running()
        if running is None:
            return None
        found = _RANKS.match(code.split("\n", 1)[0])
        try:
            ranks = rank_lists.parse(found[1] if found else "all", running.size)
        except UsageError:
            ranks = tuple(range(running.size))  # the cell would be refused
        alive = [rank for rank in ranks if rank not in running.roster.dead]
        return self._chosen if self._chosen in alive else next(iter(alive), None)

    def _ask_one_rank(self, lines: list[str]) -> list[str]:
        # The ranks would print the same text, or texts that differ in an address.
        found = _HELP.fullmatch("".join(lines))
        rank = self._rank_for("") if found else None
        if found is None or rank is None:
            return lines
        return [f"{found['before']}-r {rank}{found['after']}"]


FEATURE = NameCompletion
