"""The transport between ranks that share a GPU, through memory that they share on it (CUDA IPC).

Each rank has a window (`windows.py`), which the other members of its group open once for each
epoch. Arrays move in rounds of at most a window. In a round each rank copies its part to its
window, and then reads the others'. Of an allreduce the first rank reads: it reduces all windows in
its own, from which all copy the result. A GPU takes longer to change between processes, about
0.3 ms for each rank of a call, than one process takes to reduce.

Ranks write to their own windows only, and read them at a time when each has arrived after the end
of its own work (`_phase`). So no work on the GPU waits for another process, which may have ended:
CUDA's events between processes would save no more than that wait on the host, and CUDA leaves open
what a stream does that waits for an event of a process that has died.

The window of a rank that has left, or died, is as that rank left it. No rank reads it any more from
then on, and it is closed before windows are opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from allranks.collectives.arrays.reductions import Arithmetic, is_half
from allranks.collectives.calls.call import Call, Members, Steps, cut
from allranks.collectives.calls.rank_state import RankState
from allranks.collectives.gpu.device import Device
from allranks.records.deferred import deferred
from allranks.records.ranks import label

GpuArray = Any
_BLOCK_BYTES = 16 << 20
"""Of what is converted at once."""
_NOWHERE = " There is none in WSL 2, between containers, and between slices of a GPU."
Told = Callable[[Call, Any], Steps[list[Any]]]
"""Every member's value on every member, through host memory."""


