"""The source of the notebook's functions in the errors of ranks that ran them.

``view.apply_sync(f)`` sends the code of ``f`` without its source, which only the notebook has. So
the notebook adds the lines to the traceback.
"""

from __future__ import annotations

import linecache
import re
from typing import Any

from IPython.core.getipython import get_ipython

_AROUND = 2
_COLOURS = r"(?:\x1b\[[\d;]*m)*"
#: A frame as IPython shows it, and its line, where it has no source.
_FRAME = re.compile(
    rf"{_COLOURS}File {_COLOURS}(?P<file>[^\n\x1b]+?):(?P<line>\d+){_COLOURS}(?P<call>[^\n]*)\n"
    r"[^\n]*Could not get source[^\n]*"
)


def show_sources(client: Any) -> None:
    """Adds sources to the errors of this client of ipyparallel."""
    unwrap = client._unwrap_exception

    def with_sources(content: dict[str, Any]) -> Any:
        text = add_sources("\n".join(content["traceback"]))
        return unwrap({**content, "traceback": text.split("\n")})

    client._unwrap_exception = with_sources


def add_sources(traceback: str) -> str:
    """Returns a traceback with the lines of frames whose source this process has."""
    return _FRAME.sub(lambda found: _frame(found) or found[0], traceback)


def _frame(found: re.Match[str]) -> str:
    file, number = found["file"], int(found["line"])
    lines = linecache.getlines(file)
    if not 0 < number <= len(lines):
        return ""
    compiler = getattr(get_ipython(), "compile", None)
    known = compiler.format_code_name(file) if compiler is not None else None
    where = f"{' '.join(known)}, line {number}" if known else f"File {file}:{number}"
    shown = [f"{where}{found['call']}"]
    for at in range(max(1, number - _AROUND), min(len(lines), number + _AROUND) + 1):
        mark = "---->" if at == number else ""
        shown.append(f"{mark:5} {at} {lines[at - 1].rstrip()}".rstrip())
    return "\n".join(shown)
