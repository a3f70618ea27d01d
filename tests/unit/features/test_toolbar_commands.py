"""What a notebook contains never becomes source: the extension's commands, called by node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.node import node

START = "%distributed start {}\n%distributed on"


@pytest.fixture
def press(repository):
    static = repository / "allranks" / "features" / "toolbar" / "labextension" / "static"
    script = Path(__file__).with_name("toolbar_commands.mjs")

    def press(arguments=(), typed=""):
        given = json.dumps({"arguments": [*arguments], "typed": typed})
        return json.loads(node(str(script), str(static), given))

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
