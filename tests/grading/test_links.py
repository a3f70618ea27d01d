"""A submission cannot have files of the grading account copied into its folder."""

from allranks.grading import links


def test_links_that_lead_out_of_a_folder_are_found(tmp_path):
    submission = tmp_path / "submission"
    (submission / "data").mkdir(parents=True)
    (submission / "data" / "table").touch()
    inside = {"again": "data/table", "whole": str(submission / "data"), "loop": "loop"}
    outside = {"solution": "../source", "data/zeros": "/dev/zero", "missing": "/none/x"}
    outside["by-two-links"] = "solution/lab.ipynb"
    for name, target in (inside | outside).items():
        (submission / name).symlink_to(target)
    assert links.leading_out(submission) == sorted(submission / name for name in outside)


def test_a_folder_that_is_itself_a_link_may_lead_anywhere(tmp_path):
    (tmp_path / "handed-in").mkdir()
    (tmp_path / "handed-in" / "lab.ipynb").touch()
    (tmp_path / "submitted").symlink_to("handed-in")
    assert links.leading_out(tmp_path / "submitted") == []
