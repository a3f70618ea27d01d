"""The weights that optimizers have updated in a cell, sampled at steps 1, 2, 4, 8 and at the end.

torch's optimizers, Keras' `fit`, and Keras' optimizers in loops of the user are followed where they
end a step, so a model in a function is found, too. Steps of a function that TensorFlow has compiled
are counted only. A sample has 64 numbers of each array. Runs in every rank.
"""

from __future__ import annotations

import re
import sys
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from types import ModuleType
from typing import Any

from allranks.collectives.ops.sameness import differences
from allranks.errors import WeightsDiffer
from allranks.features.verdict.records import Model

MODULES = (
    "torch.optim.optimizer",
    "keras.src.callbacks.callback_list",
    "keras.src.optimizers.base_optimizer",
)
_SAMPLED = 64
#: Of more arrays, the first ones are compared.
_MOST_ARRAYS = 256
#: A cell may make an optimizer in each step.
_MOST_FOLLOWED = 16


class Followed:
    """An optimizer of torch, or a model of Keras, in one cell."""

    def __init__(self, of: Any, arrays: Callable[[Any], list[tuple[str, Any]]]) -> None:
        self.of, self._arrays = weakref.ref(of), arrays
        self.steps = 0
        self.counts_from: int | None = None
        """The steps that an optimizer had counted itself before."""
        self._checksums: dict[int, list[int]] = {}
        self._before: dict[int, list[int]] = {}
        self._settings = ""
        with suppress(Exception):
            self._settings = _settings_of(of)
        #: The last sample: at which step, and of each array its name, its bytes and the numbers.
        self._sampled: tuple[int, list[tuple[str, int, Any]]] = (0, [])

    def step(self) -> None:
        self.steps += 1
        if self.is_due:
            self.sample()

    def begin_step(self) -> None:
        """Samples the weights again: other code than the optimizer may have averaged them."""
        if self.steps and self.is_due:
            found = self._some_of_each({})
            if found:
                self._before[self.steps] = _checksums(found)

    @property
    def is_due(self) -> bool:
        """Whether the number of steps is 1, 2, 4, 8 and so on."""
        return self.steps & (self.steps - 1) == 0

    def compare(self) -> None:
        """Compares the weights of all ranks. Collective.

        Raises:
            WeightsDiffer: they differ.
        """
        of = self.of()
        pairs = self._arrays(of) if of is not None else []
        if not pairs or _is_captured(pairs):
            return
        # By their places: a library may number the same model otherwise on each rank.
        found = [
            re.sub(r"^\[(\d+)\]", lambda place: pairs[int(place[1])][0], line)
            for line in differences([array for _, array in pairs])
        ]
        if found:
            steps = f"step {self.steps}" if self.steps else "no step"
            raise WeightsDiffer(
                f"expected the same weights on all ranks after {steps} in this cell, found:\n  "
                + "\n  ".join(found)
                + "\nBroadcast the weights before the first step, reduce the gradients of all of "
                "them, and give the optimizers of all ranks the same settings."
            )

    def sample(self, names: Mapping[int, str] | None = None) -> None:
        found = self._some_of_each(names or {})
        if found is not None:
            self._sampled = self.steps, found
            self._checksums[self.steps] = _checksums(found)

    def _some_of_each(self, names: Mapping[int, str]) -> list[tuple[str, int, Any]] | None:
        of = self.of()
        pairs = self._arrays(of)[:_MOST_ARRAYS] if of is not None else None
        if pairs is None or _is_captured(pairs):
            return None
        return [(names.get(id(array), name), _nbytes(array), _some(array)) for name, array in pairs]

    def count(self) -> None:
        """Takes the steps that the optimizer has counted, as those in compiled functions."""
        of = self.of()
        if of is not None and self.counts_from is not None:
            self.steps = max(self.steps, _counted(of) - self.counts_from)

    def ended(self, names: Mapping[int, str]) -> Model:
        """Returns what the notebook compares. ``names`` are those of arrays, by their identity.

        Of a model that is gone, as of a function that has returned, it is the last sample.
        """
        with suppress(Exception):  # as of arrays that a library has deleted
            of = self.of()
            # The thread that is asked would wait for the GPU, which may wait for another rank.
            if of is not None and not _is_at_work(self._arrays(of)):
                self.sample(names)
        at, found = self._sampled
        return Model(
            names=[name for name, _, _ in found],
            nbytes=[nbytes for _, nbytes, _ in found],
            steps=self.steps,
            sampled=at,
            checksums=self._checksums,
            numbers=[[float(number) for number in some] for _, _, some in found],
            before=self._before,
            settings=self._settings,
        )


