"""How the core calls features without an import of them. Standard library only.

A feature is an object whose class overrides some hooks of a base class: of
`allranks.engine.features.RankFeature` on a rank, of `allranks.engine.host.features.HostFeature` in
the agent of a host, of `allranks.cluster.features.NotebookFeature` in the notebook.
`allranks.features` lists them; the modules of the base classes describe when each hook is called.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from types import FunctionType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from allranks.errors import FeatureFailed

F = TypeVar("F")
P = ParamSpec("P")
R = TypeVar("R")


def implementations(
    features: Iterable[F], hook: Callable[Concatenate[F, P], R]
) -> list[Callable[P, R]]:
    """Returns the bound methods of the features that override a hook, in their order.

    The core makes each list once. A loop over eight of them takes 0.3 µs. The alternatives, a check
    of every feature at each call or a hook library, take ten times as long.
    """
    found: list[Callable[P, R]] = []
    for feature in features:
        method: Any = getattr(feature, hook.__name__)
        if method.__func__ is not hook:
            found.append(method)
    return found


def failure(hook: Callable[..., object], error: BaseException) -> FeatureFailed:
    while isinstance(hook, partial):
        hook = hook.func
    # A feature's class is called as well, to make the feature, and so are functions of its modules.
    owner: Any = getattr(hook, "__self__", hook)
    module = getattr(owner, "__module__", type(owner).__module__)
    name = getattr(hook, "__name__", hook)
    failed = FeatureFailed(
        f"expected the feature {module} to return from {name}, found "
        f"{type(error).__name__}: {error}. Report this to the authors of that feature."
    )
    failed.__cause__ = error
    return failed


_Kind = TypeVar("_Kind", bound=type)
_declaring: set[type] = set()
#: How similar a name must be to be taken for a misspelled hook.
_SIMILAR = 0.66


def declares_hooks(kind: _Kind) -> _Kind:
    """Marks a base class of features: its public names are their hooks."""
    _declaring.add(kind)
    return kind


def check(kind: type) -> None:
    """Raises FeatureFailed if a feature has a misspelled hook, or one with other parameters."""
    bases = [one for one in kind.__mro__ if one in _declaring]
    hooks: dict[str, Any] = {}
    for base in reversed(bases):
        hooks |= {name: hook for name, hook in vars(base).items() if name[0] != "_"}
    for one in kind.__mro__:
        if one in bases or not issubclass(one, tuple(bases)):
            continue
        for name, value in vars(one).items():
            if name in hooks:
                _check_parameters(kind, value, hooks[name])
                continue
            if name[0] == "_":
                continue
            # What cannot be called may be data, unless it resembles a hook that is data.
            meant = [hook for hook in hooks if callable(value) or not callable(hooks[hook])]
            if hook := _meant(name, meant):
                raise FeatureFailed(
                    f"expected hooks of {bases[-1].__name__} in the feature {kind.__module__}, "
                    f"found {name}, which would never be called. The closest hook is {hook}: "
                    "correct the name, or begin it with an underscore."
                )


def _meant(name: str, hooks: list[str]) -> str:
    """Returns the hook that a name resembles, or whose first word it has; "" for none."""
    same = [hook for hook in hooks if "_" in hook and hook.split("_")[0] == name.split("_")[0]]
    closest = difflib.get_close_matches
    found = closest(name, hooks, 1, _SIMILAR) or closest(name, same, 1, 0.0)
    return found[0] if found else ""


def _check_parameters(kind: type, own: Any, hook: Any) -> None:
    if not isinstance(hook, FunctionType) or not isinstance(own, FunctionType):
        return
    given, code = hook.__code__.co_argcount, own.__code__
    needed = code.co_argcount - len(own.__defaults__ or ())
    most = inf if code.co_flags & inspect.CO_VARARGS else code.co_argcount
    missing = code.co_kwonlyargcount > len(own.__kwdefaults__ or ())
    if not needed <= given <= most or missing:
        name = hook.__name__
        raise FeatureFailed(
            f"expected {name}{inspect.signature(hook)} in the feature {kind.__module__}, found "
            f"{name}{inspect.signature(own)}. Correct its parameters."
        )


class Hooks(Generic[F]):
    """The features of one side; ``failed`` gets what they raise, each with its name.

    A feature that raises does not keep those after it from being called. One whose class cannot be
    made, or has wrong hooks, is left out.
    """

    def __init__(
        self, classes: Iterable[type[F]], failed: Callable[[FeatureFailed], object]
    ) -> None:
        self._failed = failed
        self.features: list[F] = []
        for kind in classes:
            try:
                check(kind)
                self.features.append(kind())
            except FeatureFailed as wrong:
                failed(wrong)
            except Exception as error:
                failed(failure(kind, error))
        self._found: dict[str, list[Callable[..., Any]]] = {}
        self._takers: dict[type, list[Callable[..., object]]] = {}
        one: Any
        for one in self.features:
            for record in getattr(one, "records", ()):
                self._takers.setdefault(record, []).append(one.message_received)

    def of(self, hook: Callable[Concatenate[F, P], R]) -> list[Callable[P, R]]:
        found = self._found.get(hook.__name__)
        if found is None:
            found = self._found[hook.__name__] = implementations(self.features, hook)
        return found

    def call(
        self, hook: Callable[Concatenate[F, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls every implementation of a hook; returns their results."""
        return self.call_each(self.of(hook), *args, **kwargs)

    def call_each(
        self, found: Iterable[Callable[P, R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        results = []
        for one in found:
            try:
                results.append(one(*args, **kwargs))
            except Exception as error:
                self._failed(failure(one, error))
        return results

    def message_received(self, record: object, payloads: list[bytes]) -> None:
        # A record that is in no feature's ``records`` is dropped.
        self.call_each(self._takers.get(type(record), ()), record, payloads)
