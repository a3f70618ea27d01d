"""ipyparallel's engine, in each rank: its kernel runs the cells too.

No rank waits for the controller: its ports are chosen before the ranks are forked, and their
engines connect whenever it starts.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from typing import Any

import zmq
from ipyparallel.controller.heartmonitor import Heart
from ipyparallel.engine.app import IPEngine

from allranks.engine.kernel import KernelStart
from allranks.records.config import CLIENTS_RANKS

#: An engine is registered after its first beat.
HEARTBEAT_MS = 200
#: Engines try to connect after a tenth of a second, then after twice as long each time, up to the
#: first; or up to the second if the controller starts only on request.
_CONNECT_MS, _SELDOM_MS = 1000, 10_000


class RankEngine(IPEngine):  # type: ignore[misc]
    """An engine whose id is its rank and whose output is left to the transcript.

    ``rc[:]`` and ``%%px`` of ipyparallel reach the same variables as the cells do. ``ready`` is
    called with the engine once its kernel and its shell are there.
    """

    def __init__(self, start: KernelStart) -> None:
        super().__init__(
            id=start.rank,
            enable_nanny=False,
            use_mpi=False,
            max_heartbeat_misses=0,
            log_level=logging.ERROR,
            work_dir=os.getcwd(),
        )
        self.config.ProfileDir.location = start.profile_dir
        self.config.BaseIPythonApplication.auto_create = True
        self.ipython_dir = os.path.dirname(start.profile_dir)
        self.auto_create = True
        # An engine of ipyparallel reads it from the environment of its launcher.
        self._given_connection = start.connection
        self._ready = start.ready
        self._replaces = start.replaces
        self._look_ms = _CONNECT_MS if start.size <= CLIENTS_RANKS else _SELDOM_MS
        # For each socket's monitor, how many of its connections are still missing.
        self._missing: Counter[Any] = Counter()

    def init_engine(self) -> None:
        allow_ipv6(self._given_connection)
        # Without it, the engine waits for a file.
        self.connection_info_env = json.dumps(self._given_connection)
        super().init_engine()

    async def register(self) -> None:
        """Connects to the controller's ports and registers, without waiting for an answer."""
        connect_once, maybe_tunnel = self.init_connector()
        monitors: dict[Any, Any] = {}

        def connect(place: Any, url: str, **options: Any) -> None:
            # Tries again and again: the controller may start later.
            place.setsockopt(zmq.RECONNECT_IVL_MAX, self._look_ms)
            if place is not registrar:
                if place not in monitors:
                    monitors[place] = place.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                self._missing[monitors[place]] += 1
            connect_once(place, url, **options)

        registrar = self.registrar = self.context.socket(zmq.DEALER)
        registrar.setsockopt(zmq.IDENTITY, self.bident)
        registrar.setsockopt(zmq.LINGER, 0)  # the controller may never start
        connect(registrar, self.registration_url)
        if self._replaces:
            # The news of the other engine's death may come later, and the id must be free.
            self.session.send(registrar, "unregistration_request", content={"id": self.id})
        asked = {"uuid": self.ident, "id": self.id, "pid": os.getpid()}
        self.session.send(registrar, "registration_request", content=asked)
        # The controller assigns the requested id, so its answer is known.
        given = {"status": "ok", "id": self.id, "hb_period": HEARTBEAT_MS}
        answer = self.session.serialize(self.session.msg("registration_reply", content=given))
        try:
            await self.complete_registration(answer, connect, maybe_tunnel)
        except Exception:
            self.log.critical("the engine could not be made", exc_info=True)
            self.exit(255)

    def start_heartbeat(self, hb_ping: str, hb_pong: str, _period: int, identity: bytes) -> None:
        keys = {
            "curve_serverkey": self.curve_serverkey,
            "curve_secretkey": self.curve_secretkey,
            "curve_publickey": self.curve_publickey,
        }
        heart = Heart(hb_ping, hb_pong, heart_id=identity, **keys)
        heart.device.setsockopt_in(zmq.RECONNECT_IVL_MAX, self._look_ms)
        heart.device.setsockopt_out(zmq.RECONNECT_IVL_MAX, self._look_ms)
        # ZeroMQ starts a context's threads with its first socket, and aborts the process if it
        # cannot: later, a cell may have as many threads as the account is allowed.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.socket(zmq.PAIR).close()
        heart.device.context_factory = lambda: context
        threading.Thread(target=self._beat_once_connected, args=(heart,), daemon=True).start()

    def _beat_once_connected(self, heart: Heart) -> None:
        # The first beat completes the registration. Each socket connects when it tries again, and
        # the controller drops a client's request for an engine whose socket has not yet connected:
        # the client would wait forever. In a thread, because a cell may run for long.
        poller = zmq.Poller()
        for monitor in self._missing:
            poller.register(monitor, zmq.POLLIN)
        while self._missing.total() > 0:
            for monitor, _ in poller.poll():
                monitor.recv_multipart()
                self._missing[monitor] -= 1
        # In this thread: one that started during a cell would be taken for the cell's, which may
        # end the other ranks' waits, and no deadlock of this cell would be found.
        heart.device.run()

    @property
    def is_shut_down(self) -> bool:
        return self.kernel._shutdown_message is not None

    def redirect_output(self, iopub_socket: Any) -> None:
        # The transcript has the standard streams.
        ...

    def init_signal(self) -> None:
        # The rank has its own handlers.
        ...

    async def complete_registration(self, msg: Any, connect: Any, maybe_tunnel: Any) -> None:
        await super().complete_registration(msg, connect, maybe_tunnel)
        self._ready(self)


def allow_ipv6(connection: dict[str, Any]) -> None:
    """Lets the sockets of this process use IPv6, if the controller has an address of IPv6.
    ipyparallel makes them in contexts of its own.
    """
    if "[" not in connection["interface"]:
        return
    contexts: Any = zmq.Context
    make = contexts.socket

    def make_for_ipv6(context: Any, *kind: Any, **options: Any) -> Any:
        made = make(context, *kind, **options)
        made.setsockopt(zmq.IPV6, 1)
        return made

    contexts.socket = make_for_ipv6
