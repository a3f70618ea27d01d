"""Answers the requests of the notebook to a rank (see ``allranks.records.requests``)."""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import cloudpickle
import psutil
from IPython.core.interactiveshell import InteractiveShell

from allranks import collectives
from allranks.collectives.calls import guard
from allranks.engine import namespace
from allranks.engine.exceptions import text_of
from allranks.engine.features import Answered, RankHooks
from allranks.engine.telemetry import current_line
from allranks.errors import UsageError
from allranks.records import requests
from allranks.records.requests import end_of

T = TypeVar("T")


class RankRequests:
    """Answers requests for one rank; ``watch`` sends strips of the running cell in so many bins."""

    def __init__(
        self,
        shell: InteractiveShell,
        rank: int,
        send_output: Callable[[], None],
        watch: Callable[[int], None],
        features: RankHooks,
    ) -> None:
        self.shell = shell
        self.rank = rank
        self._send_output, self._watch = send_output, watch
        self._features = features
        self.busy = False
        self._process = psutil.Process()

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        if name == requests.STATUS:
            return self._status(), []
        if name == requests.SEND:
            self._send_output()
            return {}, []
        if name == requests.STACK:
            return {"text": _stack()}, []
        if name == requests.LOG:
            return {"text": end_of(arguments["path"], arguments["nbytes"])}, []
        if name == requests.STRIPS:
            self._watch(arguments["bins"])
            return {}, []
        if name == requests.PUSH:
            self.shell.user_ns.update(pickle.loads(payloads[0]))
            return {}, []
        if name == requests.PULL:
            return self._pull(arguments["names"])
        if name == requests.COMPLETE:
            return self._complete(arguments["code"], arguments["cursor"]), []
        if name == requests.INSPECT:
            return self._inspect(arguments["code"], arguments["cursor"], arguments["detail"]), []
        if name == requests.RENEW:
            self.begin_epoch(lambda: collectives.renew(arguments["epoch"]))
            return {}, []
        return self._features.answer(name, arguments, payloads)

    def begin_epoch(self, begin: Callable[[], T]) -> T:
        # The cells' ``comm`` becomes that of the new epoch.
        old, ended = self.shell.user_ns.get("comm"), collectives.epoch()
        found = begin()
        self._features.epoch_ended(ended)
        namespace.renew(self.shell.user_ns, old)
        return found

    def _status(self) -> dict[str, Any]:
        try:
            rss = self._process.memory_info().rss
        except OSError:
            rss = 0  # a cell has used up all descriptors
        return {
            "pid": os.getpid(),
            "rss_nbytes": rss,
            "state": "running" if self.busy else "idle",
            "line": current_line() if self.busy else "",
            "activity": collectives.activity() if self.busy else "",
        }

    def _pull(self, names: list[str]) -> Answered:
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"rank {self.rank} has no variable named {', '.join(missing)}")
        values = {name: self.shell.user_ns[name] for name in names}
        try:
            return {}, [cloudpickle.dumps(values, protocol=5)]
        except BaseException as error:  # an object's own way to be pickled may do anything
            problem = text_of(error) or type(error).__name__
            raise UsageError(
                f"rank {self.rank} cannot send {', '.join(names)}: {problem}"
            ) from None

    def _complete(self, code: str, cursor: int) -> dict[str, Any]:
        from IPython.core.completer import provisionalcompleter, rectify_completions

        with provisionalcompleter():
            found = list(rectify_completions(code, self.shell.Completer.completions(code, cursor)))
        start, end = (found[0].start, found[0].end) if found else (cursor, cursor)
        matches = [{"text": c.text, "type": c.type or "", "start": c.start} for c in found]
        return {"matches": matches, "start": start, "end": end}

    def _inspect(self, code: str, cursor: int, detail: int) -> dict[str, Any]:
        from IPython.utils.tokenutil import token_at_cursor

        name = token_at_cursor(code, cursor)
        try:
            bundle = self.shell.object_inspect_mime(name, detail_level=detail)
        except KeyError:
            return {"found": False, "data": {}}
        return {"found": True, "data": bundle}


def _stack() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in guard.frames_of_threads().items():
        parts.append(f"thread {names.get(ident, ident)}\n")
        try:
            parts.extend(traceback.format_stack(frame))
        except UnicodeError:
            parts.append("  in a file whose name is no text\n")
    return "".join(parts)
