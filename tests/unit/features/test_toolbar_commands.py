"""What a notebook contains never becomes source: the extension's commands, called by node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from allranks.command.export import export_script
from allranks.command.notebook_cells import cells_of
from allranks.magics.shell import EveryCell
from tests.node import node

START = "%distributed start {}\n%distributed on"


@pytest.fixture
def press(repository):
    static = repository / "allranks" / "features" / "toolbar" / "labextension" / "static"
    script = Path(__file__).with_name("toolbar_commands.mjs")

    def press(arguments=(), typed="", sources=(), cells=(), outputs=()):
        lists = {"arguments": arguments, "sources": sources, "cells": cells, "outputs": outputs}
        return json.loads(node(str(script), str(static), json.dumps({"typed": typed, **lists})))

    return press


def test_a_button_of_a_notebook_can_pass_neither_source_nor_any_number_of_ranks(press):
    values = ["4\nimport os", "4", "", 3, 4.5, -2, 10**30, None, True, [4], {"valueOf": 4}]
    for found in press([{"n": n} for n in values])["results"]:
        assert not found["enabled"]
        assert found["refused"].startswith("expected 2, 4, 8 or no number of ranks")
        assert found["sent"] == []


def test_the_numbers_of_the_menu_start_ranks(press):
    found = press([{"n": n} for n in (2, 4, 8)])["results"]
    assert [one["sent"][-1] for one in found] == [START.format(f"-n {n}") for n in (2, 4, 8)]
    assert all(one["enabled"] and not one["refused"] for one in found)


def test_options_that_a_person_types_are_one_line(press):
    (found,) = press([{}], typed="-n 2\r\n\x85\x1c\u2028import os")["results"]
    assert found["sent"][-1] == START.format("-n 2 import os")


def test_the_cells_that_the_launchers_card_writes_can_be_exported(press):
    first, second = press()["first"]
    cells = [{"cell_type": "code", "source": source} for source in (first, second)]
    made = export_script(cells_of({"cells": cells}), "Untitled.ipynb", "a.py", "allranks export")
    assert made.cluster.n == 4
    assert second in made.source
    assert made.notes == []


def test_a_notebook_that_starts_its_ranks_is_offered_no_cell(press):
    start = press()["first"][0]
    starting = [start, "x = 1\n%distributed start", "%%distributed -n 2\n1", "%dist_init -n 2"]
    others = ["%load_ext allranks", "%%distributed\n1", "print('%distributed start')", "# -n 4"]
    assert press(sources=starting)["starts"] == [True] * len(starting)
    assert press(sources=others)["starts"] == [False] * len(others)


def test_a_cell_that_does_not_find_a_magic_is_offered_the_line_that_loads_it(press):
    output = {"output_type": "stream", "text": "UsageError: Cell magic `%%rank` not found."}
    found = press(outputs=[output])
    assert found["said"] == ["%%rank is a magic of allranks. Run first: %load_ext allranks"]
    assert found["written"] == [[1, "%load_ext allranks"]]
    assert press(outputs=[output | {"text": "1 / 0"}])["said"] == []


def test_the_mark_of_a_cell_follows_the_kernel(press):
    toggle = EveryCell(InteractiveShell())
    some = {"every_cell": False, "local": toggle.local_beginnings}
    every = some | {"every_cell": True}
    sources = ["print(1)", "%%distributed -n 2\n1", "\n%%rank 0\n1", "%%time\n1", "%%local\n1", ""]
    sources += ["%distributed status", "%load_ext allranks"]
    with_all = [True, True, True, False, False, False, False, False]
    assert press(cells=[[source, every] for source in sources])["runs"] == with_all
    with_some = [False, True, True, False, False, False, False, False]
    assert press(cells=[[source, some] for source in sources])["runs"] == with_some
    toggle.every_cell()  # the kernel of ranks
    state = every | {"local": toggle.local_beginnings}
    toggle.off()
    of_ranks = press(cells=[["%%time\n1", state], ["%pip install x", state]])
    assert of_ranks["runs"] == [True, False]
