"""Tab, Shift-Tab and ``--help`` in cells for the ranks and on the lines of the magics."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from allranks.errors import AllranksError
from allranks.magics.ensemble import ensemble_parser
from allranks.magics.options import COMMANDS, cell_parser, command_parser
from allranks.magics.session import Session
from allranks.magics.shell import EveryCell
from allranks.records import requests

_MAGIC = re.compile(r"\s*(%{1,2})(distributed|ensemble)\b(.*)", re.DOTALL)
_ASKS = re.compile(r"%%(distributed|ensemble)\s+(.*\s)?(-h|--help)\s*$")
_RANK = (0,)


def words_for(line: str) -> Sequence[str]:
    """Returns the candidates for the last word of a line: commands, or options not used yet."""
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
    # While a name or a value is typed, options would be wrong.
    return [word for word in known if word not in before] if last.startswith("-") else ()


def _with_a_cell(lines: list[str]) -> list[str]:
    # IPython refuses a cell magic without a cell; help needs none.
    text = [line for line in lines if line.strip()]
    if len(text) == 1 and _ASKS.match(text[0]):
        return [f"{text[0].rstrip()}\n", "#\n"]
    return lines


class Completion:
    """Completes the lines of the magics.

    Names of the ranks are completed and documented by requests to rank 0.
    """

    def __init__(self, shell: InteractiveShell, session: Session, toggle: EveryCell) -> None:
        self._shell = shell
        self._session = session
        self._toggle = toggle
        shell.Completer.custom_matchers += [self._match_line, self._match_name]
        shell.input_transformers_cleanup.append(_with_a_cell)
        self._kernel = getattr(shell, "kernel", None)
        self._inspect: Callable[..., Any] | None = getattr(self._kernel, "do_inspect", None)
        if self._kernel is not None:
            self._kernel.do_inspect = self._do_inspect

    def remove(self) -> None:
        self._shell.Completer.custom_matchers.remove(self._match_line)
        self._shell.Completer.custom_matchers.remove(self._match_name)
        self._shell.input_transformers_cleanup.remove(_with_a_cell)
        if self._kernel is not None:
            self._kernel.do_inspect = self._inspect

    def _is_for_ranks(self, code: str) -> bool:
        if self._session.running is None:
            return False
        return code.lstrip().startswith(("%%distributed", "%%ensemble", "%%px")) or (
            self._toggle.is_on and not code.lstrip().startswith("%")
        )

    def _ask(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        cluster = self._session.running
        if cluster is None:
            return {}
        try:
            return cluster.ask(name, arguments, ranks=_RANK)[0][0]
        except AllranksError:
            return {}  # rank 0 is busy: better no answer than a late or a wrong one

    @context_matcher(priority=1001, identifier="allranks_line")  # type: ignore[untyped-decorator]
    def _match_line(self, context: CompletionContext) -> dict[str, Any]:
        line = context.line_with_cursor[: context.cursor_position]
        found = [word for word in words_for(line) if word.startswith(context.token)]
        completions = [SimpleCompletion(text=word, type="magic") for word in found]
        return {"completions": completions, "suppress": bool(found), "ordered": True}

    @context_matcher(priority=1000, identifier="allranks")  # type: ignore[untyped-decorator]
    def _match_name(self, context: CompletionContext) -> dict[str, Any]:
        code = context.full_text
        in_magic_line = context.cursor_line == 0 and code.startswith("%%")
        if in_magic_line or not self._is_for_ranks(code):
            return {"completions": []}
        lines = code.split("\n")
        cursor = sum(len(line) + 1 for line in lines[: context.cursor_line])
        cursor += context.cursor_position
        found = self._ask(requests.COMPLETE, {"code": code, "cursor": cursor})
        start = cursor - len(context.token)
        completions = [
            SimpleCompletion(text=code[start : match["start"]] + match["text"], type=match["type"])
            for match in found.get("matches", [])
        ]
        # The notebook's own results for names of the ranks would be wrong.
        return {"completions": completions, "suppress": True, "ordered": True}

    def _do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> Any:
        if self._is_for_ranks(code):
            arguments = {"code": code, "cursor": cursor_pos, "detail": detail_level}
            found = {"found": False, "data": {}} | self._ask(requests.INSPECT, arguments)
            return {"status": "ok", "metadata": {}, "found": found["found"], "data": found["data"]}
        assert self._inspect is not None
        return self._inspect(code, cursor_pos, detail_level, omit_sections)
