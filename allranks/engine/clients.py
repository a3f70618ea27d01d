"""Requests of ipyparallel's clients on a rank: their output, their interrupts and their errors."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from allranks.collectives import world
from allranks.engine.interrupts import Interrupts
from allranks.engine.transcript import Entry
from allranks.engine.wire import RankWire

_ERROR = ("ename", "evalue", "traceback")
#: A request of a client, in place of the number of a cell.
_CLIENT = -1


def serve_clients(kernel: Any, wire: RankWire, interrupts: Interrupts) -> None:
    """Sends clients the output of their requests, and lets their signals interrupt a request.

    An engine of ipyparallel has its own standard streams, and a nanny for signals.
    """
    failed: list[Entry] = []
    execute = kernel.do_execute

    async def do_execute(*arguments: Any, **options: Any) -> dict[str, Any]:
        reply: dict[str, Any] = await execute(*arguments, **options)
        if reply["status"] == "error":
            failed.append(["error", {name: reply[name] for name in _ERROR}])
        return reply

    def answering(handle: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
            failed.clear()
            # A rank that drops the requests behind an error leaves the others waiting for it in
            # a collective. The next `%%px` can come that early: an interrupted one does not wait.
            parent["content"]["stop_on_error"] = False
            publish = partial(_publish, kernel, parent)
            with wire.output_for_client(publish) as alone, _like_a_cell(interrupts, alone):
                done = handle(stream, ident, parent)
                if inspect.isawaitable(done):
                    await done
            publish(failed)

        return answer

    # In the control channel's thread.
    def signal_request(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        asked = parent["content"]["sig"]
        content: dict[str, Any] = {"status": "ok"}
        if asked not in ("SIGINT", signal.SIGINT):
            found = f"expected SIGINT, found {asked}. Type: %distributed restart"
            content = {"status": "error", "ename": "UsageError", "evalue": found}
            content |= {"traceback": [f"UsageError: {found}"]}
        elif interrupts.number == _CLIENT and interrupts.heard:
            interrupts.send(_CLIENT)
        kernel.session.send(stream, "signal_reply", content, parent=parent, ident=ident)

    kernel.do_execute = do_execute
    for name in ("execute_request", "apply_request"):
        kernel.shell_handlers[name] = answering(kernel.shell_handlers[name])
    kernel.control_handlers["signal_request"] = signal_request


@contextmanager
def _like_a_cell(interrupts: Interrupts, alone: bool) -> Iterator[None]:
    """Lets interrupts end a request, and lets it call collectives without a notice."""
    if not alone:  # a cell does this
        yield
        return
    this = world.current()
    reported, this.strays_reported = this.strays_reported, True
    interrupts.number, interrupts.count = _CLIENT, 0
    interrupts.hear()
    try:
        yield
    finally:
        interrupts.hear_no_more()
        this.strays_reported = reported


def _publish(kernel: Any, parent: dict[str, Any], entries: list[Entry]) -> None:
    for kind, *rest in entries:
        content: dict[str, Any]
        if kind in ("display", "update", "result"):
            name = {"display": "display_data", "update": "update_display_data"}.get(kind)
            content = {"data": rest[0], "metadata": rest[1], "transient": {}}
            if name is None:
                name = "execute_result"
                content["execution_count"] = kernel.shell.execution_count
            elif rest[2] is not None:
                content["transient"]["display_id"] = rest[2]
        elif kind == "error":
            name, content = "error", rest[0]
        elif kind == "clear":
            name, content = "clear_output", {"wait": rest[0]}
        elif kind == "hidden":
            name = "stream"
            text = f"{rest[0]:,} lines ({rest[1]:,} bytes) are only in the rank's log\n"
            content = {"name": "stderr", "text": text}
        elif kind in ("out", "err", "notice"):
            name = "stream"
            content = {"name": "stdout" if kind == "out" else "stderr", "text": rest[0]}
            content["text"] += "\n" * (kind == "notice")
        else:
            continue
        kernel.session.send(
            kernel.iopub_socket, name, content, parent=parent, ident=kernel._topic(name)
        )
