"""``%load_ext allranks.px`` beside ipyparallel's own magics."""

import pytest
from ipyparallel.client.magics import ParallelMagics
from IPython.core.interactiveshell import InteractiveShell

from allranks.features.ipyparallel import px_magics
from allranks.features.ipyparallel.px_magics import PxMagics
from allranks.magics import extension
from tests.unit.features.unconnected_client import Unconnected


@pytest.fixture
def shell():
    made = InteractiveShell()
    yield made
    px_magics.unload(made)
    extension.unload(made)


def activate(shell):
    """Does what ``view.activate()`` does in a notebook."""
    magics = ParallelMagics(shell, Unconnected()[:])
    shell.magics_manager.register(magics)
    return magics


def owners(shell):
    """Whose ``%%px``, ``%px`` and ``%autopx`` the shell has."""
    known = shell.magics_manager.magics
    found = [known["cell"].get("px"), known["line"].get("px"), known["line"].get("autopx")]
    return {magic and magic.__self__ for magic in found}


def test_that_px_leaves_engines_is_said_and_undone_when_the_extension_goes(shell, capsys):
    theirs = activate(shell)
    px_magics.load(shell)
    assert capsys.readouterr().out == (
        "%%px, %px and %autopx now run on the ranks; before, on engines of ipyparallel. For these "
        "again type: %unload_ext allranks.px\n"
    )
    assert [type(one) for one in owners(shell)] == [PxMagics]
    px_magics.unload(shell)
    assert owners(shell) == {theirs}


def test_engines_that_have_ended_do_not_come_back(shell, capsys):
    activate(shell).view.client._closed = True
    px_magics.load(shell)
    assert capsys.readouterr().out == ""
    px_magics.unload(shell)
    assert owners(shell) == {None}


def test_magics_that_came_later_stay_when_the_extension_goes(shell):
    px_magics.load(shell)
    theirs = activate(shell)
    px_magics.unload(shell)
    assert owners(shell) == {theirs}
