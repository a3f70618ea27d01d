"""What a cell costs that only prints."""

import os
import sys
from types import SimpleNamespace

from allranks import features
from allranks.cluster.features import ClusterContext, NotebookHooks
from allranks.cluster.state import ClusterState
from allranks.records.wire import Output, Reply
from tests.unit.cluster.test_notebook_hooks import CELL

FEATURES = os.path.dirname(features.__file__)


def test_a_cell_that_only_prints_runs_no_code_of_features_in_the_notebook():
    entered = set[str]()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(FEATURES):
            entered.add(f"{frame.f_code.co_filename}: {frame.f_code.co_qualname}")

    hooks = NotebookHooks(features.load("notebook"))
    hooks.started(ClusterContext(2, lambda *_: None, starts_ranks=True))
    printed = Output(0, 1, (["out", "hello\n"],), 0, 0, 6)
    sys.setprofile(note)
    try:
        hooks.cell_started(CELL)
        for record in (printed, Reply(0, 1, "ok", 0.1, False, False, "", None)):
            assert hooks.receive(record, []) is record
        hooks.cell_left(None, SimpleNamespace(roster=ClusterState(2)))
        hooks.cell_finished()
    finally:
        sys.setprofile(None)
    assert hooks.take_failure() is None
    assert entered == set()
    hooks.stopped()
