"""Ports that stay free until who was told of one has taken it.

A port that the system gives to whoever asks for any may be given to another program before a kernel
or a server, which takes a second to start, has it. Other processes that test on this machine, of
this run or another, get other ports: each port that was given away stays locked until the process
that asked for it has ended.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket

#: Below those that the system gives by itself.
_OWN = range(12_000, 32_000)

_turn = random.randrange(len(_OWN))
# A byte for each port, which is locked and never written. The system unlocks what a process leaves.
_locks = os.open(f"/tmp/allranks-test-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)


def free_port() -> int:
    global _turn
    for _ in _OWN:
        _turn = (_turn + 1) % len(_OWN)
        port = _OWN[_turn]
        with socket.socket() as probe:
            try:
                fcntl.lockf(_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"expected a free port between {_OWN[0]} and {_OWN[-1]}, found none")
