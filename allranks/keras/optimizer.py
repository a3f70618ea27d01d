"""A Keras 3 optimizer that applies the same gradients on every rank, on jax and torch.

The optimizer itself becomes distributed: its class is replaced by a subclass of the same name. So
it keeps its state, and a saved model refers to a class of Keras and loads without allranks.
Runs in every rank.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

from allranks import collectives
from allranks.collectives import Average, Min, ProcessSet, ReduceOp, Sum, global_process_set
from allranks.collectives.world.process_sets import group_of
from allranks.errors import UsageError
from allranks.keras.private_names import import_private, replace, require, subclass
from allranks.keras.versions import inner, keras

_NAME = "DistributedOptimizer"


def distribute(optimizer: Any, op: ReduceOp, process_set: ProcessSet, name: str | None) -> Any:
    """Makes an optimizer reduce its gradients over the ranks before it clips and applies them."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        distribute(optimizer.inner_optimizer, op, process_set, name)
        replace(keras.optimizers.LossScaleOptimizer, "check_finite", _on_all_ranks)
        return optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"DistributedOptimizer needs an optimizer of Keras: found {type(optimizer).__name__}. "
            "Pass for instance keras.optimizers.Adam()."
        )
    require(keras.optimizers.Optimizer, "apply", "_clip_gradients", "_backend_apply_gradients")
    if not isinstance(optimizer, Distributed):
        optimizer.__class__ = subclass(type(optimizer), Distributed)
    # Not by setattr, because Keras tracks what is assigned to an optimizer.
    settings = op, process_set, name or _NAME
    object.__setattr__(optimizer, "_allranks", settings)
    if keras.backend.backend() == "jax":
        trainer = import_private("keras.src.backend.jax.trainer", "JAXTrainer").JAXTrainer
        for function in ("make_train_function", "make_test_function"):
            replace(trainer, function, _raising_kept_errors(function.replace("make_", "")))
    return optimizer


class Distributed:
    """Methods that are added to the class of an optimizer.

    ``apply`` reduces gradients before Keras clips them. With gradient accumulation,
    ``_clip_gradients`` reduces them once for all steps.
    """

    _allranks: tuple[ReduceOp, ProcessSet, str]
    gradient_accumulation_steps: int | None

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        # fit(), apply_gradients(), stateless_apply() and the user's own loops all call this.
        grads = list(grads)
        if not self.gradient_accumulation_steps:
            grads = _reduced(grads, *self._allranks)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        if self.gradient_accumulation_steps:
            grads = _reduced(list(grads), *self._allranks)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        mine: Any = self
        plain = type(self).__bases__[1]  # the class of Keras, after Distributed
        state = [np.asarray(keras.ops.convert_to_numpy(one)) for one in mine.variables]
        return _unpickled, (plain, mine.get_config(), state, self._allranks)


def _unpickled(kind: Any, config: Any, state: list[Any], settings: Any) -> Any:
    made = distribute(kind.from_config(config), *settings)
    for variable, value in zip(made.variables, state, strict=False):
        variable.assign(value)
    return made


def _reduced(grads: list[Any], op: ReduceOp, process_set: ProcessSet, name: str) -> list[Any]:
    """Returns the gradients reduced over the ranks, in one call; None stays None."""
    # Raises on a rank outside the process set.
    group_of(process_set, name)
    shared = [index for index, gradient in enumerate(grads) if gradient is not None]
    if not shared or process_set.size() == 1:
        return grads
    # If some gradients are missing, another rank's gradient of the same shape may belong to
    # another variable. Then the ranks also compare the labels.
    labels = tuple(f"gradient {i}" for i in shared) if len(shared) < len(grads) else ()

    def reduce(*arrays: Any) -> Sequence[Any]:
        return collectives.grouped_allreduce(
            arrays, op, process_set=process_set, labels=labels, name=name
        )

    made = _call(reduce, [grads[index] for index in shared])
    outs = list(grads)
    for index, gradient in zip(shared, made, strict=True):
        outs[index] = gradient
    return outs


