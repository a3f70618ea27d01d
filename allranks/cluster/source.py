"""Checks a cell before it is sent: a SyntaxError is reported once, and nothing has run."""

from __future__ import annotations

import ast
import traceback

from IPython.core.inputtransformer2 import TransformerManager

_FILE = "<cell>"


def below(magic: str, cell: str) -> str:
    """Returns a cell for the ranks: its magic stays as a comment, which keeps the lines' numbers.

    A magic below it, as ``%%timeit``, has to be the first line.
    """
    return cell if cell.lstrip().startswith("%%") else f"# {magic}".rstrip() + f"\n{cell}"


def check(text: str) -> None:
    """Raises SyntaxError if a cell cannot be compiled; it may use all of IPython's syntax.

    Raises:
        SyntaxError: with the cell's own line numbers.
    """
    transformed = TransformerManager().transform_cell(text)
    compile(transformed, _FILE, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def explain(error: SyntaxError, number: int) -> str:
    """Returns what is wrong with a cell, its line under it, and that nothing has run.

    Args:
        error: what :func:`check` raised.
        number: the notebook's number of the cell.
    """
    told = "".join(traceback.format_exception_only(error))
    told = told.replace(f'File "{_FILE}"', f"Cell In[{number}]").rstrip()
    return f"the cell was not run on any rank.\n{told}"
