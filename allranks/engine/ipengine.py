"""ipyparallel's engine, led by a rank: quiet, without a nanny, and named by its rank."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import zmq
from ipyparallel.controller.heartmonitor import Heart
from ipyparallel.engine.app import IPEngine

from allranks.engine.host.controller import HEARTBEAT_MS
from allranks.records.config import CLIENTS_RANKS

# ipykernel loads debugpy for a debugger that no front end can reach on a rank; it takes half the
# start of an engine. Without it ipykernel does without, and a cell may still import debugpy.
if "debugpy" not in sys.modules:
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    try:
        import ipykernel.debugger  # noqa: F401
    finally:
        del sys.modules["debugpy"]

CELL_FILE = "In["
#: The controller is looked for after a tenth of a second, then after twice as long each time, and
#: this at most; or this, where it comes only when asked for.
_LOOK_MS, _SELDOM_MS = 1000, 10_000


class CellNames:
    """Names cells as a person does: ``In[7]``, and ``In[7]#2`` when that number comes again.

    ipykernel's own name is a hash of the text, in a temporary folder that it never makes.
    """

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}

    def name(self, _raw: str, code: str, number: int) -> str:
        """Returns the file name to compile a cell under; the same text keeps its name."""
        again = 1
        while True:
            name = f"{CELL_FILE}{number}]" + (f"#{again}" if again > 1 else "")
            if self._sources.setdefault(name, code) == code:
                return name
            again += 1


class RankEngine(IPEngine):  # type: ignore[misc]
    """An engine whose id is its rank and whose output is left to the transcript.

    ``rc[:]`` and ``%%px`` of ipyparallel reach the same variables as the cells do.

    Args:
        connection: ipyparallel's connection information for engines.
        rank: this process's rank, and the engine id to ask for.
        size: how many ranks there are.
        session_dir: where the engine keeps its profile.
        ready: called with the engine once its kernel and its shell are there.
        replaces: whether it takes the place of an engine that has died.
    """

    def __init__(
        self,
        connection: dict[str, Any],
        rank: int,
        size: int,
        session_dir: str,
        ready: Callable[[RankEngine], None],
        *,
        replaces: bool = False,
    ) -> None:
        super().__init__(
            id=rank,
            enable_nanny=False,
            use_mpi=False,
            max_heartbeat_misses=0,
            log_level=logging.ERROR,
            work_dir=os.getcwd(),
        )
        self.config.ProfileDir.location = os.path.join(session_dir, f"engine-{rank}")
        self.config.BaseIPythonApplication.auto_create = True
        self.ipython_dir = session_dir
        self.auto_create = True
        # What the launcher's environment hands over as text is handed over directly here.
        self._given_connection = connection
        self._ready = ready
        self._replaces = replaces
        self._look_ms = _LOOK_MS if size <= CLIENTS_RANKS else _SELDOM_MS

    def init_engine(self) -> None:
        """Takes the connection information as given; there is no file to wait for."""
        self.connection_info_env = json.dumps(self._given_connection)
        super().init_engine()

    async def register(self) -> None:
        """Connects to where the controller will be, and says who is there; waits for no answer.

        An engine that has died is made to give up its id first: the controller itself would wait a
        minute for a sign of it.
        """
        patient, maybe_tunnel = self.init_connector()

        def connect(place: Any, url: str, **options: Any) -> None:
            # It is looked for again and again until it comes.
            place.setsockopt(zmq.RECONNECT_IVL_MAX, self._look_ms)
            patient(place, url, **options)

        registrar = self.registrar = self.context.socket(zmq.DEALER)
        registrar.setsockopt(zmq.IDENTITY, self.bident)
        registrar.setsockopt(zmq.LINGER, 0)  # nobody may ever come to hear it
        connect(registrar, self.registration_url)
        if self._replaces:
            self.session.send(registrar, "unregistration_request", content={"id": self.id})
        asked = {"uuid": self.ident, "id": self.id}
        self.session.send(registrar, "registration_request", content=asked)
        # It gives the id that is asked for: what it will answer is known.
        given = {"status": "ok", "id": self.id, "hb_period": HEARTBEAT_MS}
        answer = self.session.serialize(self.session.msg("registration_reply", content=given))
        try:
            await self.complete_registration(answer, connect, maybe_tunnel)
        except Exception:
            self.log.critical("the engine could not be made", exc_info=True)
            self.exit(255)

    def start_heartbeat(self, hb_ping: str, hb_pong: str, _period: int, identity: bytes) -> None:
        """Answers the controller's beat, once it comes."""
        keys = {
            "curve_serverkey": self.curve_serverkey,
            "curve_secretkey": self.curve_secretkey,
            "curve_publickey": self.curve_publickey,
        }
        heart = Heart(hb_ping, hb_pong, heart_id=identity, **keys)
        heart.device.setsockopt_in(zmq.RECONNECT_IVL_MAX, self._look_ms)
        heart.device.setsockopt_out(zmq.RECONNECT_IVL_MAX, self._look_ms)
        heart.start()

    @property
    def is_shut_down(self) -> bool:
        """Whether ipyparallel's client has ended the engine."""
        return self.kernel._shutdown_message is not None

    def redirect_output(self, iopub_socket: Any) -> None:
        """Leaves the standard streams to the transcript."""

    def init_signal(self) -> None:
        """Leaves the signals to the rank."""

    async def complete_registration(self, msg: Any, connect: Any, maybe_tunnel: Any) -> None:
        """Makes the kernel, then hands it to the rank."""
        await super().complete_registration(msg, connect, maybe_tunnel)
        self.kernel.shell.compile.get_code_name = CellNames().name
        self._ready(self)
