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

_SOURCE, _NETWORK = 12, -0x100000 & 0xFFFFFFFF
_KEEP_LOOPBACK = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x20, 0, 0, _NETWORK + _SOURCE),  # the address that a packet comes from
        (0x54, 0, 0, 0xFF000000),
        (0x15, 0, 1, 0x7F000000),
        (0x06, 0, 0, 0xFFFFFFFF),
        (0x06, 0, 0, 0),
    )
)
"""The same, but of packets from 127.0.0.0/8 keep all."""


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


def can_close() -> bool:
    """Whether a process can close ports on which it listens itself."""
    if sys.platform != "linux":
        return False
    with socket.socket() as tried:
        try:
            _attach(tried, _KEEP_LOOPBACK)
        except OSError:
            return False
    return True


def close_own(*, but_to_this_host: bool) -> None:
    """Lets nobody, or only this host, connect to the ports on which this process listens.

    Ranks that take a dead one's place are reached through such ports, by the loopback's address.
    """
    program = _KEEP_LOOPBACK if but_to_this_host else _DROP_ALL
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    _silence(found, program)
        except OSError:
            continue  # it is gone: the folder's own


def _silence(found: socket.socket, program: bytes = _DROP_ALL) -> None:
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return
    if found.getsockname()[0] in ("127.0.0.1", "::1"):
        return
    _attach(found, program if found.family == socket.AF_INET else _DROP_ALL)


def _attach(found: socket.socket, program: bytes) -> None:
    code = ctypes.create_string_buffer(program)
    # struct sock_fprog: how many instructions, and where they are.
    told = struct.pack("@HP", len(program) // len(_DROP_ALL), ctypes.addressof(code))
    found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, told)
