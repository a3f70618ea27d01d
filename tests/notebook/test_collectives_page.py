"""Every cell of the page on collectives runs, and gives what the page says of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import Kernel

PAGE = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text()
CELLS = re.findall(r"```python\n(%%distributed .*?)```", PAGE, re.DOTALL)
#: What a cell shows, by its own last words.
SHOWN = {
    "import numpy as np\n": "",
    "# array([6., 4.]) on every rank\n": "ranks 0–3 → array([6., 4.])",
    "np.ones(3)], Sum)\n": "",
    "# array([6]) on rank 0, None elsewhere\n": "rank 0 → array([6])",
    "# array([0, 7]) on every rank\n": "ranks 0–3 → array([0, 7])",
    "# shape (6, 2): rows may differ from rank to rank\n": "[3, 3]])",
    "# array([0, 1, 2, 3]) on rank 0\n": "rank 0 → array([0, 1, 2, 3])",
    "# array([2, 3]) on rank 1\n": "rank 1 → array([2, 3])",
    "# (2, 2) on ranks 0 and 1, (1, 2) on ranks 2 and 3\n": "ranks 0–1 → (2, 2)\nranks 2–3",
    "[rank, 6 - rank, 0, 0])\n": "",
    "# [0 1 2]\n": "rank 1 │ [0 1 2]",
    "barrier()\n": "",
    'f"rank {rank}")\n': "",
    "# poll(handle) asks without waiting\n": "",
    "# 2 on 0 and 2, 4 on 1 and 3\n": "ranks 0, 2 → 2\nranks 1, 3 → 4",
    "# 3: the rank that joined last\n": "ranks 0–3 → 3",
    "# nobody copies anything\n": "ranks 0–3 → array([1.5, 1.5, 1.5, ..., 1.5, 1.5, 1.5]",
    'timeline("trace.json")\n': "s waiting for rank",
}
OPERATIONS = """
    allreduce grouped_allreduce reduce broadcast allgather grouped_allgather gather scatter
    reducescatter grouped_reducescatter alltoall send recv barrier broadcast_object
    allgather_object allreduce_async poll synchronize add_process_set remove_process_set join
    empty timeline
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("page")) as kernel:
        assert kernel.run("%load_ext allranks").status == "ok"
        yield kernel


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_of_the_page_shows_what_the_page_says(ranks: Kernel, cell: str) -> None:
    ended = ranks.run(cell)
    assert ended.status == "ok", ended.text
    (shown,) = (text for words, text in SHOWN.items() if cell.endswith(words))
    text = re.sub(r" +(?=[│→])", " ", ended.text)
    assert shown in text


@pytest.mark.parametrize("operation", OPERATIONS.split())
def test_every_operation_is_on_the_page(operation: str) -> None:
    assert re.search(rf"\b{operation}\b", PAGE)


def test_every_cell_has_an_expectation_of_its_own() -> None:
    assert len(CELLS) == len(SHOWN)
