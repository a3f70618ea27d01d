"""What ranks say about a long request of a client, for instance for which ranks they wait.

ipyparallel keeps it as the request's standard error. Here the notebook shows it where it waits for
the request, or a cell does.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from allranks.cluster.function_sources import add_sources
from allranks.features.ipyparallel import client_requests
from allranks.features.ipyparallel.blocking_calls import runs_before, say_it_goes_on
from allranks.features.ipyparallel.metadata import NOTICE_OF
from allranks.records.ranks import label
from allranks.records.wire import Output
from allranks.widgets.dashboard.view import text_view

if TYPE_CHECKING:
    from ipyparallel.client.asyncresult import AsyncResult

#: Earlier notices are left to ipyparallel: a short call shows no more than there.
_LONG_SECONDS = 2.0
#: After this time a wait prints what comes first.
_QUIET_SECONDS = 5.0
#: How often a wait looks whether the ranks of another notebook have ended.
_VISIT_SECONDS = 2.0


class _Notices:
    """The notices of one request that have not been shown; ``wakes`` are called at each of them,
    and at the answer.
    """

    def __init__(self, request: Any) -> None:
        self._made = time.monotonic()
        self._come = SimpleQueue[tuple[int, str]]()
        self.error: Mapping[str, Any] | None = None
        """The message with the exception of the request, once it has come."""
        self.wakes: list[Callable[[None], object]] = []
        request.iopub_callbacks.append(self)
        request.add_done_callback(lambda _: self._wake())

    def __call__(self, message: Mapping[str, Any]) -> None:  # in the thread of the client
        if message["header"]["msg_type"] == "error":
            self.error = message
        rank = message.get("metadata", {}).get(NOTICE_OF)
        if rank is not None and time.monotonic() - self._made > _LONG_SECONDS:
            self._come.put((rank, message["content"]["text"]))
            self._wake()

    def _wake(self) -> None:
        for wake in tuple(self.wakes):
            wake(None)

    def take(self) -> Iterable[tuple[int, str]]:
        with suppress(Empty):  # another thread may wait for the request, too
            while True:
                yield self._come.get_nowait()


def keep_notices(plain: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Changes what makes the futures of a request: the first is that of its answer."""

    @wraps(plain)
    def create(client: Any, *arguments: Any, **options: Any) -> list[Any]:
        futures = plain(client, *arguments, **options)
        _Notices(futures[0])
        return futures

    return create


def show_in_waits(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Changes a client's wait for futures."""

    @wraps(plain)
    def await_futures(client: Any, futures: Iterable[Any], timeout: float | None) -> Any:
        return plain(client, futures, _show_until(futures, timeout))

    return await_futures


def show_in_results(kind: type[AsyncResult]) -> Callable[[], None]:
    """Shows notices in the waits for results, and exceptions that come before their output is
    shown; returns what undoes it.
    """
    of_all: Any = kind.wait
    of_one: Any = kind._wait_for_child
    of_output: Any = kind.stream_output

    @wraps(of_all)
    def wait(result: Any, timeout: float | None = -1, return_when: Any = None) -> Any:
        if return_when is None:
            timeout = _show_until(result._children, timeout)
        return of_all(result, timeout, return_when)

    @wraps(of_one)
    def wait_for_child(child: Any, *arguments: Any, **options: Any) -> Any:
        _show_until([child], None)
        return of_one(child, *arguments, **options)

    @wraps(of_output)
    @contextmanager
    def stream_output(result: Any) -> Iterator[None]:
        # Of what has come already, ipyparallel shows all but exceptions, as if it had shown them.
        kept = _notices_of(result._children)
        early = [
            (target, request, kept[request].error)
            for target, request in zip(result._targets, result._children, strict=True)
            if request in kept and kept[request].error is not None
        ]
        with of_output(result):
            for target, request, message in early:
                result._iopub_streaming_output_callback(target, request, message)
            yield

    def change(**functions: Any) -> None:
        for name, function in functions.items():
            setattr(kind, name, function)

    of_child, child = staticmethod(of_one), staticmethod(wait_for_child)
    change(wait=wait, _wait_for_child=child, stream_output=stream_output)
    return lambda: change(wait=of_all, _wait_for_child=of_child, stream_output=of_output)


def _show_until(requests: Iterable[Any], timeout: float | None) -> float | None:
    """Shows notices until all requests are answered, or for ``timeout`` seconds; returns how many
    are left. None, and less than 0, are no limit.
    """
    if timeout == 0:
        return timeout
    until = math.inf if timeout is None or timeout < 0 else time.monotonic() + timeout
    quiet_until = time.monotonic() + _QUIET_SECONDS
    woken = SimpleQueue[None]()
    kept = _notices_of(requests)
    for one in kept.values():
        one.wakes.append(woken.put)
    try:
        while not all(request.done() for request in kept):
            for rank, text in _taken(kept):
                _show(rank, text)
            now = time.monotonic()
            if now >= until:
                break
            if now >= quiet_until:
                quiet_until = math.inf
                _show_what_is_first(request.msg_id for request in kept if not request.done())
            left = min(until, quiet_until) - now
            if client_requests.end_visits():
                left = min(left, _VISIT_SECONDS)
            with suppress(Empty):
                woken.get(timeout=None if left == math.inf else max(0.0, left))
    except KeyboardInterrupt as pressed:
        say_it_goes_on(pressed, [request.msg_id for request in kept if not request.done()])
        raise
    finally:
        for one in kept.values():
            one.wakes.remove(woken.put)
    return timeout if until == math.inf else max(0.0, until - time.monotonic())


def _show_what_is_first(requests: Iterable[str]) -> None:
    if what := runs_before([*requests]):
        sys.stderr.write(f"the request waits: {what} first\n")
        sys.stderr.flush()


def late_lines(requests: Iterable[Any]) -> list[str]:
    """Returns the notices that have not been shown, for a cell that comes after these requests."""
    return [f"{label([rank])}: {_as_shown(text)}" for rank, text in _taken(_notices_of(requests))]


def _notices_of(requests: Iterable[Any]) -> dict[Any, _Notices]:
    return {
        request: one
        for request in requests
        for one in getattr(request, "iopub_callbacks", ())
        if isinstance(one, _Notices)
    }


def _taken(kept: Mapping[Any, _Notices]) -> Iterator[tuple[int, str]]:
    for request, one in kept.items():
        is_streamed = len(request.iopub_callbacks) > 1  # with all of its output
        for notice in one.take():
            if not is_streamed:
                yield notice


def _as_shown(text: str) -> str:
    return add_sources(text.rstrip("\n"))


def _show(rank: int, text: str) -> None:
    view = text_view((rank,))
    view.output(Output(rank, 0, (["notice", _as_shown(text)],), 0, 0, 0))
    view.finish()
