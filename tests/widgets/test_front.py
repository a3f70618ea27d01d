"""The JavaScript of the panel: its own tests, and the modules joined for a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from allranks.lessons import explainer
from allranks.widgets.dashboard import saved_panel
from allranks.widgets.scripts import joined
from tests.node import node

#: Bytes, compressed: what each saved cell with a panel contains besides its data.
MOST_PACKED = 35_000


TESTS = sorted((Path(__file__).parents[1] / "front").glob("*.test.js"))


@pytest.mark.parametrize("test", TESTS, ids=lambda path: path.name)
def test_the_modules_do_what_their_own_tests_say(test):
    assert re.search(r"^. pass [1-9]", node("--test", str(test)), re.MULTILINE)


@pytest.mark.parametrize(
    ("files", "exports"),
    [(saved_panel.panel_files, ["default", "revive"]), (explainer._files, ["default"])],
)
def test_modules_are_joined_into_one_that_a_page_can_import(files, exports, tmp_path):
    script = tmp_path / "joined.mjs"
    script.write_text(files()[0])
    names = f"console.log(JSON.stringify(Object.keys(await import({json.dumps(script.as_uri())}))))"
    assert json.loads(node("--input-type=module", "--eval", names)) == exports


def test_a_module_comes_once_behind_what_it_imports_without_comments_and_types(tmp_path):
    (tmp_path / "low.js").write_text("// Why.\nexport const low = 1;\n")
    middle = 'import { low } from "./low.js";\n/** @type {number} */\nexport const middle = low;\n'
    (tmp_path / "middle.js").write_text(middle)
    top = 'import { low } from "./low.js";\nimport { middle } from "./middle.js";\n'
    (tmp_path / "top.js").write_text(f"{top}export default /** @type {{any}} */ (low + middle);\n")
    expected = "const low = 1;\nconst middle = low;\nexport default (low + middle);\n"
    assert joined(tmp_path / "top.js") == expected


def test_the_scripts_of_a_saved_cell_are_small():
    assert sum(len(part) * 3 // 4 for part in saved_panel._packed_files()) <= MOST_PACKED
