"""Messages of several ranks of one host in one, as its relay sends them. Both sides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from allranks.errors import WireError

BATCH = b"batch"
"""The first frame; the second one tells how many frames each message has, as JSON."""


def joined(messages: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns the frames of one message that holds all of these; one alone stays as it is."""
    if len(messages) == 1:
        return list(messages[0])
    counts = json.dumps([len(frames) for frames in messages]).encode()
    return [BATCH, counts, *(frame for frames in messages for frame in frames)]


def parts(frames: list[bytes]) -> Iterator[list[bytes]]:
    """Yields the messages that one holds, in order: itself alone where it is no batch.

    Raises:
        WireError: the frames were not joined by :func:`joined`.
    """
    if frames[0] != BATCH:
        yield frames
        return
    try:
        counts = [int(count) for count in json.loads(frames[1])]
    except (IndexError, TypeError, ValueError) as error:
        raise WireError(f"a batch of {len(frames)} frames cannot be read: {error!r}") from error
    rest = frames[2:]
    if sum(counts) != len(rest) or min(counts, default=0) < 1:
        raise WireError(f"expected messages of {counts} frames, found {len(rest)} frames")
    for count in counts:
        yield rest[:count]
        del rest[:count]
