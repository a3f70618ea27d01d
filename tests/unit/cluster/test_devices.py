"""Finding GPUs, on a FAKE pynvml: what CUDA_VISIBLE_DEVICES shows, and what is refused."""

import sys

import pytest

from allranks import Cluster
from allranks.cluster import devices
from allranks.errors import UsageError

A, B, C = "GPU-aaaa1111-0", "GPU-aabb2222-1", "GPU-cccc3333-2"
SLICES = ["MIG-5e1f0000-a", "MIG-5e1f1111-b"]
PLAIN = [{"uuid": A}, {"uuid": B}, {"uuid": C}]
CUT = [{"uuid": A, "slices": []}, {"uuid": B, "slices": SLICES}]


def uuids() -> list[str]:
    return [gpu.uuid for gpu in devices.visible_gpus()]


@pytest.mark.parametrize(
    ("gpus", "chosen", "wanted"),
    [
        (PLAIN, None, [A, B, C]),
        (PLAIN, "", []),
        (PLAIN, "  ", []),
        (PLAIN, "-1", []),
        (PLAIN, "2,0", [C, A]),
        (PLAIN, " 1 , 2 ", [B, C]),
        (PLAIN, f"{C},0", [C, A]),
        (PLAIN, "GPU-c", [C]),
        (PLAIN, "GPU-aa", []),
        (PLAIN, "GPU-AAAA", [A]),
        (PLAIN, "0,-1,1", [A]),
        (PLAIN, "1,7,0", [B]),
        (PLAIN, "NoDevFiles", []),
        (PLAIN, "0,0,1", [A, B]),
        (CUT, None, [A, *SLICES]),
        (CUT, SLICES[1], [SLICES[1]]),
        (CUT, f"{SLICES[0]},{SLICES[1]}", SLICES),
        (CUT, "MIG-5e1f1", [SLICES[1]]),
        (CUT, "MIG-5e1f", []),
        (CUT, "1", [SLICES[0]]),
        (CUT, B, [SLICES[0]]),
        (CUT, f"MIG-{B}/1/0", [f"MIG-{B}/1/0"]),
        (CUT, "MIG-GPU-other/1/0", []),
    ],
)
def test_visible_devices_are_read_by_cudas_rules_and_slices_are_gpus(driver, gpus, chosen, wanted):
    driver(gpus, chosen)
    assert uuids() == wanted


def test_a_lost_gpu_or_a_missing_driver_or_package_leaves_none_to_choose(driver, monkeypatch):
    driver([{"uuid": A}, {"uuid": B, "lost": True}, {"uuid": C}])
    assert uuids() == [A, C]
    driver(None)
    assert devices.visible_gpus() == ()
    assert Cluster(3).size == 3
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


def test_there_is_a_rank_for_each_gpu_of_those_that_are_visible_or_chosen(driver):
    driver(PLAIN)
    assert Cluster().size == 3
    assert Cluster(gpus="2,0").size == 2
    driver(PLAIN, "2,1")
    assert [gpu.uuid for gpu in devices.choose("all")] == [C, B]
    assert [gpu.uuid for gpu in devices.choose("1")] == [B]
    with pytest.raises(UsageError, match="indices below 2"):
        devices.choose("2")
    assert devices.choose("none") == ()


def test_sharing_is_said_by_gpu(driver):
    driver(PLAIN[:2])

    def notices(cluster):
        return devices.notices(cluster.gpus, cluster.size)

    staged = "; collectives are staged through the host"
    assert notices(Cluster(2)) == []
    assert notices(Cluster(3)) == [f"2 ranks share GPU 0{staged}"]
    assert notices(Cluster(4)) == [f"2 ranks share GPU 0, 2 ranks share GPU 1{staged}"]
    both = "collectives move small arrays through the host, and large ones in memory on the GPU"
    assert notices(Cluster(2, gpus="1")) == [f"2 ranks share GPU 1; {both}"]
    assert notices(Cluster(4, gpus="none")) == []


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
