"""Ports that stay free until who was told of one has taken it.

A port that the system gives to whoever asks for any may be given to another program before a kernel
or a server, which takes a second to start, has it.
"""

from __future__ import annotations

import os
import random
import socket

#: Below those that the system gives by itself; each process of a run has a part of its own, and
#: the last one is that of tests which run beside the lanes.
_FIRST, _EACH, _PARTS = 12_000, 5_000, 4


def _own() -> range:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw3")
    first = _FIRST + _EACH * (int(worker.removeprefix("gw")) % _PARTS)
    return range(first, first + _EACH)


_turn = random.randrange(_EACH)


def free_port() -> int:
    global _turn
    own = _own()
    for _ in own:
        _turn = (_turn + 1) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", own[_turn]))
            except OSError:
                continue
            return own[_turn]
    raise RuntimeError(f"expected a free port between {own[0]} and {own[-1]}, found none")
