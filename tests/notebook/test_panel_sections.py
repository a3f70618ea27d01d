"""A panel section from outside of the package: the example of docs/extending.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.widgets.dashboard.cell_model import PanelSection, add_section
from tests.kernel import Kernel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
LOGGING = """
import time
for i in range(20 + 5 * rank):
    log(step=i, loss=1 / (i + 1))
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    section = PAGE.read_text().partition("## Adding a panel section\n")[2].partition("\n## ")[0]
    (source,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (folder / "slowest_steps.py").write_text(source)
    with Kernel(folder) as kernel:
        path = f"import sys; sys.path.insert(0, {str(folder)!r})"
        kernel.run(f"%load_ext allranks\n{path}\nimport slowest_steps")
        kernel.run("%distributed start -n 2")
        yield kernel


def test_the_section_stays_in_the_notebook(notebook):
    cell = notebook.run(f"%%distributed{LOGGING}")
    assert re.search(r"rank 0 +19 +5\n +rank 1 +24 +0", cell.text)
    page = cell.displays[-1]["text/html"]
    section = page.partition("<details><summary>slowest steps</summary>")[2]
    assert section.startswith('<img alt="the last step of each rank"')
    assert "<td>rank 1</td><td>24</td><td>0</td>" in section


def test_the_live_panel_has_the_section(notebook):
    cell = notebook.start(f"%%distributed{LOGGING}time.sleep(60)")

    def html() -> str:
        messages = [comm["data"].get("content", {}) for comm in cell.comms]
        return "".join(m.get("sections", {}).get("slowest steps", "") for m in messages)

    notebook.pump(lambda: "<td>rank 1</td><td>24</td>" in html(), 30, "the section", cell)
    notebook.interrupt()
    cell.wait(20)


def test_a_cell_without_logged_values_has_no_such_section(notebook):
    cell = notebook.run("%%distributed --view full\npass")
    assert "slowest steps" not in cell.displays[-1]["text/html"].partition("<script>")[0]


def test_a_section_needs_a_title():
    class Untitled(PanelSection):
        pass

    with pytest.raises(ValueError, match="expected a title of Untitled, found none"):
        add_section(Untitled)
