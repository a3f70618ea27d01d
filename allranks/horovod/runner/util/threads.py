"""A function in a thread, as packages that build on Horovod call it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Calls a function in a thread, which has begun when it is returned.

    Args:
        target: with ``args``.
        name: the thread's.
        daemon: whether the process may end before it.
        silent: whether what it raises is kept to itself.

    Raises:
        ValueError: ``args`` is no tuple or list.
    """
    if not isinstance(args, (tuple, list)):
        raise ValueError(f"args needs a tuple: found {type(args).__name__}. Type: args=(x,)")

    def quietly(*given: Any) -> None:
        with suppress(Exception):
            target(*given)

    thread = threading.Thread(
        target=quietly if silent else target, args=tuple(args), name=name, daemon=daemon
    )
    thread.start()
    return thread
