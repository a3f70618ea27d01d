"""What ``make lab`` opens: copies of the labs that say nothing yet, and no question or warning."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import nbformat

from tests.browser.lab import Lab
from tests.kernel import wait_until
from tests.ports import free_port

ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/lab/tree/01_ranks\.ipynb\?token=(\w+)")
PRIVATE = ("JUPYTER_", "JUPYTERLAB_", "IPYTHONDIR", "XDG_")


def test_the_first_lab_opens_without_outputs_questions_or_warnings(browser, tmp_path, repository):
    """In a tree of its own, for a user who has set nothing."""
    shutil.copytree(repository / "notebooks", tmp_path / "notebooks")
    serve, said = tmp_path / "notebooks" / "serve.py", tmp_path / "said.txt"
    # A copy that is there is left as it is.
    labs = tmp_path / "labs"
    labs.mkdir()
    (labs / "02_allreduce.ipynb").write_text("mine")
    env = {name: text for name, text in os.environ.items() if not name.startswith(PRIVATE)}
    port = ["--port", str(free_port()), "--LabApp.expose_app_in_browser=True"]
    with said.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, serve, "01_ranks", "--no-browser", *port],
            cwd=tmp_path,
            env=env | {"HOME": str(tmp_path)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: ADDRESS.search(said.read_text()), said.read_text, 90)
        url, token = ADDRESS.search(said.read_text()).groups()
        server = SimpleNamespace(url=url, token=token, root=labs)
        lab = Lab(browser.new_page(), server).open("01_ranks.ipynb")
        assert lab.page.locator(".jp-OutputArea-output").count() == 0
        lab.run_cell(1)
        lab.wait_idle()
        lab.page.wait_for_timeout(
            1000
        )  # what asks for news does so a moment after the page is there
        assert lab.page.locator(".Toastify__toast, .jp-Dialog").all_inner_texts() == []
        lab.save()
        lab.close()
        lab.page.close()
    finally:
        process.terminate()
        process.wait(60)
    # A kernel that is slow to begin is asked again, and that is said.
    lines = [line for line in said.read_text().splitlines() if "Nudge: attempt" not in line]
    assert [line for line in lines if re.search(r"(?i)\[W |warning", line)] == []
    assert nbformat.read(labs / "01_ranks.ipynb", 4).cells[1].execution_count == 1
    ours, theirs = (folder / "09_ensemble.ipynb" for folder in (repository / "notebooks", labs))
    sources = [[cell.source for cell in nbformat.read(path, 4).cells] for path in (ours, theirs)]
    assert sources[0] == sources[1]
    assert (labs / "02_allreduce.ipynb").read_text() == "mine"
    assert "Remove one to begin it anew." in said.read_text()
