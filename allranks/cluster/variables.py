"""Variables on their way between the notebook and the ranks."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import cloudpickle

from allranks.cluster.answers import Answers
from allranks.errors import UsageError

_MPI = "mpi4py.MPI"


def pack(values: dict[str, Any], to: str) -> bytes:
    """Returns variables as ranks take them.

    Args:
        values: by their names.
        to: where they are to go, as ``the ranks``.

    Raises:
        UsageError: one of them cannot be pickled.
    """
    try:
        packed: bytes = cloudpickle.dumps(values, protocol=5)
    except Exception as error:
        raise UsageError(f"{', '.join(values)} cannot be sent to {to}: {error}") from error
    return packed


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Within, a value of a rank's is unpickled in the notebook, where that may start no MPI.

    Args:
        place: where it comes from, as ``on rank 0``.

    Raises:
        UsageError: it can only be unpickled on a rank, or where its modules are.
    """
    barred = sys.modules.setdefault(_MPI, cast(ModuleType, None)) is None
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # it may raise anything
        why = f"{type(error).__name__}: {error}"
        if barred and isinstance(error, ImportError) and error.name == _MPI:
            why = "it is MPI's, which runs on the ranks only"
        raise UsageError(
            f"expected a value that the notebook can read, found {place}: {why}. "
            "Send a plain value, as list(...) or an array."
        ) from error
    finally:
        if barred:
            del sys.modules[_MPI]


def load(packed: bytes, rank: int) -> Any:
    """Returns a value of a rank's, as the notebook has it.

    Raises:
        UsageError: it cannot be read here.
    """
    with reading(f"on rank {rank}"):
        return pickle.loads(packed)


def unpack(answers: Answers, names: str | Sequence[str]) -> dict[int, Any]:
    """Returns ``{rank: value}`` of ranks' answers; with several names ``{rank: {name: value}}``.

    Raises:
        UsageError: a value cannot be read here.
    """
    pulled = {rank: load(payloads[0], rank) for rank, (_, payloads) in answers.items()}
    if isinstance(names, str):
        return {rank: got[names] for rank, got in pulled.items()}
    return pulled
