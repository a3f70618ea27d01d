"""Cells are checked before anything is sent."""

import pytest

from allranks.cluster.options import check_source, explain_syntax


@pytest.mark.parametrize(
    "cell",
    ["x = 1", "await f()", "!ls", "%time x = 1", "x?", "%%time\nx = 1", "async for a in b: pass"],
)
def test_all_of_ipythons_syntax_is_valid(cell: str) -> None:
    check_source(cell)


def test_a_syntax_error_says_that_nothing_has_run() -> None:
    with pytest.raises(SyntaxError) as caught:
        check_source("x = 1\ndef f(:\n")
    said = explain_syntax(caught.value, number=7)
    assert said.startswith("the cell was not run on any rank.")
    assert "Cell In[7], line 2" in said
