"""ipyparallel's clients of one set of ranks, and the files by which others find them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from allranks.cluster import cluster
from allranks.cluster.failures import ending
from allranks.cluster.features import ClusterContext
from allranks.cluster.function_sources import add_sources
from allranks.errors import UsageError
from allranks.features.ipyparallel import client_requests
from allranks.features.ipyparallel.connection_files import ConnectionFiles, own_notebook
from allranks.features.ipyparallel.metadata import NOTEBOOK
from allranks.records.agent import (
    Again,
    AgentExit,
    Controller,
    ControllerExit,
    Event,
    Registered,
)

if TYPE_CHECKING:
    import ipyparallel

_CLIENT_SECONDS = 30.0
_CLIENT_TRY_SECONDS = 3.0


class RankClients:
    """From the start of the ranks to their end; ``information`` is where clients connect."""

    def __init__(self, ranks: ClusterContext) -> None:
        self.information: dict[str, Any] = {}
        self._ranks = ranks
        self._made: list[ipyparallel.Client] = []
        #: How ipyparallel's controller has ended; "" if it has not.
        self._controller_end = ""
        self._files = ConnectionFiles(ranks.size)
        #: That the end of the ranks finds all files that the agent's thread writes.
        self._files_lock = threading.Lock()
        self._is_over = False
        ranks.listen(self._hear, Controller, Registered, ControllerExit, AgentExit, Again)
        ranks.at_end.callback(self._end)

    def _hear(self, event: Event, pid: int | None) -> None:
        match event:
            case Controller(client):
                self.information = client
            case Registered(client, engine):
                # A home may be read-only; client() needs no files.
                with self._files_lock, suppress(OSError):
                    if not self._is_over:
                        named = client | {NOTEBOOK: own_notebook()}
                        self._files.write(named, engine, pid)
            case ControllerExit(code):
                self._controller_end = ending(code)
                why = self._without_controller()
                self._end_clients(lambda: why)
            case AgentExit():  # before the slow removal of files
                self._files.close()
                self._end_clients()
            case Again():
                self._controller_end = ""
                self._end_clients()
                self._files.close()

    def _end(self) -> None:
        with self._files_lock:
            self._is_over = True
        roster = self._ranks.roster
        if roster.phase == "stopped" and roster.lost_because:
            # The user's own clients still reach the ranks, which another notebook has.
            client_requests.end(self._made, partial(_ended, "are left to another notebook"))
        else:
            self._end_clients()
        self._files.close()

    def _end_clients(self, why: Callable[[], str] | None = None) -> None:
        if self.information:
            clients = client_requests.of_ranks(self.information["key"])
            client_requests.end(clients, why or partial(_ended, "have ended"))

    def _without_controller(self) -> str:
        return (
            "expected ipyparallel's controller, which clients need, found that it "
            f"{self._controller_end}. Its log is {self._ranks.log_dir}/controller.log. Type: "
            "%distributed restart"
        )

    def client(self) -> ipyparallel.Client:
        """Returns the client of the notebook, which closes with the ranks."""
        if self._controller_end:
            raise UsageError(self._without_controller())
        if "[" in self.information["interface"]:
            zmq.Context.instance().set(zmq.IPV6, 1)  # that of clients
        self._ranks.start_controller()
        # A caller may have closed the last one, for instance by ``with``.
        self._made[:] = [client for client in self._made if not client._closed]
        deadline = time.monotonic() + _CLIENT_SECONDS
        while not self._made:
            try:
                self._made.append(self._connect())
            except TimeoutError as error:
                # A client misses an engine that registers while it connects: try another client.
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"expected {self._ranks.size} engines at ipyparallel's controller within "
                        f"{_CLIENT_SECONDS:g} s, found {error}. Its log is "
                        f"{self._ranks.log_dir}/controller.log. Try again"
                    ) from error
        return self._made[0]

    def _connect(self) -> ipyparallel.Client:
        import ipyparallel

        made = ipyparallel.Client(self.information, timeout=_CLIENT_SECONDS)
        client_requests.follow(made)
        show_sources(made)
        try:
            size = self._ranks.size
            made.wait_for_engines(size, timeout=_CLIENT_TRY_SECONDS, interactive=False)
        except BaseException:
            made.close()
            raise
        return made


def _ended(how: str) -> str:
    """Returns why a client is of no use any more, and what to type as things are now."""
    no_ranks = cluster.session is not None and cluster.session.running is None
    typed = "Type first: %distributed start   Then type" if no_ranks else "Type"
    return (
        f"expected ranks of this client, found that they {how}. {typed}: rc = ipp.Client()   "
        "and make its views again; if %px used it, also: rc.activate()"
    )


def show_sources(client: Any) -> None:
    """Adds the sources of the notebook's functions to the errors of this client."""
    unwrap = client._unwrap_exception

    def with_sources(content: dict[str, Any]) -> Any:
        text = add_sources("\n".join(content["traceback"]))
        return unwrap({**content, "traceback": text.split("\n")})

    client._unwrap_exception = with_sources
