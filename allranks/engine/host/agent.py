"""What mpiexec runs in the place of ssh: asks the nursery to run a command on another host.

It runs without site-packages (``python -I -S``). mpiexec calls it with a host and a command; the
nursery hands both to the notebook, and that to the nursery of the other host. This process stays
as long as the nursery, as ssh would.
"""

import json
import socket
import sys


def main(address: str, host: str, *command: str) -> None:
    """Ask, and wait until the nursery is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as nursery:
        nursery.connect(address)
        nursery.sendall(json.dumps({"host": host, "command": " ".join(command)}).encode() + b"\n")
        nursery.recv(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
