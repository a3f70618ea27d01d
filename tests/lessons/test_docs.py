"""The cells on the pages about algorithms and the model print what the pages show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CELL = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize("page", ["algorithms.md", "model.md"])
def test_the_cells_print_what_the_page_shows(page, capsys):
    names: dict[str, object] = {}
    cells = [cell for cell in CELL.findall((DOCS / page).read_text()) if "mpi4py" not in cell[0]]
    assert cells
    for code, shown in cells:
        exec(code, names)
        printed = capsys.readouterr().out
        assert not shown or printed == shown
