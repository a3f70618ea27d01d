"""Closing ports to the network that mpiexec and MPI open, where all ranks are on this host.

A packet filter is attached to each listening socket (Linux). Both sides; standard library only.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress

#: A system call without a function in the C library. Its number is the same on all processors but
#: Alpha.
_PIDFD_GETFD = 438
_SO_ATTACH_FILTER = 26
NOT_SUPPORTED = (
    "this system lets you attach no packet filter to a socket (SO_ATTACH_FILTER), which would "
    "close MPI's ports to the network"
)
NOT_INSPECTED = (
    "this system lets no process take a descriptor of its child (pidfd_getfd), which is needed to "
    "close the port of mpiexec to the network"
)
#: A program of one instruction for the kernel's packet filter: keep no byte of any packet.
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)

#: The offset of the source address in the header of IPv4, and SKF_NET_OFF, the start of it.
_SOURCE, _NETWORK = 12, -0x100000 & 0xFFFFFFFF
#: Keep only packets from 127.0.0.0/8.
_KEEP_LOOPBACK = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x20, 0, 0, _NETWORK + _SOURCE),  # the address that a packet comes from
        (0x54, 0, 0, 0xFF000000),  # its first byte
        (0x15, 0, 1, 0x7F000000),  # unless it is 127, skip one instruction
        (0x06, 0, 0, 0xFFFFFFFF),  # keep the packet
        (0x06, 0, 0, 0),  # drop it
    )
)


def restrict_ports_of(pid: int) -> None:
    """Refuses all connections to ports on which a child listens beyond loopback.

    mpiexec waits there for its helpers on other hosts, and has no setting that turns this off.
    Where the system lets no process inspect its child's descriptors, the ports stay open.
    """
    if sys.platform != "linux":
        return
    try:
        child = os.pidfd_open(pid)
    except OSError:
        return
    libc = ctypes.CDLL(None)
    try:
        for number in _sockets_of(pid):
            descriptor = libc.syscall(_PIDFD_GETFD, child, number, 0)
            if descriptor >= 0:
                # The child's socket stays open, since mpiexec polls it, but receives nothing.
                with socket.socket(fileno=descriptor) as found:
                    _restrict(found)
    except OSError:
        pass  # it has ended, or may not be inspected
    finally:
        os.close(child)


def is_supported() -> bool:
    if sys.platform != "linux":
        return False
    with socket.socket() as tried:
        try:
            _attach(tried, _KEEP_LOOPBACK)
        except OSError:
            return False
    return True


def can_inspect_children() -> bool:
    """Whether this process can take a descriptor of its child, for example a socket."""
    if sys.platform != "linux":
        return False
    with subprocess.Popen(["/bin/sh", "-c", "read -r _"], stdin=subprocess.PIPE) as child:
        try:
            opened = os.pidfd_open(child.pid)
        except OSError:
            return False
        descriptor = ctypes.CDLL(None).syscall(_PIDFD_GETFD, opened, 0, 0)
        os.close(opened)
        if descriptor >= 0:
            os.close(descriptor)
        return bool(descriptor >= 0)


def restrict_own_ports(*, allow_this_host: bool) -> list[int]:
    """Refuses connections to the ports on which this process listens, and returns the ports.

    Replacements of dead ranks need connections from this host: they connect by the address of the
    loopback.
    """
    ports = []
    program = _KEEP_LOOPBACK if allow_this_host else _DROP_ALL
    for number in _sockets_of(os.getpid()):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
            ports += _restrict(found, program)
    return ports


def _sockets_of(pid: int) -> list[int]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile: the descriptor of the listing itself
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def _restrict(found: socket.socket, program: bytes = _DROP_ALL) -> list[int]:
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        return []
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return []
    address, port, *_ = found.getsockname()
    if address in ("127.0.0.1", "::1"):
        return []
    _attach(found, program if found.family == socket.AF_INET else _DROP_ALL)
    return [port]


def _attach(found: socket.socket, program: bytes) -> None:
    code = ctypes.create_string_buffer(program)
    # struct sock_fprog: the number of instructions, and their address.
    filter_program = struct.pack("@HP", len(program) // len(_DROP_ALL), ctypes.addressof(code))
    found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_program)
