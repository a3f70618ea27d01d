"""Errors of functions that a view of ipyparallel has applied."""

from __future__ import annotations

import linecache
import re
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

pytest.importorskip("ipyparallel")

from ipyparallel.engine.kernel import IPythonParallelKernel
from ipyparallel.serialize import pack_apply_message

from allranks.cluster.function_sources import add_sources
from allranks.features.ipyparallel.clients import show_sources
from allranks.features.ipyparallel.rank import _from_function

FILE = "/tmp/ipykernel_1/2.py"
SOURCE = """
def applied(x):
    def inner(y):
        z = 1 / y
        return z
    return inner(x)
"""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.fixture
def failed() -> str:
    """The traceback that a rank sends, which has no source of the function."""
    names: dict[str, Any] = {}
    exec(compile(SOURCE, FILE, "exec"), names)
    names["applied"].__module__ = "__main__"
    shell: Any = InteractiveShell()
    shell._showtraceback = lambda *shown: setattr(shell, "_last_traceback", shown[2])
    kernel: Any = SimpleNamespace(
        shell=shell,
        log=SimpleNamespace(info=lambda *_: None),
        get_engine_info=lambda method: {},
    )
    message = pack_apply_message(names["applied"], (0,), {})
    with _from_function(shell):
        reply, _ = IPythonParallelKernel.do_apply(kernel, None, message, "1", {})
    assert shell.showtraceback.__name__ == "showtraceback"
    return "\n".join(reply["traceback"])


def test_a_traceback_begins_with_the_function(failed: str) -> None:
    frames = re.findall(r"(?m)^(?:File|Cell) (.*), in .*?(\w+)\(\w\)$", plain(failed))
    assert frames == [(f"{FILE}:6", "applied"), (f"{FILE}:4", "inner")]


def test_an_error_that_ipython_shows_within_a_request_is_shown() -> None:
    shell: Any = InteractiveShell()
    shown = list[Any]()
    shell._showtraceback = lambda *one: shown.append(one[1])
    with _from_function(shell):
        shell.run_cell("1 / 0")
        shell.showtraceback((KeyError, KeyError("x"), None))
    assert list(map(type, shown)) == [ZeroDivisionError, KeyError]


def test_the_notebook_adds_the_lines_that_it_has(failed: str, monkeypatch: Any) -> None:
    assert add_sources(failed) == failed
    lines = SOURCE.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, FILE, (len(SOURCE), None, lines, FILE))
    content = {"traceback": failed.split("\n"), "ename": "ZeroDivisionError"}
    client: Any = SimpleNamespace(_unwrap_exception=lambda content: content)
    show_sources(client)
    shown = client._unwrap_exception(content)
    assert shown["ename"] == "ZeroDivisionError"
    said = plain("\n".join(shown["traceback"]))
    assert "----> 4         z = 1 / y" in said
    assert "----> 6     return inner(x)" in said
    assert "Could not get source" not in said
    assert said.endswith("ZeroDivisionError: division by zero")
