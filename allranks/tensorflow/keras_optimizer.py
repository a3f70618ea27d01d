"""A Keras optimizer that applies the same gradients on every rank. Runs in every rank.

The optimizer itself becomes distributed: its class is replaced by a subclass of the same name. So
it keeps its state, and a saved model refers to a class of Keras and loads without allranks.

Keras 2 has two kinds of optimizers, and each kind has one method that combines gradients before
they are clipped. Keras 3 has one kind; its ``apply`` clips gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allranks import collectives
from allranks.collectives import Average, Min, ProcessSet, ReduceOp, Sum, global_process_set
from allranks.collectives.world.process_sets import group_of
from allranks.errors import UsageError
from allranks.keras import missing_gradients
from allranks.keras.private_names import replace, require, subclass
from allranks.keras.reducing import Reducing, set_untracked
from allranks.keras.versions import build, inner, is_legacy
from allranks.tensorflow.compression import TensorCompression
from allranks.tensorflow.gradients import GradientReduction
from allranks.tensorflow.patches import after
from allranks.tensorflow.tf_bridge import Array, call_on_arrays

Pairs = list[tuple[Any, Any]]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = TensorCompression.none,
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
        op: Average or Sum.
        backward_passes_per_step: each rank adds up the gradients of this number of steps; then
            they are reduced and applied once.
        average_aggregated_gradients: whether accumulated gradients are averaged; else summed.
        process_set: this and the other arguments are as in
            `allranks.tensorflow.DistributedGradientTape`.

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
    # `passes` steps are accumulated before gradients are reduced and applied, as their sum or mean.
    if is_legacy(optimizer):
        _distribute_keras_2(inner(optimizer), reduction, passes, summed)
        return optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            "DistributedOptimizer needs an optimizer of Keras or of tf.compat.v1.train: found "
            f"{type(optimizer).__name__}. Pass for instance keras.optimizers.Adam()."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        distribute(optimizer.inner_optimizer, reduction, passes, summed)
        return optimizer
    require(keras.optimizers.Optimizer, "apply", "_clip_gradients", "_backend_apply_gradients")
    if passes > 1:
        _accumulate(optimizer, passes)
    if not isinstance(optimizer, Keras3Distributed):
        optimizer.__class__ = subclass(type(optimizer), Keras3Distributed)
    set_untracked(optimizer, _allranks=reduction, _allranks_factor=float(passes) if summed else 1.0)
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _on_all_ranks)
    _switch_off_xla()
    return optimizer


def _distribute_keras_2(
    optimizer: Any, reduction: GradientReduction, passes: int, summed: bool
) -> None:
    if not isinstance(optimizer, Keras2Distributed):
        older = hasattr(optimizer, "_create_all_weights")
        require(type(optimizer), "_aggregate_gradients" if older else "aggregate_gradients")
        optimizer.__class__ = subclass(type(optimizer), Keras2Distributed)
    sums = GradientSums(passes, summed) if passes > 1 else None
    set_untracked(optimizer, _allranks=reduction, _allranks_sums=sums)


class _Distributed:
    """Methods and attributes that are added to the class of an optimizer."""

    _allranks: GradientReduction

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradient of a variable from the reduction."""
        self._allranks.register_local([var])


