"""ipyparallel's controller, in a process of its own that the nursery forks."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from ipyparallel.controller.app import IPController
from ipyparallel.util import select_random_ports

from allranks.engine import processes

_HEARTBEAT_MS = 200
_HEARTBEAT_MISSES = 300  # a rank that is stopped for a while stays registered
_SHARED_PORTS = ("registration",)
_PAIRED_PORTS = ("control", "mux", "task", "iopub")


def connection_info(key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the connection information for engines and for clients, on free local ports.

    Args:
        key: the key that every message of this cluster is signed with.
    """
    ports = iter(select_random_ports(len(_SHARED_PORTS) + 2 * len(_PAIRED_PORTS) + 5))
    base = {
        "ssh": "",
        "interface": "tcp://127.0.0.1",
        "key": key,
        "curve_serverkey": None,
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
    return engine, client


def run(engine: dict[str, Any], client: dict[str, Any], session_dir: str) -> None:
    """Serves the cluster until the process is ended."""
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
    config.HeartMonitor.period = _HEARTBEAT_MS
    config.HeartMonitor.max_heartmonitor_misses = _HEARTBEAT_MISSES
    config.IPController.broadcast_scheduler_depth = 0
    config.IPController.db_class = "NoDB"
    # initialize() binds the sockets that these name, and would choose others itself.
    controller.engine_info, controller.client_info = engine, client
    controller.initialize([])
    controller.start()
