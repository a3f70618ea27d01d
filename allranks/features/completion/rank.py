"""Completes and describes names on a rank: completely while it is idle, and else what is known."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any

from IPython.utils.tokenutil import token_at_cursor

from allranks.engine.features import Answered, RankContext, RankFeature
from allranks.engine.interrupts import MAIN_THREAD
from allranks.records.deferred import interruptible

COMPLETE, DESCRIBE = "complete", "describe"
#: The same without code of the user's, as properties and ``__repr__``: for a rank that runs a cell.
COMPLETE_BUSY, DESCRIBE_BUSY = "complete_busy", "describe_busy"
#: Code of the user's is interrupted after this time.
_SECONDS = 2.0
_TEXT_LENGTH = 200
_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*\.?$|$")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class NamesOfRank(RankFeature):
    """Answers what Tab and Shift-Tab ask in the notebook."""

    requests = frozenset({COMPLETE, DESCRIBE})
    requests_while_busy = frozenset({COMPLETE_BUSY, DESCRIBE_BUSY})

    def started(self, rank: RankContext) -> None:
        self._shell, self._rank = rank.shell, rank.rank

    def answer(self, name: str, arguments: dict[str, Any], payloads: list[bytes]) -> Answered:
        code, cursor = arguments["code"], arguments["cursor"]
        if name == COMPLETE_BUSY:
            return self._complete_known(code[:cursor]), []
        if name == DESCRIBE_BUSY:
            return self._describe_known(token_at_cursor(code, cursor)), []
        with _interrupted_after(_SECONDS):
            if name == COMPLETE:
                return self._complete(code, cursor), []
            return self._inspect(token_at_cursor(code, cursor), arguments["detail"]), []

    def _complete(self, code: str, cursor: int) -> dict[str, Any]:
        from IPython.core.completer import provisionalcompleter, rectify_completions

        _save_whole_files()
        # IPython leaves out what a part of it has found that raises, and shows its traceback, which
        # an interrupt of a slow import of jedi would cause.
        before, sys.excepthook = sys.excepthook, lambda *_: None
        try:
            with provisionalcompleter():
                completions = self._shell.Completer.completions(code, cursor)
                found = list(rectify_completions(code, completions))
        finally:
            sys.excepthook = before
        path = _PATH.search(code[:cursor])
        if not found and path and "." in path[0]:
            # jedi finds no attributes if a process was killed while it wrote to jedi's cache.
            return self._complete_known(code[:cursor])
        return {"matches": [self._match(code, c.text, c.start, c.type or "") for c in found]}

    def _inspect(self, name: str, detail: int) -> dict[str, Any]:
        try:
            bundle = self._shell.object_inspect_mime(name, detail_level=detail)
        except KeyError:
            return {"found": False, "data": {}}
        return {"found": True, "data": self._with_rank(bundle)}

    def _with_rank(self, bundle: dict[str, Any]) -> dict[str, Any]:
        ends = {
            "text/plain": f"\nRank: {self._rank}",
            "text/html": f"<h1>Rank</h1>\n<pre>{self._rank}</pre>",
        }
        return {kind: text + ends.get(kind, "") for kind, text in bundle.items()}

    def _complete_known(self, before: str) -> dict[str, Any]:
        path = _PATH.search(before)
        *owners, last = path[0].split(".") if path else [""]
        try:
            names = _static_names(self._find(owners)) if owners else list(self._shell.user_ns)
        except (AttributeError, KeyError):
            names = []
        found = sorted(n for n in map(str, names) if n.startswith(last))
        if not last:
            found = [n for n in found if not n.startswith("_")]
        start = len(before) - len(last)
        return {"matches": [self._match(before, name, start) for name in found]}

    def _match(self, code: str, text: str, start: int, kind: str = "") -> dict[str, Any]:
        is_attribute = code[:start].endswith(".")
        if kind in ("", "<unknown>") and text in self._shell.user_ns and not is_attribute:
            # The words of jedi, which JupyterLab has icons for.
            value = self._shell.user_ns[text]
            kinds = {ModuleType: "module", type: "class", FunctionType: "function"}
            kind = kinds.get(type(value), "instance")
        return {"text": text, "type": kind, "start": start}

    def _describe_known(self, name: str) -> dict[str, Any]:
        try:
            value = self._find(name.split("."))
        except (AttributeError, KeyError):
            return {"found": False, "data": {}}
        lines = [f"Type:      {type(value).__name__}"]
        if type(value) in _PLAIN:
            lines.append(f"Value:     {_short(value)}")
        if isinstance(value, FunctionType):
            code = value.__code__
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            lines.insert(0, f"Arguments: {', '.join(names)}")
            text: Any = value.__doc__
        else:
            owner = value if isinstance(value, type | ModuleType) else type(value)
            text = vars(owner).get("__doc__")
        if isinstance(text, str):
            lines.append(f"Docstring: {inspect.cleandoc(text)}")
        lines.append(f"Rank {self._rank} is busy: more is shown when it is idle.")
        module = value.__name__ if isinstance(value, ModuleType) else ""
        return {"found": True, "data": {"text/plain": "\n".join(lines)}, "module": module}

    def _find(self, path: list[str]) -> Any:
        value = self._shell.user_ns[path[0]]
        for name in path[1:]:
            value = inspect.getattr_static(value, name)
        return value


def _short(value: Any) -> str:
    # repr() refuses long integers, and takes long for long texts.
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a long integer"
    text = repr(value[:_TEXT_LENGTH] if isinstance(value, str | bytes) else value)
    return text[:_TEXT_LENGTH]


def _static_names(value: Any) -> list[str]:
    """Returns the attributes of a value; no code of the user's runs."""
    owners = [*type.__dict__["__mro__"].__get__(value if isinstance(value, type) else type(value))]
    names = {name for owner in owners for name in vars(owner)}
    if not isinstance(value, type):
        try:
            names.update(object.__getattribute__(value, "__dict__"))
        except AttributeError:
            pass  # it has slots
    return list(names)


def _save_whole_files() -> None:
    """Makes jedi write a file of its cache under another name first.

    All kernels of a user share this cache, and complete nothing where a file of it was cut short:
    by `_interrupted_after`, by the end of the rank, or because it is still written.
    """
    try:
        from parso import cache
    except ImportError:
        return  # IPython works without jedi

    def save(hashed_grammar: str, path: Any, item: Any, cache_path: Any = None) -> None:
        place = cache._get_hashed_path(hashed_grammar, path, cache_path=cache_path)  # type: ignore[no-untyped-call]
        part = f"{place}.{os.getpid()}"
        try:
            with open(part, "wb") as file:
                pickle.dump(item, file, pickle.HIGHEST_PROTOCOL)
            os.replace(part, place)
        except BaseException:
            with suppress(OSError):
                os.remove(part)
            raise

    cache._save_to_file_system = save


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Within, code of the user's that takes longer raises KeyboardInterrupt: no cell runs, so that
    an interrupt of the notebook would not reach it.
    """
    lock, over = threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not over:
                signal.pthread_kill(MAIN_THREAD, signal.SIGINT)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    try:
        with interruptible():
            timer.start()
            yield
    finally:
        timer.cancel()
        with lock:
            over = True


FEATURE = NamesOfRank