def _call(function: Callable[..., Sequence[Any]], tensors: list[Any]) -> Sequence[Any]:
    """Calls a function of arrays, also while jax traces: then each run of the program calls it."""
    if keras.backend.backend() == "torch":
        return function(*(tensor.detach() for tensor in tensors))
    import jax
    from jax.experimental import io_callback

    if not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return function(*tensors)

    def carried(*arrays: Any) -> list[Any]:
        # jax keeps only the text of an exception. The number in it finds the exception again.
        try:
            return list(function(*map(np.asarray, arrays)))
        except BaseException as error:
            number = next(_numbers)
            _kept[number] = error
            while len(_kept) > _MOST_KEPT:
                _kept.popitem(last=False)
            raise RuntimeError(f"{error} [allranks failure {number}]") from error

    specs = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]
    # Ordered, so that all ranks make their calls in the same order.
    made: Sequence[Any] = io_callback(carried, specs, *tensors, ordered=True)
    return made


# Limited, because errors that jax drops are never fetched.
_MOST_KEPT = 16
_numbers = count(1)
_kept: OrderedDict[int, BaseException] = OrderedDict()


def _raising_kept_errors(name: str) -> Callable[[Any], Any]:
    """Replaces a method of Keras' trainer that makes the function ``name`` of a step."""

    def wrapped(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_function(self: Any, *args: Any, **options: Any) -> None:
            before = getattr(self, name, None)
            make(self, *args, **options)
            step = getattr(self, name)
            if step is not before:
                setattr(self, name, _raising(step))

        return make_function

    return wrapped


def _raising(step: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            return step(*args)
        except Exception as error:
            found = re.search(r"\[allranks failure (\d+)\]", str(error))
            kept = _kept.pop(int(found.group(1)), None) if found else None
            if kept is None:
                raise
        raise kept

    return call


def _on_all_ranks(check: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a method of ``LossScaleOptimizer``: a step with an overflow is skipped on all ranks.

    Otherwise only the rank with the overflow skips it, and the others wait for its gradients.
    """

    def check_finite(self: Any, grads: Any) -> Any:
        mine, one = check(self, grads), inner(self)
        if not isinstance(one, Distributed) or one._allranks[1].size() == 1:
            return mine
        process_set = one._allranks[1]

        def agree(flag: Any) -> list[Any]:
            # The minimum of booleans: True only if the gradients of all ranks are finite.
            return [collectives.allreduce(flag, Min, process_set=process_set, name="check_finite")]

        return _call(agree, [keras.ops.convert_to_tensor(mine)])[0]

    return check_finite


def DistributedOptimizer(
    optimizer: Any,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Any:
    """Makes a Keras optimizer reduce gradients over the ranks before it applies them.

    The same optimizer is changed and returned. It keeps its state, and a model that has been
    compiled with it trains distributed from now on. With ``gradient_accumulation_steps``, the
    accumulated gradients are reduced once.

    Args:
        optimizer: an optimizer of Keras 3, with any backend; with TensorFlow also of Keras 2.
        op: Average or Sum.
        process_set: the ranks that train this model.
        name: for the timeline.

    Raises:
        UsageError: ``optimizer`` is not an optimizer of Keras, or ``op`` is another one.
    """
    if keras.backend.backend() == "tensorflow":
        from allranks.tensorflow import keras_optimizer

        return keras_optimizer.DistributedOptimizer(optimizer, name, op=op, process_set=process_set)
    if op not in (Average, Sum):
        found = getattr(op, "name", None) or repr(op)
        raise UsageError(
            f"DistributedOptimizer needs op=Average or op=Sum: found {found:.60}. "
            "To reduce gradients by another operation, call allreduce in a training loop."
        )
    return distribute(optimizer, op, process_set, name)
