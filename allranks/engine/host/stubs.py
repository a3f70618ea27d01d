"""The programs that launchers run in place of a rank and of ssh. Standard library only.

They run this file without site-packages (``python -I -S``), so that they are up in milliseconds:

    stubs.py rank ADDRESS [REPLACED]          hands its place over to the host agent, then waits
    stubs.py shell ADDRESS HOST COMMAND…      asks the host agent to run a command on another host

The host agent, which has everything imported, forks the real rank with the environment of the stub.
The stub ends as the rank ended, so the launcher sees it. A shell ends with the host agent, as ssh
ends with the command that it runs.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys

#: Variables with the numbers of descriptors that connect a rank to MPICH's process manager.
_PASSED_DESCRIPTORS = ("PMI_FD",)
_CALLERS = 64


def command(kind: str, address: str) -> list[str]:
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), kind, address]


def stand_for_rank(address: str, replaced: str = "[]") -> int:
    """Returns the exit code of the rank; a signal is raised again in this process.

    ``replaced`` are the ranks that have died, as JSON, if this process replaces one of them.
    """
    passed = [int(os.environ[name]) for name in _PASSED_DESCRIPTORS if name in os.environ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.connect(address)
        request = {
            "environment": dict(os.environ),
            "descriptors": passed,
            "replaced": json.loads(replaced),
        }
        text = json.dumps(request).encode()
        socket.send_fds(agent, [len(text).to_bytes(8, "little")], passed or [0])
        agent.sendall(text)
        answer = agent.recv(8)
    if not answer:
        return 1  # the host agent is gone, and its ranks with it
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:
        # SIGKILL and SIGSTOP have no handlers.
        signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
        os.kill(os.getpid(), -code)
    return code


def stand_for_ssh(address: str, host: str, *words: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.connect(address)
        agent.sendall(json.dumps({"host": host, "command": " ".join(words)}).encode() + b"\n")
        # Returns when the agent is gone.
        agent.recv(1)
    return 0


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
            text.write(f'exec {shlex.join(command("shell", address))} "$@"\n')
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
        for caller in self._callers:
            caller.close()


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    sys.exit(stand_for_rank(*arguments) if kind == "rank" else stand_for_ssh(*arguments))
