"""Replaces magics of IPython on a rank."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics


def replace_magic(
    shell: InteractiveShell, kind: type[Magics], magic: str, method: str, by: Callable[..., Any]
) -> None:
    """Replaces the method of a class behind ``%magic``, and behind ``%%magic``.

    Not the magic itself: newer versions of IPython make the class's object when a magic is used,
    which takes up to 10 ms, so a rank that starts should not ask for it.
    """
    setattr(kind, method, by)
    for line_or_cell, magics in shell.magics_manager.magics.items():
        found = magics.get(magic)
        # Any attribute of a magic that is not loaded yet would load it.
        if isinstance(found, MethodType) and isinstance(found.__self__, kind):
            owner: Any = found.__self__  # an older version has made it
            magics[magic] = owner.magics[line_or_cell][magic] = getattr(owner, method)
