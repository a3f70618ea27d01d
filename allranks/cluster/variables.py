"""Variables on their way between the notebook and the ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle

from allranks.cluster.answers import Answers
from allranks.errors import UsageError


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


def unpack(answers: Answers, names: str | Sequence[str]) -> dict[int, Any]:
    """Returns ``{rank: value}`` of ranks' answers; with several names ``{rank: {name: value}}``."""
    pulled = {rank: pickle.loads(payloads[0]) for rank, (_, payloads) in answers.items()}
    if isinstance(names, str):
        return {rank: got[names] for rank, got in pulled.items()}
    return pulled
