"""What IPython finds in a cell's source, with and without the searches that can find nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core import inputtransformer2
from IPython.core.interactiveshell import InteractiveShell

from allranks.engine.cell_source import search_only_where_needed

PLAIN = """
    def f(x):
        text = f"{x % 3:.1%} of {x!r} != {x}"  # 5 % of it
        return [x for x in range(9) if x % 2 and x != 3 and (x / 2
            - 1)]

    v = f(2)
"""
PARTS = [
    *("%time f()", "!ls", "x = %pwd", "x = !ls", "x =\\\n  %pwd", "x = \\\n!ls", "f?", "??f"),
    *(",f a b", ";f a b", "/f a", "    %who", "  !ls -l \\\n  -a", "def f():\n  %who", "f??"),
    *("%%bash\nls", "x = y % z", "x = (y\n% z)", "x != y", "s = '?'", "'%\n%a\n!b\n'", "#!x"),
    *("if x:\n    pass", "x = 1;  # ok", "x == %y", "f(a=!b)", ">>> %who", "In [1]: x = !ls"),
    *("x\x0c%who", "(", "'", "x = [%y]", "await f()", "x: int = %pwd", "pass", "", "\x0c%who"),
]


@pytest.fixture
def shells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[InteractiveShell]]:
    """One as IPython makes it, and one that searches only where needed."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    made = [InteractiveShell(), InteractiveShell()]
    search_only_where_needed(made[1])
    yield made
    for shell in made:
        shell.history_manager.end_session()


def test_every_source_is_transformed_as_by_ipython(shells):
    chosen = random.Random(0)
    sources = [*PARTS, PLAIN]
    sources += ["\n".join(chosen.choices(PARTS, k=chosen.randint(2, 4))) for _ in range(300)]
    for source in sources:
        theirs, ours = (transformed(one, source) for one in shells)
        assert ours == theirs


def transformed(shell: InteractiveShell, source: str) -> str:
    """The source that would be compiled, or the error of its indentation."""
    try:
        found: str = shell.input_transformer_manager.transform_cell(source)
        compile(found, "cell", "exec")
        return found
    except IndentationError as error:
        return error.msg
    except SyntaxError:
        return found


def test_plain_source_is_not_split_into_tokens_or_compiled(shells, monkeypatch):
    def refuse(*_):
        raise AssertionError("a search that can find nothing")

    ours = shells[1]
    monkeypatch.setattr(inputtransformer2, "make_tokens_by_line", refuse)
    monkeypatch.setattr("IPython.core.interactiveshell._should_be_async", refuse)
    transformed = ours.transform_cell(PLAIN)
    assert not ours.should_run_async(PLAIN, transformed_cell=transformed)


@pytest.mark.parametrize(
    "source",
    [
        "await f()",
        "async with f(): pass",
        "[x async for x in f()]",
        "awaited = 1",
        "async def f(): 0",
    ],
)
def test_a_cell_that_awaits_is_found(shells, source):
    theirs, ours = (one.should_run_async(source, transformed_cell=source) for one in shells)
    assert ours is theirs


def test_a_search_that_a_cell_has_added_sees_every_source(shells):
    seen = []

    class Added(inputtransformer2.TokenTransformBase):
        @classmethod
        def find(cls, tokens_by_line):
            seen.append(tokens_by_line)

    manager = shells[1].input_transformer_manager
    manager.token_transformers.append(Added)
    assert manager.transform_cell(PLAIN)
    assert seen
