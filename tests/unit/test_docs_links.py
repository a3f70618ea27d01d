"""What README and docs link to, and the pictures that they show, exist."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def links_of(page: str) -> list[str]:
    """The relative links of a page; what stands in code is no link."""
    links = [one or other for one, other in LINK.findall(CODE.sub("", page))]
    return [link for link in links if not re.match(r"[a-z]+:", link)]


def anchors_of(page: str) -> set[str]:
    """The names by which a page's headings can be linked to, made as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    headings = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text)]
    return {heading.replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path):
    for link in links_of(path.read_text()):
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), f"{path.name} links to {link}, which is not there"
        assert not anchor or anchor in anchors_of(found.read_text()), f"{link}: no such heading"


def test_links_are_found_and_every_page_is_named_in_the_index():
    page = '[a](one.md) ![b](two.png) `[c](three.md)` [d](https://e.org) <img src="four.png">'
    assert links_of(page) == ["one.md", "two.png", "four.png"]
    index = links_of((REPOSITORY / "docs" / "index.md").read_text())
    assert {path.name for path in PAGES} - {"README.md", "index.md"} <= set(index)


LABS = Path(__file__).parents[2] / "notebooks"


def test_lab_7_prints_the_command_that_installs_its_packages(capsys, monkeypatch):
    lab = nbformat.read(LABS / "12_torch.ipynb", as_version=4)
    (source,) = (cell.source for cell in lab.cells if cell.id == "load")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(source.replace("%load_ext allranks", ""), {})
    assert "Type in a cell: %pip install torch scikit-learn" in capsys.readouterr().out
