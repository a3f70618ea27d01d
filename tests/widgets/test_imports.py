"""What is said of slow imports: what, on which ranks, and how many are through with it."""

from __future__ import annotations

import sys

from allranks.engine.telemetry import importing
from allranks.records.telemetry import Pulse
from allranks.widgets.dashboard.cell_model import Imports


def pulse(rank: int, module: str) -> Pulse:
    return Pulse(rank, 1, "", "In[1]:1", 1, 1, 0, importing=module)


def test_ranks_that_import_the_same_are_one_line_until_all_are_through() -> None:
    imports = Imports()
    assert imports.line() is None
    for rank in range(4):
        imports.take(pulse(rank, "tensorflow"))
    assert imports.line() == ("importing tensorflow on ranks 0–3", 0, 4)
    imports.take(pulse(2, ""))
    imports.left(3)
    assert imports.line() == ("importing tensorflow on ranks 0–3", 2, 4)
    imports.take(pulse(0, "sklearn"))
    imports.take(pulse(1, ""))
    assert imports.line() == ("importing sklearn on rank 0", 0, 1)
    imports.take(pulse(0, ""))
    assert imports.line() is None


def test_an_import_is_named_by_the_outermost_package(tmp_path, monkeypatch) -> None:
    package = tmp_path / "outer_package"
    package.mkdir()
    (package / "__init__.py").write_text("import outer_package.inner")
    (package / "inner.py").write_text("import inner_module")
    (tmp_path / "inner_module.py").write_text(
        "from allranks.engine.telemetry import importing\nseen = importing()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    __import__("outer_package.inner")
    assert sys.modules["inner_module"].seen == "outer_package"
    assert importing() == ""
