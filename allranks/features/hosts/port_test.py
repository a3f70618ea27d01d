"""Finds out which hosts this one can connect to: MPI's processes connect from each host to each."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from allranks.countdown import Countdown
from allranks.records import limits
from allranks.records.config import family_of

_STEP_SECONDS = 0.5
_BACKLOG = 1024


class Target(NamedTuple):
    """A port that another host listens on for the test."""

    host: str
    address: str
    port: int


def listen(address: str) -> socket.socket:
    """Returns a socket that other hosts can connect to; the system accepts for it."""
    return socket.create_server(("", 0), family=family_of(address), backlog=_BACKLOG)


def unreachable(
    targets: Iterable[Target], seconds: float = limits.PORT_TEST_SECONDS
) -> Mapping[str, str]:
    """Returns why hosts could not be connected to, by host. Tries all at the same time."""
    problems: dict[str, str] = {}
    with selectors.DefaultSelector() as selector:
        for target in targets:
            tried = socket.socket(family_of(target.address))
            tried.setblocking(False)
            code = tried.connect_ex((target.address, target.port))
            if code in (0, errno.EINPROGRESS):
                selector.register(tried, selectors.EVENT_WRITE, target.host)
            else:
                problems[target.host] = os.strerror(code)
                tried.close()
        # A process that stands still here looks again before it judges.
        limit = Countdown(seconds)
        while selector.get_map() and (left := limit.left()) > 0:
            for key, _ in selector.select(min(left, _STEP_SECONDS)):
                tried = key.fileobj  # type: ignore[assignment]
                if code := tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    problems[key.data] = os.strerror(code)
                selector.unregister(tried)
                tried.close()
        for key in list(selector.get_map().values()):
            problems[key.data] = f"no answer within {seconds:g} s"
            key.fileobj.close()  # type: ignore[union-attr]
    return problems
