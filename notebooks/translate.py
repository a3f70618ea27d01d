"""Takes the text out of a lab for a translator, and puts the translation into a copy of the lab.

python notebooks/translate.py take notebooks/01_ranks.ipynb 01_ranks.md
python notebooks/translate.py put notebooks/01_ranks.ipynb 01_ranks.fr.md labs/01_ranks.fr.ipynb

The text is Markdown. A comment before each cell's text names the cell; it stays as it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

MARK = re.compile(r"^<!-- cell ([\w-]+) -->\n", re.MULTILINE)


def texts(lab: NotebookNode) -> dict[str, NotebookNode]:
    """The Markdown cells of a lab, by their ids."""
    return {cell.id: cell for cell in lab.cells if cell.cell_type == "markdown"}


def take(lab: NotebookNode) -> str:
    """The text of all Markdown cells."""
    return "\n".join(f"<!-- cell {name} -->\n{cell.source}\n" for name, cell in texts(lab).items())


def put(lab: NotebookNode, translation: str) -> None:
    """Replaces the text of the Markdown cells, and removes the output."""
    _, *parts = MARK.split(translation)
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    cells = texts(lab)
    if found.keys() != cells.keys():
        missing = ", ".join(cells.keys() - found.keys()) or "none"
        unknown = ", ".join(found.keys() - cells.keys()) or "none"
        raise SystemExit(
            f"expected a text for each cell of the lab; missing: {missing}, unknown: {unknown}. "
            "Take the text again, and compare it with the translation."
        )
    for name, cell in cells.items():
        cell.source = found[name].strip()
    for cell in lab.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["take", "put"])
    parser.add_argument("lab", type=Path)
    parser.add_argument("text", type=Path, help="a Markdown file, written or read")
    parser.add_argument("copy", type=Path, nargs="?", help="with put: the translated lab, written")
    options = parser.parse_args()
    lab = nbformat.read(options.lab, as_version=4)
    if options.what == "take":
        options.text.write_text(take(lab), encoding="utf-8")
        return
    if options.copy is None:
        parser.error("expected the name of the translated lab after the text; found none")
    put(lab, options.text.read_text(encoding="utf-8"))
    nbformat.write(lab, options.copy)


if __name__ == "__main__":
    sys.exit(main())
