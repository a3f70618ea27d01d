"""Hosts, and notebooks on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hosts.hosts import Hosts, require
from tests.hosts.notebook import NotebookOnAHost

SSH = "--on ssh:h1:2,h2:2"
NewNotebook = Callable[..., NotebookOnAHost]


@pytest.fixture(scope="session")
def shared_hosts() -> Iterator[Hosts]:
    """The hosts of all files that need no others."""
    require()
    with Hosts(3) as up:
        yield up


@pytest.fixture(scope="module")
def hosts(shared_hosts: Hosts) -> Iterator[Hosts]:
    """Three hosts that ssh reaches from ``h0``; at a file's end they are as at its beginning."""
    yield shared_hosts
    found = shared_hosts.restore()
    assert found == [], found


@pytest.fixture
def new_notebook(hosts: Hosts) -> Iterator[NewNotebook]:
    """Opens notebooks on ``h0``, ``new_notebook(env={…})``, that are closed with the test."""
    with ExitStack() as stack:

        def open_one(env: dict[str, str | None] | None = None) -> NotebookOnAHost:
            return stack.enter_context(NotebookOnAHost(hosts, folder_in(hosts.shared), env))

        yield open_one


@pytest.fixture(scope="module")
def notebook(hosts: Hosts) -> Iterator[NotebookOnAHost]:
    """Two ranks on each of two hosts for the tests of one file; at the end nothing is left."""
    with NotebookOnAHost(hosts, folder_in(hosts.shared)) as shared:
        started = shared.on_ranks("kept = 10 * rank", SSH)
        assert started.status == "ok", started.text
        yield shared
        shared.shutdown()
        shared.check_nothing_left()


def folder_in(place: Path) -> Path:
    folder = place / f"n{len(list(place.iterdir()))}"
    folder.mkdir()
    return folder
