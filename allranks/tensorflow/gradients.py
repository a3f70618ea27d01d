"""The gradients of one step, reduced in one crossing to the ranks. Runs in every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from allranks import collectives
from allranks.collectives import Average, ProcessSet, ReduceOp, global_process_set
from allranks.collectives.ops.reducing import op_of
from allranks.collectives.world import process_sets
from allranks.errors import UsageError
from allranks.tensorflow import compression as compressions
from allranks.tensorflow import sparse
from allranks.tensorflow.compression import Compression
from allranks.tensorflow.crossing import Array, cross, like
from allranks.tensorflow.places import ANYWHERE, HOST


@dataclass
class Reduction:
    """How gradients become the same on every rank.

    Attributes:
        op: Average, Sum or Adasum; on dense tensors Min, Max and Product too.
        compression: packs dense gradients on their way.
        sparse_as_dense: whether ``tf.IndexedSlices`` are reduced as dense tensors.
        predivide: with Average, gradients are divided by this before they are added up and
            multiplied by it afterwards: half precision overflows later.
        process_set: whose ranks take part.
        scale_local: whether gradients of local variables are divided by the number of ranks, as
            those of the others are by averaging.
        name: for the timeline.
        device_dense: where dense gradients meet, as in `cross`.
        device_sparse: where the rows of ``tf.IndexedSlices`` meet.
        local: identities of the variables whose gradients stay as they are, and the variables.
    """

    op: ReduceOp = Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    process_set: ProcessSet = global_process_set
    scale_local: bool = True
    name: str | None = None
    device_dense: str = ANYWHERE
    device_sparse: str = ANYWHERE
    local: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.op = op_of("allreduce", self.op)
        compressions.check(self.compression)
        process_sets.check(self.process_set, self.name or "allreduce")
        if self.predivide != 1.0 and self.op is not Average:
            raise ValueError(
                "gradient_predivide_factor needs op=Average: "
                f"found op={self.op.name}. Leave one of them out."
            )

    def register_local(self, variables: Iterable[Any]) -> None:
        """Lets the gradients of these variables stay as each rank has computed them."""
        for variable in variables:
            self.local[identity(variable)] = variable

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """The gradients of all ranks as one: the same on every rank.

        Args:
            gradients: dense tensors, ``tf.IndexedSlices`` or None, the same variables' on every
                rank; the rows of slices may differ.
            variables: the gradients' variables, where some of them may be local.

        Returns:
            As many gradients, in the same order.

        Collective over the process set.
        """
        outs = list(gradients)
        shared = []
        size = self.process_set.size()
        for index, gradient in enumerate(outs):
            if gradient is None:
                continue
            if self.local and identity(variables[index]) in self.local:
                if self.scale_local:
                    outs[index] = divided(gradient, size)
                continue
            if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                outs[index] = tf.convert_to_tensor(gradient)
            shared.append(index)
        if not shared or (size == 1 and self.process_set.included()):
            return outs
        # Where some are missing the ranks compare which: another's of the same shape is not it.
        labels = [f"gradient {i}" for i in shared] if len(shared) < len(outs) else []
        crossed = self._cross([outs[i] for i in shared], labels)
        for index, made in zip(shared, crossed, strict=True):
            outs[index] = made
        return outs

    def _cross(self, gradients: list[Any], labels: list[str]) -> list[Any]:
        outs: list[Any] = list(gradients)
        rows = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        dense = [i for i in range(len(gradients)) if i not in rows]
        if rows:
            sparse.check(self.op)
        packed, contexts = [], []
        for index in dense:
            small, context = self.compression.compress(gradients[index])
            packed.append(small)
            contexts.append(context)
        parts = [p for i in rows for p in (gradients[i].values, gradients[i].indices)]

        shapes = sparse.dense_shapes([gradients[i] for i in rows])

        def move(*arrays: Array) -> list[Any]:
            made = self._reduced(arrays[: len(dense)], [labels[i] for i in dense if labels])
            if rows:
                end = len(dense) + len(parts)
                made = made + sparse.gather(
                    arrays[len(dense) : end],
                    arrays[end:],
                    self.process_set,
                    self.name,
                    [labels[i] for i in rows if labels],
                )
            return made

        specs = [like(tensor) for tensor in packed]
        specs += [like(part, open_rows=True) for part in parts]
        name = self.name or "allranks_gradients"
        devices = [self.device_dense] * len(packed) + [self.device_sparse] * len(parts)
        devices += [HOST] * len(shapes)
        made = cross(move, [*packed, *parts, *shapes], specs, name, self.process_set, devices)
        for place, (index, context) in enumerate(zip(dense, contexts, strict=True)):
            outs[index] = self.compression.decompress(made[place], context)
        for place, index in enumerate(rows):
            start = len(dense) + 2 * place
            outs[index] = sparse.rebuilt(
                gradients[index], made[start : start + 2], self.op, self.process_set
            )
        return outs

    def _reduced(self, dense: Sequence[Array], labels: Sequence[str]) -> list[Any]:
        if not dense:
            return []
        return collectives.grouped_allreduce(
            dense,
            self.op,
            process_set=self.process_set,
            labels=tuple(labels),
            prescale_factor=1.0 / self.predivide,
            postscale_factor=self.predivide,
            name=self.name,
        )


def identity(variable: Any) -> int:
    """The same for a Keras variable and the TensorFlow variable inside it."""
    inner = getattr(variable, "value", None)
    return id(variable if inner is None or callable(inner) else inner)


def divided(gradient: Any, size: int) -> Any:
    """A gradient divided by the number of ranks; slices stay slices."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


def check_groups(num_groups: int, groups: Any) -> None:
    """Says whether Horovod's grouping is well formed; all gradients of a step are one group here.

    Raises:
        UsageError: it is not.
    """
    if num_groups < 0 or (isinstance(groups, int) and groups < 0):
        raise UsageError(
            f"groups needs a number that is not negative: found {groups or num_groups}. "
            "Leave it out: all gradients of a step move together."
        )
    if groups is not None and not isinstance(groups, (int, list, tuple)):
        raise UsageError(
            "groups needs a number, or a list of lists of variables: "
            f"found {type(groups).__name__}. Leave it out: all gradients move together."
        )
