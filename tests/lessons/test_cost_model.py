"""The cost model counts the algorithms' messages and bytes, and marks texts as simulated."""

from __future__ import annotations

import sys
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.lessons.model import HGX_H100, P100_25GBE, predict, predict_step
from allranks.lessons.model.costs import Fabric, Latency, Protocol, Share, terms
from allranks.lessons.ring import explain

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


@pytest.mark.parametrize("size", [3, 7, 15])
def test_the_model_counts_the_rounds_of_a_full_tree(size):
    assert terms("tree", 8, size, 1).inside == explain([np.ones(1)] * size, "tree").rounds


@pytest.mark.parametrize("size", range(2, 40))
def test_the_models_binary_tree_is_never_too_fast(size):
    assert terms("tree", 8, size, 1).inside >= 2 * (size.bit_length() - 1)


def test_a_ring_costs_what_the_formula_says():
    p, n, S = 32, 4, 10**6
    waited = 5e-6 + (2 * (p - 1) - 2 * (n - 1)) * 1e-6 + 2 * (n - 1) * 10e-6
    moved = 2 * (p - 1) / p * S / 10e9
    assert predict(S, p, n, "ring", FORMULAS).seconds == pytest.approx(waited + moved)


def test_a_pipelined_tree_costs_what_the_formula_says():
    p, n, S = 32, 4, 10**6
    waited = 5e-6 + 2 * ((p / n - 1) * 1e-6 + log2(n) * 10e-6)
    assert predict(S, p, n, "tree", FORMULAS).seconds == pytest.approx(waited + 2 * S / 10e9)


def test_recursive_doubling_costs_what_the_formula_says():
    alone = predict(1000, 16, 1, "recursive doubling", FORMULAS)
    assert alone.seconds == pytest.approx(5e-6 + 4 * (1e-6 + 1000 / 100e9))
    folded = predict(1000, 17, 1, "recursive doubling", FORMULAS)
    assert folded.seconds == pytest.approx(5e-6 + 6 * (1e-6 + 1000 / 100e9))


def test_the_ranks_of_a_host_share_its_network_in_recursive_doubling():
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
        best = predict(nbytes, 64, 8)
        assert best.seconds == min(
            predict(nbytes, 64, 8, algorithm).seconds for algorithm in ("ring", "tree")
        )


def test_a_single_rank_has_no_bandwidth():
    prediction = predict(1000, 1)
    assert (prediction.seconds, prediction.algbw_gbps, prediction.busbw_gbps) == (0, None, None)
    assert "over 1 rank on 1 host: 0 µs, busbw n/a" in str(prediction)


def test_a_prediction_reads_well():
    assert str(predict(2**26, 8, 1, "ring")) == (
        "simulated allreduce of 67,108,864 B over 8 ranks on 1 host: 373 µs, busbw 315 GB/s "
        "(ring, Simple; hosts of 8 H100, 8 x 400 Gb/s each; NCCL 2.30 tuner constants)"
    )


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


def test_what_cannot_be_predicted_is_refused():
    with pytest.raises(ValueError, match="at least one rank: found 4 ranks on 8 hosts"):
        predict(1, 4, 8)
    with pytest.raises(ValueError, match="found algorithm 'star'"):
        predict(1, 4, 1, "star")
    with pytest.raises(ValueError, match="protocol 'best' on 2 hosts"):
        predict(1, 16, 2, "nvls")
    with pytest.raises(ValueError, match="knows ring, recursive doubling, tree and nvls"):
        terms("star", 1, 4, 1)


def test_a_step_pays_only_for_what_is_not_hidden():
    open_ = predict_step(0.1, 10**9, 16, 4, P100_25GBE)
    half = predict_step(0.1, 10**9, 16, 4, P100_25GBE, overlap=0.1)
    assert open_.exposed_seconds == open_.communication_seconds
    assert half.exposed_seconds == pytest.approx(0.9 * open_.exposed_seconds)
    assert half.efficiency == pytest.approx(0.1 / (0.1 + half.exposed_seconds))
    assert half.speedup == pytest.approx(16 * half.efficiency)


def test_no_more_is_hidden_than_the_backward_pass_lasts():
    step = predict_step(0.03, 10**9, 16, 4, P100_25GBE, overlap=1.0)
    assert step.exposed_seconds == pytest.approx(step.communication_seconds - 0.02)


def test_fusion_saves_latencies():
    fused = predict_step(0.1, 10**7, 512, 64, tensors=200)
    single = predict_step(0.1, 10**7, 512, 64, tensors=200, fusion_nbytes=None)
    assert (fused.allreduces, single.allreduces) == (1, 200)
    assert fused.communication_seconds < single.communication_seconds / 20


def test_one_rank_scales_perfectly():
    step = predict_step(0.1, 10**9, 1)
    assert (step.efficiency, step.exposed_seconds) == (1.0, 0.0)


def test_a_step_says_that_it_is_simulated():
    step = predict_step(0.1, 10**9, 64, 8, overlap=0.5)
    assert step.simulated
    assert str(step).startswith("simulated step over 64 ranks on 8 hosts: ")
    assert "simulated" in repr(step)


def test_an_impossible_overlap_is_refused():
    with pytest.raises(ValueError, match=r"0 to 1: found 1\.5"):
        predict_step(0.1, 10**9, 4, overlap=1.5)


def test_fabrics_name_their_source():
    for fabric in (HGX_H100, P100_25GBE):
        assert "NCCL 2.30" in fabric.name
