"""A Keras 3 optimizer that applies the same gradients on every rank, on jax and torch.

The optimizer itself becomes distributed: its class is replaced by a subclass of the same name. So
it keeps its state, and a saved model refers to a class of Keras and loads without allranks.
Runs in every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from allranks import collectives
from allranks.collectives import Average, Min, ProcessSet, ReduceOp, Sum, global_process_set
from allranks.collectives.world.process_sets import group_of
from allranks.errors import UsageError
from allranks.keras import missing_gradients
from allranks.keras.private_names import replace, require, subclass
from allranks.keras.reducing import Reducing, set_untracked
from allranks.keras.versions import inner, keras

if TYPE_CHECKING:
    from allranks.keras.jax_steps import CompiledStep

_NAME = "DistributedOptimizer"


def distribute(optimizer: Any, op: ReduceOp, process_set: ProcessSet, name: str | None) -> Any:
    """Makes an optimizer reduce its gradients over the ranks before it clips and applies them."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        distribute(optimizer.inner_optimizer, op, process_set, name)
        replace(keras.optimizers.LossScaleOptimizer, "check_finite", _on_all_ranks)
        replace(keras.optimizers.LossScaleOptimizer, "stateless_apply", _keeping_scale)
        return optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"DistributedOptimizer needs an optimizer of Keras: found {type(optimizer).__name__}. "
            "Pass for instance keras.optimizers.Adam()."
        )
    require(keras.optimizers.Optimizer, "apply", "_clip_gradients", "_backend_apply_gradients")
    if not isinstance(optimizer, Distributed):
        optimizer.__class__ = subclass(type(optimizer), Distributed)
    set_untracked(optimizer, _allranks=(op, process_set, name or _NAME))
    if keras.backend.backend() == "jax":
        from allranks.keras import jax_steps

        jax_steps.install()
    return optimizer


class Distributed(Reducing):
    """An optimizer on jax or torch."""

    _allranks: tuple[ReduceOp, ProcessSet, str]
    _allranks_step: CompiledStep | None = None
    _allranks_failed: Any = None

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        # On jax, a step of fit calls this, and returns the variables to Keras.
        set_untracked(self, _allranks_step=_traced_step())
        given = trainable_variables, optimizer_variables
        try:
            made = super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]
            failed = self._allranks_failed
        finally:
            set_untracked(self, _allranks_step=None, _allranks_failed=None)
        return made if failed is None else _chosen(failed, given, made)

    def _clip_gradients(self, grads: Any) -> Any:
        if self.gradient_accumulation_steps:
            grads = self._allranks_reduced(list(grads), self._allranks_filtered)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _allranks_reduced(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        places = missing_gradients.places(variables, self._trainable_variables)
        made, failed = _reduced(grads, places, *self._allranks, self._allranks_step)
        set_untracked(self, _allranks_failed=failed)
        return made

    def __reduce__(self) -> Any:
        mine: Any = self
        plain = type(self).__bases__[1]  # the class of Keras, after Distributed
        state = [np.asarray(keras.ops.convert_to_numpy(one)) for one in mine.variables]
        return _unpickled, (plain, mine.get_config(), state, self._allranks)


def _chosen(failed: Any, given: Any, made: Any) -> Any:
    """Both lists of variables as they were given where a collective has failed."""

    def chosen(old: list[Any], new: list[Any]) -> list[Any]:
        before = map(keras.ops.convert_to_tensor, old)  # LossScaleOptimizer gives variables
        return [keras.ops.where(failed, *both) for both in zip(before, new, strict=True)]

    return chosen(given[0], made[0]), chosen(given[1], made[1])


def _unpickled(kind: Any, config: Any, state: list[Any], settings: Any) -> Any:
    made = distribute(kind.from_config(config), *settings)
    for variable, value in zip(made.variables, state, strict=False):
        variable.assign(value)
    return made


def _reduced(
    grads: list[Any],
    places: Sequence[int] | None,
    op: ReduceOp,
    process_set: ProcessSet,
    name: str,
    step: CompiledStep | None,
) -> tuple[list[Any], Any]:
    """Returns the gradients reduced over the ranks, in one call, and whether that has failed.

    None stays None. The second value is None where a failure raises an exception.
    """
    # Raises on a rank outside the process set.
    group_of(process_set, name)
    shared = [index for index, gradient in enumerate(grads) if gradient is not None]
    if not shared or process_set.size() == 1:
        return grads, None
    labels = missing_gradients.labels(shared, len(grads), places)

    def reduce(*arrays: Any) -> Sequence[Any]:
        return collectives.grouped_allreduce(
            arrays, op, process_set=process_set, labels=labels, name=name
        )

    made, failed = _call(reduce, [grads[index] for index in shared], step)
    outs = list(grads)
    for index, gradient in zip(shared, made, strict=True):
        outs[index] = gradient
    return outs, failed


def _traced_step() -> CompiledStep | None:
    if keras.backend.backend() != "jax":
        return None
    from allranks.keras.jax_steps import traced_step

    return traced_step.get()


def _call(
    function: Callable[..., Sequence[Any]], tensors: list[Any], step: CompiledStep | None
) -> tuple[Sequence[Any], Any]:
    """Calls a function of arrays, also while jax traces: then each run of the program calls it.

    In a step of ``fit`` on jax, the second value is whether the call has failed, and a failed
    call returns its arguments. Elsewhere a failure raises an exception.
    """
    if keras.backend.backend() == "torch":
        return function(*(tensor.detach() for tensor in tensors)), None
    import jax
    from jax.experimental import io_callback

    if not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return function(*tensors), None
    specs = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]

    def call(*arrays: Any) -> list[Any]:
        return list(function(*map(np.asarray, arrays)))

    # Ordered, so that all ranks make their calls in the same order.
    if step is None:
        # A program of the user. jax raises its own exception, which has the text of this one.
        return io_callback(call, specs, *tensors, ordered=True), None
    flag = jax.ShapeDtypeStruct((), np.bool_)
    *made, failed = io_callback(step.catching(call), [*specs, flag], *tensors, ordered=True)
    return made, failed


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

        made, _ = _call(agree, [keras.ops.convert_to_tensor(mine)], _traced_step())
        return made[0]

    return check_finite


def _keeping_scale(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a method of ``LossScaleOptimizer``: a step that fails on jax changes no scale.

    Otherwise the scales of ranks that fail in different steps would differ from then on.
    """

    def stateless_apply(
        self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        made, step = apply(self, optimizer_variables, grads, trainable_variables), _traced_step()
        one = inner(self)
        if step is None or not isinstance(one, Distributed) or one._allranks[1].size() == 1:
            return made
        return _chosen(step.has_failed(), (trainable_variables, optimizer_variables), made)

    return stateless_apply


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
