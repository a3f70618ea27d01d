"""A notebook in a real JupyterLab, in a real browser."""

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook


def notebook(*sources):
    return new_notebook(cells=[new_markdown_cell("# A heading"), *map(new_code_cell, sources)])


def test_a_notebook_runs_and_shows_its_output(lab, server, tmp_path):
    lab.open(server.add(notebook("print(1 + 1)", "6 * 7")))
    lab.run_all()
    lab.wait_idle()
    assert lab.outputs_text(1) == "2"
    assert "42" in lab.outputs_text(2)
    assert lab.screenshot(tmp_path / "page.png").stat().st_size > 10_000


def test_one_cell_runs_alone_and_can_be_interrupted(lab, server):
    lab.open(server.add(notebook("import time; print('here'); time.sleep(60)", "print('no')")))
    lab.run_cell(1)
    lab.wait_for(1, "here")
    lab.interrupt()
    lab.wait_idle()
    assert "KeyboardInterrupt" in lab.outputs_text(1)
    assert lab.outputs_text(2) == ""


def test_widgets_are_drawn_and_react(lab, server):
    source = (
        "import ipywidgets\n"
        "button = ipywidgets.Button(description='press')\n"
        "button.on_click(lambda b: setattr(b, 'description', 'pressed'))\n"
        "button"
    )
    lab.open(server.add(notebook(source)))
    lab.run_all()
    lab.output(1).get_by_role("button", name="press").click()
    lab.wait_for(1, "pressed")
    assert lab.complaints == []


def test_a_saved_notebook_has_its_outputs(lab, server):
    lab.open(server.add(notebook("print('kept')")))
    lab.run_all()
    lab.wait_idle()
    saved = nbformat.read(lab.save(), as_version=4)
    assert saved.cells[1].outputs[0].text == "kept\n"
