"""Output that comes after the end of its cell."""

from types import SimpleNamespace

import pytest

from allranks.cluster.cells import Cells
from allranks.records.wire import Output


def test_late_output_that_cannot_be_shown_ends_one_cell_only():
    cells, shown = Cells(), []

    def fail(batch):
        raise ZeroDivisionError

    cells._take(Output(1, 0, (["out", "a"],), 0, 0, 0), [])
    with pytest.raises(ZeroDivisionError):
        cells.show_late(SimpleNamespace(output=fail))
    cells.show_late(SimpleNamespace(output=shown.append))
    assert not shown
    cells._take(Output(1, 0, (["out", "b"],), 0, 0, 0), [])
    cells.show_late(SimpleNamespace(output=shown.append))
    assert [batch.entries[1:] for batch in shown] == [(["out", "b"],)]
