"""Looking back at cells: drawn again, compared, written where the user says; further sections."""

import csv
import os
import re
from pathlib import Path

import pytest

from allranks.widgets.dashboard.cell_model import PanelSection, add_section
from tests.kernel import Kernel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"

LOGGING = "%%distributed\nprint('loss of', {0})\nfor i in range(5): log(loss={0} * i + rank)"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A kernel with two ranks; its third cell has logged, and its fifth; the fourth has failed."""
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.run("%load_ext allranks\n%distributed start -n 2")
        kernel.run("%%distributed\nprint('nothing logged')")
        kernel.run(LOGGING.format(1))
        kernel.run("%%distributed\nprint('before'); 1 / 0")
        kernel.run(LOGGING.format(10))
        yield kernel


def test_a_cell_is_drawn_again_with_output_and_curves(notebook):
    cell = notebook.run("%distributed last")
    panel, text = cell.displays
    assert "data-allranks" in panel["text/html"]
    assert re.search(r"loss +4 +40.5 +40 +41 +40 +41", panel["text/plain"])
    assert text["text/plain"] == "ranks 0–1 │ loss of 10"
    (shown,) = notebook.run("%distributed last 2").displays
    assert shown["text/plain"] == "ranks 0–1 │ nothing logged"
    shown = notebook.run("%distributed last 4").displays
    assert shown[0]["text/plain"] == "ranks 0–1 │ before"


def test_the_curves_of_cells_lie_over_each_other_and_over_those_of_earlier_notebooks(notebook):
    (shown,) = notebook.run("%distributed compare 3 5").displays
    assert "data-allranks" in shown["text/html"]
    said = shown["text/plain"]
    assert re.match(r"In\[3\] took .*, In\[5\] took .*; each curve is the mean of all", said)
    assert re.search(r"cell 3 +cell 5\n +loss +4 .* 4\.5 +40\.5$", said, re.MULTILINE)
    (shown,) = notebook.run("%distributed compare 3 5 -r 1").displays
    assert re.search(r"loss +4 .* 5 +41$", shown["text/plain"], re.MULTILINE)
    said = notebook.run("%distributed log -r 0").text
    folder = Path(re.search(r"rank 0: (.*)/rank-0\.log", said)[1])
    assert sorted(path.name for path in folder.glob("cell-*")) == [
        "cell-3.json.gz",
        "cell-5.json.gz",
    ]
    (shown,) = notebook.run(f"%distributed compare 5 {folder}/cell-3.json.gz").displays
    assert "4.5" in shown["text/plain"]


def test_csv_is_written_where_it_was_asked_for_and_nowhere_else(notebook, tmp_path):
    before = notebook.run("import os; print(sorted(os.listdir()))").stdout
    notebook.run(f"%distributed export {tmp_path}/results 3")
    rows = list(csv.reader((tmp_path / "results" / "curves.csv").read_text().splitlines()))
    assert rows[0] == ["name", "rank", "member", "step", "value"]
    assert rows[1:3] == [["loss", "0", "", "0.0", "0.0"], ["loss", "0", "", "1.0", "1.0"]]
    assert len(rows) == 1 + 2 * 5
    assert notebook.run("print(sorted(os.listdir()))").stdout == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "last 77",
            r"expected the number of a cell .*, found 2, 3, 4, 5, and In\[77\] is none.*Type one",
        ),
        ("last 3 5", "expected one cell number, found 3 5"),
        ("compare 3", "expected two cell numbers or more, found 3"),
        ("compare 3 4", r"1 s in 20 or more collectives, found 3, 5, and In\[4\] is none"),
        ("compare 3 none.gz", "expected a cell's file, found none.gz"),
        ("export", "expected a folder and optionally a cell number, found none"),
        (f"export {os.devnull}/x 3", "expected a folder that can be written"),
    ],
)
def test_what_is_not_there_is_said(notebook, line, said):
    cell = notebook.run(f"%distributed {line}").fails("UsageError")
    assert re.search(said, cell.error_value)


def test_every_logged_value_and_every_kind_of_call_is_exported(notebook, tmp_path):
    notebook.run(
        "%%distributed\nfor i in range(10_000): log(loss=i % 7 + rank)\n"
        "for i in range(150): allreduce(i, name=f'value {i}')"
    ).ok()
    assert "missing" not in notebook.run(f"%distributed export {tmp_path}").text
    rows = [*csv.DictReader((tmp_path / "curves.csv").read_text().splitlines())]
    for rank in range(2):
        found = [(r["step"], r["value"]) for r in rows if r["rank"] == str(rank)]
        assert found == [(str(float(i)), str(float(i % 7 + rank))) for i in range(10_000)]
    calls = [*csv.DictReader((tmp_path / "timings.csv").read_text().splitlines())]
    assert {row["name"] for row in calls} == {f"value {i}" for i in range(150)}


UNEVEN = """
import time
for i in range(20 + 5 * rank):
    log(step=i, loss=1 / (i + 1))
"""


@pytest.fixture(scope="module")
def with_section(notebook):
    """That kernel with the example of docs/extending.md, a section from outside of the package."""
    section = PAGE.read_text().partition("## Adding a panel section\n")[2].partition("\n## ")[0]
    (source,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (notebook.cwd / "slowest_steps.py").write_text(source)
    notebook.run("import slowest_steps").ok()
    return notebook


def test_a_section_stays_in_the_notebook(with_section):
    cell = with_section.run(f"%%distributed{UNEVEN}")
    assert re.search(r"rank 0 +19 +5\n +rank 1 +24 +0", cell.text)
    page = cell.displays[-1]["text/html"]
    section = page.partition("<details><summary>slowest steps</summary>")[2]
    assert section.startswith('<img alt="the last step of each rank"')
    assert "<td>rank 1</td><td>24</td><td>0</td>" in section


def test_the_live_panel_has_the_section(with_section):
    cell = with_section.start(f"%%distributed{UNEVEN}time.sleep(600)")

    def html() -> str:
        messages = [comm["data"].get("content", {}) for comm in cell.comms]
        return "".join(m.get("sections", {}).get("slowest steps", "") for m in messages)

    with_section.pump(lambda: "<td>rank 1</td><td>24</td>" in html(), 60, "the section", cell)
    with_section.interrupt()
    cell.wait()


def test_a_cell_without_logged_values_has_no_such_section(with_section):
    cell = with_section.run("%%distributed --view full\npass")
    assert "slowest steps" not in cell.displays[-1]["text/html"].partition("<script>")[0]


def test_a_section_needs_a_title():
    class Untitled(PanelSection):
        pass

    with pytest.raises(ValueError, match="expected a title of Untitled, found none"):
        add_section(Untitled)
