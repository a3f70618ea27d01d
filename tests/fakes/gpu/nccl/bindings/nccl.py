"""FAKE nccl.bindings.nccl: communicators that do not block, on the fake NCCL of cupy.

What would block goes on in a thread, and the communicator is in progress until then: so NCCL's user
guide has it for communicators with ``blocking=0``, "Fault Tolerance" and "Nonblocking Group
Operation". An error that comes there is told by comm_get_async_error.

``gates`` holds what goes on next back until it is opened, for some seconds.
"""

from __future__ import annotations

import threading

import numpy as np
from cupy.cuda import _queue
from cupy.cuda import nccl as _nccl

gates: list[threading.Event] = []
_GATE_SECONDS = 10
unique_id_dtype = np.dtype([("internal", "i1", (128,))])
NCCLError = _nccl.NcclError


class Config:
    blocking = -(2**31)


class UniqueId(bytearray):
    @staticmethod
    def from_buffer(buffer):
        return UniqueId(buffer)


class _Comm:
    def __init__(self):
        self.made = self.thread = None
        self.error = ""

    def goes_on(self, do):
        """Does it where it keeps nobody."""

        def done():
            _queue.use()  # NCCL's own threads do
            if gates:
                gates.pop().wait(_GATE_SECONDS)
            try:
                do()
            except (NCCLError, AssertionError) as error:
                self.error = self.error or str(error)

        assert self.thread is None or not self.thread.is_alive(), "called while in progress"
        self.thread = threading.Thread(target=done, daemon=True, name="nccl")
        self.thread.start()


_group = threading.local()


def get_version():
    return _nccl.get_version()


def get_unique_id():
    return UniqueId(_nccl.get_unique_id())


def check_status(status):
    if status not in (0, 7):
        raise NCCLError(f"NCCL_ERROR_SYSTEM_ERROR: the fake has failed with {status}")


def comm_init_rank_config(nranks, comm_id, rank, config):
    assert config.blocking == 0
    comm = _Comm()

    def make():
        comm.made = _nccl.NcclCommunicator(nranks, bytes(comm_id), rank)

    comm.goes_on(make)
    return comm


def comm_get_async_error(comm):
    if comm.thread.is_alive():
        return 7
    try:
        comm.made.check_async_error()
    except NCCLError:
        return 2
    except KeyError as error:
        return error.args[0]
    return 2 if comm.error else 0


def comm_abort(comm):
    if comm.made is not None:
        comm.made.abort()
        _group.ended.append(comm)


def group_start():
    _group.calls, _group.ended = [], []
    _nccl.groupStart()


def group_end():
    calls, _group.calls = _group.calls, None
    aborts, _nccl._thread.aborts = _nccl._thread.aborts, []
    _nccl.groupEnd()
    for comm in _group.ended:
        comm.thread.join()  # NCCL 2.30, src/init.cc, ncclCommAbort: ncclGroupJobAbort
    _nccl._await_aborts(aborts)

    def do():
        _nccl.groupStart()
        for name, comm, arguments in calls:
            getattr(comm.made, name)(*arguments)
        _nccl.groupEnd()

    if calls:
        calls[0][1].goes_on(do)


def _call(name, comm, *arguments):
    assert comm.made is not None
    if getattr(_group, "calls", None) is not None:
        _group.calls.append((name, comm, arguments))
    else:
        comm.goes_on(lambda: getattr(comm.made, name)(*arguments))


def all_reduce(sendbuff, recvbuff, count, datatype, op, comm, stream):
    _call("allReduce", comm, sendbuff, recvbuff, count, datatype, op, stream)


def reduce(sendbuff, recvbuff, count, datatype, op, root, comm, stream):
    _call("reduce", comm, sendbuff, recvbuff, count, datatype, op, root, stream)


def broadcast(sendbuff, recvbuff, count, datatype, root, comm, stream):
    _call("broadcast", comm, sendbuff, recvbuff, count, datatype, root, stream)


def reduce_scatter(sendbuff, recvbuff, recvcount, datatype, op, comm, stream):
    _call("reduceScatter", comm, sendbuff, recvbuff, recvcount, datatype, op, stream)


def all_gather(sendbuff, recvbuff, sendcount, datatype, comm, stream):
    _call("allGather", comm, sendbuff, recvbuff, sendcount, datatype, stream)


def send(sendbuff, count, datatype, peer, comm, stream):
    _call("send", comm, sendbuff, count, datatype, peer, stream)


def recv(recvbuff, count, datatype, peer, comm, stream):
    _call("recv", comm, recvbuff, count, datatype, peer, stream)
