"""Help on the line of a magic: Tab completes commands and options, and ``--help`` needs no cell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion
from IPython.core.interactiveshell import InteractiveShell

from allranks.magics.ensemble import ensemble_parser
from allranks.magics.options import COMMANDS, cell_parser, command_parser

_MAGIC = re.compile(r"\s*(%{1,2})(distributed|ensemble)\b(.*)", re.DOTALL)
_ASKS = re.compile(r"%%(distributed|ensemble)\s+(.*\s)?(-h|--help)\s*$")


class LineHelp:
    """Completes the lines of the magics in a shell.

    Args:
        shell: the notebook's shell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._matcher = self._make_matcher()
        shell.Completer.custom_matchers.append(self._matcher)
        shell.input_transformers_cleanup.append(_with_a_cell)

    def remove(self) -> None:
        """Leaves the shell as it was."""
        self._shell.Completer.custom_matchers.remove(self._matcher)
        self._shell.input_transformers_cleanup.remove(_with_a_cell)

    @staticmethod
    def _make_matcher() -> Any:
        def allranks_line_matcher(context: CompletionContext) -> dict[str, Any]:
            line = context.line_with_cursor[: context.cursor_position]
            found = [word for word in words_for(line) if word.startswith(context.token)]
            completions = [SimpleCompletion(text=word, type="magic") for word in found]
            return {"completions": completions, "suppress": bool(found), "ordered": True}

        allranks_line_matcher.matcher_api_version = 2  # type: ignore[attr-defined]
        allranks_line_matcher.matcher_priority = 1001  # type: ignore[attr-defined]
        allranks_line_matcher.matcher_identifier = "allranks_line"  # type: ignore[attr-defined]
        return allranks_line_matcher


def words_for(line: str) -> Sequence[str]:
    """Returns what may stand where a line ends: commands, or the options that are not there yet.

    Args:
        line: as ``%distributed start --g``; the last word may be a part of one, or empty.
    """
    found = _MAGIC.match(line)
    if found is None or not found[3][:1].isspace():
        return ()
    *before, last = re.split(r"\s+", found[3].lstrip())
    if found[2] == "ensemble":
        known = ensemble_parser().words if found[1] == "%%" else []
    elif found[1] == "%%":
        known = cell_parser().words
    elif not before:
        return [*COMMANDS, "--help"]
    else:
        known = command_parser(before[0]).words if before[0] in COMMANDS else []
    # Nobody who types a name or a value wants options offered.
    return [word for word in known if word not in before] if last.startswith("-") else ()


def _with_a_cell(lines: list[str]) -> list[str]:
    """IPython refuses a cell magic without a cell; help needs none."""
    text = [line for line in lines if line.strip()]
    if len(text) == 1 and _ASKS.match(text[0]):
        return [f"{text[0].rstrip()}\n", "#\n"]
    return lines
