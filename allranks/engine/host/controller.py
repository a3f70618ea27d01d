"""ipyparallel's controller, in a process of its own that the host agent forks.

No rank waits for it: where it will listen is settled before the ranks are forked, their engines
connect there by themselves whenever it comes, and it comes when all ranks are up, or somebody asks.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import zmq
from ipyparallel.controller.app import IPController

from allranks.engine import processes

HEARTBEAT_MS = 200
_HEARTBEAT_MISSES = 300  # a rank that is stopped for a while stays registered
_SHARED_PORTS = ("registration",)
_LOOPBACK = "tcp://127.0.0.1"
_PAIRED_PORTS = ("control", "mux", "task", "iopub")


Info = dict[str, Any]


def connection_info(interface: str = "") -> tuple[Info, Info, str, list[socket.socket]]:
    """Returns the connection information for engines and for clients, on free ports.

    Every message is signed with a key that both have; beyond loopback it is encrypted as well.

    Args:
        interface: where the controller listens, as ``tcp://10.0.0.1``; by default on loopback.

    Returns:
        Both, the controller's CURVE secret key, which is empty on loopback, and sockets that hold
        its ports, to be closed once it listens there.
    """
    address = (interface or _LOOPBACK).removeprefix("tcp://")
    held = [_hold(address) for _ in range(len(_SHARED_PORTS) + 2 * len(_PAIRED_PORTS) + 5)]
    public, secret = (key.decode() for key in zmq.curve_keypair()) if interface else ("", "")
    ports = (place.getsockname()[1] for place in held)
    base = {
        "ssh": "",
        "interface": interface or _LOOPBACK,
        "key": os.urandom(32).hex(),
        "curve_serverkey": public or None,
        "location": socket.gethostname(),
        "pack": "json",
        "unpack": "json",
        "signature_scheme": "hmac-sha256",
        "registration": next(ports),
    }
    engine = dict(base, hb_ping=next(ports), hb_pong=next(ports), broadcast=[next(ports)])
    client = dict(base, notification=next(ports), broadcast=next(ports), task_scheme="leastload")
    for name in _PAIRED_PORTS:
        engine[name] = next(ports)
        client[name] = next(ports)
    return engine, client, secret, held


def _hold(address: str) -> socket.socket:
    """Returns a socket whose port nobody else is given, and the controller can still listen on."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind((address, 0))
    return place


def run(
    engine: Info,
    client: Info,
    secret: str,
    session_dir: str,
    size: int,
    complete: Callable[[], object],
) -> None:
    """Serves the cluster until the process is ended; ``complete``: all its engines are there."""
    # The heart monitor is a process of its own, which knows nothing of ours.
    own = os.getpid()
    os.register_at_fork(after_in_child=lambda: processes.die_with_parent(own))
    controller = IPController(
        use_threads=True,
        log_level=logging.WARNING,
        write_connection_files=False,
        work_dir=os.getcwd(),
    )
    controller.ipython_dir = session_dir
    controller.auto_create = True
    config = controller.config
    config.ProfileDir.location = os.path.join(session_dir, "controller")
    config.Session.key = engine["key"].encode()
    if secret:
        config.IPController.enable_curve = True
        config.IPController.curve_publickey = engine["curve_serverkey"].encode()
        config.IPController.curve_secretkey = secret.encode()
    config.HeartMonitor.period = HEARTBEAT_MS
    config.HeartMonitor.max_heartmonitor_misses = _HEARTBEAT_MISSES
    config.IPController.broadcast_scheduler_depth = 0
    config.IPController.db_class = "NoDB"
    # initialize() binds the sockets that these name, and would choose others itself.
    controller.engine_info, controller.client_info = engine, client
    controller.initialize([])
    hub = controller.hub
    accept_late_registrations(hub)
    finish = hub.finish_registration

    def finish_registration(heart: bytes) -> None:
        finish(heart)
        if len(hub.engines) == size:
            complete()

    hub.finish_registration = finish_registration
    controller.start()


def accept_late_registrations(hub: Any) -> None:
    """Has an engine whose heart was heard before its registration registered all the same.

    ipyparallel's hub hears of a new heart once, and ignores one that it does not expect: its own
    engines begin to beat after the hub's answer. Ours do not wait for the answer, and each socket
    connects in its own time.

    Args:
        hub: an `ipyparallel.controller.hub.Hub`.
    """
    early: set[bytes] = set()
    heard, register = hub.handle_new_heart, hub.query_handlers["registration_request"]

    def handle_new_heart(heart: bytes) -> None:
        if heart not in hub.incoming_registrations:
            early.add(heart)
        heard(heart)

    def register_engine(sender: bytes, message: dict[str, Any]) -> None:
        register(sender, message)
        for heart in early.intersection(hub.incoming_registrations):
            early.remove(heart)
            heard(heart)

    hub.handle_new_heart = handle_new_heart
    hub.query_handlers["registration_request"] = register_engine
