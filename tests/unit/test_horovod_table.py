"""The table of Horovod's names says what there is and what there is not."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.ranks import horovod_names

PAGE = (Path(__file__).parents[2] / "docs" / "horovod.md").read_text()
SECTION = re.compile(r"^### (horovod\S*)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (`.*?`) \| (works|differs|not here) \| .*? \|(.*)\|$", re.MULTILINE)
TABLE = {
    module: [(re.findall(r"`(\w+)`", names), here, note) for names, here, note in ROW.findall(body)]
    for module, body in SECTION.findall(PAGE)
}
LOOK = """
import importlib, json, sys
import allranks.horovod
modules = {name: importlib.import_module(name) for name in sys.argv[1:]}
assert not [n for n, m in sys.modules.items() if getattr(m, "__name__", "")[:8] == "horovod."]
print(json.dumps({name: sorted(dir(module)) for name, module in modules.items()}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, set[str]]:
    """The names that each module has where ``horovod`` is allranks."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow: pip install 'allranks[tensorflow]'")
    said = subprocess.run(
        [sys.executable, "-c", LOOK, *TABLE, "horovod.keras"], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    return {module: set(names) for module, names in json.loads(said.stdout).items()}


def test_the_page_has_what_is_tried():
    """If not: python tests/mpi/ranks/horovod_names.py docs/horovod.md"""
    assert horovod_names.page(PAGE) == PAGE
    assert set(horovod_names.MODULES) == set(TABLE)


def test_the_table_is_read_whole():
    rows = PAGE.partition("## Every name")[2].count("\n| `")
    assert sum(len(told) for told in TABLE.values()) == rows > 30


@pytest.mark.parametrize("module", sorted(TABLE))
def test_every_name_is_there_or_not_as_the_table_says(module, found):
    there = found[module] | (
        {"SyncBatchNormalization"} if module == "horovod.tensorflow" else set()
    )
    for names, here, note in TABLE[module]:
        for name in names:
            assert (name in there) == (here != "not here"), (module, name)
        if here != "works":
            assert note.strip(), f"{names} of {module}: say how it differs, or what to use"


@pytest.mark.parametrize("module", ["horovod.tensorflow", "horovod.tensorflow.keras.callbacks"])
def test_every_public_name_is_in_the_table(module, found):
    told = {name for names, _, _ in TABLE[module] for name in names}
    public = {name for name in found[module] if re.match(r"[A-Za-z]\w+$", name)}
    own = importlib.util.find_spec("allranks" + module.removeprefix("horovod"))
    text = Path(own.origin).read_text()
    exported = set(re.findall(r'^    "(\w+)",$', text, re.MULTILINE))
    assert exported & public <= told


def test_keras_goes_by_both_of_its_names(found):
    assert found["horovod.keras"] == found["horovod.tensorflow.keras"]
