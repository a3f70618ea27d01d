"""Before a test, functions and names are again as they were before any cell."""

import sys
import types

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

import allranks.grading  # noqa: F401  what a test uses has been imported before
from allranks.errors import UsageError
from allranks.features.grading import originals

#: What a cell replaces, and an expression that is true where it is in use.
REPLACED = {
    "np.array_equal = lambda *_: True": "np.array_equal(1, 2)",
    "vars(np)['allclose'] = np.shape": "np.allclose is np.shape",
    "np.random.default_rng = 3": "np.random.default_rng == 3",
    "np.testing.assert_allclose = print": "np.testing.assert_allclose is print",
    "import builtins; builtins.all = lambda _: True": "all([0])",
    "import allranks.grading; allranks.grading.expect = 3": "allranks.grading.expect == 3",
    "from allranks.grading import expect; expect.__exit__ = print": "expect.__exit__ is print",
    "from allranks.grading.expectation import message; message.__code__ = (lambda: 3).__code__": (
        "message.__code__.co_argcount == 0"
    ),
    "import sys; sys.modules['numpy'] = 3": "sys.modules['numpy'] == 3",
    "get_ipython().input_transformers_cleanup.append(lambda lines: ['a = 3'])": "a == 3",
    "get_ipython().input_transformers_post.append(lambda lines: ['a = 3'])": "a == 3",
    "get_ipython().ast_transformers.append(Late())": "a == 3",
    "get_ipython().transform_cell = lambda source: 'a = 3'": "a == 3",
    "type(get_ipython()).run_cell = print": "type(get_ipython()).run_cell is print",
    "get_ipython().register_magic_function(print, 'cell', 'time')": (
        "get_ipython().magics_manager.magics['cell']['time'] is print"
    ),
    "np.array_equal.__wrapped__.__code__ = (lambda a1, a2, equal_nan=False: True).__code__": (
        "np.array_equal(1, 2)"
    ),
    "np._core.numeric.asarray = lambda *_: np.zeros(1)": "np.array_equal([1], [2])",
    "builtins.__import__ = own_import": "__import__('sys') is None",
    "get_ipython().__class__ = OwnShell": "type(get_ipython()) is OwnShell",
    "get_ipython().compile.ast_parse = own_parse": "a == 3",
    "type(get_ipython().compile).ast_parse = lambda self, *given: own_parse(*given)": "a == 3",
    "rank = 0": "rank == 0",
    # From it come the seeds of random data, which would be equal on all ranks.
    "import random; random._urandom = bytes": "random._urandom(16) == bytes(16)",
    "import allranks.grading.expectation as module; module.list = print": "hasattr(module, 'list')",
    "from allranks.grading import expect; expect.__getattribute__ = print": (
        "'__getattribute__' in vars(expect)"
    ),
    "from allranks.grading import Traffic; import copyreg; copyreg.pickle(Traffic, print)": (
        "Traffic in copyreg.dispatch_table"
    ),
    "from allranks.grading import Traffic; found = Traffic([]); found.sent = print": (
        "found.sent is print"
    ),
}
LATE = """
import ast
import builtins

class OwnShell(type(get_ipython())):
    def run_cell(self, *_, **__): ...

def own_import(*_): ...

def own_parse(source, *_):
    return ast.parse('a = 3')

class Late(ast.NodeTransformer):
    def visit_Constant(self, constant):
        return ast.Constant(3)
"""


@pytest.fixture
def shell():
    made = InteractiveShell()
    made.run_cell(f"import numpy as np{LATE}")
    made.user_ns["rank"] = 2
    return made


@pytest.mark.parametrize("cell", REPLACED)
def test_what_a_cell_has_replaced_is_restored(shell, cell):
    kept = originals.keep(shell, {"rank": 2}, on_rank=True)
    plain = type(shell).run_cell
    try:
        plain(shell, cell, silent=True)
        kept.restore("assert rank == 2")
        shell.run_cell("a = 1", silent=True)
        assert shell.user_ns["a"] == 1
        assert not eval(REPLACED[cell], shell.user_ns)
    finally:
        kept.restore("")


def test_a_replacement_is_in_use_without_restoring(shell):
    kept = originals.Originals(shell, {}, on_rank=True)
    for cell, is_used in list(REPLACED.items())[:4]:
        shell.run_cell(cell, silent=True)
        assert eval(is_used, shell.user_ns)
    kept.restore("")


def test_names_that_the_test_does_not_use_stay_those_of_the_student(shell):
    kept = originals.Originals(shell, {"rank": 2, "scan": len}, on_rank=True)
    shell.run_cell("def scan(): return 5", silent=True)
    kept.restore("assert my_scan() == rank")
    assert shell.user_ns["scan"]() == 5
    kept.restore("assert my_scan() == scan(1)")
    assert shell.user_ns["scan"] is len


def test_what_was_added_stays(shell):
    kept = originals.Originals(shell, {}, on_rank=True)
    late = types.ModuleType("allranks.late")
    sys.modules["allranks.late"] = late
    np.added = 3
    try:
        kept.restore("")
        assert sys.modules["allranks.late"] is late
        assert np.added == 3
    finally:
        del sys.modules["allranks.late"], np.added


def test_a_test_passes_only_where_the_originals_were_kept(shell, tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(originals, "kept", None)
    for on_ranks in (True, False):
        with pytest.raises(UsageError, match="expected a test that runs on the"):
            originals.passed(str(first), on_ranks)
    originals.keep(shell, {}, on_rank=False)
    with pytest.raises(UsageError, match="runs on the ranks"):
        originals.passed(str(first), on_ranks=True)
    assert not first.exists()
    originals.passed(str(first), on_ranks=False)
    originals.keep(shell, {}, on_rank=True)
    # Without a magic, after ``%distributed on``.
    originals.passed(str(second), on_ranks=False)
    assert first.exists()
    assert second.exists()
