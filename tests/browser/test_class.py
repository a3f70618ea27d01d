"""A teacher in JupyterLab, and four students in notebooks of their own."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from allranks.features.classroom.door import own_account
from tests.browser.conftest import PICTURES, fresh_page
from tests.kernel import Kernel

NAMES = ("ana", "ben", "eva", "zoe")
LATE = "%%distributed\nimport time\nif rank == 1:\n    time.sleep(600)\nallreduce(1.0)"
FAILS = "%%distributed\nif rank == 1:\n    raise ValueError('no <data>')\nallreduce(1.0)"
TRAINS = """%%distributed --view full
for step in range(20):
    log(step=step, loss=1 / (1 + step + rank))
"""


@pytest.fixture
def students(server, tmp_path):
    """A kernel for each name, with two ranks for all but the last one."""
    with ExitStack() as stack:
        found = {}
        for name in NAMES:
            (home := tmp_path / name).mkdir()
            environment = {
                "ALLRANKS_CLASS_DIR": str(tmp_path),
                "JUPYTERHUB_USER": name,
                "JPY_SESSION_NAME": f"/home/{name}/02_allreduce.ipynb",
            }
            found[name] = stack.enter_context(Kernel(home, environment))
            found[name].run("%load_ext allranks")
            if name != NAMES[-1]:
                found[name].run("%distributed start -n 2")
        yield found


def test_a_lecture(browser, server, students, tmp_path):
    place = f"import os\nos.environ['ALLRANKS_CLASS_DIR'] = {str(tmp_path)!r}\n"
    with fresh_page(browser, server) as lab:
        sources = place + "%load_ext allranks", "%distributed class"
        lab.open(server.add(new_notebook(cells=[new_code_cell(source) for source in sources])))
        lab.run_all()
        tiles = lab.output(1).locator(".ar-class > div")
        expect(lab.output(1)).to_contain_text("No student has joined yet.")
        for name in NAMES:
            extra = " panel" if name == "eva" else ""
            students[name].run(f"%distributed join {own_account()}{extra}")
        expect(tiles).to_have_count(4)
        expect(lab.output(1)).not_to_contain_text("No student has joined yet.")
        students["ana"].start("1 + 1", metadata={"cellId": "check-1"}).wait()
        late = students["ben"].start(LATE)
        students["eva"].run(TRAINS)
        students["zoe"].run("print(undefined)")
        expect(tiles.nth(0)).to_contain_text("zoe")
        expect(tiles.nth(0)).to_contain_text("NameError: name 'undefined' is not defined")
        expect(lab.output(1)).to_contain_text("rank 0 is waiting in allreduce(Average) for rank 1")
        expect(tiles.filter(has_text="ana")).to_contain_text("✓ solved: 1")
        students["ana"].run(FAILS)
        expect(lab.output(1)).to_contain_text("ValueError: no <data>")
        chooser = lab.output(1).locator("select")
        evas = chooser.locator("option", has_text="eva")
        expect(evas).to_have_count(1)
        chooser.select_option(label=evas.text_content())
        frame = lab.output(1).frame_locator("iframe")
        expect(frame.locator("img, svg").first).to_be_visible()
        for theme in ("JupyterLab Dark", "JupyterLab Light"):
            lab.choose_theme(theme)
            lab.screenshot(PICTURES / f"class-{theme.split()[1].lower()}.png")
        students["ben"].interrupt()
        late.wait()
        students["zoe"].run("%distributed leave")
        expect(tiles.last).to_contain_text("left")
        # Scripts of a student's panel do not run.
        assert [one for one in lab.complaints if "about:srcdoc" not in one] == []
