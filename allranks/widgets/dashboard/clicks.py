"""What is done when a button is clicked that every live view has."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from allranks.records import requests
from allranks.records.wire import Answer
from allranks.widgets.dashboard.live import Live
from allranks.widgets.dashboard.saving import save

#: Makes a request of ranks: its name, its arguments, what takes each answer, and which ranks.
Ask = Callable[[str, dict[str, Any], Callable[[Answer], None], Iterable[int]], None]


def act(click: dict[str, Any], live: Live, ask: Ask) -> None:
    """Does what was clicked: where the ranks are, save, interrupt, or a page that has come up.

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
    elif kind == "save":
        live.say(saved=save(live.figures, live.logs))
    elif kind == "interrupt":
        # From pages that cannot ask the server to interrupt the kernel.
        signal.raise_signal(signal.SIGINT)


def _say_where(live: Live, name: str, answer: Answer) -> None:
    live.say(where={"rank": answer.rank, "what": name, **answer.content})
