"""Whether torch's groups on GPUs are those of allranks: the option, and GPUs that ranks share."""

import pytest

from allranks.features.torch_jax import choice

GPU, OTHER = "GPU-5c1f4d2e-0000-0000-0000-000000000001", "GPU-5c1f4d2e-0000-0000-0000-000000000002"
SHARE, APART = [(0, GPU), (0, GPU)], [(0, GPU), (0, OTHER)]


@pytest.fixture(autouse=True)
def _nothing_is_chosen(monkeypatch):
    monkeypatch.setattr(choice, "_shared", False)
    monkeypatch.delenv(choice.SETTING, raising=False)


@pytest.mark.parametrize(
    ("option", "places", "takes"),
    [
        ("", SHARE, True),
        ("", APART, False),
        ("", [(0, GPU), (1, GPU)], False),  # of two hosts
        ("", [*SHARE, (0, "")], False),  # one rank has none of its own, or no cupy
        ("nccl", SHARE, False),
        ("gloo", SHARE, False),
        ("allranks", APART, True),
    ],
)
def test_groups_take_tensors_on_gpus(option, places, takes, monkeypatch):
    monkeypatch.setenv(choice.SETTING, option)
    choice.note_gpus(places)
    assert choice.takes_gpu() is takes
    choice.note_gpus(APART)
    assert choice.takes_gpu() is (option == "allranks")


@pytest.mark.parametrize(
    ("shown", "by_nccl", "found"),
    [
        (GPU, "", GPU),
        (GPU, "1", ""),
        (f"{GPU},{OTHER}", "", ""),
        ("0", "", ""),
        ("-1", "", ""),
        ("", "", ""),
    ],
)
def test_a_rank_has_a_gpu_of_its_own_if_it_is_shown_no_other(shown, by_nccl, found, monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", by_nccl)
    assert choice.own_gpu() == found
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert choice.own_gpu() == ""
