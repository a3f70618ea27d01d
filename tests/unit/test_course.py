"""A lab is a presentation and a text for translators, and shows no answer beside its question."""

import re
import subprocess
import sys

import nbformat
import pytest

from notebooks import translate
from tests import labs
from tests.labs import LABS


@pytest.mark.parametrize("name", LABS)
def test_answers_and_checks_are_folded(name):
    lab = labs.read(name)
    answers = [cell for cell in lab.cells if cell.id.startswith("answer-")]
    assert answers
    for cell in answers:
        assert cell.source.startswith("<details>\n<summary>Answer</summary>\n\n"), cell.id
        assert cell.source.endswith("\n\n</details>"), cell.id
    for cell in labs.code_cells(lab):
        if cell.id.startswith("check-"):
            assert cell.metadata.jupyter.source_hidden, cell.id


@pytest.mark.parametrize("name", LABS)
def test_every_exercise_has_a_check(name):
    lab = labs.read(name)
    exercises = [cell.id[9:] for cell in lab.cells if re.match(r"exercise-\d+$", cell.id)]
    assert exercises == labs.exercises(lab)


def test_a_lab_becomes_slides(tmp_path):
    path = labs.path_of("02_allreduce")
    command = ["nbconvert", "--to", "slides", str(path), f"--output-dir={tmp_path}"]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    page = (tmp_path / "02_allreduce.slides.html").read_text()
    sections = sum(
        cell.metadata.get("slideshow", {}).get("slide_type") in ("slide", "subslide")
        for cell in labs.read("02_allreduce").cells
    )
    # A slide is a section of sections, one for it and for each slide below it.
    assert page.count("<section>") > sections > 10
    assert page.count("<summary>Answer</summary>") == 8


def test_a_translation_takes_the_place_of_the_text_and_nothing_else():
    lab = labs.read("01_ranks")
    text = translate.take(lab)
    translate.put(lab, text.replace("# Ranks", "# Rangs"))
    was, now = labs.read("01_ranks").cells, lab.cells
    assert now[0].source == was[0].source.replace("# Ranks", "# Rangs")
    assert [cell.source for cell in now[1:]] == [cell.source for cell in was[1:]]
    assert not any(cell.outputs for cell in labs.code_cells(lab))
    nbformat.validate(lab)


def test_a_translation_without_a_cell_names_it():
    lab = labs.read("01_ranks")
    text = translate.take(lab).replace("<!-- cell title -->", "")
    with pytest.raises(SystemExit, match="missing: title, unknown: none"):
        translate.put(lab, text)
