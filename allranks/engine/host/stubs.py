"""The programs that launchers run in place of a rank and of ssh. Standard library only.

They run this file without site-packages (``python -I -S``), and import what Python has loaded at
its start or what is written in C: so they are up in a few milliseconds, of which a start of many
ranks has many.

    stubs.py rank ADDRESS [REPLACED]          hands its place over to the host agent, then waits
    stubs.py shell ADDRESS HOST COMMAND…      asks the host agent to run a command on another host

The host agent, which has everything imported, forks the real rank with the environment of the stub.
The stub ends as the rank ended, so the launcher sees it. A shell ends with the host agent, as ssh
ends with the command that it runs.
"""

from __future__ import annotations

import os
import sys
from _json import encode_basestring_ascii as quoted
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket

#: Variables with the numbers of descriptors that connect a rank to MPICH's process manager.
_PASSED_DESCRIPTORS = ("PMI_FD",)
_INT_NBYTES = 4


def command(kind: str, address: str) -> list[str]:
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), kind, address]


def stand_for_rank(address: str, replaced: str = "[]") -> int:
    """Returns the exit code of the rank; a signal is raised again in this process.

    ``replaced`` are the ranks that have died, as JSON, if this process replaces one of them.
    """
    passed = [int(os.environ[name]) for name in _PASSED_DESCRIPTORS if name in os.environ]
    variables = [f"{quoted(name)}: {quoted(value)}" for name, value in os.environ.items()]
    environment = "{" + ", ".join(variables) + "}"
    text = (
        f'{{"environment": {environment}, "descriptors": {passed}, "replaced": {replaced}}}'
    ).encode()
    numbers = b"".join(n.to_bytes(_INT_NBYTES, sys.byteorder) for n in passed or [0])
    agent = _connected(address)
    agent.sendmsg([len(text).to_bytes(8, "little")], [(SOL_SOCKET, SCM_RIGHTS, numbers)])
    agent.sendall(text)
    answer = agent.recv(8)
    agent.close()
    if not answer:
        return 1  # the host agent is gone, and its ranks with it
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:
        # Not at the top of the file: few ranks end by a signal.
        import signal

        # SIGKILL and SIGSTOP have no handlers.
        signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
        os.kill(os.getpid(), -code)
    return code


def stand_for_ssh(address: str, host: str, *words: str) -> int:
    agent = _connected(address)
    asked = f'{{"host": {quoted(host)}, "command": {quoted(" ".join(words))}}}'
    agent.sendall(asked.encode() + b"\n")
    # Returns when the agent is gone.
    agent.recv(1)
    return 0


def _connected(address: str) -> socket:
    agent = socket(AF_UNIX, SOCK_STREAM)
    agent.connect(address)
    return agent


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    sys.exit(stand_for_rank(*arguments) if kind == "rank" else stand_for_ssh(*arguments))
