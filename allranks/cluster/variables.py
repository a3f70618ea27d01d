"""Values and functions on their way between the notebook and the ranks."""

from __future__ import annotations

import pickle
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import cloudpickle

from allranks.cluster.sockets import Answers
from allranks.errors import UsageError
from allranks.records.deferred import interruptible

_MPI = "mpi4py.MPI"
_COUNTED_NBYTES = 10_000_000
_INSTEAD = "Send its data, such as a list or an array, or make it in a cell that runs on the ranks."


def pack(values: dict[str, Any], to: str) -> bytes:
    """Returns variables in the form that ranks read; ``to`` is for errors, as ``the ranks``."""
    try:
        packed: bytes = cloudpickle.dumps(values, protocol=5)
    except Exception as error:
        stuck = [name for name, value in values.items() if sent_nbytes(value) is None]
        # An object of allranks says itself what to do instead.
        instead = "" if isinstance(error, UsageError) else f". {_INSTEAD}"
        raise UsageError(
            f"{', '.join(stuck or values)} cannot be sent to {to}: {error}{instead}"
        ) from error
    return packed


class _Counter:
    """A file that counts what is written, and raises `_Enough` beyond `_COUNTED_NBYTES`."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, part: Any) -> None:
        self.nbytes += len(part)
        if self.nbytes > _COUNTED_NBYTES:
            raise _Enough


class _Enough(Exception):
    pass


class _CountingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Counts objects that know their size by it: libraries copy their values to pickle them."""

    def __init__(self, counter: _Counter, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(counter, protocol=5, buffer_callback=buffers.append)
        self._counter = counter

    def reducer_override(self, value: Any) -> Any:
        """Returns how an object is pickled."""
        kind = type(value)
        # The class is asked: an object may have an answer for any name. Arrays of numpy are counted
        # by their buffers.
        if hasattr(kind, "nbytes") and not kind.__module__.startswith("numpy"):
            nbytes = value.nbytes
            if type(nbytes) is int and nbytes > _COUNTED_NBYTES:
                self._counter.nbytes += nbytes
                return str, ()
        return super().reducer_override(value)


def sent_nbytes(value: Any) -> int | None:
    """Returns how many bytes a value has when it is sent; None if it cannot be pickled.

    It copies no array, and ends soon: of other large values it counts a part.
    """
    counter, buffers = _Counter(), list[pickle.PickleBuffer]()
    try:
        _CountingPickler(counter, buffers).dump(value)
    except _Enough:
        pass
    except Exception:  # an object's __reduce__ may raise anything
        return None
    return counter.nbytes + sum(memoryview(buffer).nbytes for buffer in buffers)


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Within, a rank's value is unpickled in the notebook, which must not start MPI. An interrupt
    ends this at once: a value may import a library.

    Raises UsageError if it can only be unpickled on a rank; ``place`` is for errors, as ``on rank
    0``.
    """
    barred = sys.modules.setdefault(_MPI, cast(ModuleType, None)) is None
    try:
        with interruptible():
            yield
    except OSError:
        raise
    except (Exception, SystemExit) as error:  # unpickling may raise anything
        why = f"{type(error).__name__}: {error}"
        if barred and isinstance(error, ImportError) and error.name == _MPI:
            why = "it is MPI's, which runs on the ranks only"
        raise UsageError(
            f"expected a value that the notebook can read, found {place}: {why}. "
            "Send a plain value, such as list(...) or an array."
        ) from error
    finally:
        if barred:
            del sys.modules[_MPI]


def load(packed: bytes, rank: int) -> Any:
    with reading(f"on rank {rank}"):
        return pickle.loads(packed)


def unpack(answers: Answers, names: str | Sequence[str]) -> dict[int, Any]:
    """Returns ``{rank: value}`` of ranks' answers; with several names ``{rank: {name: value}}``."""
    pulled = {rank: load(payloads[0], rank) for rank, (_, payloads) in answers.items()}
    if isinstance(names, str):
        return {rank: got[names] for rank, got in pulled.items()}
    return pulled


class OnRank:
    """A function of the rank side, by name: pickled as the function itself, never imported here."""

    def __init__(self, module: str, name: str) -> None:
        self.__name__ = name
        self._where = f"{module}:{name}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return pkgutil.resolve_name, (self._where,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # On a rank only.
        return pkgutil.resolve_name(self._where)(*args, **kwargs)
