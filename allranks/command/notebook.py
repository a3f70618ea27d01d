"""The cells of a notebook file, and which of them its ranks run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import UsageError
from allranks.magics.options import CellOptions, parse_cell, parse_command

_MAGIC, _COMMAND = "%%distributed", "%distributed"
_FOR_NOTEBOOK = (_COMMAND, "%%", "%load_ext", "%reload_ext")
"""Begins of cells that ``%distributed on`` leaves to the notebook."""
FAILS = "raises-exception"
"""The tag of a cell that may fail; a notebook's "Run all" goes on after it."""

HEADING, RANKS, NOTEBOOK, ENSEMBLE, PUSH = "heading", "ranks", "notebook", "ensemble", "push"


@dataclass
class Found:
    """A cell, or a part of one.

    Attributes:
        kind: RANKS for what ranks run; or why a script has it in a comment only.
        where: what the cell is called.
        source: of RANKS without the magic, of PUSH the variables' names.
        magic: the line of the magic, as it is written.
        options: what stands behind it.
        fails: whether it may fail, which ends a script.
    """

    kind: str
    where: str
    source: str
    magic: str = ""
    options: CellOptions = field(default_factory=CellOptions)
    fails: bool = False


def read(path: Path) -> dict[str, Any]:
    """Returns a notebook as its file has it.

    Raises:
        UsageError: there is no such file, or it is no notebook of version 4, or a damaged one.
    """
    try:
        made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"expected a notebook, found {error}. Type for example: allranks export train.ipynb"
        ) from None
    cells = _under(made, "cells")
    if not isinstance(cells, list) or made.get("nbformat") != 4:
        raise UsageError(
            f"expected a notebook of version 4, found another file in {path}. "
            f"Type: jupyter nbconvert --to notebook --nbformat 4 {path}"
        )
    for number, cell in enumerate(cells, 1):
        source = _under(cell, "source")
        texts = [_under(cell, "cell_type"), *(source if isinstance(source, list) else [source])]
        if not all(isinstance(text, str) for text in texts):
            raise UsageError(
                f"expected cells with a type and a source, found the {number}. of {path} without: "
                "the file is damaged. Open it in Jupyter, save it, and export again."
            )
    return made


def _under(made: Any, *names: str) -> Any:
    """Returns what stands in a file under these names; None where nothing does."""
    for name in names:
        made = made.get(name) if isinstance(made, dict) else None
    return made


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Within, what a line of a cell is refused for is said with the cell."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def found(notebook: dict[str, Any]) -> Iterator[Found]:
    """Yields what a notebook has, in order.

    Raises:
        UsageError: an option of a magic cannot be understood.
    """
    # The notebook's own kernel may be the one that sends every cell to the ranks.
    on = str(_under(notebook, "metadata", "kernelspec", "name")).startswith("allranks")
    number = 0
    for cell in notebook["cells"]:
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for line in source.splitlines():
                if line.startswith("#"):
                    yield Found(HEADING, "", line.lstrip("# "))
        if cell["cell_type"] != "code" or not source.strip():
            continue
        number += 1
        where = f"cell {number}"
        first, _, rest = source.strip("\n").partition("\n")
        word = first.split(maxsplit=1)[0] if first.strip() else ""
        tags = _under(cell, "metadata", "tags")
        fails = isinstance(tags, list) and FAILS in tags
        if word == _MAGIC:
            if {"-h", "--help"} & set(first.split()):
                continue
            with _named(where):
                options = parse_cell(first.strip().removeprefix(_MAGIC))
            yield Found(RANKS, where, rest, first.strip(), options, fails)
        elif word == "%%ensemble":
            yield Found(ENSEMBLE, where, rest, first.strip())
        elif word in ("%%px", "%px"):
            raise UsageError(
                f"{where} expected {_MAGIC}, found {word}, whose engines a script does not know. "
                f"Type {_MAGIC} in its place, and export again."
            )
        elif on and not source.lstrip().startswith(_FOR_NOTEBOOK):
            yield Found(RANKS, where, source.strip("\n"), fails=fails)
        else:
            for one in _in_notebook(source, where):
                if one.magic in ("on", "off"):
                    on = one.magic == "on"
                else:
                    yield one


def _in_notebook(source: str, where: str) -> Iterator[Found]:
    """What a cell of the notebook's own says to its ranks, and then the rest of it."""
    rest = []
    for line in source.strip("\n").splitlines():
        words = line.split()
        if words[:1] != [_COMMAND]:
            if words[:1] not in (["%load_ext"], ["%reload_ext"]):
                rest.append(line)
            continue
        if words[1:2] in ([], ["help"]) or {"-h", "--help"} & set(words):
            continue
        with _named(where):
            command, options = parse_command(line.strip().removeprefix(_COMMAND))
        cell = CellOptions(cluster=options.cluster, ranks=options.ranks)
        if command == "push":
            yield Found(PUSH, where, ", ".join(options.names), line.strip(), cell)
        elif command in ("on", "off"):
            yield Found(NOTEBOOK, where, "", command)
        else:
            yield Found(NOTEBOOK, where, "", line.strip(), cell)
    if "".join(rest).strip():
        yield Found(NOTEBOOK, where, "\n".join(rest))
