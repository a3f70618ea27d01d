"""What mpiexec runs in the place of ssh: asks the host agent to run a command on another host.

It runs without site-packages (``python -I -S``). mpiexec calls it with a host and a command. The
agent passes both through the notebook to the agent of the other host. This process lives as long
as the agent, as ssh would.
"""

import json
import socket
import sys


def main(address: str, host: str, *command: str) -> None:
    """Ask, and wait until the host agent is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as nursery:
        nursery.connect(address)
        nursery.sendall(json.dumps({"host": host, "command": " ".join(command)}).encode() + b"\n")
        nursery.recv(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
