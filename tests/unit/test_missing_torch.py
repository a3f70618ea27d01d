"""``allranks.torch`` is imported only by its user, and says how to install what it needs."""

from __future__ import annotations

import importlib
import sys

import pytest

from allranks.errors import MissingDependency


def test_a_missing_torch_comes_with_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "allranks.torch", raising=False)
    with pytest.raises(MissingDependency, match="needs PyTorch") as raised:
        importlib.import_module("allranks.torch")
    assert str(raised.value).endswith("To install it: pip install torch")
