"""The handles (`Work`) of torch's calls on allranks. This module imports torch, so it is imported
only once a cell has imported torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.futures import Future

from allranks.collectives import world as worlds
from allranks.collectives.calls.call import Call, Pause
from allranks.collectives.gpu.device import Device
from allranks.collectives.ops.inputs import Handle
from allranks.errors import StaleHandle
from allranks.features.torch_jax import cuda
from allranks.features.torch_jax.messages import Transfer
from allranks.features.torch_jax.tensors import ends_backward, in_backward


class FinishedWork(dist.Work):  # type: ignore[misc]
    """A call that has ended."""

    def __init__(self, outputs: Sequence[Any] = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._at_end: Callable[[], None] | None = None
        self.devices: list[Any] = []
        """The GPUs that the outputs are on."""

    def when_ended(self, action: Callable[[], None]) -> None:
        """Calls a function once the call has been waited for."""
        self._at_end = action

    def ended(self) -> bool:
        """Calls that function; true, as the result of ``wait``."""
        action, self._at_end = self._at_end, None
        if action is not None:
            action()
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self.ended()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Any]:
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        self.wait()
        future = CallFuture(self)
        future.end(self._outputs)
        return future


class CallFuture(Future):  # type: ignore[misc]
    """The future of a call in a backward pass: a wait for it in Python drives the call.

    Communication hooks wait for futures within the pass, and for those that ``then`` returns.
    Errors keep their types in it.
    """

    def __init__(self, work: FinishedWork) -> None:
        super().__init__(devices=work.devices or None)
        self._work = work

    def wait(self) -> Any:
        if not super().done():
            self._work.wait()
        return super().wait()

    def done(self) -> bool:
        if not super().done() and self._work.is_completed():
            self._work.wait()
        done: bool = super().done()
        return done

    def end(self, outputs: list[Any], error: BaseException | None = None) -> None:
        """Completes the future, once."""
        if super().done():
            return
        if error is None:
            self.set_result(outputs)
        else:
            # A future takes no KeyboardInterrupt.
            kept = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self.set_exception(kept)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = CallFuture(self._work)

        def follow(done: Any) -> None:
            try:
                result = callback(done)
            except Exception as error:
                following.set_exception(error)
            else:
                following.set_result(result)

        self.add_done_callback(follow)
        return following


_awaited: WeakSet[CallFuture] = WeakSet()
"""The futures for which C++ may wait, where no signal reaches it."""


def end_waits_in_cpp() -> None:
    """Ends the waits of C++ for futures, after an interrupt that it has not noticed."""
    for future in list(_awaited):
        future.end([], InterruptedError("the call was interrupted"))


class CallWork(FinishedWork):
    """A posted call. Python and C++ wait for it by `wait`, DDP's reducer by its future.

    No thread drives the call. In a backward pass, the future is completed by a callback at the
    end of the pass, which runs before the reducer waits for its futures: so calls and computation
    overlap. Elsewhere C++ could wait for the future without a call to Python, so `get_future`
    finishes the call: outside of a pass, and in its last callbacks, as DDP with a static graph.
    """

    def __init__(self, call: Call, outputs: Sequence[Any] = ()) -> None:
        super().__init__(outputs)
        self._call = call
        self._handle = Handle(call)
        self._future: CallFuture | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and timeout > timedelta(0) and not self.is_completed():
            self._wait_until(time.monotonic() + timeout.total_seconds())
        try:
            self._handle.synchronize()
        except BaseException as error:
            if self._future is not None:
                self._future.end([], error)
            raise
        self._follow()
        if self._future is not None:
            self._future.end(self._outputs)
        return self.ended()

    def _follow(self) -> None:
        """What comes after the call's end and before that of its future."""

    def _wait_until(self, deadline: float) -> None:
        pause = Pause()
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Operation timed out! {self._call.spec.title} has not completed"
                )
            pause()

    def is_completed(self) -> bool:
        try:
            return self._handle.poll()
        except StaleHandle:
            return True

    def is_success(self) -> bool:
        return self._call.done and self._call.error is None

    def exception(self) -> BaseException | None:
        return self._call.error

    def get_future(self) -> Any:
        if self._future is not None:
            return self._future
        future = self._future = CallFuture(self)
        if in_backward() and not ends_backward() and not self.is_completed():
            _awaited.add(future)
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        else:
            self.wait()
        return future


