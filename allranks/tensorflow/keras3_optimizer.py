"""A Keras 3 optimizer that applies the same gradients on every rank. Runs in every rank.

The optimizer itself becomes distributed: its class is replaced by a subclass of the same name. So
it keeps its state, and a saved model refers to a class of Keras and loads without allranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.collectives import Average, Min, ProcessSet, ReduceOp, Sum, global_process_set
from allranks.collectives.world.process_sets import group_of
from allranks.errors import UsageError
from allranks.tensorflow import keras2_optimizer
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.gradients import GradientReduction
from allranks.tensorflow.keras_version import is_legacy
from allranks.tensorflow.private_api import import_private, require
from allranks.tensorflow.tf_bridge import Array, call_on_arrays

_PATCHED = "_allranks_patched"


class Keras3Distributed:
    """Methods that are added to an optimizer's class.

    ``apply`` reduces gradients before Keras clips them. With gradient accumulation,
    ``_clip_gradients`` reduces them once for all passes.
    """

    gradient_accumulation_steps: int | None
    _allranks: GradientReduction
    _allranks_factor: float
    _allranks_filtered: Sequence[Any] = ()
    _allranks_state: list[Any] | None = None

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradient of a variable from the reduction."""
        self._allranks.register_local([var])

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Updates the variables with the gradients of all ranks."""
        # fit(), apply_gradients() and the user's own loops all call this.
        grads = list(grads)
        if not self.gradient_accumulation_steps and grads:
            known = self._trainable_variables if trainable_variables is None else None  # type: ignore[attr-defined]
            variables = list(trainable_variables) if known is None else known
            trainable_variables = None if known is not None else variables
            grads = self._allranks_reduced(grads, variables)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        if self.gradient_accumulation_steps:
            # Keras calls this once, after the last pass, with the average of all passes.
            grads = self._allranks_reduced(list(grads), self._allranks_filtered)
            if self._allranks_factor != 1.0:
                grads = [
                    g if g is None else g * tf.cast(self._allranks_factor, g.dtype) for g in grads
                ]
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _allranks_reduced(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        # Raises on a rank outside the process set. In Horovod such a rank trains alone, unnoticed.
        group_of(self._allranks.process_set, self._allranks.name or "DistributedOptimizer")
        return self._allranks.reduce(grads, variables)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        # Not by setattr, because Keras tracks variables that are assigned to an optimizer.
        object.__setattr__(self, "_allranks_filtered", list(trainable_variables))
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def build(self, variables: Any) -> Any:
        """Creates the state for these variables, or restores the state that was pickled."""
        super().build(variables)  # type: ignore[misc]
        if self._allranks_state is not None:
            with tf.init_scope():  # Keras calls build while it traces the first step
                self.set_weights(self._allranks_state)  # type: ignore[attr-defined]
            object.__setattr__(self, "_allranks_state", None)

    def __reduce__(self) -> Any:
        mine: Any = self
        plain = type(self).__mro__[2]  # after the subclass and Keras3Distributed
        state = [variable.numpy() for variable in mine.variables] if mine.built else None
        return _unpickled, (
            plain,
            mine.get_config(),
            state,
            self._allranks,
            self._allranks_factor,
        )


def _unpickled(
    kind: Any, config: Any, state: Any, reduction: GradientReduction, factor: float
) -> Any:
    # The config contains the number of accumulated steps.
    made = distribute(kind.from_config(config), reduction, 1, False)
    object.__setattr__(made, "_allranks_factor", factor)
    object.__setattr__(made, "_allranks_state", state)
    return made


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a Keras optimizer reduce gradients over the ranks before it applies them.

    The same optimizer is changed and returned. It keeps its state, and a model that has been
    compiled with it trains distributed from now on.

    Args:
        optimizer: an optimizer of Keras 3 or Keras 2.
        name: for the timeline.
        device_dense: as in `allreduce`.
        device_sparse: as in `allreduce`.
        compression: as in `allreduce`.
        sparse_as_dense: whether ``tf.IndexedSlices`` are reduced as dense tensors.
        gradient_predivide_factor: with Average, divides before the sum and multiplies after it.
        op: Average or Sum.
        backward_passes_per_step: each rank adds up the gradients of this number of steps; then
            they are reduced and applied once.
        average_aggregated_gradients: whether accumulated gradients are averaged; else summed.
        num_groups: ignored, because all gradients move together.
        groups: ignored, like num_groups.
        process_set: the ranks that take part.
        scale_local_gradients: whether gradients of local variables are divided by the number of
            ranks.

    Raises:
        ValueError: a predivide factor with Sum.
        UsageError: ``optimizer`` is not an optimizer of Keras, or ``op`` is another one.
    """
    if op not in (Average, Sum):
        found = getattr(op, "name", None) or repr(op)
        raise UsageError(
            f"DistributedOptimizer needs op=Average or op=Sum: found {found:.60}. "
            "DistributedGradientTape takes the others."
        )
    if not hasattr(backward_passes_per_step, "__index__") or backward_passes_per_step < 1:
        raise UsageError(
            "backward_passes_per_step needs a whole number, 1 or more: found "
            f"{backward_passes_per_step!r:.60}. Leave it out to reduce in every step."
        )
    reduction = GradientReduction(
        op=op,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        name=name or f"Distributed{type(optimizer).__name__}",
    )
    summed = backward_passes_per_step > 1 and not average_aggregated_gradients
    return distribute(optimizer, reduction, backward_passes_per_step, summed)


