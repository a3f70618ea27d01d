"""The script of a page, made of the modules in ``front``."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_IMPORT = re.compile(r'^import \{[^}]*\} from "(\.[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async |class |const |function)", re.MULTILINE)
#: Whole lines, and types; a page needs neither.
_COMMENTS = re.compile(r"^[ \t]*//[^\n]*\n|/\*\*(?:(?!\*/).)*\*/\s*", re.MULTILINE | re.DOTALL)


@cache
def joined(entry: Path) -> str:
    """Returns a module and all that it imports as one module, because a widget has one script.

    Only ``export default …`` and ``export { … };`` are left. The names at the top of these modules
    differ.
    """
    sources: dict[Path, str] = {}

    def take(path: Path) -> None:
        if path in sources:
            return
        sources[path] = ""
        source = path.read_text("utf-8")
        for name in _IMPORT.findall(source):
            take((path.parent / name).resolve())
        # Behind what it imports.
        del sources[path]
        sources[path] = _EXPORT.sub("", _IMPORT.sub("", _COMMENTS.sub("", source))).strip()

    take(entry.resolve())
    return "\n".join(sources.values()) + "\n"
