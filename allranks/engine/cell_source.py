"""What IPython looks for in a cell's source: magics, and ``await``.

IPython splits each cell into tokens, and compiles it twice, before it runs it. For a cell of 60
lines that takes longer than all other steps together, and every rank does it. Most cells have no
character that such a search could find.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

#: ``%magic``, ``!command``, ``,f a``, ``;f a``, ``/f a``, ``x = %magic``, ``x = !command``, ``x?``.
_MAY_BE_SPECIAL = re.compile(r"^\s*[%!,;/]|=\s*[%!]|\?", re.MULTILINE)
#: The searches that these characters are for. A cell may add others.
_SEARCHES = {"MagicAssign", "SystemAssign", "EscapedCommand", "HelpEnd"}


def search_only_where_needed(shell: InteractiveShell) -> None:
    """Has IPython search a cell for magics and ``await`` only where there may be some."""
    manager: TransformerManager = shell.input_transformer_manager
    transform: Callable[[list[str]], list[str]] = manager.do_token_transforms
    is_async: Callable[..., bool] = shell.should_run_async

    def do_token_transforms(lines: list[str]) -> list[str]:
        names = {getattr(search, "__name__", "") for search in manager.token_transformers}
        return lines if names <= _SEARCHES and not _has_special(lines) else transform(lines)

    def should_run_async(
        source: str, *, transformed_cell: str | None = None, **options: Any
    ) -> bool:
        # Python's keywords cannot be written in another way.
        text = source if transformed_cell is None else transformed_cell
        may_wait = "await" in text or "async" in text
        return may_wait and is_async(source, transformed_cell=transformed_cell, **options)

    setattr(manager, "do_token_transforms", do_token_transforms)  # noqa: B010  a method, to mypy
    setattr(shell, "should_run_async", should_run_async)  # noqa: B010


def _has_special(lines: list[str]) -> bool:
    return any(map(_MAY_BE_SPECIAL.search, lines))
