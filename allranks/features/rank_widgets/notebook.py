"""Widgets of ranks in the notebook: each has a proxy in the kernel, with the same id.

A message of a rank's widget goes to the front end as if a widget of the kernel had sent it, and
the answers go back. That happens in the thread that receives from the ranks, so widgets also work
between cells.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allranks.cluster.features import ClusterContext, NotebookFeature
from allranks.features.rank_widgets.bars import MODEL, STATES, DrawnBars
from allranks.records.wire import Output, Record, Widget
from allranks.widgets.displays import TITLES
from allranks.widgets.text import NOTEBOOK, RankText, front_end

_TARGET = "jupyter.widget"
_MOST_OUTPUTS = 1000
#: Outputs are sent whole each time: a long one less often.
_NBYTES_A_SECOND = 500_000


def _of_state(name: str) -> property:
    return property(lambda proxy: proxy.state.get(name, ""))


@dataclass(eq=False)
class ProxyWidget:
    """A widget of one rank: its channel to the front end, and its current state.

    A page that is loaded anew finds it among the kernel's own widgets.
    """

    rank: int
    model_id: str
    channel: Any
    state: dict[str, Any]
    outputs: list[dict[str, Any]] = field(default_factory=list)
    clears_next: bool = False
    next_at: float = 0.0
    shown_soon: bool = False

    _model_name = _of_state("_model_name")
    _model_module = _of_state("_model_module")
    _model_module_version = _of_state("_model_module_version")

    def get_state(self, *_: Any, **__: Any) -> dict[str, Any]:
        return dict(self.state)

    def _get_embed_state(self, drop_defaults: bool = False) -> dict[str, Any]:
        from ipywidgets import Widget as OfKernel

        state: dict[str, Any] = OfKernel._get_embed_state(self, drop_defaults)
        return state

    def close(self) -> None:
        # The widget is the rank's.
        ...


class WidgetProxies:
    """The widgets of one cluster's ranks."""

    def __init__(self) -> None:
        #: Sends a record and its payloads to ranks, from any thread.
        self.send: Callable[..., object] = lambda *_: None
        #: Whether the front end draws widgets; else their content is shown as text.
        self.drawn = False
        self._proxies: dict[str, ProxyWidget] = {}
        #: In which widget each rank writes now.
        self._into: dict[int, str] = {}
        #: The widgets of ranks that are gone, and their last states.
        self._left: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()

    def sift(self, record: Any, payloads: Sequence[bytes]) -> Any:
        # Handles messages of widgets, and output in them; the rest is returned.
        if isinstance(record, Widget):
            with self._lock:
                self._take(record, payloads)
            return None
        if isinstance(record, Output):
            into = record.rank in self._into
            if into or any(entry[0] == "into" for entry in record.entries):
                with self._lock:
                    return self._divert(record)
        return record

    def close(self) -> None:
        # The views stay, and show a line when they are used.
        with self._lock:
            self.send = lambda *_: None
            for name, proxy in self._proxies.items():
                self._left[name] = proxy.state
                STATES.pop(name, None)
                _forget(name)
            self._proxies.clear()
            self._into.clear()

    def _take(self, record: Widget, payloads: Sequence[bytes]) -> None:
        buffers = list(payloads)
        if record.kind == "comm_open":
            self._open(record, buffers)
            return
        proxy = self._proxies.get(record.comm)
        if proxy is None:
            return
        if record.kind == "comm_close":
            del self._proxies[record.comm]
            STATES.pop(record.comm, None)
            _forget(record.comm)
            proxy.channel.close(data=record.data)
        else:
            if "state" in record.data:
                proxy.state.update(_whole(record.data, buffers))
            proxy.channel.send(record.data, record.metadata, buffers)

    def _open(self, record: Widget, buffers: list[bytes]) -> None:
        state = _whole(record.data, buffers)
        proxy = ProxyWidget(record.rank, record.comm, NullComm(), state)
        if self.drawn:
            import comm
            from ipywidgets.widgets import widget

            channel = proxy.channel = comm.create_comm(
                target_name=record.target,
                comm_id=record.comm,
                data=record.data,
                metadata=record.metadata,
                buffers=buffers,
            )
            channel.on_msg(lambda message: self._heard(record, message))
            channel.on_close(lambda _: self._gone(record.comm))
            if record.target == _TARGET:
                widget._instances[record.comm] = proxy
        self._proxies[record.comm] = proxy
        STATES[record.comm] = state

    def _gone(self, name: str) -> None:
        self._proxies.pop(name, None)
        self._left.pop(name, None)

    def _tell_gone(self, opened: Widget) -> None:
        for name in _around(opened.comm, self._left):
            if name in TITLES:
                TITLES[name](
                    f"rank {opened.rank} has ended, and this widget no longer works: run the "
                    "cell again."
                )

    def _heard(self, opened: Widget, message: dict[str, Any]) -> None:
        data = message["content"]["data"]
        buffers = [bytes(buffer) for buffer in message.get("buffers", ())]
        proxy = self._proxies.get(opened.comm)
        if opened.comm in self._left:
            self._tell_gone(opened)
            return
        if proxy is not None and data.get("method") == "update":
            proxy.state.update(_whole(data, buffers))
        told = replace(opened, kind="comm_msg", data=data, metadata=message.get("metadata", {}))
        self.send((opened.rank,), told, *buffers)

    def _divert(self, record: Output) -> Output:
        """Puts output of a rank into the widget that it belongs in; returns the rest."""
        rest: list[list[Any]] = []
        changed: set[str] = set()
        for entry in record.entries:
            if entry[0] == "into":
                self._into.pop(record.rank, None)
                if entry[1] in self._proxies:
                    self._into[record.rank] = entry[1]
                continue
            name = self._into.get(record.rank)
            if name is None or entry[0] in ("notice", "hidden"):
                rest.append(entry)
            elif name in self._proxies:
                _write(self._proxies[name], entry)
                changed.add(name)
        for name in changed:
            rest += self._show(name, self._proxies[name])
        return replace(record, entries=tuple(rest))

    def _show(self, name: str, proxy: ProxyWidget) -> list[list[Any]]:
        """Shows the content of a widget for output; where none is drawn, returns it as an entry."""
        if not self.drawn:
            return [["update", {"text/plain": _as_text(proxy.outputs)}, {}, name]]
        wait = proxy.next_at - time.monotonic()
        if wait <= 0:
            self._send_outputs(proxy)
        elif not proxy.shown_soon:
            proxy.shown_soon = True
            later = threading.Timer(wait, self._show_late, [proxy])
            later.daemon = True
            later.start()
        return []

    def _show_late(self, proxy: ProxyWidget) -> None:
        with self._lock:
            proxy.shown_soon = False
            self._send_outputs(proxy)

    def _send_outputs(self, proxy: ProxyWidget) -> None:
        outputs = list(proxy.outputs)
        nbytes = sum(len(str(output.get("text") or output.get("data"))) for output in outputs)
        proxy.next_at = time.monotonic() + nbytes / _NBYTES_A_SECOND
        proxy.state["outputs"] = outputs
        data = {"method": "update", "state": {"outputs": outputs}, "buffer_paths": []}
        proxy.channel.send(data)


