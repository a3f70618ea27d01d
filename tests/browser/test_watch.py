"""A notebook in JupyterLab watches the ranks of another one, and runs a cell on them."""

from __future__ import annotations

import re
import tempfile

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser.conftest import PICTURES
from tests.faults.notebook import Notebook

TRAINS = (
    "import os, time\nprint('begun')\nstep = 0\n"
    "while not os.path.exists('go'):\n"
    "    step += 1\n    log(loss=1 / step + rank / 9)\n    time.sleep(0.05)\n"
    "print('over')"
)


def test_a_page_shows_what_another_notebook_runs_below_the_line_that_watches(lab, server, tmp_path):
    # Where the server's kernels look for clusters, too.
    with Notebook(tmp_path, {"TMPDIR": tempfile.gettempdir()}) as other:
        other.on_ranks("kept = 10 * rank", "-n 2")
        name = re.findall(r"(\w{8})  .* attached to this notebook", _listed(other))[0]
        cells = [
            "%load_ext allranks",
            f"%distributed attach {name}",
            "%%distributed\nprint('mine', kept)",
        ]
        lab.open(server.add(new_notebook(cells=[new_code_cell(cell) for cell in cells])))
        lab.run_cell(0)
        lab.run_cell(1)
        lab.wait_idle()
        cell = other.start_on_ranks(TRAINS)
        lab.wait_for(1, "begun")
        canvas = lab.output(1).locator("canvas[aria-label^='loss:']")
        expect(canvas).to_be_visible(timeout=60_000)
        expect(lab.output(1).get_by_role("button", name="Interrupt")).to_be_hidden()
        lab.picture_of(1, PICTURES / "watching.png")
        (tmp_path / "go").touch()
        cell.wait()
        lab.wait_for(1, "over")
        assert f"of the notebook of process {other.pid}, on ranks 0–1:" in lab.outputs_text(1)
        lab.run_cell(2)
        lab.wait_for(2, "mine 10")
        assert ", watched by this notebook" in _listed(other)
        lab.picture_of(1, PICTURES / "watched.png")
        assert "are back" in other.on_ranks("kept").text
        # Else they would stay for the second one, and other tests' notebooks would find them.
        other.run("%distributed stop")


def _listed(notebook: Notebook) -> str:
    return notebook.run("%distributed clusters").text
