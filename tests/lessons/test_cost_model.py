"""The cost model: what it counts and says, its fit to measurements, and published figures."""

from __future__ import annotations

import sys
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.lessons.model import (
    P100_25GBE,
    Fabric,
    Latency,
    Measurement,
    Protocol,
    Share,
    fit,
    fit_overlap,
    nonnegative_least_squares,
    predict,
    predict_step,
    terms,
)
from allranks.lessons.published import HOROVOD_512, Scaling
from allranks.lessons.ring import explain

# 16 GPUs, four a server, RDMA, allreduce on the GPU with NCCL.
#
# Source: the table in Horovod's README up to pull request #44 (October 2017). It does not name the
# network card; 25 Gb/s is taken from the larger run.
HOROVOD_16 = (
    Scaling("Inception V3", 134.4, 23_851_784, 16, 4, 2022.6 / 134.4 / 16),
    Scaling("ResNet-101", 119.4, 44_707_176, 16, 4, 1746.2 / 119.4 / 16),
    Scaling("VGG-16", 130.9, 138_357_544, 16, 4, 1787.4 / 130.9 / 16),
)

# 8 H100 of one host, large arrays, allreduce with NVLink SHARP. Source: nccl-tests #290.
H100_BUSBW_GBPS = 476.0

# The same with NCCL_ALGO=RING, 2 to 8 GPUs, 2 to 4 GiB. Source: nccl #1455.
H100_RING_BUSBW_GBPS = (365.0, 370.0)

FORMULAS = Fabric(
    name="round numbers",
    protocols=(
        Protocol(
            "plain",
            dict.fromkeys(("ring", "tree", "recursive doubling"), Latency(5e-6, 1e-6, 10e-6)),
            dict.fromkeys(("ring", "tree", "recursive doubling"), Share()),
        ),
    ),
    inside_bandwidth=100e9,
    between_bandwidth=10e9,
    pipelined_tree=True,
)


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("algorithm", ["ring", "recursive doubling"])
def test_the_model_counts_the_messages_that_the_algorithm_sends(algorithm, size):
    run = explain([np.ones(size * 2)] * size, algorithm)
    into_rank_0 = sum(step.nbytes for step in run.steps if step.receiver == 0)
    counted = terms(algorithm, 2 * size * 8, size, 1)
    assert counted.inside == run.rounds
    if algorithm == "ring" or size & (size - 1) == 0:
        assert counted.inside_nbytes == into_rank_0


def test_the_model_counts_the_rounds_of_a_tree():
    for size in (3, 7, 15):
        assert terms("tree", 8, size, 1).inside == explain([np.ones(1)] * size, "tree").rounds
    # A tree that is not full is never too fast.
    assert all(terms("tree", 8, p, 1).inside >= 2 * (p.bit_length() - 1) for p in range(2, 40))


def test_each_algorithm_costs_what_its_formula_says():
    p, n, S = 32, 4, 10**6
    ring = 5e-6 + (2 * (p - 1) - 2 * (n - 1)) * 1e-6 + 2 * (n - 1) * 10e-6
    ring += 2 * (p - 1) / p * S / 10e9
    tree = 5e-6 + 2 * ((p / n - 1) * 1e-6 + log2(n) * 10e-6) + 2 * S / 10e9
    for size, ranks, hosts, algorithm, seconds in (
        (S, p, n, "ring", ring),
        (S, p, n, "tree", tree),
        (1000, 16, 1, "recursive doubling", 5e-6 + 4 * (1e-6 + 1000 / 100e9)),
        (1000, 17, 1, "recursive doubling", 5e-6 + 6 * (1e-6 + 1000 / 100e9)),
    ):
        found = predict(size, ranks, hosts, algorithm, FORMULAS).seconds
        assert found == pytest.approx(seconds), (algorithm, ranks)
    # The ranks of a host share its network in recursive doubling.
    counted = terms("recursive doubling", 100, 32, 4)
    assert (counted.inside, counted.between) == (3, 2)
    assert (counted.inside_nbytes, counted.between_nbytes) == (300, 1600)


