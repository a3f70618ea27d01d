"""Only what is installed in the environment adds launchers and features, and runs beside it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks import installed, python_path
from allranks.cluster.features import NotebookHooks
from allranks.cluster.host_agent import open_sockets
from allranks.cluster.sockets import EventQueue
from tests.distributions import install

GROUP = "allranks.features"


def added() -> list[str]:
    return [entry.name for entry in installed.entry_points(GROUP)]


def test_a_distribution_in_the_current_folder_adds_nothing(tmp_path, monkeypatch):
    """As in the folder of a notebook that came from another person."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    install(tmp_path, "evil", group=GROUP, entries={"evil": "evil"})
    assert added() == []
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}.")  # which name the current folder too
    assert added() == []


@pytest.mark.parametrize("how", ["installed", "for development", "by PYTHONPATH"])
def test_a_distribution_of_the_environment_adds_its_entry_points(tmp_path, monkeypatch, how):
    site, sources = tmp_path / "site", tmp_path / "sources"
    site.mkdir()
    sources.mkdir()
    monkeypatch.setattr("site.getsitepackages", lambda: [str(site)])
    monkeypatch.setattr(sys, "path", [*sys.path, str(site), str(sources)])
    place = site if how == "installed" else sources
    pythonpath = install(place, "good", group=GROUP, entries={"good": "good"})
    if how == "for development":
        (site / "good.pth").write_text(f"# sources\nimport sys\n{sources}\n")
    if how == "by PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", pythonpath)
    assert added() == ["good"]
    assert installed.entry_points(GROUP)[0].dist.name == "good"


def test_a_folder_that_code_has_added_to_the_path_counts_once_pythonpath_names_it(
    tmp_path, monkeypatch
):
    """As `sitecustomize` may, or a cell: nothing tells these apart."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    install(tmp_path, "added", group=GROUP, entries={"added": "added"})
    assert added() == []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert added() == ["added"]


@pytest.mark.parametrize("places", [{}, {"PYTHONPATH": "/there"}])
def test_ranks_have_the_notebooks_pythonpath_unless_a_place_names_another(
    tmp_path, monkeypatch, places
):
    monkeypatch.setenv("PYTHONPATH", ":/here")
    monkeypatch.setenv("ALLRANKS_LOG_DIR", str(tmp_path))
    launcher: Any = SimpleNamespace(
        environment=lambda: places,
        command=lambda size: ["mpiexec"],
        why_not_replaced=lambda: "it is not",
        rank_variables=(),
    )
    wire, config = open_sockets(launcher, 2, (), (), (), EventQueue(), NotebookHooks(()), {})
    wire.close()
    assert config.environment == {"PYTHONPATH": ":/here"} | places


def test_no_file_of_the_current_folder_takes_a_modules_place_in_our_processes(tmp_path):
    for name in ("json", "socket", "mpi4py", "asyncio"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    command = Path(sys.prefix, "bin", "allranks")
    subprocess.run([command, "doctor"], cwd=tmp_path, capture_output=True, check=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", ["", ":", ".:", "lib", ":{own}", "{own}:.", "lib:{own}:"])
def test_a_part_of_pythonpath_that_names_the_current_folder_counts_for_ranks_only(
    tmp_path, monkeypatch, value
):
    own, here = tmp_path / "own", tmp_path / "here"
    for folder in (own, here, here / "lib"):
        folder.mkdir()
        (folder / "json.py").write_text(f"print({folder.name!r})\n")
    (own / "json.py").rename(own / "ours.py")
    value = value.format(own=own)
    monkeypatch.chdir(here)
    environment = {"PYTHONPATH": value, "LANG": "C"}
    cleaned = python_path.without_current_folder(environment)
    assert cleaned == {"LANG": "C"} | ({"PYTHONPATH": str(own)} if str(own) in value else {})

    def run(*words: str, **more: str) -> str:
        command = [sys.executable, *words]
        return subprocess.run(command, env=more, capture_output=True, text=True, check=True).stdout

    assert run("-P", "-c", "import json", **cleaned) == ""
    # The path of ranks is that of any Python without the folder of its program.
    show = "import sys; print(*sys.path, sep=chr(10))"
    path = run("-P", "-c", show, **cleaned).splitlines()
    notebook = run("-P", "-c", show, **environment).splitlines()
    assert python_path.with_current_folder(path, value) == notebook
