"""Runs in the notebook's kernel: shows output of the ranks live, and saves it in the notebook."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ring"]


def __getattr__(name: str) -> Any:
    # Found when it is used: lessons import this package, and it never imports them.
    if name == "ring":
        return importlib.import_module("allranks.lessons.explainer").ring
    raise AttributeError(f"module 'allranks.widgets' has no attribute {name!r}")
