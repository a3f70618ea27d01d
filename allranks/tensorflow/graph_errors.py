"""Raises the exceptions of collectives unchanged from TensorFlow's graphs. Runs in every rank.

TensorFlow replaces every exception of a Python function inside a graph by an error of its own,
whose text contains a traceback. This module keeps the exception, puts its number into that text,
and raises the exception where TensorFlow would raise its error. So ``model.fit`` raises the
`CollectiveMismatch` or `RankLeft` itself. Each is also an instance of the TensorFlow error that
Horovod raises in this case.
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from allranks import errors
from allranks.collectives.calls.rank_state import interrupt_pipe
from allranks.keras.private_names import import_private, replace

# Limited, because errors that TensorFlow drops are never fetched.
_MOST_KEPT = 16
_MARK = re.compile(r"\[allranks failure (\d+)\]")
_INTERRUPTED = "REPLACED BY KeyboardInterrupt"
_numbers = itertools.count(1)
_kept: OrderedDict[int, BaseException] = OrderedDict()


def _with_tensorflow_error(error: type[Exception], tensorflow_error: type[Exception]) -> Any:
    def __init__(self: Any, *given: Any) -> None:
        # From a text; or, as TensorFlow's own, from a node, an operation, a text and a number, by
        # which Keras makes a copy with the name of the layer.
        text = given[2] if len(given) > 2 else given[0]
        tensorflow_error.__init__(self, None, None, text)

    def __reduce__(self: Any) -> Any:
        return type(self), (self.message,)

    members = {
        "__doc__": f"`allranks.errors.{error.__name__}`, and what Horovod raises in its place.",
        "__module__": __name__,
        "__init__": __init__,
        "__reduce__": __reduce__,
    }
    return type(error.__name__, (error, tensorflow_error), members)


_PUBLIC: dict[type[BaseException], Any] = {
    error: _with_tensorflow_error(error, tensorflow_error)
    for error, tensorflow_error in (
        (errors.CollectiveMismatch, tf.errors.FailedPreconditionError),
        (errors.RankLeft, tf.errors.UnknownError),
        (errors.UsageError, tf.errors.InvalidArgumentError),
    )
}
CollectiveMismatch, RankLeft, UsageError = _PUBLIC.values()


def _public(error: BaseException) -> BaseException:
    kind = _PUBLIC.get(type(error))
    return error if kind is None else kind(str(error))


@contextmanager
def with_tensorflows_errors() -> Iterator[None]:
    """Raises the exceptions of allranks in the block as the classes of this module."""
    try:
        yield
    except (errors.CollectiveError, errors.UsageError) as error:
        public = _public(error)
        if public is error:
            raise
        raise public.with_traceback(error.__traceback__) from None


class Carried(Exception):
    """Has the number of a kept exception in its text, because TensorFlow keeps only the text."""


def carried(function: Callable[..., Any]) -> Callable[..., Any]:
    # The exceptions of the returned function leave the graph unchanged.
    def call(*arrays: Any) -> Any:
        interrupt_pipe.received()  # the main thread handles an interrupt from before this call
        try:
            return function(*arrays)
        except BaseException as error:
            number = next(_numbers)
            _kept[number] = error
            while len(_kept) > _MOST_KEPT:
                _kept.popitem(last=False)
            # Only the first line, because TensorFlow logs this text more than once.
            first = str(error).partition("\n")[0]
            text = f"{type(error).__name__}: {first} [allranks failure {number}]"
            raise Carried(text) from None

    return call


def install() -> None:
    execute = import_private("tensorflow.python.eager.execute")
    for name in ("quick_execute", "execute", "execute_with_cancellation"):
        replace(execute, name, _raising_kept)
    # The iterators of datasets raise by this function.
    ops = import_private("tensorflow.python.framework.ops")
    replace(ops, "raise_from_not_ok_status", _raising_kept)
    session = import_private("tensorflow.python.client.session", "BaseSession").BaseSession
    replace(session, "_do_call", _raising_kept)


def _raising_kept(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except tf.errors.OpError as error:
            mark = _MARK.search(str(error.message))
            kept = _kept.pop(int(mark[1]), None) if mark else None
            if kept is None:
                raise
            found = _public(kept)
        except RuntimeError as error:
            # Ctrl-C reached the main thread while TensorFlow made its error.
            if _INTERRUPTED not in str(error):
                raise
            found = KeyboardInterrupt()
        raise found from None

    return call


def skip_autograph() -> None:
    # AutoGraph would rewrite this package, which contains no graph code.
    config = import_private(
        "tensorflow.python.autograph.core.config", "CONVERSION_RULES", "DoNotConvert"
    )
    config.CONVERSION_RULES = (config.DoNotConvert("allranks"), *config.CONVERSION_RULES)
