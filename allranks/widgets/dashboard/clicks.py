"""What is done when a button is clicked that every live view has."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from allranks.records import requests
from allranks.records.wire import Answer
from allranks.widgets.dashboard.live import Live

#: Makes a request of ranks: its name, its arguments, what takes each answer, and which ranks.
Ask = Callable[[str, dict[str, Any], Callable[[Answer], None], Iterable[int]], None]


def act(click: dict[str, Any], live: Live, ask: Ask) -> None:
    """Does what was clicked: where the ranks are, profile, interrupt, or a page that has come up.

    Settings are kept, for the picture and for other pages.

    Args:
        click: what the page said.
        live: the view that it belongs to.
        ask: makes a request of ranks whose answers are delivered later.
    """
    kind = click.get("kind")
    if kind == "ready":
        live.greet()
    elif kind == "where":
        for name in (requests.STATUS, requests.STACK):
            ask(name, {}, partial(_say_where, live, name), live.figures.ranks)
    elif kind == "profile" and live.profiled is not None:
        live.profiled.begin()
    elif kind == "settings" and isinstance(click.get("settings"), dict):
        live.settings = click["settings"]
    elif kind == "interrupt" and not live.watched:
        # From pages that cannot ask the server to interrupt the kernel.
        signal.raise_signal(signal.SIGINT)


def _say_where(live: Live, name: str, answer: Answer) -> None:
    live.say(where={"rank": answer.rank, "what": name, **answer.content})
