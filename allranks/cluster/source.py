"""Checks a cell before it is sent: a SyntaxError is reported once, and nothing has run."""

from __future__ import annotations

import ast

from IPython.core.inputtransformer2 import TransformerManager


def check(text: str) -> None:
    """Raises SyntaxError if a cell cannot be compiled; it may use all of IPython's syntax.

    Raises:
        SyntaxError: with the cell's own line numbers.
    """
    transformed = TransformerManager().transform_cell(text)
    compile(transformed, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
