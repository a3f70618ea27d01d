"""ipyparallel's controller, a process that the host agent forks.

It starts when all ranks are up, or at the first request of a client.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import zmq
from ipyparallel.controller.app import IPController
from ipyparallel.controller.broadcast_scheduler import BroadcastScheduler
from ipyparallel.controller.heartmonitor import HeartMonitor

from allranks.engine import processes
from allranks.features.ipyparallel.engine import HEARTBEAT_MS, allow_ipv6
from allranks.features.ipyparallel.impossible_tasks import fail_impossible_tasks
from allranks.features.ipyparallel.metadata import OF_RANKS
from allranks.records.config import family_of

#: Once all engines are registered, beats are rare: on several hosts they would be most of the
#: traffic of idle ranks.
_RARE_HEARTBEAT_MS = 60_000
_REGISTERING_SECONDS = 10.0
_HEARTBEAT_MISSES = 300  # a rank that is stopped for a while stays registered
#: No file of the controller becomes larger. It logs each message that it cannot read.
LARGEST_LOG_NBYTES = 10 << 20
_SHARED_PORTS = ("registration",)
_LOOPBACK = "tcp://127.0.0.1"
_PAIRED_PORTS = ("control", "mux", "task", "iopub")
#: More than a pipe holds: the whole lines that were written.
_PIPE_NBYTES = 1 << 20

Info = dict[str, Any]


def connection_info(interface: str = "") -> tuple[Info, Info, str, list[socket.socket]]:
    """Returns the connection information for engines and for clients, on free ports.

    Every message is encrypted (CURVE) and signed. The controller accepts all who have its public
    key: like the key of the signatures, it serves as a shared secret. Also returns the controller's
    secret key, and sockets that reserve its ports, to be closed once it listens there.
    """
    address = (interface or _LOOPBACK).removeprefix("tcp://").strip("[]")
    held = [_hold(address) for _ in range(len(_SHARED_PORTS) + 2 * len(_PAIRED_PORTS) + 5)]
    public, secret = (key.decode() for key in zmq.curve_keypair())
    ports = (place.getsockname()[1] for place in held)
    base = {
        "ssh": "",
        "interface": interface or _LOOPBACK,
        "key": os.urandom(32).hex(),
        "curve_serverkey": public,
        "location": socket.gethostname(),
        "pack": "json",
        "unpack": "json",
        "signature_scheme": "hmac-sha256",
        "registration": next(ports),
    }
    engine = dict(base, hb_ping=next(ports), hb_pong=next(ports), broadcast=[next(ports)])
    client = dict(base, notification=next(ports), broadcast=next(ports), task_scheme="leastload")
    client[OF_RANKS] = "yes"  # its numbers are ports
    for name in _PAIRED_PORTS:
        engine[name] = next(ports)
        client[name] = next(ports)
    return engine, client, secret, held


def _hold(address: str) -> socket.socket:
    # SO_REUSEADDR: the controller can listen on the port although this socket reserves it.
    place = socket.socket(family_of(address))
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
    deaths: int,
) -> None:
    """Runs the controller until the process ends; calls ``complete`` once all engines are there.

    ``deaths`` is a pipe, with the rank and the process of each engine that has ended, a line each.
    """
    # The logs of its libraries as well, and of the heart monitor. Writing fails from there on,
    # because Python ignores SIGXFSZ.
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hard == resource.RLIM_INFINITY or hard > LARGEST_LOG_NBYTES:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_LOG_NBYTES, LARGEST_LOG_NBYTES))
    allow_ipv6(engine)
    # The heart monitor is a process that ipyparallel starts. From 3.14 on, Python does not fork it
    # by default.
    multiprocessing.set_start_method("fork", force=True)
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
    config.IPController.enable_curve = True
    config.IPController.curve_publickey = engine["curve_serverkey"].encode()
    config.IPController.curve_secretkey = secret.encode()
    config.HeartMonitor.period = HEARTBEAT_MS
    config.HeartMonitor.max_heartmonitor_misses = _HEARTBEAT_MISSES
    beat_soon = beat_rarely(size)
    # One scheduler, because one port is reserved for it.
    config.IPController.broadcast_scheduler_depth = 0
    name_coalesced_targets()
    fail_impossible_tasks()
    config.IPController.db_class = "NoDB"
    # Without these, initialize() would choose other ports.
    controller.engine_info, controller.client_info = engine, client
    controller.initialize([])
    hub = controller.hub
    accept_late_registrations(hub, beat_soon)
    unregister_dead(hub, deaths)
    finish = hub.finish_registration

    def finish_registration(heart: bytes) -> None:
        finish(heart)
        if len(hub.engines) == size:
            complete()

    hub.finish_registration = finish_registration
    controller.start()


def name_coalesced_targets() -> None:
    """Lets clients read the replies to ``broadcast_view(…, is_coalescing=True)``."""
    send = BroadcastScheduler.send_to_targets

    def send_to_targets(
        scheduler: Any, msg: Any, request: str, targets: Any, idents: Any, is_coalescing: bool
    ) -> None:
        send(scheduler, msg, request, targets, idents, is_coalescing)
        if is_coalescing:
            # A single scheduler of ipyparallel 9.2 leaves out the ids, which clients expect.
            scheduler.accumulated_targets[request] = msg["metadata"]["targets"]

    BroadcastScheduler.send_to_targets = send_to_targets


def beat_rarely(size: int) -> Callable[[], object]:
    """Makes heartbeats rare while all engines answer. The heart monitor is forked after this.

    The function that it returns makes them frequent again, for an engine that registers.
    """
    beat_as_ipyparallel, start_as_ipyparallel = HeartMonitor.beat, HeartMonitor.start
    asked, asks = os.pipe()
    frequent_until = 0.0

    def beat(monitor: Any) -> None:
        beat_as_ipyparallel(monitor)
        complete = len(monitor.hearts) >= size and not monitor.on_probation
        rare = complete and time.monotonic() > frequent_until
        monitor.caller.callback_time = _RARE_HEARTBEAT_MS if rare else HEARTBEAT_MS

    def start(monitor: Any) -> None:
        start_as_ipyparallel(monitor)
        monitor.loop.add_handler(asked, lambda *_: beat_soon(monitor), monitor.loop.READ)

    def beat_soon(monitor: Any) -> None:
        nonlocal frequent_until
        os.read(asked, 4096)
        if monitor.caller.callback_time != HEARTBEAT_MS:
            frequent_until = time.monotonic() + _REGISTERING_SECONDS
            monitor.caller.stop()
            monitor.caller.callback_time = HEARTBEAT_MS
            monitor.caller.start()

    HeartMonitor.beat, HeartMonitor.start = beat, start
    return lambda: os.write(asks, b"\0")


def accept_late_registrations(hub: Any, beat_soon: Callable[[], object]) -> None:
    # The hub reports a new heart once, and ignores one that it does not expect: the engines of
    # ipyparallel begin to beat after its answer. Those of ranks do not wait for the answer, and
    # their sockets connect in any order.
    early: set[bytes] = set()
    heard, register = hub.handle_new_heart, hub.query_handlers["registration_request"]

    def handle_new_heart(heart: bytes) -> None:
        if heart not in hub.incoming_registrations:
            early.add(heart)
        heard(heart)

    def register_engine(sender: bytes, message: dict[str, Any]) -> None:
        register(sender, message)
        beat_soon()
        for heart in early.intersection(hub.incoming_registrations):
            early.remove(heart)
            heard(heart)

    hub.handle_new_heart = handle_new_heart
    hub.query_handlers["registration_request"] = register_engine


def unregister_dead(hub: Any, deaths: int) -> None:
    """Unregisters engines at their death: clients then get EngineError for their requests."""
    # By its process, because another engine may have its rank by now.
    hearts: dict[tuple[int, int], bytes] = {}
    register = hub.query_handlers["registration_request"]

    def register_engine(sender: bytes, message: dict[str, Any]) -> None:
        register(sender, message)
        asked = message["content"]
        if "pid" in asked:  # not if an engine of ipyparallel has joined
            hearts[asked["id"], asked["pid"]] = asked["uuid"].encode()

    def read(*_: object) -> None:
        lines = os.read(deaths, _PIPE_NBYTES).decode().splitlines()
        if not lines:  # the host agent has ended
            hub.loop.remove_handler(deaths)
        for rank, pid in map(str.split, lines):
            heart = hearts.pop((int(rank), int(pid)), b"")
            hub.incoming_registrations.pop(heart, None)
            hub.handle_stopped_heart(heart)

    hub.query_handlers["registration_request"] = register_engine
    hub.loop.add_handler(deaths, read, hub.loop.READ)