def _write(proxy: ProxyWidget, entry: list[Any]) -> None:
    # As a notebook keeps outputs.
    kind, *rest = entry
    outputs = proxy.outputs
    if kind == "clear":
        proxy.clears_next = bool(rest[0])
        if not rest[0]:
            outputs.clear()
        return
    if proxy.clears_next:
        proxy.clears_next = False
        outputs.clear()
    if kind in ("out", "err"):
        name = "stdout" if kind == "out" else "stderr"
        if outputs and outputs[-1].get("name") == name:
            outputs[-1] = {**outputs[-1], "text": outputs[-1]["text"] + rest[0]}
        else:
            outputs.append({"output_type": "stream", "name": name, "text": rest[0]})
        return
    named = {"display_id": rest[2]} if len(rest) > 2 and rest[2] else {}
    shown = {
        "output_type": "display_data",
        "data": rest[0],
        "metadata": rest[1],
        "transient": named,
    }
    same = [at for at, old in enumerate(outputs) if named and old.get("transient") == named]
    if kind == "update" and same:
        for at in same:
            outputs[at] = shown
    else:
        outputs.append(shown)
    del outputs[:-_MOST_OUTPUTS]


def _as_text(outputs: list[dict[str, Any]]) -> str:
    text = RankText()
    for output in outputs:
        text.feed("out", output.get("text") or output["data"].get("text/plain", "") + "\n")
    return "\n".join(line.text for line in text.lines)


class NullComm:
    """The channel where no widgets are drawn."""

    def send(self, *_: Any) -> None: ...

    def close(self, **_: Any) -> None: ...


def _around(name: str, states: dict[str, dict[str, Any]]) -> list[str]:
    found = [name]
    # The list grows meanwhile: outer widgets may be in others.
    for inner in found:
        found += [
            outer
            for outer, state in states.items()
            if MODEL + inner in state.get("children", ()) and outer not in found
        ]
    return found


def _whole(data: dict[str, Any], buffers: list[bytes]) -> dict[str, Any]:
    state: dict[str, Any] = data.get("state", {})
    paths = data.get("buffer_paths", [])
    if not paths:
        return dict(state)
    from ipywidgets.widgets.widget import _put_buffers

    whole: dict[str, Any] = copy.deepcopy(state)
    _put_buffers(whole, paths, buffers)
    return whole


def _forget(name: str) -> None:
    from ipywidgets.widgets import widget

    widget._instances.pop(name, None)


class NotebookWidgets(NotebookFeature):
    """Has a proxy in the kernel for each widget of the ranks."""

    display_folders = (DrawnBars,)

    def __init__(self) -> None:
        self._proxies = WidgetProxies()

    def started(self, cluster: ClusterContext) -> None:
        # Output belongs in a widget only once there is one. Ranks that another notebook has started
        # may have some already.
        self.arriving = (Widget,) if cluster.starts_ranks else (Widget, Output)
        # Views of widgets of earlier ranks keep their proxies.
        self._proxies = WidgetProxies()
        self._proxies.send = cluster.send

    def ranks_reserved(self) -> None:
        self._proxies.drawn = front_end() == NOTEBOOK

    def message_arriving(self, record: Record, payloads: list[bytes]) -> Record | None:
        self.arriving = (Widget, Output)
        if self.cell is not None:  # each cell may come from another front end
            self._proxies.drawn = self.cell.front_end == NOTEBOOK
        left: Record | None = self._proxies.sift(record, payloads)
        return left

    def stopped(self) -> None:
        self._proxies.close()


FEATURE = NotebookWidgets
