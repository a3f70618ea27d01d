"""The weights of optimizers are sampled at steps 1, 2, 4, 8 and at the end."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from allranks.features.verdict.weights import Weights, install


class Tensor:
    """As much of a tensor as is looked at."""

    requires_grad = True

    def __init__(self, numbers):
        self.numbers = np.array(numbers, np.float64)
        self.shape = self.numbers.shape

    def is_floating_point(self):
        return True

    def element_size(self):
        return self.numbers.itemsize

    def nelement(self):
        return self.numbers.size

    numel = nelement

    def detach(self):
        return self

    cpu = double = detach

    def numpy(self):
        return self.numbers.copy()

    def reshape(self, _):
        return Tensor(self.numbers.reshape(-1))

    def __getitem__(self, part):
        return Tensor(self.numbers[part])


class Optimizer:
    def __init__(self, *tensors):
        self.param_groups = [{"params": tensors}]


def hooks_of(weights):
    """What torch calls before and after each step."""
    found = {}
    module = SimpleNamespace(
        __name__="torch.optim.optimizer",
        register_optimizer_step_pre_hook=lambda hook: found.update(before=hook),
        register_optimizer_step_post_hook=lambda hook: found.update(after=hook),
    )
    install(module, lambda: weights)
    return found["before"], found["after"]


def train(weights, optimizer, steps):
    before, after = hooks_of(weights)
    for _ in range(steps):
        before(optimizer, (), {})
        for tensor in optimizer.param_groups[0]["params"]:
            tensor.numbers += 1
        after(optimizer, (), {})


def test_a_model_is_sampled_before_its_first_step_at_doubling_steps_and_at_the_end():
    weights, optimizer = Weights(), Optimizer(Tensor([0.0, 5.0]), Tensor(np.zeros(1000)))
    train(weights, optimizer, 11)
    (model,) = weights.ended({"net": optimizer, 7: "no name", "_": optimizer})
    assert list(model.checksums) == [0, 1, 2, 4, 8, 11]
    assert (model.steps, model.sampled) == (11, 11)
    assert model.names == ["array 0 (2,)", "array 1 (1000,)"]
    assert model.nbytes == [16, 8000]
    assert model.numbers[0] == [11.0, 16.0]
    assert len(model.numbers[1]) <= 64


def test_weights_that_change_between_two_steps_are_sampled_again():
    weights, tensor = Weights(), Tensor([0.0])
    optimizer = Optimizer(tensor)
    train(weights, optimizer, 4)
    (model,) = weights.ended({})
    assert [*model.before] == [1, 2]
    assert all(model.before[step] == model.checksums[step] for step in model.before)
    tensor.numbers += 1
    train(weights, optimizer, 1)
    (model,) = weights.ended({})
    assert model.before[4] != model.checksums[4]


def test_of_a_model_that_is_gone_the_last_sample_is_kept():
    weights = Weights()
    train(weights, Optimizer(Tensor([1.0])), 11)
    (model,) = weights.ended({})
    assert (model.steps, model.sampled, model.numbers) == (11, 8, [[9.0]])


def test_arrays_have_the_names_of_the_cells_models(monkeypatch):
    class Module:
        def named_parameters(self):
            return [("module.0.weight", tensor)]

    class Proxy:
        """As of a server: to ask it for anything takes a while."""

        def __getattribute__(self, name):
            asked.append(name)
            raise TimeoutError

    asked: list[str] = []
    torch = SimpleNamespace(Module=Module)
    monkeypatch.setitem(sys.modules, "torch.nn.modules.module", torch)  # type: ignore[arg-type]
    weights, tensor = Weights(), Tensor([1.0])
    optimizer = Optimizer(tensor)
    train(weights, optimizer, 1)
    assert weights.ended({"far": Proxy(), "net": Module()})[0].names == ["net.0.weight"]
    assert asked == []


def test_an_optimizer_that_steps_within_the_step_of_another_is_not_followed():
    weights = Weights()
    whole = Optimizer(Tensor([1.0]), Tensor([2.0]))
    part = Optimizer(Tensor([1.0]))
    before, after = hooks_of(weights)
    for step in range(3):
        before(whole, (), {})
        if step != 1:  # which raises
            before(part, (), {})
            after(part, (), {})
            after(whole, (), {})
    (model,) = weights.ended({})
    assert (model.steps, len(model.names)) == (2, 2)


def test_of_many_optimizers_in_a_cell_the_last_ones_are_followed():
    weights = Weights()
    kept = [Optimizer(Tensor([float(number)])) for number in range(40)]
    for optimizer in kept:
        train(weights, optimizer, 1)
    assert [model.numbers for model in weights.ended({})] == [[[n + 1.0]] for n in range(24, 40)]


def test_sharded_arrays_are_not_compared_and_strange_ones_fail_no_training():
    sharded, strange = Tensor([1.0]), Tensor([1.0])
    sharded.device_mesh = "a mesh"
    strange.reshape = None
    for tensor in (sharded, strange):
        weights, optimizer = Weights(), Optimizer(tensor)
        train(weights, optimizer, 2)
        assert [one.names for one in weights.ended({})] in ([[]], [])


# ---- Keras' optimizers in loops of the user


class Variable:
    dtype = "float64"

    def __init__(self, path):
        self.path, self.numbers = path, np.zeros(3)
        self.shape = self.numbers.shape

    def __array__(self, dtype=None, copy=None):
        return self.numbers.copy()


class KerasOptimizer:
    def __init__(self):
        self.iterations, self._trainable_variables = np.array(5), []

    def apply(self, grads, trainable_variables=None):
        self._trainable_variables = trainable_variables
        self.step()

    def step(self):
        self.iterations += 1
        for one in self._trainable_variables:
            one.numbers += 1


@pytest.fixture
def tensorflow(monkeypatch):
    """As much of TensorFlow and Keras as is asked; ``eager`` is false while it compiles."""
    found = SimpleNamespace(eager=True, stateless=False, init_scope=nullcontext)
    found.executing_eagerly = lambda: found.eager
    scope = SimpleNamespace(in_stateless_scope=lambda: found.stateless)
    keras = SimpleNamespace(ops=SimpleNamespace(convert_to_numpy=np.asarray))
    for name, module in {
        "tensorflow": found,
        "keras": keras,
        "keras.src.backend.common.stateless_scope": scope,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    monkeypatch.setattr(KerasOptimizer, "apply", KerasOptimizer.apply)
    return found


def followed_by(weights):
    module = SimpleNamespace(
        __name__="keras.src.optimizers.base_optimizer", BaseOptimizer=KerasOptimizer
    )
    install(module, lambda: weights)
    return KerasOptimizer(), [Variable("dense/kernel"), Variable("dense/bias")]


def test_an_optimizer_of_keras_is_followed_in_a_loop_of_the_user(tensorflow):
    weights = Weights()
    optimizer, variables = followed_by(weights)
    for _ in range(9):
        optimizer.apply([], iter(variables))
    (model,) = weights.ended({})
    assert model.names == ["dense/kernel", "dense/bias"]
    assert list(model.checksums) == [0, 1, 2, 4, 8, 9]
    assert (model.steps, model.sampled, model.numbers[0]) == (9, 9, [9.0, 9.0, 9.0])


def test_steps_of_a_compiled_function_are_those_that_the_optimizer_has_counted(tensorflow):
    weights = Weights()
    optimizer, variables = followed_by(weights)
    tensorflow.eager = False
    optimizer.apply([], variables)
    for _ in range(29):
        optimizer.step()
    (model,) = weights.ended({})
    assert (model.steps, list(model.checksums), model.numbers[0]) == (30, [0, 30], [30.0] * 3)


def test_an_optimizer_is_not_followed_beside_its_model_or_where_variables_are_no_state(tensorflow):
    weights = Weights()
    optimizer, variables = followed_by(weights)
    model = KerasModel(optimizer)
    weights.began(model, lambda _: [])
    optimizer.apply([], variables)
    tensorflow.stateless = True
    KerasOptimizer().apply([], variables)
    assert [one.names for one in weights.ended({})] == []


class KerasModel:
    def __init__(self, optimizer):
        self.optimizer = SimpleNamespace(inner_optimizer=optimizer)
