"""The option that chooses torch's process groups."""

from __future__ import annotations

import pytest

from allranks.features import load
from allranks.features.torch_jax.notebook import TorchGroups


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "torch.distributed runs on allranks, also with the backend gloo."),
        ({"torch": "nccl"}, "torch.distributed runs on allranks, also with the backend gloo."),
        ({"torch": "allranks"}, "also with the backends gloo and nccl"),
        ({"torch": "gloo"}, "its own process groups"),
    ],
)
def test_the_start_says_whose_groups_torch_has(monkeypatch, settings, said):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert said in TorchGroups().start_text(settings)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TorchGroups().start_text(settings) == ""


def test_the_features_of_the_package_have_the_option_for_torch():
    found = [option.name for kind in load("notebook") for option in kind.start_options]
    assert "torch" in found
