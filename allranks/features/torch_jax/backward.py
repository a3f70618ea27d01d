"""The warning of a backward pass that goes through a collective, as torch's own groups give it.

This module imports torch, so it is imported only once a cell has imported torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch


def warning(function: Callable[..., Any], title: str) -> Callable[..., Any]:
    """A method of a process group that replaces the values of its first argument's tensors.

    Autograd does not see this: the gradients are those of the values before the call.
    """

    @wraps(function)
    def method(group: Any, tensors: Any, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.register_hook(partial(_warn, title))
        return function(group, tensors, *args, **options)

    return method


def _warn(title: str, gradient: Any) -> None:
    warnings.warn(
        f"torch.distributed.{title} has no gradient: a backward pass goes through its tensor as if "
        "there were no such call, so the gradient is not that of the result. Type "
        f"torch.distributed.nn.functional.{title}(x), or call {title} on x.detach().",
        stacklevel=1,
    )
