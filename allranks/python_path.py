"""The current folder in ``PYTHONPATH``: none for processes that run only our code, kept for ranks.

Python's option ``-P`` leaves the current folder out of the path of modules. An empty or relative
part of ``PYTHONPATH``, as in ``:/opt/lib``, puts it back, before the standard library. Files of the
notebook's folder could then take the places of modules. Cells do import from that folder, on the
ranks as in the notebook. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

NAME = "PYTHONPATH"


def without_current_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables for a process that runs only our code, which is started with ``-P``."""
    found = dict(environment)
    kept = [part for part in found.pop(NAME, "").split(os.pathsep) if os.path.isabs(part)]
    return {**found, NAME: os.pathsep.join(kept)} if kept else found


def with_current_folder(path: Sequence[str], value: str) -> list[str]:
    """Returns a path of modules as Python makes it from a value of ``PYTHONPATH``, from the path of
    a process that was started without the current folder.
    """
    parts = [os.path.abspath(part) for part in value.split(os.pathsep)] if value else []
    return [*dict.fromkeys([*parts, *path])]
