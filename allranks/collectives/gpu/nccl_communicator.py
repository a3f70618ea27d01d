"""A group's NCCL communicator, from its creation to its end.

Creating one blocks until all members do the same, for seconds. So a thread does it, and the rank
waits as it does everywhere: an interrupt ends the wait, and so does a member that has left.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from allranks.collectives.calls.call import Call, Members
from allranks.collectives.calls.transport import Transport
from allranks.collectives.calls.wait import Pause, Steps
from allranks.collectives.gpu.cupy_api import (
    BYTES,
    IN_PROGRESS,
    Communicator,
    NcclModule,
    load_nccl,
)
from allranks.collectives.gpu.device import Device
from allranks.collectives.gpu.nccl_order import start_thread
from allranks.errors import TransportFailed
from allranks.records.ranks import label

_ID_NBYTES = 128
_ENDING_SECONDS = 10.0
"""How long a new communicator waits for the aborts of former ones."""
_TOLD_SECONDS, _LIMIT_SECONDS = 30.0, 300.0
"""Connecting takes 0.7 to 4 s; after these times a rank reports what to check, and gives up."""
_ADVICE = "NCCL_DEBUG=WARN in the ranks' environment makes NCCL print more."


class NcclConnection:
    """A group's communicator of this epoch, made when it is first needed."""

    def __init__(self, members: Members, device: Device, host: Transport) -> None:
        self.members, self.device, self.host = members, device, host
        self._comm: Communicator | None = None
        self._making: _Making | None = None

    def comm(self, call: Call) -> Steps[Communicator]:
        """The communicator. Collective over the group, whose members have all arrived."""
        if self._comm is None:
            unique = yield from self._unique(call)
            making = self._making = _Making(self.device, self.members.size, unique, self.members.me)
            try:
                start_thread(making)
            except RuntimeError as error:
                raise TransportFailed(
                    f"NCCL needs a thread to connect {label(self.members.ranks)}: {error}. "
                    "ulimit -u shows how many this user may have; in a container --pids-limit=-1."
                ) from error
            call.stage += 1
            began, warned = time.monotonic(), False
            while making.is_alive():
                yield call
                waited = time.monotonic() - began
                if waited > _TOLD_SECONDS and not warned:
                    warned = True
                    self.device.notice(f"{self._late(waited)} It keeps waiting.")
                if waited > _LIMIT_SECONDS:
                    raise TransportFailed(self._late(waited))
            if making.problem is not None:
                ranks = label(self.members.ranks)
                raise TransportFailed(
                    f"NCCL could not connect {ranks}: {making.problem}. {_ADVICE}"
                ) from making.problem
            self._comm, self._making = making.comm, None
        assert self._comm is not None
        return self._comm

    def _late(self, waited: float) -> str:
        return (
            f"NCCL has not connected {label(self.members.ranks)} within {waited:.0f} s: it needs a "
            "network interface that all of them reach (NCCL_SOCKET_IFNAME=eth0 names it) and room "
            f"in /dev/shm (df -h /dev/shm; in a container --shm-size=1g). {_ADVICE}"
        )

    def _unique(self, call: Call) -> Steps[bytes]:
        """The first member's unique id, on all members; the byte before it is 1 if there is one."""
        word = np.zeros(1 + _ID_NBYTES, np.uint8)
        problem: Exception | None = None
        if self.members.me == 0:
            try:
                word[1:] = np.frombuffer(load_nccl().get_unique_id(), np.uint8)
                word[0] = 1
            except Exception as error:
                problem = error
        yield from call.moved(self.host.broadcast, word, 0)
        if not word[0]:
            why = str(problem) if problem is not None else "see its own error"
            raise TransportFailed(
                f"NCCL could not start on rank {self.members.ranks[0]}: {why}. {_ADVICE}"
            ) from problem
        return word[1:].tobytes()

    def check(self) -> None:
        """Raises `TransportFailed` if launched work has failed since."""
        if self._comm is not None:
            try:
                is_in_progress(self._comm)
            except RuntimeError as error:
                raise _failed(error) from error

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Raises `TransportFailed` if NCCL refuses a launch within."""
        try:
            yield
        except RuntimeError as error:
            raise _failed(error) from error

    def abandon(self) -> None:
        """Parks the communicator to be aborted: freeing one that hangs would hang."""
        making, comm = self._making, self._comm
        self._making = self._comm = None
        if making is not None:
            making.leave()
        if comm is not None:
            self.device.aborts.park(comm)


class _Making(threading.Thread):
    """Creates a communicator; aborts it itself if the call was left meanwhile."""

    def __init__(self, device: Device, members: int, unique: bytes, me: int) -> None:
        super().__init__(name="allranks-nccl", daemon=True)
        self._members, self._unique, self._me = members, unique, me
        self._device = device
        self._lock = threading.Lock()
        self._left = False
        self.comm: Communicator | None = None
        self.problem: Exception | None = None

    def run(self) -> None:
        """Creates it, and makes all connections that a first call would otherwise make."""
        # With it calls return at once, with a result that cupy takes for an unknown error.
        os.environ.pop("NCCL_COMM_BLOCKING", None)
        # Connect for all algorithms now: otherwise the first use of one blocks within a call.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        try:
            self._device.aborts.wait(_ENDING_SECONDS)
            self._device.use()
            nccl = load_nccl()
            comm = nccl.NcclCommunicator(self._members, self._unique, self._me)
            with self._lock:
                self.comm, left = comm, self._left
            if left:
                self.leave()
                self._device.aborts.abort()
                return
            settle(comm, lambda: self._left)
            if self._members > 1 and not self._left:
                self._connect_pairs(nccl, comm)
        except Exception as error:
            self.problem = error

    def _connect_pairs(self, nccl: NcclModule, comm: Communicator) -> None:
        """Sends a byte between all pairs, as no variable makes NCCL connect these beforehand."""
        device, others = self._device, [i for i in range(self._members) if i != self._me]
        stream = device.new_stream()
        with stream:
            room = device.cupy.empty((2 * self._members,), np.uint8)
        nccl.groupStart()
        try:
            for i in others:
                comm.send(room.data.ptr + i, 1, BYTES, i, stream.ptr)
                comm.recv(room.data.ptr + self._members + i, 1, BYTES, i, stream.ptr)
        finally:
            nccl.groupEnd()
        settle(comm, lambda: self._left)
        done, pause = device.event(stream), Pause()
        while not self._left and not device.happened(done):
            pause()

    def leave(self) -> None:
        """No call waits for it any more; its NCCL call ends when the communicator is aborted."""
        with self._lock:
            self._left = True
            comm, self.comm = self.comm, None
        if comm is not None:
            self._device.aborts.park(comm, self)


def settle(comm: Communicator, left: Callable[[], bool]) -> None:
    """Returns once nothing is being launched, or ``left()`` is true."""
    pause = Pause()
    while not left() and is_in_progress(comm):
        pause()


def is_in_progress(comm: Communicator) -> bool:
    """Whether a launch is in progress; raises RuntimeError if one has failed.

    Source: cupy 14, cupy_backends/cuda/libs/nccl.pyx: the KeyError of a result it has no text for.
    """
    try:
        comm.check_async_error()
    except KeyError as error:
        if error.args != (IN_PROGRESS,):
            raise RuntimeError(f"NCCL returned the result {error}") from error
        return True
    return False


def _failed(error: RuntimeError) -> TransportFailed:
    more = last_error()
    return TransportFailed(
        f"NCCL has failed: {error}{f' ({more})' if more else ''}. The other ranks hear of it, and "
        f"the next cell starts a fresh communicator. {_ADVICE}"
    )


def last_error() -> str:
    """NCCL's text about its last error; "" if it is not available."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
        library.ncclGetLastError.restype = ctypes.c_char_p
        library.ncclGetLastError.argtypes = [ctypes.c_void_p]
        text = library.ncclGetLastError(None)
    except (OSError, AttributeError):
        return ""
    return text.decode("utf-8", "replace").strip() if text else ""
