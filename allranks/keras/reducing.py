"""Where an optimizer of Keras 3 reduces its gradients, with any backend. Runs in every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def set_untracked(optimizer: Any, **attributes: Any) -> None:
    # Not by setattr, because Keras tracks what is assigned to an optimizer.
    for name, value in attributes.items():
        object.__setattr__(optimizer, name, value)


class Reducing:
    """Methods that are added to the class of an optimizer, with any backend.

    ``apply`` reduces gradients before Keras clips them. With gradient accumulation,
    ``_clip_gradients`` reduces them once for all steps.
    """

    _allranks_filtered: Sequence[Any] = ()
    # Of the class of Keras that follows in the order of the bases.
    _trainable_variables: list[Any]
    gradient_accumulation_steps: int | None

    def _allranks_reduced(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        # fit(), apply_gradients(), stateless_apply() and the user's own loops all call this.
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)  # it may be an iterator
        if grads and not self.gradient_accumulation_steps:
            given = trainable_variables is not None
            variables = trainable_variables if given else self._trainable_variables
            grads = self._allranks_reduced(grads, variables)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        # Keras has left out the variables without a gradient.
        set_untracked(self, _allranks_filtered=list(trainable_variables))
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
