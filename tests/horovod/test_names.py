"""The tables in docs/horovod.md have the names that `names_suite` tests."""

from __future__ import annotations

import re
from pathlib import Path

from tests.horovod import names

PAGE = (Path(__file__).parents[2] / "docs" / "horovod.md").read_text()


def test_the_page_has_what_is_tried() -> None:
    """To update the page: python tests/horovod/names.py docs/horovod.md"""
    assert names.page(PAGE) == PAGE
    assert re.findall(r"^### (horovod\S*)$", PAGE, re.MULTILINE) == [*names.MODULES]


def test_a_difference_comes_with_a_note() -> None:
    for rows in names.MODULES.values():
        for row in rows:
            assert row.note or row.here == "works", row.names
