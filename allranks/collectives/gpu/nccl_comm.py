"""A group's NCCL communicator, from its making to its end.

Making one blocks until all members do the same, for seconds. So a thread does it, and the rank
waits as it waits everywhere: an interrupt is heard, and so is a member that has left.
"""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np

from allranks.collectives.calls.call import Call, Members
from allranks.collectives.calls.transport import Transport
from allranks.collectives.calls.wait import Steps
from allranks.collectives.gpu.api import Communicator, load_nccl
from allranks.collectives.gpu.device import Device
from allranks.errors import TransportFailed
from allranks.records.ranks import label

_ID_NBYTES = 128
_ADVICE = "NCCL_DEBUG=WARN in the ranks' environment makes NCCL say more."


class Connection:
    """A communicator of this epoch, or the way to one."""

    def __init__(self, members: Members, device: Device, host: Transport) -> None:
        self.members, self.device, self.host = members, device, host
        self._comm: Communicator | None = None
        self._making: _Making | None = None

    def comm(self, call: Call) -> Steps[Communicator]:
        """The communicator. Collective over the group, whose members have all arrived."""
        if self._comm is None:
            unique = yield from self._unique(call)
            making = self._making = _Making(self.device, self.members.size, unique, self.members.me)
            making.start()
            call.stage += 1
            while making.is_alive():
                yield call
            self._making = None
            if making.problem is not None:
                whom = label(self.members.ranks)
                raise TransportFailed(
                    f"NCCL could not connect {whom}: {making.problem}. {_ADVICE}"
                ) from making.problem
            self._comm = making.comm
        assert self._comm is not None
        return self._comm

    def _unique(self, call: Call) -> Steps[bytes]:
        """The first member's unique id, on all members; the byte before says whether it has one."""
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
                f"NCCL could not begin on rank {self.members.ranks[0]}: {why}. {_ADVICE}"
            ) from problem
        return word[1:].tobytes()

    def check(self) -> None:
        """Raises `TransportFailed` where something that was launched has failed since."""
        if self._comm is None:
            return
        try:
            self._comm.check_async_error()
        except KeyError:
            # How cupy reads "in progress".
            return
        except RuntimeError as error:
            more = last_error()
            raise TransportFailed(
                f"NCCL has failed: {error}{f' ({more})' if more else ''}. The other ranks hear of "
                f"it, and the next cell starts a fresh communicator. {_ADVICE}"
            ) from error

    def abandon(self) -> None:
        """Ends what is under way and the communicator. Freeing one that hangs would hang."""
        making, comm = self._making, self._comm
        self._making = self._comm = None
        if making is not None:
            making.leave()
        if comm is not None:
            comm.abort()


class _Making(threading.Thread):
    """Makes a communicator; one that is made too late, for nobody, it ends itself."""

    def __init__(self, device: Device, members: int, unique: bytes, me: int) -> None:
        super().__init__(name="allranks-nccl", daemon=True)
        self._arguments = members, unique, me
        self._device = device
        self._lock = threading.Lock()
        self._left = False
        self.comm: Communicator | None = None
        self.problem: Exception | None = None

    def run(self) -> None:
        """Makes it."""
        # What it asks for, calls that return at once, cupy reads as errors that it does not know.
        os.environ.pop("NCCL_COMM_BLOCKING", None)
        try:
            with self._device.cupy.cuda.Device(self._device.number):
                comm = load_nccl().NcclCommunicator(*self._arguments)
        except Exception as error:
            self.problem = error
            return
        with self._lock:
            if not self._left:
                self.comm = comm
                return
        comm.abort()

    def leave(self) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._left = True
            comm, self.comm = self.comm, None
        if comm is not None:
            comm.abort()


def last_error() -> str:
    """What NCCL says about its last error; "" where it cannot be asked."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
        library.ncclGetLastError.restype = ctypes.c_char_p
        library.ncclGetLastError.argtypes = [ctypes.c_void_p]
        said = library.ncclGetLastError(None)
    except (OSError, AttributeError):
        return ""
    return said.decode("utf-8", "replace").strip() if said else ""
