"""Closing the ports that a launcher opens to the network, where all ranks are on this host."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys

_PIDFD_GETFD = 438
"""The number of a system call that the C library has no function for; the same on every processor
but Alpha."""
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""A program of one instruction for the kernel's packet filter: of each packet keep no byte."""


def close_to_network(pid: int) -> None:
    """Lets nobody connect to the ports on which a child listens beyond loopback (Linux).

    A launcher waits there for its helpers on other hosts, and has no setting to do without. The
    sockets stay, as it polls them, and hear nothing. A system that lets no process look at its
    child's descriptors leaves them open.
    """
    if sys.platform != "linux":
        return
    try:
        child = os.pidfd_open(pid)
    except OSError:
        return
    libc = ctypes.CDLL(None)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                continue
            descriptor = libc.syscall(_PIDFD_GETFD, child, int(name), 0)
            if descriptor >= 0:
                with socket.socket(fileno=descriptor) as found:
                    _silence(found)
    except OSError:
        pass  # it has ended, or it may not be looked at
    finally:
        os.close(child)


def _silence(found: socket.socket) -> None:
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return
    if found.getsockname()[0] in ("127.0.0.1", "::1"):
        return
    program = ctypes.create_string_buffer(_DROP_ALL)
    # struct sock_fprog: how many instructions, and where they are.
    told = struct.pack("@HP", 1, ctypes.addressof(program))
    found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, told)
