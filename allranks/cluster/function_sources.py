"""The source of the notebook's functions in the errors of ranks that ran them.

A function is sent as its code, without its source, which only the notebook has. So the notebook
adds the lines to the error, and the number of the cell.
"""

from __future__ import annotations

import linecache
import re
from dataclasses import replace

from IPython.core.getipython import get_ipython

from allranks.errors import Report

_AROUND = 2
_COLOURS = r"(?:\x1b\[[\d;]*m)*"
#: A frame as IPython shows it, and its line, where it has no source. A long line of a message with
#: many of its parts must not take minutes: so it begins a line, and gives nothing back.
_FRAME = re.compile(
    rf"(?m)^{_COLOURS}File {_COLOURS}(?P<file>[^\n\x1b]+?):(?P<line>\d++){_COLOURS}"
    r"(?P<call>[^\n]*+)"
    r"(?:\n[^\n]*Could not get source[^\n]*|(?=\n\n|\Z))"
)
#: The file of a cell's code, and perhaps a line, in any other text.
_PLACE = re.compile(r"(?m)(?P<file>/[^\s\"'\x1b:]+|<ipython[^\s>]+>)(?::(?P<line>\d+)(?P<end>$)?)?")


def with_sources(report: Report) -> Report:
    """Returns a rank's report with the lines and numbers of this notebook's cells."""
    if get_ipython() is None:
        return report
    source = report.source_line
    if report.line is not None and not source:
        for found in _FRAME.finditer("\n".join(report.traceback)):
            if int(found["line"]) == report.line and _cell(found["file"]):
                source = linecache.getline(found["file"], report.line).strip()
    return replace(
        report,
        traceback=tuple(map(add_sources, report.traceback)),
        message=_named(report.message),
        source_line=source,
    )


def add_sources(traceback: str) -> str:
    """Returns a traceback with the lines of frames whose source this process has."""
    return _named(_FRAME.sub(lambda found: _frame(found) or found[0], traceback))


def _frame(found: re.Match[str]) -> str:
    file, number = found["file"], int(found["line"])
    # Cells are there. No file is opened: a rank's may be a pipe here, or on a server that is gone.
    lines = linecache.getlines(file) if file in linecache.cache else []
    if not 0 < number <= len(lines):
        return ""
    cell = _cell(file)
    where = f"Cell {cell}, line {number}" if cell else f"File {file}:{number}"
    shown = [f"{where}{found['call']}"]
    for at in range(max(1, number - _AROUND), min(len(lines), number + _AROUND) + 1):
        mark = "---->" if at == number else ""
        shown.append(f"{mark:5} {at} {lines[at - 1].rstrip()}".rstrip())
    return "\n".join(shown)


def _named(text: str) -> str:
    """Returns a text with ``In[3]`` for the files of cells; lines at an end get their source."""

    def named(found: re.Match[str]) -> str:
        file, line = found["file"], found["line"]
        if not (cell := _cell(file)):
            return found[0]
        source = linecache.getline(file, int(line)).strip() if found["end"] is not None else ""
        return f"{cell}{f':{line}' if line else ''}{f': {source}' if source else ''}"

    return _PLACE.sub(named, text)


def _cell(file: str) -> str:
    """Returns the number of a cell of this notebook by the file of its code; "" for others."""
    compiler = getattr(get_ipython(), "compile", None)
    known = compiler.format_code_name(file) if compiler is not None else None
    return str(known[1]) if known else ""
