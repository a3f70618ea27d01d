"""The extension in several shells of one process, as where a cell makes a shell of its own."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster import cluster, features
from allranks.cluster.features import NotebookFeature, ProcessChange
from allranks.magics.extension import load, loaded, unload

SHELLS, PROCESS = [], []


class Changes(NotebookFeature):
    """A feature that changes each shell, and the process."""

    _of_process = ProcessChange(lambda undo: PROCESS.append(1) or undo.callback(PROCESS.pop))

    @classmethod
    def loaded(cls, shell, undo):
        SHELLS.append(shell)
        undo.callback(SHELLS.remove, shell)
        undo.enter_context(cls._of_process)


class FailsToUndo(NotebookFeature):
    @classmethod
    def loaded(cls, shell, undo):
        undo.callback([].remove, shell)


@pytest.fixture(autouse=True)
def one_feature(monkeypatch):
    monkeypatch.setattr(features, "_registered", [Changes])


@pytest.mark.parametrize("first", [0, 1])
def test_an_unload_undoes_only_the_changes_of_its_own_shell(shells, first):
    outer, inner = shells
    assert [outer, inner] == SHELLS
    assert PROCESS == [1]
    left = shells[1 - first]
    unload(shells[first])
    assert [left] == SHELLS
    assert PROCESS == [1]
    session = loaded(left).session
    assert cluster.session is session
    unload(left)
    assert SHELLS == PROCESS == []
    assert cluster.session is not session
    # Again, as after a reload.
    load(left)
    assert ([left], [1]) == (SHELLS, PROCESS)


def test_an_unload_where_the_extension_was_not_loaded_changes_nothing(shells):
    unload(InteractiveShell())
    assert (list(shells), [1]) == (SHELLS, PROCESS)


def test_a_feature_that_cannot_undo_its_changes_is_named_and_keeps_no_other_from_it(monkeypatch):
    monkeypatch.setattr(features, "_registered", [Changes, FailsToUndo, Changes])
    shell = InteractiveShell()
    load(shell)
    with pytest.warns(UserWarning, match=rf"the feature {__name__} .*ValueError"):
        unload(shell)
    assert SHELLS == PROCESS == []
