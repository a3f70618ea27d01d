"""Carries messages between widgets on a rank and their views in the notebook, both ways.

A widget's state is sent twenty times a second, so views skip the states in between. Messages that
cannot be merged are limited in number and size.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import comm
from comm.base_comm import BaseComm
from jupyter_client.jsonutil import json_default

from allranks.engine.cell import in_rank
from allranks.engine.features import RankContext, RankFeature
from allranks.records.wire import Record, Widget

#: How many widgets of all ranks send their state, twenty times a second: the notebook's server
#: passes on a thousand messages a second.
_STATES_AT_A_TIME = 24
#: A second's messages that are no states, and their bytes.
_MOST_MESSAGES, _MOST_NBYTES = 500, 16 << 20
_OUTPUT = "OutputModel"


@dataclass
class _State:
    """The unsent part of a widget's state, by name: values and buffers."""

    values: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, list[tuple[list[Any], bytes]]] = field(default_factory=dict)

    def take(self, state: dict[str, Any], paths: list[list[Any]], buffers: list[bytes]) -> None:
        # Newer values replace those that were not sent.
        for name, value in state.items():
            self.values[name] = value
            self.buffers.pop(name, None)
        for path, buffer in zip(paths, buffers, strict=False):
            self.buffers.setdefault(path[0], []).append((path, buffer))

    def message(self) -> tuple[dict[str, Any], list[bytes]]:
        every = [one for some in self.buffers.values() for one in some]
        paths, buffers = [path for path, _ in every], [buffer for _, buffer in every]
        return {"method": "update", "state": self.values, "buffer_paths": paths}, buffers


class RankWidgets(RankFeature):
    """Carries the messages of one rank's widgets."""

    dormant = True  # until the rank has a widget
    records = (Widget,)

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._states: dict[str, _State] = {}
        #: The comms of widgets for output, and those in which something is written now.
        self._outputs: set[str] = set()
        self._open: list[str] = []
        self._recent: deque[tuple[float, int]] = deque()
        self._dropped = 0
        self._heard: queue.SimpleQueue[tuple[Widget, list[bytes]]] = queue.SimpleQueue()
        self._listener: threading.Thread | None = None

    def started(self, rank: RankContext) -> None:
        self._rank, self._send, self._transcript = rank.rank, rank.wire.send, rank.transcript
        self._activate = rank.activate
        self._most = max(1, _STATES_AT_A_TIME // rank.size)
        widgets, cell = self, rank.cell

        class RankComm(BaseComm):
            def publish_msg(self, msg_type: str, data: Any = None, *rest: Any, **more: Any) -> None:
                widgets.publish(self, msg_type, data, *rest, **more)

            def handle_msg(self, msg: dict[str, Any]) -> None:
                if self._msg_callback and cell():
                    # The events around a cell would take the figures of the one that runs.
                    self._msg_callback(msg)
                else:
                    super().handle_msg(msg)

        # Every library that makes widgets makes them by this function.
        comm.create_comm = RankComm

    def publish(
        self,
        channel: BaseComm,
        kind: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: list[bytes] | None = None,
        **_: Any,
    ) -> None:
        """Sends the message of a widget; a state a little later, together with what follows."""
        if not in_rank():
            return  # the views are the rank's
        told = _as_json(data or {})
        raw = [bytes(buffer) for buffer in buffers or ()]
        name = channel.comm_id
        self._activate(self)
        with self._lock:
            if kind == "comm_open" and told.get("state", {}).get("_model_name") == _OUTPUT:
                self._outputs.add(name)
            if kind == "comm_msg" and told.get("method") == "update":
                state = told["state"]
                if name in self._outputs and "msg_id" in state:
                    self._redirect(name, bool(state.pop("msg_id")))
                if state or raw:
                    kept = self._states.setdefault(name, _State())
                    kept.take(state, told.get("buffer_paths", []), raw)
                return
            self._flush(name)
            if told.get("method") == "custom" and not self._afford(sum(map(len, raw))):
                self._dropped += 1
                return
            if kind == "comm_close":
                self._outputs.discard(name)
            more = _as_json(metadata or {})
            self._send(Widget(self._rank, kind, name, told, more, channel.target_name), *raw)

    def output_sending(self, final: bool) -> None:
        # The states that have waited longest, or at the end all of them.
        with self._lock:
            for name in list(self._states)[: None if final else self._most]:
                self._flush(name)
            if self._dropped:
                one = self._dropped == 1
                what = "1 widget message was" if one else f"{self._dropped:,} widget messages were"
                said = f"{what} not sent: at most {_MOST_MESSAGES} per second. States are all sent."
                self._transcript.place(["notice", said])
                self._dropped = 0

    def _flush(self, name: str) -> None:
        state = self._states.pop(name, None)
        if state is not None:
            data, buffers = state.message()
            self._send(Widget(self._rank, "comm_msg", name, data, {}, ""), *buffers)

    def _afford(self, nbytes: int) -> bool:
        now = monotonic()
        while self._recent and now - self._recent[0][0] > 1:
            self._recent.popleft()
        if len(self._recent) >= _MOST_MESSAGES:
            return False
        if self._recent and sum(size for _, size in self._recent) + nbytes > _MOST_NBYTES:
            return False
        self._recent.append((now, nbytes))
        return True

    def _redirect(self, name: str, begins: bool) -> None:
        # Later output belongs in a widget for output, or no longer does.
        if begins:
            self._open.append(name)
        elif name in self._open:
            self._open.remove(name)
        self._transcript.into(self._open[-1] if self._open else "")

    def message_received(self, record: Record, payloads: list[bytes]) -> None:
        # In a thread of its own, because a callback may take long and this thread receives records.
        if not isinstance(record, Widget):
            return
        if self._listener is None:
            self._listener = threading.Thread(
                target=self._listen, name="allranks-widgets", daemon=True
            )
            self._listener.start()
        self._heard.put((record, payloads))

    def _listen(self) -> None:
        while True:
            record, payloads = self._heard.get()
            # The manager logs exceptions of the callbacks.
            message = {
                "content": {"comm_id": record.comm, "data": record.data},
                "metadata": record.metadata,
                "buffers": [memoryview(payload) for payload in payloads],
            }
            getattr(comm.get_comm_manager(), record.kind)(None, "", message)


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    # A copy, because the state may change before it is sent.
    copy: dict[str, Any] = _read(_write(value))
    return copy


_write = json.JSONEncoder(default=json_default).encode
_read = json.JSONDecoder().decode


FEATURE = RankWidgets
