"""FAKE cupy.cuda.nccl: what NCCL does, as messages over MPI between real ranks.

Its rules are the real one's, each with its source:

* A communicator is made when all members have met, and blocks until then. NCCL user guide,
  ncclCommInitRank.
* The first use of an algorithm connects it, and the first use of a pair connects that: inside the
  call, or inside groupEnd, until the other members have come to it. With NCCL_RUNTIME_CONNECT=0
  algorithms are connected while the communicator is made; pairs are not. NCCL 2.30, src/init.cc
  (runtimeConn), src/enqueue.cc and src/group.cc (ncclCollPreconnect, ncclP2PPreconnectFunc).
* A kernel holds the GPU until all members' have come: one of another communicator does not start
  beside it. NCCL user guide, "Using multiple NCCL communicators concurrently": the order of
  launches must be the same on all GPUs.
* An abort ends the kernels of the other members too, while they are in the call, with garbage and
  with no error. Seen on an H200 with NCCL 2.32: 2 of 21 calls returned so; here all do. NVIDIA/nccl
  issue 863.
* An abort ends the communicator's kernels at once, and returns when all members have aborted and
  no other communicator's kernel is left on the GPU; aborts of a group are all told before any of
  them is waited for. NCCL user guide, "Fault Tolerance"; NCCL 2.30, src/init.cc (ncclCommAbort).
* What a rank has sent is served by its end of the communicator after its own kernel has ended:
  once it has aborted nobody gets it any more. NCCL 2.30, src/proxy.cc.
* The end of an abort frees the communicator, whoever is in a call on it: in a group, that of the
  group. NCCL 2.30, src/init.cc (commReclaim). It waits for the whole GPU, and so does every other
  call of CUDA of that process meanwhile.
* Groups belong to a thread. NCCL user guide, "Group Calls".
* A thread has a current GPU of its own. NCCL user guide, "Creating a Communicator".

``broken`` makes `check_async_error` fail, with a result of NCCL's; ``refuses`` the next launch;
``slow_seconds`` makes connecting take a while, ``slow_pairs`` the first use of a pair, which hears
of an abort only then; ``serves_after`` all sends.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import struct
import threading
import time
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from allranks.collectives import world as worlds
from cupy.cuda import _queue

available = os.environ.get("ALLRANKS_FAKE_NCCL") != "no"
"""Without it no call of all ranks is made here: a rank in a dead one's place imports this alone."""
NCCL_VERSION = 22703
broken: list[int] = []
refuses: list[str] = []
slow_seconds: list[float] = []
slow_pairs: list[float] = []
serves_after = [0.0]
launched: list[tuple] = []
"""Every operation of this rank: name, count, dtype, op."""
aborted: list[int] = []
connected: list[str] = []
"""The thread of each connection that was made at the first use."""


def _communicators():
    if not available:
        return None, None, None
    this = worlds.current() if worlds.exists() else None
    if this is None or this.mpi is None:
        everybody = MPI.COMM_WORLD
    else:
        # In a notebook the other one ends with an epoch.
        everybody = this.mpi.pristine
        if this.joined_epoch:
            # The others made theirs before: this rank can stage arrays only.
            return everybody, everybody, everybody
    return everybody.Dup(), everybody.Dup(), everybody.Dup()


_world, _aborts, _connects = _communicators()
_rank = (_world or MPI.COMM_WORLD).Get_rank()
_numbers = itertools.count(1)
_thread = threading.local()
_DTYPES = {
    0: "int8", 1: "uint8", 2: "int32", 3: "uint32", 4: "int64", 5: "uint64",
    6: "float16", 7: "float32", 8: "float64",
}  # fmt: skip
# As the GPU has it, a NaN loses against every number.
_OPS = {0: np.add, 1: np.multiply, 2: np.fmax, 3: np.fmin}
_GARBAGE = 65
_kept: list = []
_holding: list = []
"""The communicator whose kernel holds the GPU."""


class NcclError(RuntimeError):
    pass


def get_version():
    return NCCL_VERSION


def get_unique_id():
    """128 bytes: who the root is, and which of its communicators this is."""
    return struct.pack("<II", _rank, next(_numbers)).ljust(128, b"\xf9")


def groupStart():
    assert _group() is None, "groups are not nested here"
    _thread.calls, _thread.aborts = [], []


def groupEnd():
    calls, aborts = _thread.calls, _thread.aborts
    _thread.calls = None
    by_stream = {}
    for comm, sends, receives, finish, stream in calls:
        entry = by_stream.setdefault((id(comm), stream), (comm, [], [], [], stream))
        entry[1].extend(sends)
        entry[2].extend(receives)
        entry[3].append(finish)
    for comm, sends, receives, finishes, stream in by_stream.values():
        comm._connect({i for i, _ in [*sends, *receives]}, comm.peers)
        comm._queue(sends, receives, lambda done=finishes: [f() for f in done] and None, stream)
    _await_aborts(aborts)


