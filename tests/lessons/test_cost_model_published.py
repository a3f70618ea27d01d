"""Compares the model with published figures, some fitted and some predicted."""

from __future__ import annotations

import pytest

from allranks.lessons.model import HGX_H100, P100_25GBE, fit_overlap, predict, predict_step
from allranks.lessons.model.published import (
    H100_BUSBW_GBPS,
    H100_RING_BUSBW_GBPS,
    HOROVOD_16,
    HOROVOD_512,
)

MIB = 2**20
POINTS = 0.06
"""Six points of efficiency: the tolerance of every comparison with Horovod's 512 GPUs."""


def step(run, overlap):
    return predict_step(
        run.alone_seconds, run.gradient_nbytes, run.ranks, run.hosts, P100_25GBE, overlap=overlap
    )


def overlap_of(run):
    return fit_overlap(run.efficiency, step(run, 0.0))


@pytest.mark.parametrize("fitted", HOROVOD_512, ids=lambda run: run.model)
@pytest.mark.parametrize("foretold", HOROVOD_512, ids=lambda run: run.model)
def test_overlap_fitted_on_one_model_foretells_the_others_on_512_gpus(fitted, foretold):
    prediction = step(foretold, overlap_of(fitted))
    assert prediction.efficiency == pytest.approx(foretold.efficiency, abs=POINTS)


def test_overlap_fitted_on_vgg_gives_the_documented_figures():
    overlap = overlap_of(HOROVOD_512[2])
    assert overlap == pytest.approx(0.46, abs=0.005)
    efficiencies = [round(step(run, overlap).efficiency, 2) for run in HOROVOD_512]
    assert efficiencies == [0.92, 0.88, 0.68]


@pytest.mark.parametrize("fitted", HOROVOD_16[:2], ids=lambda run: run.model)
@pytest.mark.parametrize("foretold", HOROVOD_512, ids=lambda run: run.model)
def test_overlap_fitted_on_16_gpus_foretells_512(fitted, foretold):
    prediction = step(foretold, overlap_of(fitted))
    assert prediction.efficiency == pytest.approx(foretold.efficiency, abs=POINTS)


def test_vgg_on_16_gpus_is_a_documented_miss():
    overlap = overlap_of(HOROVOD_512[2])
    inception, resnet, vgg = (step(run, overlap).efficiency for run in HOROVOD_16)
    assert inception == pytest.approx(HOROVOD_16[0].efficiency, abs=0.02)
    assert resnet == pytest.approx(HOROVOD_16[1].efficiency, abs=0.02)
    assert round(vgg, 2) == 0.73
    assert round(HOROVOD_16[2].efficiency, 2) == 0.85


def test_without_overlap_the_published_efficiencies_are_not_reached():
    for run in HOROVOD_512:
        assert step(run, 0.0).efficiency < run.efficiency


def test_eight_h100_reach_the_published_bus_bandwidth():
    prediction = predict(8 * 2**30, 8)
    assert prediction.algorithm == "nvls"
    assert prediction.busbw_gbps == pytest.approx(H100_BUSBW_GBPS, rel=0.03)


@pytest.mark.parametrize("gpus", range(2, 9))
def test_rings_of_h100_reach_the_published_bus_bandwidth(gpus):
    low, high = H100_RING_BUSBW_GBPS
    busbw = predict(4 * 2**30, gpus, 1, "ring").busbw_gbps
    assert 0.99 * low <= busbw <= 1.01 * high


@pytest.mark.parametrize(("gpus", "busbw"), [(5, 420), (6, 440), (7, 460), (8, 480)])
def test_the_switch_gains_with_the_number_of_gpus_as_measured(gpus, busbw):
    """Source: nccl #1455, NCCL_ALGO=NVLS, 2 to 4 GiB."""
    assert predict(4 * 2**30, gpus, 1, "nvls").busbw_gbps == pytest.approx(busbw, rel=0.03)


def test_4096_ranks_want_a_tree():
    """Source: NCCL 2.30's tuner constants on 512 hosts of 8: 10.7 ms against 0.6 ms."""
    ring, tree = (predict(64 * MIB, 4096, 512, name) for name in ("ring", "tree"))
    assert ring.seconds == pytest.approx(10.7e-3, rel=0.03)
    assert tree.seconds == pytest.approx(0.6e-3, rel=0.05)
    assert predict(64 * MIB, 4096, 512).algorithm == "tree"
    assert HGX_H100.pipelined_tree