class IpcTransport:
    """Transport of GPU arrays in windows on the one GPU that all members use."""

    name = "ipc"

    def __init__(self, own: RankState, members: Members, device: Device) -> None:
        self.own, self.members, self.device = own, members, device
        self._epoch = own.epoch
        self._nbytes = 0
        """The bytes of a round."""
        self._opened: list[int] = []
        """The addresses of the other members' windows."""
        self._windows: list[GpuArray] = []
        """The members' windows, as bytes."""

    def open(self, call: Call, told: Told) -> Steps[str]:
        """Opens the members' windows, the first time. Collective; all have agreed.

        Returns: why that is not possible, the same on every member; or "".
        """
        if self._windows:
            return ""
        windows, number = self.device.windows, self.members.number
        call.stage += 1
        # What an earlier epoch has left to the GPU may still write to this rank's window.
        while not windows.all_closed():
            yield call
        mine = ["", "", 0]
        try:
            mine[1:] = windows.handle(number).hex(), windows.size()
        except RuntimeError as error:
            mine[0] = str(error)
        rows = yield from told(call, mine)
        if not any(problem for problem, *_ in rows):
            with deferred():  # an interrupt would lose what was just opened
                problem = self._open_each(rows)
            rows = yield from told(call, [problem])
        why = next((self._refused(index, row[0]) for index, row in enumerate(rows) if row[0]), "")
        if why:
            windows.forget(number)  # for the next group that tries: it allocates no other one
        return why

    def _open_each(self, rows: list[Any]) -> str:
        """Opens the windows of these handles; returns why one cannot be, or ""."""
        device, windows = self.device, []
        self._nbytes = min(nbytes for _, _, nbytes in rows)
        try:
            for index, (_, handle, _) in enumerate(rows):
                if index == self.members.me:
                    at = device.windows.own(self.members.number)
                else:
                    at = device.windows.open(bytes.fromhex(handle))
                    self._opened.append(at)
                windows.append(device.over(at, self._nbytes))
        except RuntimeError as error:
            return str(error)
        self._windows = windows
        return ""

    def _refused(self, index: int, problem: str) -> str:
        return (
            "Large arrays move in memory that processes share on the GPU, and CUDA refuses it to "
            f"{label([self.members.ranks[index]])} ({problem}): the arrays are staged through the "
            f"host.{'' if 'MemoryAllocation' in problem else _NOWHERE}"
        )

    def connect(self, call: Call) -> Steps[None]:
        """Needs nothing: `open` comes before."""
        yield from ()

    def confirm(self, call: Call) -> Steps[None]:
        """Needs nothing: the last phase ends when all have read."""
        yield from ()

    def abandon(self) -> None:
        """Closes the other ranks' windows, once nothing on the GPU can read them."""
        device, opened = self.device, self._opened
        self._opened, self._windows = [], []
        device.windows.close(opened, device.once_idle(device.collectives))

    def allreduce(
        self, call: Call, source: GpuArray, out: GpuArray, reduction: Arithmetic
    ) -> Steps[None]:
        step = self._nbytes // source.itemsize
        for start in range(0, source.size, step):
            here = slice(start, start + step)
            yield from self._reduce(call, source[here], out[here], reduction)

    def _reduce(
        self, call: Call, source: GpuArray, out: GpuArray, reduction: Arithmetic
    ) -> Steps[None]:
        parts, me = self._parts(source), self.members.me
        yield from self._fill(call, lambda: _stage(reduction, source, parts[me]))
        # In place: the first window is the first of the parts.
        yield from self._read(call, None if me else lambda: _combine(reduction, parts, parts[0]))
        yield from self._read(call, lambda: np.copyto(out, parts[0]))

    def reducescatter(
        self,
        call: Call,
        source: GpuArray,
        bounds: Sequence[int],
        out: GpuArray,
        reduction: Arithmetic,
    ) -> Steps[None]:
        """Reduces round by round; each member keeps its own part of each."""
        step, first, last = self._nbytes // source.itemsize, *bounds[self.members.me :][:2]
        for start in range(0, source.size, step):
            end = min(start + step, source.size)
            low = min(max(first, start), end)
            high = max(low, min(last, end))
            into, inside = out[low - first : high - first], slice(low - start, high - start)
            yield from self._scatter(call, source[start:end], inside, into, reduction)

    def _scatter(
        self, call: Call, source: GpuArray, inside: slice, out: GpuArray, reduction: Arithmetic
    ) -> Steps[None]:
        parts, me = self._parts(source), self.members.me
        own = [part[inside] for part in parts]
        yield from self._fill(call, lambda: _stage(reduction, source, parts[me]))
        yield from self._read(call, (lambda: _combine(reduction, own, out)) if out.size else None)

    def broadcast(self, call: Call, array: GpuArray, root: int) -> Steps[None]:
        rows = [[array.nbytes if i == root else 0] for i in range(self.members.size)]
        yield from self._exchange(call, array, rows, 0, None if self.members.me == root else array)

    def allgather(
        self, call: Call, source: GpuArray, lengths: Sequence[int], root: int
    ) -> Steps[list[GpuArray]]:
        reads = root in (-1, self.members.me)
        incoming = list(lengths) if reads else [0] * len(lengths)
        out = self.device.empty((sum(incoming),), source.dtype)
        rows = [[length] for length in lengths]
        yield from self._exchange(call, source, rows, 0, out if reads else None)
        return cut(out, incoming)

    def alltoall(
        self, call: Call, source: GpuArray, table: Sequence[Sequence[int]]
    ) -> Steps[list[GpuArray]]:
        me = self.members.me
        incoming = [row[me] for row in table]
        out = self.device.empty((sum(incoming),), source.dtype)
        yield from self._exchange(call, source, table, me, out)
        return cut(out, incoming)

    def _exchange(
        self,
        call: Call,
        source: GpuArray,
        table: Sequence[Sequence[int]],
        chosen: int,
        out: GpuArray | None,
    ) -> Steps[None]:
        """Copies the piece of this index of every member to ``out``, one after the other.

        ``table`` holds the bytes of each member's pieces. A round has a part of each piece.
        """
        call.held = [call.held, out]
        me, step = self.members.me, self._nbytes // len(table[0])
        sends, incoming = _spans(table[me]), _spans([row[chosen] for row in table])
        for start in range(0, max(map(max, table)), step):
            # For each member, where this round's part of each of its pieces is in its window.
            inside = [_spans([_count(length, start, step) for length in row]) for row in table]
            fills = [
                (self._windows[me][window], source[_shifted(window, piece.start + start)])
                for window, piece in zip(inside[me], sends, strict=True)
                if window.start < window.stop
            ]
            reads = [
                (out[_shifted(spans[chosen], piece.start + start)], window[spans[chosen]])
                for window, spans, piece in zip(self._windows, inside, incoming, strict=True)
                if out is not None and spans[chosen].start < spans[chosen].stop
            ]
            # The first time also without a piece: the reads write to results, and these may lie in
            # memory that the caller's earlier work still uses.
            yield from self._fill(call, partial(_copy_each, fills) if fills or not start else None)
            yield from self._read(call, partial(_copy_each, reads) if reads else None)

    def _parts(self, like: GpuArray) -> list[GpuArray]:
        """The beginnings of all windows, as arrays of this size and dtype."""
        return [window[: like.nbytes].view(like.dtype) for window in self._windows]

    def _fill(self, call: Call, work: Callable[[], object] | None) -> Steps[None]:
        """Lets each rank write to its own window, behind the caller's work."""
        yield from self._phase(call, work, reads=False)

    def _read(self, call: Call, work: Callable[[], object] | None) -> Steps[None]:
        """Lets ranks read all windows.

        Not behind the caller's work, which may be long: the results were allocated before the
        windows were filled, and that was behind it.
        """
        yield from self._phase(call, work, reads=True)

    def _phase(self, call: Call, work: Callable[[], object] | None, *, reads: bool) -> Steps[None]:
        """Ends when this rank's work on the GPU has ended, and that of all others."""
        device = self.device
        if work is not None:
            if reads:  # of a rank that has left, no window is read
                yield from self.own.while_one_has_left(call, self._epoch)
            way = device.on(device.collectives) if reads else device.behind_caller(call)
            with way as stream:
                began = device.event(stream, timed=True)
                work()
                ended = device.event(stream, timed=True)
            yield from device.wait(ended, call)
            device.add_seconds(call, began, ended)
            device.events.give_back(began, ended, timed=True)
        yield from call.agreement.barrier(call)