@given(
    nbytes=st.integers(1, 2**34),
    hosts=st.integers(1, 12_500),
    per_host=st.integers(1, 8),
    algorithm=st.sampled_from(["ring", "tree", "best"]),
)
def test_every_prediction_is_labelled_positive_and_no_slower_than_a_larger_one(
    nbytes, hosts, per_host, algorithm
):
    ranks = hosts * per_host
    prediction = predict(nbytes, ranks, hosts, algorithm)
    assert prediction.simulated
    assert "simulated" in str(prediction)
    assert "simulated" in repr(prediction)
    assert (prediction.seconds > 0) == (ranks > 1)
    assert prediction.seconds <= predict(2 * nbytes, ranks, hosts, algorithm).seconds


def test_best_is_the_fastest():
    for nbytes in (4, 2**16, 2**30):
        each = [predict(nbytes, 64, 8, algorithm).seconds for algorithm in ("ring", "tree")]
        assert predict(nbytes, 64, 8).seconds == min(each)


def test_a_prediction_reads_well():
    assert str(predict(2**26, 8, 1, "ring")) == (
        "simulated allreduce of 67,108,864 B over 8 ranks on 1 host: 373 µs, busbw 315 GB/s "
        "(ring, Simple; hosts of 8 H100, 8 x 400 Gb/s each; NCCL 2.30 tuner constants)"
    )
    alone = predict(1000, 1)
    assert (alone.seconds, alone.algbw_gbps, alone.busbw_gbps) == (0, None, None)
    assert "over 1 rank on 1 host: 0 µs, busbw n/a" in str(alone)


def test_a_hundred_thousand_ranks_take_no_time_to_predict():
    calls = []
    sys.setprofile(lambda _frame, event, _: calls.append(event))
    try:
        prediction = predict(2**30, 100_000, 12_500)
    finally:
        sys.setprofile(None)
    assert prediction.busbw_gbps > 300
    # None of them for each rank, or each host.
    assert 10 < len(calls) < 10_000


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: predict(1, 4, 8), "at least one rank: found 4 ranks on 8 hosts"),
        (lambda: predict(1, 4, 1, "star"), "found algorithm 'star'"),
        (lambda: predict(1, 16, 2, "nvls"), "protocol 'best' on 2 hosts"),
        (lambda: terms("star", 1, 4, 1), "knows ring, recursive doubling, tree and nvls"),
        (lambda: predict_step(0.1, 10**9, 4, overlap=1.5), r"0 to 1: found 1\.5"),
        (
            lambda: fit([(4, 1e-6)], ranks=4),
            r"found 1 measurements\. Time a small and a large",
        ),
        (lambda: fit([(4, 1e-6), (400, 1e-6)], ranks=1), "over two or more ranks"),
        (lambda: fit([(4, 1e-6), (400, 1e-6)]), r"pairs .* need the number of ranks"),
    ],
)
def test_what_cannot_be_predicted_or_fitted_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_a_step_pays_only_for_what_the_backward_pass_does_not_hide():
    open_ = predict_step(0.1, 10**9, 16, 4, P100_25GBE)
    half = predict_step(0.1, 10**9, 16, 4, P100_25GBE, overlap=0.1)
    assert open_.exposed_seconds == open_.communication_seconds
    assert half.exposed_seconds == pytest.approx(0.9 * open_.exposed_seconds)
    assert half.efficiency == pytest.approx(0.1 / (0.1 + half.exposed_seconds))
    assert half.speedup == pytest.approx(16 * half.efficiency)
    # No more is hidden than the backward pass lasts.
    short = predict_step(0.03, 10**9, 16, 4, P100_25GBE, overlap=1.0)
    assert short.exposed_seconds == pytest.approx(short.communication_seconds - 0.02)
    alone = predict_step(0.1, 10**9, 1)
    assert (alone.efficiency, alone.exposed_seconds) == (1.0, 0.0)