def _settings_of(of: Any) -> str:
    """Returns the settings of an optimizer, or of that of a model."""
    groups = getattr(of, "param_groups", None)
    if groups is None:
        settings = getattr(of, "optimizer", of).get_config()
        return str({**settings, "name": ""})
    plain = (bool, int, float, str, tuple)
    return str([[(k, v) for k, v in one.items() if isinstance(v, plain)] for one in groups])


def _checksums(found: Sequence[tuple[str, int, Any]]) -> list[int]:
    return [zlib.crc32(some.tobytes()) for _, _, some in found]


class Weights:
    """What is followed in one cell. With ``compares``, the ranks compare all of it."""

    def __init__(self, compares: bool = False) -> None:
        self.compares = compares
        self._followed: dict[int, Followed] = {}

    def began(self, of: Any, arrays: Callable[[Any], list[tuple[str, Any]]]) -> Followed:
        found = self._followed.get(id(of))
        # Another object may have the place of one that is gone.
        if found is None or found.of() is not of:
            if len(self._followed) >= _MOST_FOLLOWED:
                gone = [key for key, one in self._followed.items() if one.of() is None]
                for key in gone or [next(iter(self._followed))]:
                    del self._followed[key]
            found = self._followed[id(of)] = Followed(of, arrays)
            found.sample()
        return found

    def compare(self, of: Any) -> None:
        """Compares what an optimizer or a model has, if this is wanted after this step."""
        found = self._followed.get(id(of)) if self.compares else None
        if found is not None and found.is_due:
            found.compare()

    @property
    def steps(self) -> int:
        return max((one.steps for one in [*self._followed.values()]), default=0)

    def has_model_of(self, optimizer: Any) -> bool:
        """Whether a model is followed that this optimizer trains."""
        for one in [*self._followed.values()]:
            trained_by = getattr(one.of(), "optimizer", None)
            if optimizer in (trained_by, getattr(trained_by, "inner_optimizer", None)):
                return True
        return False

    def ended(self, variables: dict[str, Any]) -> list[Model]:
        for one in [*self._followed.values()]:
            with suppress(Exception):
                one.count()
        followed = [one for one in [*self._followed.values()] if one.steps]
        names = _names(variables) if followed else {}
        return [one.ended(names) for one in followed]


def install(module: ModuleType, weights: Callable[[], Weights | None]) -> None:
    """Follows the optimizers of a module; ``weights`` returns those of the cell that runs."""
    if module.__name__ == MODULES[0]:
        _install_torch(module, weights)
    elif module.__name__ == MODULES[1]:
        _install_keras(module, weights)
    else:
        _install_optimizers_of_keras(module, weights)


# A hook must not fail the training in which it is called, unless the user wants a comparison.


def _install_torch(module: ModuleType, weights: Callable[[], Weights | None]) -> None:
    # An optimizer that shards its state has another one for a part of the weights in its own step.
    outer: list[Any] = []

    def before(optimizer: Any, *_: Any) -> None:
        own = weights()
        # A step that has raised has left its optimizer there.
        if not outer or outer[0]() in (None, optimizer) or outer[1] is not own:
            outer[:] = weakref.ref(optimizer), own
            if own is not None:
                with suppress(Exception):
                    own.began(optimizer, _of_torch).begin_step()

    def after(optimizer: Any, *_: Any) -> None:
        if not outer or outer[0]() is not optimizer:
            return
        outer.clear()
        own = weights()
        if own is not None:
            with suppress(Exception):
                own.began(optimizer, _of_torch).step()
            own.compare(optimizer)

    # torch.compile leaves the hooks out of what it compiles.
    plainly = getattr(sys.modules.get("torch"), "_disable_dynamo", lambda hook: hook)
    module.register_optimizer_step_pre_hook(plainly(before))
    module.register_optimizer_step_post_hook(plainly(after))


def _of_torch(optimizer: Any) -> list[tuple[str, Any]]:
    arrays = [array for group in optimizer.param_groups for array in group["params"]]
    # Each rank has a part of a sharded array, which differs.
    if any(hasattr(one, "device_mesh") or hasattr(one, "_fsdp_flattened") for one in arrays):
        return []
    return [
        (f"array {at} {tuple(array.shape)}", array)
        for at, array in enumerate(arrays)
        if array.requires_grad and array.is_floating_point()
    ]


def _install_keras(module: ModuleType, weights: Callable[[], Weights | None]) -> None:
    kind: Any = module.CallbackList
    begins, ends = kind.on_train_begin, kind.on_train_batch_end

    def model_of(callbacks: Any) -> Any:
        model = vars(callbacks).get("_model")
        # There the property writes all weights back, in each step.
        return model if hasattr(model, "jax_state_sync") else getattr(callbacks, "model", None)

    def follow(callbacks: Any) -> Followed | None:
        own, model = weights(), model_of(callbacks)
        return own.began(model, _of_keras) if own is not None and model is not None else None

    @wraps(begins)
    def on_train_begin(self: Any, *args: Any, **options: Any) -> None:
        with suppress(Exception):
            follow(self)
        begins(self, *args, **options)

    @wraps(ends)
    def on_train_batch_end(self: Any, *args: Any, **options: Any) -> None:
        ends(self, *args, **options)
        with suppress(Exception):
            followed = follow(self)
            if followed is not None:
                followed.step()
        own = weights()
        if own is not None:
            own.compare(model_of(self))

    kind.on_train_begin, kind.on_train_batch_end = on_train_begin, on_train_batch_end


