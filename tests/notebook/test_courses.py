"""Notebooks as courses on MPI have them, written for ipyparallel: all runs but the first cell.


``says`` in a cell's metadata is what is found in its output.
"""

from pathlib import Path

import nbformat
import pytest

from tests.kernel import Kernel

COURSES = sorted(Path(__file__).with_name("courses").glob("*.ipynb"))
START = "%load_ext allranks.px\n%distributed start -n 4"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    with Kernel(tmp_path_factory.mktemp("courses")) as started:
        yield started


@pytest.mark.parametrize("path", COURSES, ids=lambda path: path.stem)
def test_a_course_runs_as_it_is_but_for_the_line_that_starts_the_ranks(kernel, path):
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert cells[0].id == "start"
    assert "ipyparallel" in cells[0].source
    for cell in cells:
        ran = kernel.run(START if cell.id == "start" else cell.source)
        assert ran.status == "ok", f"{cell.source}\n\n{ran.text}"
        assert "Error" not in ran.text  # of MPI's own, beside what the cell says
        for said in cell.metadata.get("says", ()):
            assert said in ran.text
