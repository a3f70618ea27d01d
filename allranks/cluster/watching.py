"""How a notebook hears what another one runs on ranks, and asks it for them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from allranks.cluster.sessions import Found, name_of, visit
from allranks.cluster.sharing import unpack
from allranks.errors import UsageError
from allranks.records.config import WATCHERS_DOOR

_OPENS_SECONDS = 2.0
_ANSWERS_SECONDS = 5.0
_LETS_GO_SECONDS = 10.0
_POLL_SECONDS = 0.02


def begin(folder: str, seen: int) -> socket.socket:
    """Returns a connection to the notebook that holds ranks, which tells of them from now on.

    Args:
        folder: the session's.
        seen: the last cell that was seen of them; 0 for none.

    Raises:
        OSError: it does not listen.
    """
    door = _connected(folder)
    try:
        door.sendall(json.dumps({"want": "watch", "seen": seen}).encode() + b"\n")
    except BaseException:
        door.close()
        raise
    return door


async def messages(door: socket.socket) -> AsyncIterator[tuple[dict[str, Any], list[bytes]]]:
    """Yields what the notebook tells that holds the ranks, until it does so no longer.

    Each is a head and the frames of a record (see ``allranks.cluster.sharing.pack``).

    Raises:
        OSError: the connection is broken.
    """
    reader, writer = await asyncio.open_unix_connection(sock=door)
    try:
        with suppress(asyncio.IncompleteReadError):
            while True:
                yield await unpack(reader.readexactly)
    finally:
        writer.close()


def borrow(folder: str) -> Found:
    """Has the notebook that holds the ranks let them go; returns the cluster, which is free then.

    Raises:
        UsageError: it does not, or the ranks have ended.
    """
    found = visit(folder, "watch")
    if found is not None and found.holder not in (0, os.getpid()):
        _ask(found)
        deadline = time.monotonic() + _LETS_GO_SECONDS
        holder = found.holder
        while found is not None and found.holder == holder and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            found = visit(folder)
    if found is None:
        raise UsageError(
            f"expected the ranks of {name_of(folder)}, found that they have ended. Run the cell "
            "again, and it starts ranks of its own"
        )
    return found


def _ask(found: Found) -> None:
    whose = f"the notebook of process {found.holder}"
    try:
        with _connected(found.folder) as door:
            door.sendall(json.dumps({"want": "lend"}).encode() + b"\n")
            line = door.makefile("rb").readline()
    except TimeoutError:
        why = f"{whose} has not answered: it runs a cell of its own. Wait for its end there"
    except OSError:
        return  # it has gone, or let them go: the nursery knows
    else:
        why = f"{whose} has them, and {json.loads(line)['refused']}" if b"refused" in line else ""
    if why:
        raise UsageError(
            f"expected idle ranks, found that {why}, and run this cell again; nothing was run"
        )


def _connected(folder: str) -> socket.socket:
    """Returns a connection to who holds the ranks, which listens in a moment."""
    path = os.path.join(folder, WATCHERS_DOOR)
    deadline = time.monotonic() + _OPENS_SECONDS
    while True:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.settimeout(_ANSWERS_SECONDS)
        try:
            door.connect(path)
        except OSError:
            door.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return door
