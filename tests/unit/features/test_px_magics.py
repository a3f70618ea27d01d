"""``%load_ext allranks.px`` beside ipyparallel's own magics, and the result of ``%%px -o``."""

import gc
from types import SimpleNamespace

import ipyparallel
import pytest
from ipyparallel.client.magics import ParallelMagics
from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster.features import NotebookHooks
from allranks.errors import CellFailed
from allranks.features.ipyparallel import px_magics
from allranks.features.ipyparallel.notebook import NotebookClients
from allranks.features.ipyparallel.px_magics import PxMagics
from allranks.magics import extension
from allranks.magics.distributed import SentCell
from allranks.magics.options import CellOptions
from allranks.records.wire import Output
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


class Ranks:
    """Two ranks whose cell, the 7th, prints and ends with ``outcome``."""

    def __init__(self, outcome):
        self._outcome = outcome
        self.session = SimpleNamespace(hooks=NotebookHooks((NotebookClients,)), running=None)

    def submit(self, options, text):
        self._print(6, "late")
        return SentCell(options, text, SimpleNamespace(), SimpleNamespace(cell=7, ranks=(0, 1)))

    def finish(self, sent, local):
        self._print(7, "now")
        if isinstance(self._outcome, Exception):
            raise self._outcome
        sent.values = self._outcome

    def _print(self, cell, text):
        self.session.hooks.receive(Output(1, cell, (["out", text],), 0, 0, 0), [])


def run(outcome):
    """Runs ``%%px -o ar``; returns the notebook's variables."""
    shell = InteractiveShell()
    magics = PxMagics(shell, Ranks(outcome))
    try:
        magics._stored(CellOptions(out="ar"), "1", "")
    except CellFailed as error:
        shell.user_ns["raised"] = error
    return shell.user_ns


def test_the_result_of_a_cell_has_what_notebooks_use_of_ipyparallels():
    result = run([3, 4])["ar"]
    assert (result.get(), result.r, result[1], list(result)) == ([3, 4], [3, 4], 4, [3, 4])
    assert result.get_dict() == result.result_dict == {0: 3, 1: 4}
    assert result.stdout == result["stdout"] == ["", "now"]
    assert (result.ready(), result.successful(), result.wait()) == (True, True, True)
    assert repr(result) == "<PxResult: ended on ranks 0–1>"


@pytest.mark.filterwarnings("ignore:coroutine")
def test_no_output_is_kept_of_a_cell_that_was_never_awaited():
    async def never(): ...

    ranks = Ranks([3, 4])
    ranks.finish = lambda *_: never()
    waits = PxMagics(InteractiveShell(), ranks)._stored(CellOptions(out="ar"), "1", "")
    (clients,) = ranks.session.hooks.features
    assert clients.arriving == (Output,)
    del waits
    gc.collect()
    assert clients.arriving == ()


def test_the_result_of_a_cell_that_fails_is_stored_too():
    variables = run(CellFailed("rank 1 failed"))
    assert isinstance(variables["raised"], ipyparallel.CompositeError)
    result = variables["ar"]
    with pytest.raises(ipyparallel.CompositeError, match="rank 1 failed"):
        result.get()
    assert (result.successful(), result.stdout) == (False, ["", "now"])
