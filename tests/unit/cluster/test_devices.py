"""Finding GPUs, on a FAKE pynvml: what CUDA_VISIBLE_DEVICES shows, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from allranks import Cluster
from allranks.cluster import devices
from allranks.errors import UsageError

FAKE = str(Path(__file__).resolve().parents[2] / "fakes" / "nvml")
A, B, C = "GPU-aaaa1111-0", "GPU-aabb2222-1", "GPU-cccc3333-2"
SLICES = ["MIG-5e1f0000-a", "MIG-5e1f1111-b"]
PLAIN = [{"uuid": A}, {"uuid": B}, {"uuid": C}]
CUT = [{"uuid": A, "slices": []}, {"uuid": B, "slices": SLICES}]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    """Puts GPUs into the fake, and a CUDA_VISIBLE_DEVICES beside them."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def put(gpus: list[dict] | None, chosen: str | None = None) -> None:
        monkeypatch.setenv("ALLRANKS_FAKE_NVML", json.dumps(gpus))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if chosen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

    yield put
    sys.modules.pop("pynvml", None)


def uuids() -> list[str]:
    return [gpu.uuid for gpu in devices.visible_gpus()]


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        (None, [A, B, C]),
        ("", []),
        ("  ", []),
        ("-1", []),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        (f"{C},0", [C, A]),
        ("GPU-c", [C]),
        ("GPU-aa", []),
        ("GPU-AAAA", [A]),
        ("0,-1,1", [A]),
        ("1,7,0", [B]),
        ("NoDevFiles", []),
        ("0,0,1", [A, B]),
    ],
)
def test_visible_devices_are_read_by_cudas_rules(driver, chosen, wanted):
    driver(PLAIN, chosen)
    assert uuids() == wanted


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        (None, [A, *SLICES]),
        (SLICES[1], [SLICES[1]]),
        (f"{SLICES[0]},{SLICES[1]}", SLICES),
        ("MIG-5e1f1", [SLICES[1]]),
        ("MIG-5e1f", []),
        ("1", [SLICES[0]]),
        (B, [SLICES[0]]),
        (f"MIG-{B}/1/0", [f"MIG-{B}/1/0"]),
        ("MIG-GPU-other/1/0", []),
    ],
)
def test_slices_of_a_gpu_are_gpus(driver, chosen, wanted):
    driver(CUT, chosen)
    assert uuids() == wanted


def test_a_gpu_that_the_driver_has_lost_is_left_out(driver):
    driver([{"uuid": A}, {"uuid": B, "lost": True}, {"uuid": C}])
    assert uuids() == [A, C]


def test_without_a_driver_there_are_no_gpus(driver):
    driver(None)
    assert devices.visible_gpus() == ()
    assert Cluster(3).size == 3


def test_without_the_package_there_are_no_gpus(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert devices.visible_gpus() == ()
    with pytest.raises(UsageError, match=r"--gpus 0 needs a GPU.*pip install nvidia-ml-py"):
        Cluster(2, gpus="0")


def test_asking_for_a_gpu_that_no_driver_knows_says_why(driver):
    driver(None)
    with pytest.raises(UsageError, match=r"driver does not answer \(NVMLError_LibraryNotFound"):
        devices.choose("0")
    driver(PLAIN, "-1")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES='-1' shows none of this host's 3"):
        devices.choose("0")


def test_a_driver_without_the_package_is_told_of(driver, monkeypatch):
    monkeypatch.setattr(devices.os.path, "exists", lambda path: path == "/dev/nvidiactl")
    assert devices.overlooked() == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert devices.overlooked().endswith("pip install nvidia-ml-py")


def test_there_is_a_rank_for_each_gpu(driver):
    driver(PLAIN)
    assert Cluster().size == 3
    assert Cluster(gpus="2,0").size == 2


def test_gpus_are_chosen_among_the_visible_ones(driver):
    driver(PLAIN, "2,1")
    assert [gpu.uuid for gpu in devices.choose("all")] == [C, B]
    assert [gpu.uuid for gpu in devices.choose("1")] == [B]
    with pytest.raises(UsageError, match="indices below 2"):
        devices.choose("2")
    assert devices.choose("none") == ()


def test_sharing_is_said_by_gpu(driver):
    driver(PLAIN[:2])
    staged = "; collectives are staged through the host"
    assert Cluster(2).gpu_notices == []
    assert Cluster(3).gpu_notices == [f"2 ranks share GPU 0{staged}"]
    assert Cluster(4).gpu_notices == [f"2 ranks share GPU 0, 2 ranks share GPU 1{staged}"]
    assert Cluster(2, gpus="1").gpu_notices == [f"2 ranks share GPU 1{staged}"]
    assert Cluster(4, gpus="none").gpu_notices == []


def test_ranks_that_must_not_share_are_refused(driver):
    driver(PLAIN[:2])
    Cluster(2, exclusive=True)
    with pytest.raises(UsageError) as error:
        Cluster(4, exclusive=True)
    assert str(error.value) == (
        "4 ranks need 4 GPUs, this host has 2. Type: -n 2, or leave --exclusive out."
    )
    driver(None)
    with pytest.raises(UsageError, match=r"2 ranks need 2 GPUs, this host has 0\. Leave --excl"):
        Cluster(2, exclusive=True)
