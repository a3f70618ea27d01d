"""ipyparallel's engine, led by a rank: quiet, without a nanny, and named by its rank."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from ipyparallel.engine.app import IPEngine

# ipykernel loads debugpy for a debugger that no front end can reach on a rank; it takes half the
# start of an engine. Without it ipykernel does without, and a cell may still import debugpy.
if "debugpy" not in sys.modules:
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    try:
        import ipykernel.debugger  # noqa: F401
    finally:
        del sys.modules["debugpy"]

CELL_FILE = "In["
_REGISTRATION_SECONDS = 120.0


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
        session_dir: where the engine keeps its profile.
        ready: called with the engine once its kernel and its shell are there.
    """

    def __init__(
        self,
        connection: dict[str, Any],
        rank: int,
        session_dir: str,
        ready: Callable[[RankEngine], None],
    ) -> None:
        super().__init__(
            id=rank,
            enable_nanny=False,
            use_mpi=False,
            timeout=_REGISTRATION_SECONDS,
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

    def init_engine(self) -> None:
        """Takes the connection information as given; there is no file to wait for."""
        self.connection_info_env = json.dumps(self._given_connection)
        super().init_engine()

    def redirect_output(self, iopub_socket: Any) -> None:
        """Leaves the standard streams to the transcript."""

    def init_signal(self) -> None:
        """Leaves the signals to the rank."""

    async def complete_registration(self, msg: Any, connect: Any, maybe_tunnel: Any) -> None:
        """Registers, then hands the kernel to the rank."""
        await super().complete_registration(msg, connect, maybe_tunnel)
        self.kernel.shell.compile.get_code_name = CellNames().name
        self._ready(self)