def test_fusion_saves_latencies_and_a_step_says_that_it_is_simulated():
    fused = predict_step(0.1, 10**7, 512, 64, tensors=200)
    single = predict_step(0.1, 10**7, 512, 64, tensors=200, fusion_nbytes=None)
    assert (fused.allreduces, single.allreduces) == (1, 200)
    assert fused.communication_seconds < single.communication_seconds / 20
    assert fused.simulated
    assert str(fused).startswith("simulated step over 512 ranks on 64 hosts: ")
    assert "simulated" in repr(fused)


SIZES = [4, 2**10, 2**16, 2**20, 2**24, 2**26]


def measure(alpha, bandwidth, ranks, algorithm="ring", noise=0.0):
    random = np.random.default_rng(1)
    for nbytes in SIZES:
        counts = terms(algorithm, nbytes, ranks, 1)
        seconds = counts.inside * alpha + counts.inside_nbytes / bandwidth
        yield nbytes, seconds * (1 + noise * random.uniform(-1, 1))


@settings(max_examples=25)
@given(
    alpha=st.floats(1e-7, 1e-3),
    bandwidth=st.floats(1e8, 1e12),
    ranks=st.integers(2, 64),
    algorithm=st.sampled_from(["ring", "recursive doubling", "tree"]),
)
def test_exact_measurements_give_back_their_alpha_and_beta(alpha, bandwidth, ranks, algorithm):
    fabric = fit(measure(alpha, bandwidth, ranks, algorithm), ranks, algorithm=algorithm)
    assert fabric.relative_error == pytest.approx(0, abs=1e-6)
    for nbytes, seconds in measure(alpha, bandwidth, ranks, algorithm):
        assert predict(nbytes, ranks, 1, algorithm, fabric).seconds == pytest.approx(seconds)


def test_noise_of_ten_percent_moves_alpha_and_beta_by_less():
    fabric = fit(measure(2e-6, 5e9, 4, noise=0.1), 4)
    assert fabric.protocols[0].latency["ring"].inside == pytest.approx(2e-6, rel=0.1)
    assert fabric.inside_bandwidth == pytest.approx(5e9, rel=0.1)
    assert 0 < fabric.relative_error < 0.1


def test_one_fit_predicts_other_algorithms_and_names_its_measurements():
    fabric = fit(measure(2e-6, 5e9, 4), 4, name="two desktops")
    expected = 3 * (2e-6 + 10**6 / 5e9)
    found = predict(10**6, 8, 1, "recursive doubling", fabric)
    assert found.seconds == pytest.approx(expected)
    assert fabric.name == "two desktops, fitted to 6 measurements within 0.0%"
    assert "two desktops" in str(found)


def test_hosts_and_networks_are_told_apart():
    inside = terms("ring", 10**6, 4, 1)
    measured = [
        Measurement(nbytes, counts.inside * 1e-6 + counts.between * 2e-5
                    + counts.inside_nbytes / 1e10 + counts.between_nbytes / 1e9, ranks, hosts)
        for nbytes in SIZES
        for ranks, hosts in ((4, 1), (8, 2), (16, 4))
        for counts in (terms("ring", nbytes, ranks, hosts),)
    ]  # fmt: skip
    fabric = fit(measured)
    latency = fabric.protocols[0].latency["ring"]
    assert (latency.inside, latency.between) == pytest.approx((1e-6, 2e-5))
    assert (fabric.inside_bandwidth, fabric.between_bandwidth) == pytest.approx((1e10, 1e9))
    assert predict(10**6, 4, 1, "ring", fabric).seconds == pytest.approx(
        inside.inside * 1e-6 + inside.inside_nbytes / 1e10
    )