def _stage(reduction: Arithmetic, source: GpuArray, out: GpuArray) -> None:
    for here in _blocks(source):
        reduction.staged(source[here], out[here])


def _combine(reduction: Arithmetic, parts: list[GpuArray], out: GpuArray) -> None:
    for here in _blocks(out):
        inside = [part[here] for part in parts]
        # The same array, not only the same memory: cupy copies what overlaps with its result.
        reduction.combine(inside, inside[0] if out is parts[0] else out[here])


def _blocks(array: GpuArray) -> Iterator[slice]:
    """The whole, or blocks of a dtype that may be converted to one of up to eight times its size,
    for which ranks that share a GPU may not have the memory.
    """
    converted = array.dtype.kind in "iu" or is_half(array.dtype)
    step = _BLOCK_BYTES // array.itemsize if converted else max(1, array.size)
    for start in range(0, array.size, step):
        yield slice(start, start + step)


def _copy_each(pairs: list[tuple[GpuArray, GpuArray]]) -> None:
    for to, source in pairs:
        np.copyto(to, source)


def _spans(lengths: Sequence[int]) -> list[slice]:
    """The places of consecutive pieces of these lengths."""
    return [slice(low, high) for low, high in pairwise(accumulate(lengths, initial=0))]


def _shifted(span: slice, start: int) -> slice:
    """A place of the same length that begins at ``start``."""
    return slice(start, start + span.stop - span.start)


def _count(length: int, start: int, step: int) -> int:
    """The bytes of a piece that are in the round which begins at ``start``."""
    return max(0, min(step, length - start))
