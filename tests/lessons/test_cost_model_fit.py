"""A fit finds the α and β of measurements, and leaves unmeasured links unknown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.lessons.model import Measurement, fit, predict
from allranks.lessons.model.costs import terms
from allranks.lessons.model.fitting import nonnegative_least_squares

SIZES = [4, 2**10, 2**16, 2**20, 2**24, 2**26]


def measure(alpha, bandwidth, ranks, algorithm="ring", noise=0.0):
    random = np.random.default_rng(1)
    for nbytes in SIZES:
        counts = terms(algorithm, nbytes, ranks, 1)
        seconds = counts.inside * alpha + counts.inside_nbytes / bandwidth
        yield nbytes, seconds * (1 + noise * random.uniform(-1, 1))


@settings(max_examples=60)
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


def test_one_fit_predicts_other_algorithms_and_sizes():
    fabric = fit(measure(2e-6, 5e9, 4), 4)
    expected = 3 * (2e-6 + 10**6 / 5e9)
    assert predict(10**6, 8, 1, "recursive doubling", fabric).seconds == pytest.approx(expected)


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


def test_a_network_that_was_never_measured_is_not_guessed():
    fabric = fit(measure(2e-6, 5e9, 4), 4)
    with pytest.raises(ValueError, match="needs the latency between hosts: this cluster, fitted"):
        predict(100, 8, 2, "ring", fabric)


def test_latencies_inside_a_host_are_not_guessed_from_one_rank_a_host():
    fabric = fit([(4, 1e-4), (10**7, 1e-2)], ranks=4, hosts=4)
    assert predict(4, 4, 4, "ring", fabric).seconds == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="needs the latency inside a host"):
        predict(4, 16, 4, "ring", fabric)


def test_bytes_that_cost_nothing_measurable_are_free_and_the_error_says_so():
    fabric = fit([(64, 2e-3), (2**20, 1e-3)], ranks=4)
    alone = predict(64, 4, 1, "ring", fabric).seconds
    assert predict(2**20, 4, 1, "ring", fabric).seconds == pytest.approx(alone)
    assert fabric.relative_error > 0.3


def test_a_fit_names_its_measurements_and_its_error():
    fabric = fit(measure(2e-6, 5e9, 4), 4, name="two desktops")
    assert fabric.name == "two desktops, fitted to 6 measurements within 0.0%"
    assert "two desktops" in str(predict(4, 4, 1, "best", fabric))


def test_too_little_to_fit_is_refused():
    with pytest.raises(ValueError, match=r"found 1 measurements\. Time a small and a large"):
        fit([(4, 1e-6)], ranks=4)
    with pytest.raises(ValueError, match="over two or more ranks"):
        fit([(4, 1e-6), (400, 1e-6)], ranks=1)
    with pytest.raises(ValueError, match=r"pairs .* need the number of ranks"):
        fit([(4, 1e-6), (400, 1e-6)])


def test_least_squares_never_goes_below_zero():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    target = np.array([3.0, 2.0, 1.0])
    np.testing.assert_allclose(nonnegative_least_squares(matrix, target), [2.0, 0.0])


@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 4))
def test_no_other_nonnegative_vector_is_better(seed, columns):
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(8, columns)), random.normal(size=8)
    found = nonnegative_least_squares(matrix, target)
    residual = np.linalg.norm(matrix @ found - target)
    assert (found >= 0).all()
    for other in np.abs(found + random.normal(scale=0.1, size=(50, columns))):
        assert residual <= np.linalg.norm(matrix @ other - target) + 1e-9