class CudaWork(CallWork):
    """A call on tensors of a GPU. Its steps end when all of its work is queued there: `wait` makes
    torch's current stream wait for that work, and the host only for the other ranks.
    """

    def __init__(self, call: Call, outputs: Sequence[Any], device: Device) -> None:
        self._device = device
        super().__init__(call, outputs)
        self.devices = cuda.future_devices(self._outputs)

    def _follow(self) -> None:
        cuda.let_torch_wait(self._call, self._device)

    def is_completed(self) -> bool:
        if not super().is_completed():
            return False
        if self._call.queued:
            worlds.current().poll(self._call)
        return not self._call.queued

    def is_success(self) -> bool:
        return super().is_success() and self.is_completed()


class CopiedWork(FinishedWork):
    """A call on copies in host memory of tensors of a GPU, to which its results are copied back."""

    def __init__(self, work: Any, copies: Sequence[tuple[Any, Any]]) -> None:
        super().__init__([tensor for tensor, _ in copies])
        self._work, self._copies = work, copies
        self._copied: Any = None
        self.devices = cuda.future_devices(self._outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        if self._copies and self._copied is None:
            for tensor, source in self._copies:
                cuda.from_host(tensor, source)
            self._copied = cuda.end_of_copy(self._outputs[0])
        elif self._copied is not None:
            self._copied.wait()  # on torch's current stream, which may be another one now
        return self.ended()

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        if self._work.is_success():
            self.wait()  # copies the results back, on torch's current stream
        return True

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> BaseException | None:
        error: BaseException | None = self._work.exception()
        return error

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    source_rank = _source_rank


class SeveralWorks(FinishedWork):
    """Calls that were posted together."""

    def __init__(self, works: Sequence[Any], outputs: Sequence[Any] = ()) -> None:
        super().__init__(outputs)
        self._works = works
        self.devices = list(dict.fromkeys(each for work in works for each in work.devices))

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return self.ended()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next(filter(None, (work.exception() for work in self._works)), None)


class TransferWork(FinishedWork):
    """A send or a receive."""

    def __init__(self, transfer: Transfer, group: Any, outputs: Sequence[Any]) -> None:
        super().__init__(outputs)
        self._transfer, self._group, self._waited = transfer, group, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._waited:
            self._transfer.wait(self._group.core())
            self._waited = True
        return self.ended()

    def is_completed(self) -> bool:
        return self._transfer.poll()

    def is_success(self) -> bool:
        return self._transfer.done and self._transfer.error is None

    def exception(self) -> BaseException | None:
        return self._transfer.error

    def _source_rank(self) -> int:
        place: int = self._group.ranks.index(self._transfer.source)
        return place

    source_rank = _source_rank


def recorded(function: Callable[..., Any], title: str, place: int) -> Callable[..., Any]:
    """A method of a process group whose calls torch's profiler shows.

    ``place`` is the argument with the call's inputs.
    """

    @wraps(function)
    def method(group: Any, *args: Any, **options: Any) -> Any:
        if not _profiled():
            return function(group, *args, **options)
        inputs = _flat(args[place]) if len(args) > place else []
        record = torch._C._profiler._RecordFunctionFast(f"{group.backend_name}:{title}", inputs)
        record.__enter__()

        def end() -> None:
            record.__exit__(None, None, None)

        try:
            work = function(group, *args, **options)
        except BaseException:
            end()
            raise
        work.when_ended(end)
        return work

    return method


FORGETS_HANDLES = torch.__version__ < (2, 7)


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a process group whose last handles are kept.

    torch 2.6 does not keep the Python object of a handle for which C++ waits, as DDP does for a
    few at once, and the wait would not end.
    """
    recent: deque[Any] = deque(maxlen=8)

    @wraps(function)
    def method(*args: Any, **options: Any) -> Any:
        work = function(*args, **options)
        recent.append(work)
        return work

    return method


_profiled = torch._C._autograd._profiler_enabled


def _flat(inputs: Any) -> list[Any]:
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    return [tensor for each in inputs for tensor in _flat(each)]
