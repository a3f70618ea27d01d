"""What the first host's agent does instead of ssh: it is asked to run something on another host.

mpiexec would run ``ssh HOST COMMAND``. It is told to run `remote_shell` instead, which asks here.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from typing import Any

_AGENTS = 64


class RemoteAgent:
    """Listens for what mpiexec wants to run on other hosts.

    Args:
        folder: where its socket is, and the script that mpiexec runs.
    """

    def __init__(self, folder: str) -> None:
        program = os.path.dirname(os.path.abspath(__file__))
        address, script = os.path.join(folder, "agent"), os.path.join(folder, "agent.sh")
        self._callers: list[socket.socket] = []
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(address)
        self.listening.listen(_AGENTS)
        asks = [sys.executable, "-I", "-S", os.path.join(program, "remote_shell.py"), address]
        with open(script, "w") as text:
            # Open MPI splits the name of an agent at blanks, which a path may have.
            text.write(f'exec {shlex.join(asks)} "$@"\n')
        self.environment = {"PRTE_MCA_plm_ssh_agent": f"/bin/sh {script}"}
        """What tells mpiexec to ask here."""

    def asked(self) -> dict[str, Any] | None:
        """Returns the ``host`` and the ``command`` that somebody at the door asks for.

        None where he has left before he has said it.
        """
        caller, _ = self.listening.accept()
        with caller.makefile("rb") as said:
            line = said.readline()
        self._callers.append(caller)  # it stays as long as this
        if not line.endswith(b"\n"):
            return None
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        """Lets all who have asked end, as ssh would with what it runs."""
        for caller in self._callers:
            caller.close()
