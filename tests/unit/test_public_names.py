"""The public names of the package."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

import pytest

import allranks


def test_a_cluster_shows_what_is_for_its_users() -> None:
    found = [name for name in dir(allranks.Cluster(2)) if not name.startswith("_")]
    assert found == [
        "busy", "call", "can_heal", "client", "dead", "explain", "gpus", "heal", "heal_when",
        "healing", "interrupt", "launcher", "log_dir", "lost_because", "map", "preload", "pull",
        "push", "restart", "run", "size", "start", "state", "status", "stop",
    ]  # fmt: skip


PUBLIC = (
    "allranks",
    "allranks.collectives",
    "allranks.errors",
    "allranks.lessons.model",
    "allranks.lessons.ring",
    "allranks.widgets",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [one for one in vars(module) if not one.startswith("_")])
    public = [getattr(module, one) for one in names]
    without = [one for value in public for one in undocumented(value)]
    assert without == []


def undocumented(value: object) -> Iterator[str]:
    """Yields the name of a function or class, and of its public methods, without a docstring."""
    if not (inspect.isclass(value) or inspect.isfunction(value)) or not is_ours(value):
        return
    if not inspect.getdoc(value):
        yield value.__qualname__
    if inspect.isclass(value):
        for name, method in inspect.getmembers(value, inspect.isroutine):
            if not name.startswith("_") and is_ours(method) and not inspect.getdoc(method):
                yield f"{value.__qualname__}.{name}"


def is_ours(value: object) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("allranks")
