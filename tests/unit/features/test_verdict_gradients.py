"""Whether a cell computes gradients with jax, by its source and the functions that it calls."""

from __future__ import annotations

import sys
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from allranks.features.verdict.gradients import computes_gradients, updated_models, updated_names

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


UPDATES = [
    "w = w - 0.1 * allreduce(jax.grad(loss)(w))",
    "g = jax.grad(loss)(w)\n    g = jax.tree.map(allreduce, g)\n    w -= 0.1 * g",
    "g = gradient(w)\n    mean = allreduce(g)\n    total = total + g\n    w = w - 0.1 * mean",
    "l, g = f(w, x)\n    u, state = opt.update(allreduce(g), state)\n    w = apply_updates(w, u)",
    "w = whole(w)",
]


@pytest.mark.parametrize("step", UPDATES)
def test_a_variable_that_each_step_updates_with_reduced_gradients_is_found(jax, step):
    def whole(w):
        return w - allreduce(jax.grad(w))  # type: ignore[name-defined] # noqa: F821

    names = {**variables(jax), "whole": whole, **dict.fromkeys(("w", "g", "total", "state"), 1.0)}
    source = "def h(w):\n    g = jax.grad(loss)(w)\n"
    source += f"f = jax.jit(jax.value_and_grad(loss))\nfor step in range(9):\n    {step}"
    assert updated_names(source, names) == {"w"}
    assert updated_names(source, {}) == set()


def test_variables_that_a_loop_does_not_reduce_are_not_found(jax):
    names = {**variables(jax), "w": 1.0}
    # Weights that are averaged in each step, and trained apart.
    apart = "mean = jax.tree.map(allreduce, w)\n    w = w - gradient(w) - 0.1 * (w - mean)"
    assert updated_names(f"for step in range(9):\n    {apart}", names) == set()
    for step in ("w = w - jax.grad(loss)(w)", "g = allreduce(jax.grad(loss)(w))", "w = %timeit 1"):
        assert updated_names(f"for step in range(9):\n    {step}", names) == set()
    assert updated_names(UPDATES[0], names) == set()


def test_weights_that_a_function_averages_are_not_compared(jax):
    # Each rank trains apart between two averages: at the cell's end they differ by right.
    def allreduce(x):
        return x

    def mean_of(tree):
        return jax.tree.map(lambda one: allreduce(one) / 2, tree)

    def first(w, x):
        w = {name: allreduce(part) for name, part in w.items()}
        return w - jax.grad(x)(w)

    def inner(x, w):
        w = mean_of(w)
        return w - jax.grad(x)(w)

    @wraps(inner)
    def compiled(*_, **__):
        return None

    def gradients(x, w):
        g = jax.grad(x)(w)
        return w - mean_of(g)

    names = {**variables(jax), "w": 1.0, "x": 1.0, "mean_of": mean_of}
    names |= {"first": first, "inner": compiled, "gradients": gradients}
    inside = "def step(w):\n    w = allreduce(w)\n    return w - jax.grad(loss)(w)\n"
    for step in ("w = first(w, x)", "w = inner(x, w=w)", "w = inner(x, w)", "w = step(w)"):
        assert updated_names(f"{inside}for at in range(9):\n    {step}", names) == set(), step
    source = "for at in range(9):\n    w = gradients(x, w)"
    assert updated_names(source, names) == {"w"}
    source = "for at in range(9):\n    g = mean_of(jax.grad(x)(w))\n    w = w - g"
    assert updated_names(source, names) == {"w"}


def test_weights_beside_gradients_that_are_reduced_are_compared(jax):
    def allreduce(x):
        return x

    def mapped(w, g):
        return jax.tree.map(lambda p, q: p - 0.1 * allreduce(q), w, g)

    def zipped(w, g):
        return [p - allreduce(q) for p, q in zip(w, g, strict=True)]

    def twice(w, g):
        g = [allreduce(q) for q in g]
        return [p - q for _, (p, q) in enumerate(zip(w, g, strict=True))]

    def named(w, g):
        return {name: p - allreduce(g[name]) for name, p in w.items()}

    def keys(w, g):
        for name in w:
            w[name] = w[name] - allreduce(g[name])
        return w

    def averaged(w, g):
        return [allreduce(p) - q for p, q in zip(w, g, strict=True)]

    names = {**variables(jax), "w": 1.0}
    for step in (mapped, zipped, twice, named, keys, averaged):
        source = "for at in range(9):\n    g = jax.grad(loss)(w)\n    w = step(w, g)"
        found = set() if step is averaged else {"w"}
        assert updated_names(source, {**names, "step": step}) == found, step
    inside = "w = jax.tree.map(lambda p, q: p - allreduce(q), w, jax.grad(loss)(w))"
    assert updated_names(f"for at in range(9):\n    {inside}", names) == {"w"}
    inside = "g = jax.grad(loss)(w)\n    w = jax.tree.map(lambda p, q: allreduce(p) - q, w, g)"
    assert updated_names(f"for at in range(9):\n    {inside}", names) == set()


def test_the_numbers_of_updated_variables_are_taken(jax, monkeypatch):
    tree = SimpleNamespace(
        tree_flatten_with_path=lambda value: ([(key, value[key]) for key in value], None),
        keystr=lambda path: f"['{path}']",
    )
    monkeypatch.setitem(sys.modules, "jax.tree_util", tree)  # type: ignore[arg-type]
    weights = {"a": np.arange(200, dtype="f4"), "b": np.ones(3), "count": np.array(7)}
    names = {**variables(jax), "w": weights}
    (model,) = updated_models(f"for step in range(9):\n    {UPDATES[0]}", names)
    assert (model.names, [*model.nbytes]) == (("w['a']", "w['b']"), [800, 24])
    assert [*model.numbers] == [[float(at) for at in range(0, 200, 4)], [1.0] * 3]
