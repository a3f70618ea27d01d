"""Tab and Shift-Tab in cells for the ranks: their names, and not the notebook's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from allranks.errors import AllranksError
from allranks.magics.extension import loaded
from allranks.magics.shell import CELL_MAGICS, replace


class RankNames:
    """Completes and describes the names of the ranks, as long as the extension is loaded."""

    def __init__(self, shell: InteractiveShell, undo: ExitStack) -> None:
        magics = loaded(shell)
        assert magics is not None
        self._session, self._toggle = magics.session, magics.toggle
        shell.Completer.custom_matchers.append(self._match)
        undo.callback(shell.Completer.custom_matchers.remove, self._match)
        kernel = getattr(shell, "kernel", None)
        if kernel is not None:
            self._inspect: Callable[..., Any] = kernel.do_inspect
            replace(undo, kernel, "do_inspect", self._do_inspect)

    def _is_for_ranks(self, code: str) -> bool:
        if self._session.running is None:
            return False
        begins = tuple(f"%%{name}" for name in (*CELL_MAGICS, "rank", "px"))
        return code.lstrip().startswith(begins) or (
            self._toggle.is_on and not code.lstrip().startswith("%")
        )

    def _ask(self, name: str, *arguments: Any) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._session.hooks.command(name, *arguments)
            return found
        except AllranksError:
            return {}

    @context_matcher(priority=1000, identifier="allranks")  # type: ignore[untyped-decorator]
    def _match(self, context: CompletionContext) -> dict[str, Any]:
        code = context.full_text
        in_magic_line = context.cursor_line == 0 and code.startswith("%%")
        if in_magic_line or not self._is_for_ranks(code):
            return {"completions": []}
        lines = code.split("\n")
        cursor = sum(len(line) + 1 for line in lines[: context.cursor_line])
        cursor += context.cursor_position
        found = self._ask("complete", code, cursor)
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
            asked = self._ask("describe", code, cursor_pos, detail_level)
            found = {"found": False, "data": {}} | asked
            return {"status": "ok", "metadata": {}, "found": found["found"], "data": found["data"]}
        return self._inspect(code, cursor_pos, detail_level, omit_sections)