class Keras3Distributed(_Distributed, Reducing):
    """An optimizer of Keras 3."""

    # Of the class of Keras that follows in the order of the bases.
    _iterations: Any

    _allranks_factor: float
    _allranks_state: list[Any] | None = None

    def _clip_gradients(self, grads: Any) -> Any:
        if self.gradient_accumulation_steps:
            # Keras calls this once, after the last pass, with the average of all passes. The count
            # of steps, which is changed later, waits for this branch because it is read here.
            with tf.control_dependencies([tf.identity(self._iterations.value)]):
                grads = self._allranks_reduced(list(grads), self._allranks_filtered)
            if self._allranks_factor != 1.0:
                grads = [
                    g if g is None else g * tf.cast(self._allranks_factor, g.dtype) for g in grads
                ]
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _allranks_reduced(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        # Raises on a rank outside the process set. In Horovod such a rank trains alone, unnoticed.
        group_of(self._allranks.process_set, self._allranks.name or "DistributedOptimizer")
        places = missing_gradients.places(variables, self._trainable_variables)
        return self._allranks.reduce(grads, variables, places)

    def build(self, variables: Any) -> Any:
        # Also restores the state that was pickled.
        super().build(variables)  # type: ignore[misc]
        if self._allranks_state is not None:
            with tf.init_scope():  # Keras calls build while it traces the first step
                self.set_weights(self._allranks_state)  # type: ignore[attr-defined]
            set_untracked(self, _allranks_state=None)

    def __reduce__(self) -> Any:
        mine: Any = self
        plain = type(self).__bases__[1]  # the class of Keras, after Keras3Distributed
        state = [variable.numpy() for variable in mine.variables] if mine.built else None
        settings = self._allranks, self._allranks_factor
        return _unpickled, (plain, mine.get_config(), state, *settings)


def _unpickled(
    kind: Any, config: Any, state: Any, reduction: GradientReduction, factor: float
) -> Any:
    # The config contains the number of accumulated steps.
    made = distribute(kind.from_config(config), reduction, 1, False)
    set_untracked(made, _allranks_factor=factor, _allranks_state=state)
    return made


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


def _on_all_ranks(check: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a method of ``LossScaleOptimizer``: a step with an overflow is skipped on all ranks.

    Otherwise only the rank with the overflow skips it, and the others wait for its gradients.
    """

    def check_finite(self: Any, grads: Any) -> Any:
        mine, one = check(self, grads), inner(self)
        if not isinstance(one, Keras3Distributed) or one._allranks.process_set.size() == 1:
            return mine
        process_set = one._allranks.process_set

        # The minimum of booleans: True only if the gradients of all ranks are finite.
        def agree(flag: Array) -> list[Any]:
            array = np.asarray(flag)
            return [collectives.allreduce(array, Min, process_set=process_set, name="check_finite")]

        outputs = [tf.TensorSpec([], tf.bool)]
        return call_on_arrays(agree, [mine], outputs, "check_finite", process_set)[0]

    return check_finite


def _switch_off_xla() -> None:
    """Ignores ``jit_compile`` in models with a distributed optimizer.

    XLA cannot compile calls of Python functions, which the collectives are.
    """
    require(keras.Model, "jit_compile")
    # A base class of keras.Model defines the property, and other models inherit it from there.
    trainer = next(kind for kind in keras.Model.__mro__ if "jit_compile" in vars(kind))
    asked: property = vars(trainer)["jit_compile"]
    if getattr(asked.fget, "__module__", "") == __name__:
        return  # replaced already

    def jit_compile(self: Any) -> Any:
        one = inner(getattr(self, "optimizer", None))
        return False if isinstance(one, Keras3Distributed) else asked.fget(self)  # type: ignore[misc]

    setattr(trainer, "jit_compile", property(jit_compile, asked.fset, doc=asked.__doc__))  # noqa: B010


class Keras2Distributed(_Distributed):
    """An optimizer of Keras 2."""

    _allranks_sums: GradientSums | None
    _allranks_variables: Sequence[Any] = ()

    def aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        # Optimizers since Keras 2.11 call this.
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        places = missing_gradients.places(variables, self._allranks_variables)
        reduced = self._allranks.reduce([gradient for gradient, _ in pairs], variables, places)
        return list(zip(reduced, variables, strict=True))

    def _aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        # `keras.optimizers.legacy` calls this, without the variables that have no gradient.
        return self.aggregate_gradients(grads_and_vars)

    def _internal_apply_gradients(self, grads_and_vars: Any) -> Any:
        # Of optimizers since Keras 2.11. If the reduction fails, the step is not counted either.
        pairs = list(grads_and_vars)
        with after([gradient for gradient, _ in pairs]):
            return super()._internal_apply_gradients(pairs)  # type: ignore[misc]

    def apply_gradients(self, grads_and_vars: Any, name: Any = None, **options: Any) -> Any:
        pairs = list(grads_and_vars)
        set_untracked(self, _allranks_variables=[variable for _, variable in pairs])
        try:
            return self._allranks_applied(pairs, name, options)
        finally:
            # Optimizers that scale the loss reduce before they call this.
            set_untracked(self, _allranks_variables=())

    def _allranks_applied(self, pairs: Pairs, name: Any, options: dict[str, Any]) -> Any:
        apply: Any = super().apply_gradients  # type: ignore[misc]
        if self._allranks_sums is None:
            return apply(pairs, name=name, **options)
        variables = [variable for _, variable in pairs]
        with tf.init_scope():
            build(self, variables)
        sums: GradientSums = self._allranks_sums
        sums.add([gradient for gradient, _ in pairs], variables)

        def due() -> Any:
            apply(zip(sums.take(variables), variables, strict=True), name=name, **options)
            return tf.constant(True)

        def wait() -> Any:
            self.iterations.assign_add(1)  # type: ignore[attr-defined]
            return tf.constant(False)

        # All ranks count the same steps, so all take the branch with the collective.
        tf.cond(sums.are_due(), due, wait)
        return self.iterations  # type: ignore[attr-defined]


class GradientSums:
    """This rank's gradients added over several steps; ``summed`` applies the sum, not the mean."""

    def __init__(self, passes: int, summed: bool) -> None:
        self._passes, self._factor = passes, 1.0 if summed else 1.0 / passes
        self._sums: dict[Any, Any] = {}
        """By the reference of the variable: some steps have no gradient of a variable."""
        self._count: Any = None

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        with tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
            for gradient, variable in zip(gradients, variables, strict=True):
                if gradient is not None and variable.ref() not in self._sums:
                    zeros = tf.zeros_like(variable)
                    self._sums[variable.ref()] = tf.Variable(zeros, trainable=False)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                self._sums[variable.ref()].assign_add(tf.convert_to_tensor(gradient))
        self._count.assign_add(1)

    def are_due(self) -> Any:
        # True after the last step of a series.
        return tf.equal(self._count % self._passes, 0)

    def take(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the sum of each variable, None for one that has never had a gradient."""
        totals = [self._sums.get(variable.ref()) for variable in variables]
        made = [t if t is None else t * tf.cast(self._factor, t.dtype) for t in totals]
        with tf.control_dependencies([one for one in made if one is not None]):
            for total in totals:
                if total is not None:
                    total.assign(tf.zeros_like(total))
        return made
