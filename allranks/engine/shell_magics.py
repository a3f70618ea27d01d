"""Replaces magics of IPython on a rank."""

from __future__ import annotations

from collections.abc import Callable
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
    for magics in shell.magics_manager.magics.values():
        owner = getattr(magics.get(magic), "__self__", None)
        if isinstance(owner, kind):  # an older version has made it
            magics[magic] = getattr(owner, method)
