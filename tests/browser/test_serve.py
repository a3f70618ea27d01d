"""What ``make lab`` opens: copies of the labs that say nothing yet, and no question or warning."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from tests.browser.lab import Lab
from tests.ports import free_port

ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/lab/tree/01_ranks\.ipynb\?token=(\w+)")
PRIVATE = ("JUPYTER_", "JUPYTERLAB_", "IPYTHONDIR", "XDG_")


class Served:
    """``notebooks/serve.py`` in a tree of its own, for a user who has set nothing."""

    def __init__(self, home: Path, repository: Path) -> None:
        self.log = home / "said.txt"
        self.labs = home / "labs"
        shutil.copytree(repository / "notebooks", home / "notebooks")
        env = {name: text for name, text in os.environ.items() if not name.startswith(PRIVATE)}
        command = [sys.executable, home / "notebooks" / "serve.py", "01_ranks", "--no-browser"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(free_port()), "--LabApp.expose_app_in_browser=True"],
                cwd=home,
                env=env | {"HOME": str(home)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self.log.read_text()

    def address(self, timeout: float = 90) -> tuple[str, str]:
        deadline = time.monotonic() + timeout
        while not (found := ADDRESS.search(self.said())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no address was said:\n{self.said()}")
            time.sleep(0.1)
        return found[1], found[2]


@pytest.fixture
def served(tmp_path: Path, repository: Path) -> Iterator[Served]:
    served = Served(tmp_path, repository)
    yield served
    served.process.terminate()
    served.process.wait(60)


def test_the_first_lab_opens_without_outputs_questions_or_warnings(browser, served, repository):
    url, token = served.address()
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    server = SimpleNamespace(url=url, token=token, root=served.labs)
    lab = Lab(context.new_page(), server).open("01_ranks.ipynb")
    assert lab.page.locator(".jp-OutputArea-output").count() == 0
    lab.run_cell(1)
    lab.wait_idle()
    lab.page.wait_for_timeout(1000)  # what asks for news does so a moment after the page is there
    assert lab.page.locator(".Toastify__toast, .jp-Dialog").all_inner_texts() == []
    lab.save()
    lab.close()
    context.close()
    # A kernel that is slow to begin is asked again, and that is said.
    said = [line for line in served.said().splitlines() if "Nudge: attempt" not in line]
    assert [line for line in said if re.search(r"(?i)\[W |warning", line)] == []
    changed = nbformat.read(served.labs / "01_ranks.ipynb", 4)
    assert changed.cells[1].execution_count == 1
    ours, theirs = (
        folder / "02_allreduce.ipynb" for folder in (repository / "notebooks", served.labs)
    )
    assert [cell.source for cell in nbformat.read(theirs, 4).cells] == [
        cell.source for cell in nbformat.read(ours, 4).cells
    ]


def test_a_copy_that_is_there_is_left_as_it_is(tmp_path, repository):
    shutil.copytree(repository / "notebooks", tmp_path / "notebooks")
    (tmp_path / "labs").mkdir()
    (tmp_path / "labs" / "01_ranks.ipynb").write_text("mine")
    script = (
        "import pathlib, runpy; serve = runpy.run_path('notebooks/serve.py'); "
        "print(serve['copies'](pathlib.Path('labs')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "['01_ranks.ipynb']\n"
    assert (tmp_path / "labs" / "01_ranks.ipynb").read_text() == "mine"
    assert (tmp_path / "labs" / "02_allreduce.ipynb").exists()