def _group():
    return getattr(_thread, "calls", None)


def _await_aborts(ended):
    """Until all members have aborted, and nothing of NCCL's is left on the GPU."""
    for comm in ended:
        others = [rank for rank in comm.ranks if rank != _rank]
        requests = [_aborts.Irecv(np.empty(1, np.uint8), rank, comm.tag) for rank in others]
        _kept.append(requests)
        while not all(map(_has_come, requests)) or any(not c.dead for c in _queue.owners()):
            time.sleep(1e-4)
            _queue.progress()
        # It frees memory of the GPU, inside the driver. CUDA runtime API, cudaFree. An interrupt on
        # an H200 ended when the GPU's work did.
        with _queue.driver:
            marks = _queue.marks()
            while any(mark.done_at is None for mark in marks):
                _queue.progress()
        if comm.inside:
            os.write(2, b"FAKE NCCL: a communicator is freed while a thread is in a call on it\n")
            os.abort()


@contextmanager
def _unheard():
    """Within, an interrupt waits, as it does while C code runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            os.kill(os.getpid(), signal.SIGINT)


class NcclCommunicator:
    def __init__(self, members, unique, me):
        _queue.must_be_used()
        assert isinstance(unique, bytes)
        assert len(unique) == 128
        root, number = struct.unpack_from("<II", unique)
        self.me, self.members, self.tag = me, members, 100 + number * 64 + root
        time.sleep(slow_seconds.pop() if slow_seconds else 0)
        _end_with_mpi()
        mine = np.array([me, _rank])
        self.ranks = list(range(members))
        if me == 0:
            for _ in range(members - 1):
                member, rank = self._meet(np.zeros(2, int), MPI.ANY_SOURCE)
                self.ranks[member] = int(rank)
            self.ranks[0] = _rank
            table = np.array(self.ranks)
            for rank in self.ranks[1:]:
                _kept.append((_world.Isend(table, rank, self.tag), table))
        elif members > 1:
            _kept.append((_world.Isend(mine, root, self.tag), mine))
            self.ranks = self._meet(np.zeros(members, int), root).tolist()
        else:
            self.ranks = [_rank]
        self.dead = self.used = False
        self.inside = 0
        """Threads that connect."""
        self.peers, self.algorithms = {me}, {}
        self.eager = os.environ.get("NCCL_RUNTIME_CONNECT", "1") == "0"

    def _connect(self, peers, known):
        """What a first use does: until these members have come to theirs."""
        missing = sorted(peers - known)
        if not missing:
            return
        connected.append(threading.current_thread().name)
        with _unheard(), self._entered():
            time.sleep(slow_pairs.pop() if slow_pairs else 0)
            for i in missing:
                _kept.append(_connects.Isend(np.zeros(1, np.uint8), self.ranks[i], self.tag))
            requests = [
                _connects.Irecv(np.empty(1, np.uint8), self.ranks[i], self.tag) for i in missing
            ]
            _kept.append(requests)
            while not (all(map(_has_come, requests)) or self.dead):
                time.sleep(1e-4)
        known |= peers

    @contextmanager
    def _entered(self):
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def _meet(self, into, source):
        request = _world.Irecv(into, source, self.tag)
        while not _has_come(request):
            time.sleep(1e-4)
        return into

    def check_async_error(self):
        if broken and broken[0] == 2:
            raise NcclError("NCCL_ERROR_SYSTEM_ERROR: the fake was told to fail")
        if broken:
            # cupy 14, cupy_backends/cuda/libs/nccl.pyx: NcclError has texts for 0 to 6.
            raise KeyError(broken[0])

    def abort(self):
        _queue.must_be_used()
        assert not self.dead, "aborted twice"
        self.dead = True
        aborted.append(self.tag)
        _queue.drop(self)
        if _holding == [self]:
            _holding.clear()
        for rank in self.ranks:
            if rank != _rank:
                _kept.append(_aborts.Isend(np.zeros(1, np.uint8), rank, self.tag))
        if _group() is None:
            _await_aborts([self])
        else:
            _thread.aborts.append(self)

    def allReduce(self, send, recv, n, dtype, op, stream):
        mine = _memory(send, n, _DTYPES[dtype])
        self._reduce("allReduce", [mine] * self.members, recv, n, dtype, op, stream)

    def reduce(self, send, recv, n, dtype, op, root, stream):
        pieces = [None] * self.members
        pieces[root] = _memory(send, n, _DTYPES[dtype])
        self._reduce("reduce", pieces, recv, n, dtype, op, stream)

    def reduceScatter(self, send, recv, n, dtype, op, stream):
        pieces = _memory(send, n * self.members, _DTYPES[dtype]).reshape(self.members, n)
        self._reduce("reduceScatter", list(pieces), recv, n, dtype, op, stream)

    def _reduce(self, name, pieces, recv, n, dtype, op, stream):
        """Sends members their pieces; reduces what comes, if this one has its own."""
        mine = pieces[self.me]
        parts = [np.empty(n, _DTYPES[dtype]) for _ in pieces] if mine is not None else []

        def finish():
            if parts:
                np.copyto(parts[self.me], mine)
                total = parts[0].copy()
                for part in parts[1:]:
                    _OPS[op](total, part, out=total)
                np.copyto(_memory(recv, n, _DTYPES[dtype]), total)

        self._exchange((name, n, dtype, op), pieces, parts, finish, stream)

    def broadcast(self, send, recv, n, dtype, root, stream):
        assert dtype == 1
        mine, others, parts = _memory(recv, n), [None] * self.members, []
        if self.me == root:
            others = [mine] * self.members
        else:
            parts = [mine if i == root else None for i in range(self.members)]
        self._exchange(("broadcast", n, dtype, -1), others, parts, lambda: None, stream)

    def allGather(self, send, recv, n, dtype, stream):
        mine = _memory(send, n)
        parts = list(_memory(recv, n * self.members).reshape(self.members, n))
        copy = lambda: np.copyto(parts[self.me], mine)  # noqa: E731
        self._exchange(("allGather", n, dtype, -1), [mine] * self.members, parts, copy, stream)

    def _exchange(self, call, pieces, parts, finish, stream):
        if not self.eager:
            known = self.algorithms.setdefault(call[0], {self.me})
            self._connect(set(range(self.members)), known)
        launched.append(call)
        sends, receives = (
            [(i, each) for i, each in enumerate(some) if i != self.me and each is not None]
            for some in (pieces, parts)
        )
        self._launch(sends, receives, finish, stream)

    def send(self, buffer, n, dtype, peer, stream):
        assert (dtype, peer != self.me) == (1, True)
        assert _group() is not None, "send belongs in a group here"
        launched.append(("send", n, dtype, -1))
        self._launch([(peer, _memory(buffer, n))], [], lambda: None, stream)

    def recv(self, buffer, n, dtype, peer, stream):
        assert (dtype, peer != self.me) == (1, True)
        assert _group() is not None, "recv belongs in a group here"
        launched.append(("recv", n, dtype, -1))
        self._launch([], [(peer, _memory(buffer, n))], lambda: None, stream)

    def _launch(self, sends, receives, finish, stream):
        assert not self.dead, "launched on a communicator that has been aborted"
        if refuses:
            raise NcclError(refuses.pop())
        if _group() is not None:
            _thread.calls.append((self, sends, receives, finish, stream))
        else:
            self._queue(sends, receives, finish, stream)

    def _is_aborted_elsewhere(self):
        """Whether another member has aborted. The message stays for the end of the abort here."""
        _end_with_mpi()
        return not self.dead and _aborts.Iprobe(MPI.ANY_SOURCE, self.tag)

    def _serve(self, copies):
        requests = [] if self.dead else [_world.Isend(c, rank, self.tag) for rank, c in copies]
        _kept.append((copies, requests))
        return requests

    def _queue(self, sends, receives, finish, stream):
        state, kept = [], []

        def work():
            if _holding not in ([], [self]):
                return _queue._AGAIN
            _holding[:] = [self]
            if not state:
                # What is sent is read when the stream has come so far, and no earlier.
                copies = [(self.ranks[i], piece.copy()) for i, piece in sends]
                if serves_after[0]:
                    threading.Timer(serves_after[0], self._serve, [copies]).start()
                    state.append([])
                else:
                    state.append(self._serve(copies))
                # Into memory of our own: what was aborted may still come.
                kept.extend(np.empty(piece.nbytes, np.uint8) for _, piece in receives)
                ranks = [self.ranks[i] for i, _ in receives]
                state.append(
                    [_world.Irecv(k, rank, self.tag) for k, rank in zip(kept, ranks, strict=True)]
                )
                _kept.append((state, copies, kept))
            if self._is_aborted_elsewhere():
                for _, piece in receives:
                    piece.view(np.uint8)[:] = _GARBAGE
                finish()
                _holding.clear()
                return None
            if all(_has_come(request) for requests in state for request in requests):
                for (_, piece), came in zip(receives, kept, strict=True):
                    np.copyto(piece.view(np.uint8), came)
                finish()
                _holding.clear()
                return None
            return _queue._AGAIN

        work.owner, self.used = self, True
        with _queue._lock:
            if self.dead:
                raise NcclError("NCCL_ERROR_INTERNAL_ERROR: aborted while it was launched")
            _queue.push(work, _queue.stream_of(stream))


def _has_come(request):
    """Whether a message has come."""
    _end_with_mpi()
    return request.Test()


def _end_with_mpi():
    """Where the process ends no message comes any more, and none may be asked for."""
    if MPI.Is_finalized():
        raise SystemExit


def _memory(address, n, dtype="uint8"):
    """The array at an address, which lives somewhere in this process."""
    if not n:
        return np.empty(0, dtype)
    nbytes = n * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype)
