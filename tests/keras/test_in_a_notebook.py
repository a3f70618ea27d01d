"""Training with each backend of Keras in cells: a rank that dies, and the times in the panel."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.faults.notebook import Notebook
from tests.keras.test_backends import SETTINGS, needs_tensorflow

BEGIN = """
import os
import keras
import numpy as np
import allranks.keras as hvd

def train():
    global model
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    model.fit(np.ones((8, 4), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
    return keras.backend.backend()
"""
BACKENDS = ["jax", "torch", pytest.param("tensorflow", marks=needs_tensorflow)]


@pytest.fixture(scope="module", params=BACKENDS)
def training(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Notebook, str]]:
    """Two ranks that can train, and the name of their backend."""
    backend = request.param
    python = sys.executable if backend == "tensorflow" else request.getfixturevalue("python")
    environment = {**SETTINGS, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    with Notebook(tmp_path_factory.mktemp(backend), environment, python) as shared:
        started = shared.run("%distributed start -n 2 --preload keras", 200)
        assert started.status == "ok", started.text
        begun = shared.on_ranks(f"{BEGIN}kept = 10 * rank", timeout=200)
        assert begun.status == "ok", begun.text
        yield shared, backend
        shared.shutdown()
        shared.wait_for_no_children()


@pytest.mark.covers("timing", "Keras on tensorflow", "Keras on jax", "Keras on torch")
def test_the_panel_shows_the_time_of_the_calls_of_fit(training):
    ranks, backend = training
    cell = ranks.on_ranks("train()", "--view full", timeout=200)
    assert f"ranks 0–1 → '{backend}'" in cell.text
    assert "allreduce Distributed" in str(cell.displays)


@pytest.mark.replaces
@pytest.mark.covers("death", "Keras on tensorflow", "Keras on jax", "Keras on torch")
def test_a_rank_that_dies_in_fit_is_replaced_and_the_next_cell_trains(training):
    ranks, backend = training
    cell = ranks.on_ranks("if rank == 1: os._exit(5)\ntrain()", timeout=200)
    assert cell.error_name == "RankDied"
    assert "rank 0 was waiting" in cell.text
    assert "needs all of ranks 0–1: rank 1 ended with exit code 5" in cell.text
    weights = ranks.on_ranks(
        "rank == 1 or all(np.isfinite(one).all() for one in model.get_weights())", timeout=200
    )
    assert "ranks 0–1 → True" in weights.text
    following = ranks.on_ranks(f"{BEGIN}train(), globals().get('kept')", timeout=200)
    assert f"→ ('{backend}', 0)\n" in following.text
    assert f"→ ('{backend}', None)\n" in following.text
