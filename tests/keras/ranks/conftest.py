"""Runs each test as a cell, as in tests/mpi/ranks."""

from tests.mpi.ranks.conftest import (  # noqa: F401
    cell,
    in_a_cell,
    interrupted_after,
    next_cell_works,
    odd,
    pytest_exception_interact,
    pytest_report_header,
    until,
)
