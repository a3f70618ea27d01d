"""A Keras 3 optimizer that applies the same gradients on every rank. Runs in every rank.

The optimizer itself becomes distributed: its class is exchanged for a subclass of the same name,
so that its state stays, and a saved model names a class that Keras knows and loads without us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from allranks.collectives import Average, ProcessSet, ReduceOp, Sum, global_process_set
from allranks.errors import UsageError
from allranks.tensorflow import keras_hooks, legacy_optimizer
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.gradients import Reduction, check_groups
from allranks.tensorflow.which_keras import is_legacy

_SETTINGS = "_allranks"


class Distributed:
    """What is added to an optimizer's class.

    Gradients are reduced where ``apply`` gets them, before they are clipped; with gradient
    accumulation once for all passes, where Keras clips their sum.
    """

    gradient_accumulation_steps: int | None
    _allranks: Reduction
    _allranks_factor: float

    def register_local_var(self, var: Any) -> None:
        """Lets the gradient of a variable stay as this rank computes it."""
        self._allranks.register_local([var])

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Updates the variables with the gradients of all ranks."""
        grads = list(grads)
        if not self.gradient_accumulation_steps and grads:
            known = self._trainable_variables if trainable_variables is None else None  # type: ignore[attr-defined]
            variables = list(trainable_variables) if known is None else known
            trainable_variables = None if known is not None else variables
            grads = self._allranks.reduce(grads, variables)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        if self.gradient_accumulation_steps:
            grads = self._allranks.reduce(list(grads), self._allranks_filtered)
            if self._allranks_factor != 1.0:
                grads = [
                    g if g is None else g * tf.cast(self._allranks_factor, g.dtype) for g in grads
                ]
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        object.__setattr__(self, "_allranks_filtered", list(trainable_variables))
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def build(self, variables: Any) -> Any:
        """Creates the state for these variables, or takes up what was pickled."""
        super().build(variables)  # type: ignore[misc]
        if self._allranks_state is not None:
            with tf.init_scope():  # Keras builds while it traces the first step
                self.set_weights(self._allranks_state)  # type: ignore[attr-defined]
            object.__setattr__(self, "_allranks_state", None)

    def __reduce__(self) -> Any:
        mine: Any = self
        plain = type(self).__mro__[2]
        state = [variable.numpy() for variable in mine.variables] if mine.built else None
        return _revived, (
            plain,
            mine.get_config(),
            state,
            self._allranks,
            self._allranks_factor,
        )

    _allranks_filtered: Sequence[Any] = ()
    _allranks_state: list[Any] | None = None


def distribute(optimizer: Any, reduction: Reduction, passes: int, summed: bool) -> Any:
    """Makes a Keras optimizer distributed, and returns it.

    Args:
        optimizer: of Keras, the third or the second; it may be built and have state.
        reduction: how gradients become the same on every rank.
        passes: gradients of so many steps are accumulated on each rank, then reduced and applied.
        summed: whether accumulated gradients count as their sum, not as their average.

    Raises:
        UsageError: it is no optimizer of Keras, or accumulates another number of steps.
    """
    if is_legacy(optimizer):
        return legacy_optimizer.distribute(optimizer, reduction, passes, summed)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            "DistributedOptimizer needs an optimizer of Keras or of tf.compat.v1.train: found "
            f"{type(optimizer).__name__}. Pass for instance keras.optimizers.Adam()."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        distribute(optimizer.inner_optimizer, reduction, passes, summed)
        keras_hooks.install(Distributed)
        return optimizer
    if passes > 1:
        _accumulate(optimizer, passes)
    if not isinstance(optimizer, Distributed):
        optimizer.__class__ = subclass(type(optimizer))
    object.__setattr__(optimizer, _SETTINGS, reduction)
    object.__setattr__(optimizer, "_allranks_factor", float(passes) if summed else 1.0)
    keras_hooks.install(Distributed)
    return optimizer


_subclasses: dict[type, type] = {}


def subclass(kind: type) -> type:
    """The distributed class of a class of optimizers."""
    made = _subclasses.get(kind)
    if made is None:
        ours = kind.__module__.startswith("keras.")
        module = "keras.optimizers" if ours else kind.__module__
        names = {"__module__": module, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__}
        made = _subclasses[kind] = type(kind.__name__, (Distributed, kind), names)
        package = keras.saving.get_registered_name(kind)
        if package != kind.__name__:
            # A class that the user has registered is saved under the name it was registered by.
            keras.saving.get_custom_objects()  # the registry exists
            _registered_names()[made] = package
    return made


def _registered_names() -> dict[type, str]:
    from keras.src.saving import object_registration

    names: dict[type, str] = object_registration.GLOBAL_CUSTOM_NAMES
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
        optimizer._accumulated_gradients = [
            optimizer.add_variable_from_reference(
                reference_variable=variable, name="gradient_accumulator"
            )
            for variable in optimizer._trainable_variables
        ]


def _revived(kind: Any, config: Any, state: Any, reduction: Reduction, factor: float) -> Any:
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
    """A Keras optimizer that reduces gradients over the ranks before it applies them.

    The optimizer that is passed is the one that is returned: it keeps its state, and a model that
    has been compiled with it trains distributed from now on.

    Args:
        optimizer: of Keras 3.
        name: for the timeline.
        device_dense: as in `allreduce`.
        device_sparse: as in `allreduce`.
        compression: as in `allreduce`.
        sparse_as_dense: whether ``tf.IndexedSlices`` are reduced as dense tensors.
        gradient_predivide_factor: with Average, divides before the sum and multiplies after it.
        op: Average or Sum.
        backward_passes_per_step: gradients of so many steps are accumulated on each rank, then
            reduced and applied once.
        average_aggregated_gradients: whether accumulated gradients are averaged; else summed.
        num_groups: accepted: all gradients move together.
        groups: accepted, as num_groups.
        process_set: whose ranks take part.
        scale_local_gradients: whether gradients of local variables are divided by the number of
            ranks.

    Raises:
        ValueError: a predivide factor with Sum.
        UsageError: it is no optimizer of Keras, or another op.
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
    check_groups(num_groups, groups)
    reduction = Reduction(
        op=op,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        scale_local=scale_local_gradients,
        name=name or f"Distributed{type(optimizer).__name__}",
    )
    summed = backward_passes_per_step > 1 and not average_aggregated_gradients
    return distribute(optimizer, reduction, backward_passes_per_step, summed)
