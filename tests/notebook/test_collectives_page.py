"""The page on collectives has a picture and a runnable cell for each operation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.pages import CELL

PAGE = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
OPERATIONS = """
    init shutdown is_initialized rank size local_rank local_size cross_rank cross_size
    is_homogeneous
    allreduce grouped_allreduce allgather grouped_allgather broadcast reducescatter
    grouped_reducescatter alltoall gather scatter reduce send recv barrier
    poll synchronize allreduce_async grouped_allreduce_async allgather_async
    grouped_allgather_async broadcast_async reducescatter_async grouped_reducescatter_async
    alltoall_async gather_async scatter_async reduce_async
    broadcast_object allgather_object
    add_process_set remove_process_set global_process_set join
    empty timeline records
"""
CHOICES = """
    Average Sum Min Max Product Adasum prescale_factor postscale_factor Compression.fp16
"""
NOTHING_TO_RUN = {"init", "shutdown"}
"""They do nothing in a cell; the page says so."""


def cells_of(section: str) -> str:
    sources = [found["source"] for found in CELL.finditer(section)]
    return "\n".join(source for source in sources if source.startswith("%%distributed"))


def has_picture(section: str) -> bool:
    return bool(re.search(r"^```\n", CELL.sub("", section), re.MULTILINE))


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS.split()) - NOTHING_TO_RUN))
def test_an_operation_has_a_picture_and_a_cell_that_calls_it(operation: str) -> None:
    called = re.compile(rf"\b{operation}\b")
    sections = [section for section in SECTIONS if called.search(cells_of(section))]
    assert any(has_picture(section) for section in sections)


@pytest.mark.parametrize("word", [*CHOICES.split(), *sorted(NOTHING_TO_RUN)])
def test_what_an_operation_takes_is_told(word: str) -> None:
    assert re.search(rf"\b{re.escape(word)}\b", PAGE)
