"""Attacks from another account of this machine; without root, from the account of the tests."""

from __future__ import annotations

import os
import subprocess

_NOBODY = 65534
#: What a connection that is to be encrypted begins with, in the protocol of ZeroMQ.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
#: The head of a message of 3 GB.
_LARGE = b"\x06" + (3 << 30).to_bytes(8, "big")
_SEND_LARGE_MESSAGES = """
import socket, sys
greeting, large = map(bytes.fromhex, sys.argv[1:3])
for port in sys.argv[3:]:
    with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as attacker:
        attacker.sendall(greeting)
        got = 0
        while got < len(greeting):
            got += len(attacker.recv(len(greeting) - got))
        try:
            attacker.sendall(large)
            for _ in range(64):
                attacker.sendall(bytes(1 << 20))
        except ConnectionError:
            print("ended")
        else:
            print("took 64 MB")
"""
_STAY_IDLE = """
import socket, sys
ends = [socket.create_connection(("127.0.0.1", int(port)), timeout=20) for port in sys.argv[1:]]
for connection in ends:
    try:
        while connection.recv(64):
            pass
    except TimeoutError:
        print("stays open")
    else:
        print("ended")
"""


def run_as_another(source: str, *words: str) -> list[str]:
    """Runs a Python program, which can import the standard library only; returns its lines."""
    other = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
    done = subprocess.run(
        # Not the Python of the tests: another account may not be allowed to run that one.
        ["/usr/bin/env", "python3", "-c", source, *words],
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        **other,
    )
    return done.stdout.splitlines()


def send_large_messages(*ports: int) -> list[str]:
    """Begins a message of 3 GB at each port, without a key; "ended" is what should happen."""
    words = _GREETING.hex(), _LARGE.hex(), *map(str, ports)
    return run_as_another(_SEND_LARGE_MESSAGES, *words)


def stay_idle(*ports: int) -> list[str]:
    """Connects to each port and sends nothing; "ended" is what should happen within 20 s."""
    return run_as_another(_STAY_IDLE, *map(str, ports))
