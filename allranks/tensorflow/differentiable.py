"""An operation on tensors and the one that makes its gradient. Runs in every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from allranks.collectives import ProcessSet
from allranks.tensorflow.crossing import cross
from allranks.tensorflow.places import ANYWHERE

Function = Callable[..., Sequence[Any]]


def differentiable(
    move: Function,
    back: Callable[..., Any],
    tensors: Sequence[Any],
    specs: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    device: str = ANYWHERE,
) -> list[Any]:
    """The tensors that ``move`` makes; ``back`` makes the inputs' gradients from theirs.

    ``device`` is where the tensors meet, as in `cross`.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*inputs: Any) -> Any:
        return cross(move, inputs, specs, name, process_set, [device] * len(inputs)), back

    return list(run(*tensors))
