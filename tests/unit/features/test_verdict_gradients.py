"""Whether a cell computes gradients with jax, by its source and the functions that it calls."""

from __future__ import annotations

import sys
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from allranks.features.verdict.gradients import computes_gradients

STEPS = "for step in range(100):\n    w = update(w)\n    log(loss=allreduce(loss(w)))"


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of that name; none of its functions is called."""
    module: Any = ModuleType("jax")
    monkeypatch.setitem(sys.modules, "jax", module)
    for name in ("mpi4jax", "jax._src.distributed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found: ModuleType = module
    return found


def variables(jax: Any) -> dict[str, Any]:
    def loss(w):
        return w * w

    def gradient(w):
        return jax.grad(lambda one: loss(one))(w)

    def update(w):
        return w - gradient(w)

    @wraps(gradient)
    def compiled(w):
        return w

    return {"jax": jax, "loss": loss, "gradient": gradient, "update": update, "compiled": compiled}


def test_gradients_are_found_in_the_source_and_in_functions_that_it_calls(jax):
    names = variables(jax)
    assert computes_gradients("g = jax.value_and_grad(loss)(w)", {})
    assert computes_gradients(STEPS, names)
    assert computes_gradients(STEPS.replace("update", "compiled"), names)


def test_gradients_of_torch_beside_jax_do_not_count(jax):
    assert not computes_gradients("loss.backward()\nw -= 0.1 * w.grad", variables(jax))


def test_functions_that_are_not_called_do_not_count(jax):
    assert not computes_gradients("for x in data: total += allreduce(loss(x))", variables(jax))


def test_a_cell_without_jax_or_with_other_collectives_computes_none_alone(jax, monkeypatch):
    names = variables(jax)
    comm = type("Comm", (), {"__module__": "mpi4py.MPI"})()
    assert not computes_gradients(STEPS + "\ncomm.Barrier()", {**names, "comm": comm})
    started: Any = ModuleType("jax._src.distributed")
    started.global_state = SimpleNamespace(client=object())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jax._src.distributed", started)
        assert not computes_gradients(STEPS, names)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mpi4jax", ModuleType("mpi4jax"))
        assert not computes_gradients(STEPS, names)
    monkeypatch.delitem(sys.modules, "jax")
    assert not computes_gradients(STEPS, names)