def _of_keras(model: Any) -> list[tuple[str, Any]]:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return _shared(optimizer, model.trainable_weights)


def _shared(optimizer: Any, weights: Sequence[Any]) -> list[tuple[str, Any]]:
    # Weights of local layers differ on purpose: the optimizer or a tape has been given them.
    local = {*getattr(getattr(optimizer, "_allranks", None), "local", {})}
    local |= {*getattr(sys.modules.get("allranks.tensorflow.gradients"), "LOCAL", {})}
    return [
        (getattr(one, "path", None) or one.name, one)
        for one in weights
        if not local or _identity(one) not in local
    ]


def _identity(variable: Any) -> int:
    inner = getattr(variable, "value", None)  # a method of TensorFlow's variables
    return id(variable if inner is None or callable(inner) else inner)


def _install_optimizers_of_keras(module: ModuleType, weights: Callable[[], Weights | None]) -> None:
    kind: Any = module.BaseOptimizer
    applies = kind.apply

    def follow(own: Weights, optimizer: Any, given: Sequence[Any]) -> None:
        # What it trains is known before its first step only from what it is given.
        first = [*given]
        found = own.began(optimizer, lambda one: _shared(one, one._trainable_variables or first))
        if found.counts_from is None:
            found.counts_from = _counted(optimizer)
        found.begin_step()
        first.clear()

    @wraps(applies)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        given = None if trainable_variables is None else list(trainable_variables)
        own, tensorflow = weights(), sys.modules.get("tensorflow")
        # `fit` has its model followed; on jax its variables, and the user's, are no state.
        if own is None or tensorflow is None or own.has_model_of(self) or _has_no_state():
            return applies(self, grads, given)
        with suppress(Exception), tensorflow.init_scope():
            follow(own, self, given or ())
        made = applies(self, grads, given)
        with suppress(Exception):
            if tensorflow.executing_eagerly():
                own.began(self, lambda one: _shared(one, one._trainable_variables)).step()
        return made

    kind.apply = apply


def _has_no_state() -> bool:
    scopes = sys.modules["keras.src.backend.common.stateless_scope"]
    return bool(scopes.in_stateless_scope())


def _counted(optimizer: Any) -> int:
    from keras import ops

    return int(ops.convert_to_numpy(optimizer.iterations))


def _names(variables: dict[str, Any]) -> dict[int, str]:
    """Returns the names of the arrays of torch's models that are variables of the cell."""
    found: dict[int, str] = {}
    torch = sys.modules.get("torch.nn.modules.module")
    if torch is None:
        return found
    for name, value in variables.items():
        # A cell may have added other names than texts. By the type: another object may act when it
        # is asked for an attribute, as a proxy of a server does.
        with suppress(Exception):
            if name[:1] != "_" and issubclass(type(value), torch.Module):
                for path, array in value.named_parameters():
                    found.setdefault(id(array), f"{name}.{path.removeprefix('module.')}")
    return found


def _is_captured(pairs: Sequence[tuple[str, Any]]) -> bool:
    """Whether a graph of CUDA records what is done now, which a copy to the host would break."""
    on_gpu = any(getattr(array, "is_cuda", False) for _, array in pairs)
    return on_gpu and bool(sys.modules["torch"].cuda.is_current_stream_capturing())


def _is_at_work(pairs: Sequence[tuple[str, Any]]) -> bool:
    devices = {array.device for _, array in pairs if getattr(array, "is_cuda", False)}
    return any(not sys.modules["torch"].cuda.current_stream(one).query() for one in devices)


def _nbytes(array: Any) -> int:
    if hasattr(array, "element_size"):
        return int(array.element_size() * array.nelement())
    size = 1
    for length in array.shape:
        size *= length
    return size * {"float64": 8, "float16": 2, "bfloat16": 2}.get(array.dtype, 4)


def _some(array: Any) -> Any:
    if hasattr(array, "detach"):
        flat = array.detach().reshape(-1)
        return flat[:: max(1, -(-flat.numel() // _SAMPLED))].double().cpu().numpy()
    import numpy as np
    from keras import ops

    flat = np.asarray(ops.convert_to_numpy(array)).reshape(-1)
    return np.array(flat[:: max(1, -(-flat.size // _SAMPLED))], np.float64)
