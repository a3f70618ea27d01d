"""The table of frameworks in docs/torch_jax.md and the tests that it comes from."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = ("error", "mismatch", "interrupt", "death", "timing")
MARK = "covers"


def cells_of_the_table() -> dict[tuple[str, str], str]:
    lines = (ROOT / "docs" / "torch_jax.md").read_text().splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("| framework |"))
    found = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        framework, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found |= {(framework, what): cell for what, cell in zip(COLUMNS, cells, strict=True)}
    return found


def cells_with_a_test() -> set[tuple[str, str]]:
    found = set()
    for path in (*ROOT.glob("tests/torch/**/*.py"), *ROOT.glob("tests/keras/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == MARK:
                what, *frameworks = (ast.literal_eval(argument) for argument in node.args)
                found |= {(framework, what) for framework in frameworks}
    return found


def test_each_tick_in_the_table_of_frameworks_has_a_test_and_each_test_a_tick():
    ticked = {place for place, cell in cells_of_the_table().items() if cell.startswith("✓")}
    assert ticked == cells_with_a_test()


def test_a_cell_without_a_tick_says_what_happens():
    assert all(cells_of_the_table().values())
