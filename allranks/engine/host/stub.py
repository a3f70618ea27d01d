"""What the launcher starts in every rank: hands its place over to the host agent, then waits.

It runs without site-packages (``python -I -S``) and is up in milliseconds. The host agent, which
has everything imported, forks the real rank with this process's environment; this process ends as
the rank ended, so that the launcher sees what happened.
"""

import json
import os
import signal
import socket
import sys

#: Descriptors that MPICH's process manager talks over; their numbers must survive the hand-over.
_PASSED_DESCRIPTORS = ("PMI_FD",)


def main(address: str, replaced: str = "[]") -> int:
    """Return the exit code of the rank; a signal is raised again in this process.

    ``replaced`` lists the ranks that have died, where this process is for one of them.
    """
    passed = [int(os.environ[name]) for name in _PASSED_DESCRIPTORS if name in os.environ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as nursery:
        nursery.connect(address)
        told = {"environment": dict(os.environ), "descriptors": passed}
        text = json.dumps(told | {"replaced": json.loads(replaced)}).encode()
        socket.send_fds(nursery, [len(text).to_bytes(8, "little")], passed or [0])
        nursery.sendall(text)
        answer = nursery.recv(8)
    if not answer:
        return 1  # the host agent is gone, and its ranks with it
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
