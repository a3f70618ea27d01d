"""The commands that mpiexec wants to run on other hosts, by a stub in place of ssh."""

from __future__ import annotations

import json
import os
import shlex
import socket

from allranks.engine.host import stubs

_CALLERS = 64


class RemoteShells:
    """Receives the commands that mpiexec, by stubs of ssh, wants to run on other hosts."""

    def __init__(self, folder: str) -> None:
        address, script = os.path.join(folder, "agent"), os.path.join(folder, "agent.sh")
        self._callers: list[socket.socket] = []
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(address)
        self.listening.listen(_CALLERS)
        with open(script, "w") as text:
            # Open MPI splits the name of an agent at blanks, which a path may have.
            text.write(f'exec {shlex.join(stubs.command("shell", address))} "$@"\n')
        #: The setting with which mpiexec runs the script.
        self.environment = {"PRTE_MCA_plm_ssh_agent": f"/bin/sh {script}"}

    def asked(self) -> dict[str, str] | None:
        caller, _ = self.listening.accept()
        with caller.makefile("rb") as request:
            line = request.readline()
        self._callers.append(caller)  # it stays open until `close`
        if not line.endswith(b"\n"):
            return None
        asked: dict[str, str] = json.loads(line)
        return asked

    def close(self) -> None:
        for end in (self.listening, *self._callers):
            end.close()
