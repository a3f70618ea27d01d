"""``allranks labs``: copies without output, which are never overwritten."""

import json

import pytest

from allranks.command.main import main
from tests.labs import LABS


def run(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["labs", str(folder)])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_every_lab_is_copied_without_output(tmp_path, capsys):
    told = run(tmp_path / "course", capsys)
    assert f"{len(LABS)} labs were copied to {tmp_path / 'course'}." in told
    assert f"Type: jupyter lab {tmp_path / 'course' / LABS[0]}.ipynb" in told
    for name in LABS:
        copied = json.loads((tmp_path / "course" / f"{name}.ipynb").read_text())
        cells = [cell for cell in copied["cells"] if cell["cell_type"] == "code"]
        assert cells
        assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)


def test_it_says_which_labs_need_a_package_that_is_missing(tmp_path, capsys, monkeypatch):
    found = {"jupyterlab", "tensorflow", "torch"}
    monkeypatch.setattr("allranks.command.labs.find_spec", lambda name: name in found or None)
    told = run(tmp_path, capsys).splitlines()
    assert told[1:-1] == [
        "Labs 1 to 8 and 13 need matplotlib, not found here. Type: pip install 'allranks[lab]'",
        "Lab 12 needs sklearn, not found here. Type: pip install torch scikit-learn",
    ]


def test_a_copy_is_kept(tmp_path, capsys):
    (tmp_path / f"{LABS[0]}.ipynb").write_text("mine")
    assert f"Not overwritten: {LABS[0]}.ipynb" in run(tmp_path, capsys)
    assert (tmp_path / f"{LABS[0]}.ipynb").read_text() == "mine"


def test_a_link_in_the_folder_is_not_followed(tmp_path, capsys):
    (tmp_path / "course").mkdir()
    (tmp_path / "course" / "01_ranks.ipynb").symlink_to(tmp_path / "elsewhere")
    assert "Not overwritten: 01_ranks.ipynb" in run(tmp_path / "course", capsys)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("place", ["a-file", "a-file/below"])
def test_a_file_in_place_of_the_folder_is_an_error_in_one_line(place, tmp_path):
    (tmp_path / "a-file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["labs", str(tmp_path / place)])
    said = str(ended.value.code)
    assert said.startswith(
        f"allranks: expected a folder to which the labs can be copied, found {tmp_path / place}: "
    )
    assert said.endswith(". Type for example: allranks labs course")
