"""What a collective raises inside a graph comes out of it as it is. Runs in every rank.

TensorFlow turns every exception of a Python function inside a graph into an error of its own, with
the text of a traceback in it. Here the exception is kept, a number travels in that text, and where
TensorFlow makes its error the exception is raised in its place: out of ``model.fit`` comes the
`CollectiveMismatch` or `RankLeft` that was raised, and for who expects TensorFlow's it is one too.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from allranks import errors
from allranks.collectives.calls.interrupts import ear

_KEPT = 16
_MARK = re.compile(r"\[allranks failure (\d+)\]")
_INTERRUPTED = "REPLACED BY KeyboardInterrupt"
_numbers = itertools.count(1)
_failures: OrderedDict[int, BaseException] = OrderedDict()


class CollectiveMismatch(errors.CollectiveMismatch, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """`allranks.errors.CollectiveMismatch`, and what Horovod raises in its place."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)

    def __reduce__(self) -> Any:
        return type(self), (self.message,)


class RankLeft(errors.RankLeft, tf.errors.UnknownError):  # type: ignore[misc]
    """`allranks.errors.RankLeft`, and what Horovod raises in its place."""

    def __init__(self, message: str) -> None:
        tf.errors.UnknownError.__init__(self, None, None, message)

    def __reduce__(self) -> Any:
        return type(self), (self.message,)


class UsageError(errors.UsageError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """`allranks.errors.UsageError`, and what Horovod raises in its place."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)

    def __reduce__(self) -> Any:
        return type(self), (self.message,)


def public(error: BaseException) -> BaseException:
    """The exception as a user of TensorFlow shall catch it."""
    for kind in (CollectiveMismatch, RankLeft, UsageError):
        if type(error) is kind.__mro__[1]:
            return kind(str(error))
    return error


@contextmanager
def published() -> Iterator[None]:
    """What the block raises is raised as `public` has it."""
    try:
        yield
    except (errors.CollectiveError, errors.UsageError) as error:
        shown = public(error)
        if shown is error:
            raise
        raise shown.with_traceback(error.__traceback__) from None


class Carried(Exception):
    """Says the number of a failure, on its way through TensorFlow."""


def carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for a graph: what it raises comes out as it is."""

    def call(*arrays: Any) -> Any:
        ear.heard()  # what has come before is the main thread's to hear
        try:
            return function(*arrays)
        except BaseException as error:
            number = next(_numbers)
            _failures[number] = error
            while len(_failures) > _KEPT:
                _failures.popitem(last=False)
            # TensorFlow logs it in full, more than once, and what is raised in the end has it all.
            said = str(error).partition("\n")[0]
            text = f"{type(error).__name__}: {said} [allranks failure {number}]"
            raise Carried(text) from None

    return call


def find(message: str) -> BaseException | None:
    """The exception behind the text of an error of TensorFlow's."""
    found = _MARK.search(message)
    error = _failures.pop(int(found[1]), None) if found else None
    return None if error is None else public(error)


def install() -> None:
    """Lets TensorFlow raise what has been carried; built otherwise, it raises its own."""
    from tensorflow.python.client import session
    from tensorflow.python.eager import execute
    from tensorflow.python.framework import ops

    for name in ("quick_execute", "execute", "execute_with_cancellation"):
        _watch(execute, name)
    _watch(ops, "raise_from_not_ok_status")  # by which a dataset's iterator raises
    _watch(session.BaseSession, "_do_call")


def _watch(owner: Any, name: str) -> None:
    """Looks into every error of TensorFlow's that leaves a function."""
    function = getattr(owner, name, None)
    if function is None or hasattr(function, "allranks"):
        return

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except tf.errors.OpError as error:
            found: BaseException | None = find(str(error.message))
            if found is None:
                raise
        except RuntimeError as error:
            # Ctrl-C, heard by the main thread just when TensorFlow makes its error.
            if _INTERRUPTED not in str(error):
                raise
            found = KeyboardInterrupt()
        raise found from None

    call.allranks = True  # type: ignore[attr-defined]
    setattr(owner, name, call)


def leave_to_python() -> None:
    """Keeps AutoGraph from rewriting this package, which has nothing to rewrite in it."""
    from tensorflow.python.autograph.core import config

    config.CONVERSION_RULES = (config.DoNotConvert("allranks"), *config.CONVERSION_RULES)
