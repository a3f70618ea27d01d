"""The first lab runs on 4 ranks, is right, and is committed with what it says.

When cells say something else on purpose:
``jupyter nbconvert --to notebook --execute --inplace notebooks/01_ranks.ipynb``
"""

from __future__ import annotations

import copy
import json
import os

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell
from sklearn.datasets import load_digits

from tests.notebook.steady import steady

SOLUTIONS = {
    "1": "%%distributed\nmost = allreduce(np.bincount(labels, minlength=10).max(), op=Max)",
    "2": """%%distributed
ink = np.bincount(labels, weights=images.sum(axis=(1, 2)), minlength=10)
inkiest = (allreduce(ink, op=Sum) / allreduce(np.bincount(labels, minlength=10), op=Sum)).argmax()
""",
}

LEFT_BEHIND = """
import json
print(json.dumps({
    "counts": [counts.tolist() for counts in all_counts],
    "means": [all_means[r].tolist() for r in sorted(all_means)],
}))
"""


def text_of(cell):
    """What a reader without colours or pictures sees under a cell."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append("\n".join(output.traceback) + "\n")
        else:
            parts.append(output.data["text/plain"] + "\n")
    return "".join(parts)


def steady_lines(cell):
    """What a cell says in every run. Pictures come in the order in which they were drawn."""
    lines = steady(text_of(cell)).splitlines()
    drawn = any("image/png" in output.get("data", {}) for output in cell.outputs)
    return sorted(lines) if drawn else lines


def with_hidden_cells(notebook):
    """The lab with the exercises solved and looked at again, before its ranks are stopped."""
    notebook = copy.deepcopy(notebook)
    checks = {cell.id: cell.source for cell in notebook.cells}
    hidden = []
    for number, solution in SOLUTIONS.items():
        hidden.append(new_code_cell(solution, id=f"solution-{number}"))
        hidden.append(new_code_cell(checks[f"check-{number}"], id=f"solved-{number}"))
    hidden.append(new_code_cell(LEFT_BEHIND, id="left-behind"))
    notebook.cells[-1:-1] = hidden
    return notebook


@pytest.fixture(scope="module")
def path(request):
    return request.config.rootpath / "notebooks" / "01_ranks.ipynb"


@pytest.fixture(scope="module")
def committed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.fixture(scope="module")
def lab(committed, path, tmp_path_factory):
    """The cells of the lab by name, after a run of all of them."""
    notebook = with_hidden_cells(committed)
    state = tmp_path_factory.mktemp("state")
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    client.execute(env=os.environ | {"XDG_STATE_HOME": str(state), "IPYTHONDIR": str(state)})
    return {cell.id: cell for cell in notebook.cells}


def error_of(cell):
    return next(output for output in cell.outputs if output.output_type == "error")


def test_every_rank_has_what_one_process_finds_alone(lab):
    digits = load_digits()
    left = json.loads(text_of(lab["left-behind"]))
    assert left["counts"] == [np.bincount(digits.target).tolist()] * 4
    assert len(left["means"]) == 4
    np.testing.assert_allclose(left["means"], [digits.images.mean(axis=0)] * 4, rtol=1e-12)


def test_what_all_ranks_say_is_shown_once(lab):
    assert "ranks 0–3 │ Good morning!\n" in text_of(lab["hello"])
    assert "rank 2    │ I am rank 2 of 4\n" in text_of(lab["hello"])


def test_the_shares_are_of_all_images(lab):
    assert text_of(lab["shares"]).splitlines() == [
        "rank 0    │ 450 of 1797 images",
        "ranks 1–3 │ 449 of 1797 images",
    ]


def test_every_rank_and_the_notebook_draw(lab):
    drawn = [output for output in lab["draw-shares"].outputs if "image/png" in output.data]
    assert len(drawn) == 4
    assert any("image/png" in output.get("data", {}) for output in lab["picture"].outputs)


@pytest.mark.parametrize(
    ("cell", "name", "told"),
    [
        ("one-raises", "CellFailed", "rank 2"),
        ("one-raises", "CellFailed", "were waiting at line 5: allreduce(share)"),
        ("syntax-error", "InvalidCell", "nothing has run, on any rank"),
        ("timeout", "CellTimeout", "time.sleep(60)"),
        ("death", "ClusterLost", "ended with exit code 3"),
        ("check-1", "CellFailed", "not yet: most is still None"),
        ("check-2", "CellFailed", "not yet: inkiest is still None"),
    ],
)
def test_what_goes_wrong_on_purpose_is_told(lab, cell, name, told):
    assert error_of(lab[cell]).ename == name
    assert told in steady(text_of(lab[cell]))


def test_ranks_outlive_their_errors(lab):
    assert "ranks 0–3 → array(1797)" in text_of(lab["still-there"])


def test_the_next_cell_starts_fresh_ranks(lab):
    assert text_of(lab["fresh"]).splitlines()[-1] == "ranks 0–3 │ False"


@pytest.mark.parametrize("number", SOLUTIONS)
def test_the_exercises_can_be_solved(lab, number):
    assert text_of(lab[f"solved-{number}"]).startswith("ranks 0–3 │ right: ")


def test_the_committed_outputs_are_what_the_cells_say(committed, lab):
    for cell in committed.cells:
        if cell.cell_type == "code":
            assert (cell.id, steady_lines(cell)) == (cell.id, steady_lines(lab[cell.id]))


def test_the_committed_lab_is_small(path):
    assert path.stat().st_size < 1_000_000