def distribute(optimizer: Any, reduction: GradientReduction, passes: int, summed: bool) -> Any:
    """Makes a Keras optimizer distributed, and returns it.

    Args:
        optimizer: of Keras 3 or Keras 2; it may be built and have state.
        reduction: the settings.
        passes: the number of accumulated steps before gradients are reduced and applied.
        summed: whether to use the sum of accumulated gradients, not their average.

    Raises:
        UsageError: ``optimizer`` is not an optimizer of Keras, or accumulates another number of
            steps.
        MissingDependency: this Keras applies gradients by other methods.
    """
    if is_legacy(optimizer):
        return keras2_optimizer.distribute(optimizer, reduction, passes, summed)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            "DistributedOptimizer needs an optimizer of Keras or of tf.compat.v1.train: found "
            f"{type(optimizer).__name__}. Pass for instance keras.optimizers.Adam()."
        )
    require(keras.optimizers.Optimizer, "apply", "_clip_gradients", "_backend_apply_gradients")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        distribute(optimizer.inner_optimizer, reduction, passes, summed)
    else:
        if passes > 1:
            _accumulate(optimizer, passes)
        if not isinstance(optimizer, Keras3Distributed):
            optimizer.__class__ = _subclass(type(optimizer))
        object.__setattr__(optimizer, "_allranks", reduction)
        object.__setattr__(optimizer, "_allranks_factor", float(passes) if summed else 1.0)
    _share_overflows()
    _switch_off_xla()
    return optimizer


_subclasses: dict[type, type] = {}


def _subclass(kind: type) -> type:
    made = _subclasses.get(kind)
    if made is None:
        ours = kind.__module__.startswith("keras.")
        module = "keras.optimizers" if ours else kind.__module__
        names = {"__module__": module, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__}
        made = _subclasses[kind] = type(kind.__name__, (Keras3Distributed, kind), names)
        package = keras.saving.get_registered_name(kind)
        if package != kind.__name__:
            # A class that the user has registered is saved under its registered name.
            keras.saving.get_custom_objects()  # creates the registry
            _registered_names()[made] = package
    return made


def _registered_names() -> dict[type, str]:
    registry = import_private("keras.src.saving.object_registration", "GLOBAL_CUSTOM_NAMES")
    names: dict[type, str] = registry.GLOBAL_CUSTOM_NAMES
    return names


def _accumulate(optimizer: Any, passes: int) -> None:
    before = optimizer.gradient_accumulation_steps
    if before and before != passes:
        raise UsageError(
            f"backward_passes_per_step={passes} and gradient_accumulation_steps={before} "
            "contradict each other. Pass one of them."
        )
    if before:
        return
    optimizer.gradient_accumulation_steps = passes
    if optimizer.built:
        # Keras creates these when it builds the optimizer.
        optimizer._accumulated_gradients = [
            optimizer.add_variable_from_reference(
                reference_variable=variable, name="gradient_accumulator"
            )
            for variable in optimizer._trainable_variables
        ]


def _share_overflows() -> None:
    """Skips a step on all ranks if one rank's gradients overflow in mixed precision.

    Otherwise only that rank skips the step, and the others wait for its gradients. Optimizers that
    are not distributed are not affected.
    """
    scaling = keras.optimizers.LossScaleOptimizer
    require(scaling, "check_finite")
    check = scaling.check_finite
    if hasattr(check, _PATCHED):
        return

    @functools.wraps(check)
    def check_finite(self: Any, grads: Any) -> Any:
        mine = check(self, grads)
        inner = self.inner_optimizer
        if not isinstance(inner, Keras3Distributed):
            return mine
        process_set = inner._allranks.process_set
        if process_set.size() == 1:
            return mine

        # The minimum of booleans: True only if the gradients of all ranks are finite.
        def agree(flag: Array) -> list[Any]:
            return [
                collectives.allreduce(
                    np.asarray(flag), Min, process_set=process_set, name="check_finite"
                )
            ]

        outputs = [tf.TensorSpec([], tf.bool)]
        return call_on_arrays(agree, [mine], outputs, "check_finite", process_set)[0]

    setattr(check_finite, _PATCHED, True)
    scaling.check_finite = check_finite


def _switch_off_xla() -> None:
    """Ignores ``jit_compile`` in models with a distributed optimizer.

    XLA cannot compile calls of Python functions, which the collectives are.
    """
    require(keras.Model, "jit_compile")
    # A base class of keras.Model defines the property, and other models inherit it from there.
    trainer = next(kind for kind in keras.Model.__mro__ if "jit_compile" in vars(kind))
    asked: property = vars(trainer)["jit_compile"]
    if hasattr(asked.fget, _PATCHED):
        return

    def jit_compile(self: Any) -> Any:
        optimizer = getattr(self, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return False if isinstance(inner, Keras3Distributed) else asked.fget(self)  # type: ignore[misc]

    setattr(jit_compile, _PATCHED, True)
    setattr(trainer, "jit_compile", property(jit_compile, asked.fset, doc=asked.__doc__))  # noqa: B010