def test_what_was_never_measured_is_not_guessed():
    fabric = fit(measure(2e-6, 5e9, 4), 4)
    with pytest.raises(ValueError, match="needs the latency between hosts: this cluster, fitted"):
        predict(100, 8, 2, "ring", fabric)
    fabric = fit([(4, 1e-4), (10**7, 1e-2)], ranks=4, hosts=4)
    assert predict(4, 4, 4, "ring", fabric).seconds == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="needs the latency inside a host"):
        predict(4, 16, 4, "ring", fabric)


def test_bytes_that_cost_nothing_measurable_are_free_and_the_error_says_so():
    fabric = fit([(64, 2e-3), (2**20, 1e-3)], ranks=4)
    alone = predict(64, 4, 1, "ring", fabric).seconds
    assert predict(2**20, 4, 1, "ring", fabric).seconds == pytest.approx(alone)
    assert fabric.relative_error > 0.3


@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 4))
def test_no_other_nonnegative_vector_is_better(seed, columns):
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(8, columns)), random.normal(size=8)
    found = nonnegative_least_squares(matrix, target)
    residual = np.linalg.norm(matrix @ found - target)
    assert (found >= 0).all()
    for other in np.abs(found + random.normal(scale=0.1, size=(50, columns))):
        assert residual <= np.linalg.norm(matrix @ other - target) + 1e-9


POINTS = 0.06
"""Six points of efficiency: the tolerance of every comparison with Horovod's 512 GPUs."""


def step(run, overlap):
    return predict_step(
        run.alone_seconds, run.gradient_nbytes, run.ranks, run.hosts, P100_25GBE, overlap=overlap
    )


def overlap_of(run):
    return fit_overlap(run.efficiency, step(run, 0.0))


@pytest.mark.parametrize("fitted", [*HOROVOD_512, *HOROVOD_16[:2]], ids=str)
@pytest.mark.parametrize("foretold", HOROVOD_512, ids=lambda run: run.model)
def test_overlap_fitted_on_one_model_foretells_all_on_512_gpus(fitted, foretold):
    prediction = step(foretold, overlap_of(fitted))
    assert prediction.efficiency == pytest.approx(foretold.efficiency, abs=POINTS)
    # Without overlap these are not reached.
    assert step(foretold, 0.0).efficiency < foretold.efficiency


def test_overlap_fitted_on_vgg_gives_the_documented_figures_and_the_documented_miss():
    overlap = overlap_of(HOROVOD_512[2])
    assert overlap == pytest.approx(0.46, abs=0.005)
    assert [round(step(run, overlap).efficiency, 2) for run in HOROVOD_512] == [0.92, 0.88, 0.68]
    *close, vgg = [step(run, overlap).efficiency for run in HOROVOD_16]
    assert close == pytest.approx([run.efficiency for run in HOROVOD_16[:2]], abs=0.02)
    assert (round(vgg, 2), round(HOROVOD_16[2].efficiency, 2)) == (0.73, 0.85)


@pytest.mark.parametrize("gpus", range(2, 9))
def test_rings_of_h100_reach_the_published_bus_bandwidth(gpus):
    low, high = H100_RING_BUSBW_GBPS
    busbw = predict(4 * 2**30, gpus, 1, "ring").busbw_gbps
    assert 0.99 * low <= busbw <= 1.01 * high


MEASURED = [(5, 420), (6, 440), (7, 460), (8, 480), (8, H100_BUSBW_GBPS)]


@pytest.mark.parametrize(("gpus", "busbw"), MEASURED)
def test_the_switch_gains_with_the_number_of_gpus_as_measured(gpus, busbw):
    """Source: nccl #1455, NCCL_ALGO=NVLS, 2 to 4 GiB."""
    prediction = predict(4 * 2**30, gpus)
    assert prediction.algorithm == "nvls"
    assert prediction.busbw_gbps == pytest.approx(busbw, rel=0.03)
