"""What allranks' own features change in a process with two shells."""

import sys

import pytest
from ipyparallel import Client

from allranks.horovod.alias import HorovodFinder
from allranks.magics.extension import unload
from allranks.magics.shell import words_for
from allranks.notebook import load_features


@pytest.fixture(autouse=True)
def own_features():
    load_features()


def changes(shell):
    return {
        "%%ensemble": shell.find_cell_magic("ensemble") is not None,
        "its options": bool(words_for("%%ensemble -")),
        "ipyparallel's Client": hasattr(Client.__init__, "__wrapped__"),
        "after cells": "_replace_dead" in [
            one.__name__ for one in shell.events.callbacks["post_run_cell"]
        ],
        "import horovod": any(isinstance(one, HorovodFinder) for one in sys.meta_path),
    }  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_the_changes_for_one_shell_stay_when_the_extension_is_unloaded_in_another(shells, first):
    left = shells[1 - first]
    before = changes(left)
    assert all(before.values())
    unload(shells[first])
    assert changes(left) == before
    assert changes(shells[first])["%%ensemble"] is False
    unload(left)
    assert not any(changes(left).values())
