"""Tells the page which ranks the notebook has, and what they do.

The page's side is ``labextension``, in JavaScript. It starts and ends ranks by ``%distributed``
commands, as a user would. What it shows comes over a comm that this module registers and never
opens: a front end without the extension would report an unknown target, and the extension finds
the comm by a question to the kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from typing import Any

from IPython.core.getipython import get_ipython

from allranks.cluster import cluster
from allranks.cluster.cluster import Cluster
from allranks.cluster.failures import RankStatus, read_status
from allranks.cluster.features import ClusterContext, NotebookFeature
from allranks.records import requests
from allranks.records.wire import Answer, Ask, Record

TARGET = "allranks.ranks"
#: Ranks that have not answered after this time are silent.
_ANSWER_SECONDS = 0.5
#: Requests of the core are counted from 1.
_FIRST_REQUEST = 1 << 40


class Toolbar(NotebookFeature):
    """Answers the page's questions about the ranks, also while a cell runs."""

    in_cells = False
    arriving: tuple[type[Record], ...] = ()  # until the page asks

    def __init__(self) -> None:
        self._numbers = count(_FIRST_REQUEST)
        self._cluster: ClusterContext | None = None
        self._lock = threading.Lock()
        self._request = 0
        self._answers: dict[int, Answer] = {}
        self._asked_ranks: list[int] = []
        self._comm: Any = None

    def started(self, cluster: ClusterContext) -> None:
        self._cluster = cluster
        shell = get_ipython()
        if self._comm is None and getattr(shell, "kernel", None) is not None:
            self._comm = _registered_comm()
            self._comm.on_msg(self._asked)

    def stopped(self) -> None:
        self._cluster = None

    def _asked(self, _message: dict[str, Any]) -> None:
        # Runs in another thread than the cell, where the front end sends comm messages to a
        # subshell of the kernel. A later question replaces one that has no answer yet.
        context, running = self._cluster, _running()
        if context is None or running is None:
            self._send(None, ())
            return
        alive = [rank for rank in range(running.size) if rank not in running.dead]
        with self._lock:
            self._request, self._answers = next(self._numbers), {}
            self._asked_ranks, request = alive, self._request
        self.arriving = (Answer,)
        context.send(alive, Ask(request, requests.STATUS))
        timer = threading.Timer(_ANSWER_SECONDS, self._finish, (request,))
        timer.daemon = True
        timer.start()

    def message_arriving(self, record: Record, payloads: list[bytes]) -> Record | None:
        if not isinstance(record, Answer) or record.request < _FIRST_REQUEST:
            return record
        with self._lock:
            if record.request == self._request:
                self._answers[record.rank] = record
            whole = len(self._answers) == len(self._asked_ranks)
        if whole:
            self._finish(record.request)
        return None

    def _finish(self, request: int) -> None:
        with self._lock:
            if request != self._request:
                return
            answers, self._request = self._answers, 0
        running = _running()
        if running is None:
            self._send(None, ())
            return
        content = {rank: answer.content for rank, answer in answers.items() if not answer.problem}
        hellos = sorted(running.hellos.items())
        self._send(running, [read_status(one, content.get(rank, {})) for rank, one in hellos])

    def _send(self, running: Cluster | None, ranks: Sequence[RankStatus]) -> None:
        self._comm.send(
            {
                "ranks": [
                    {
                        "rank": one.rank,
                        "host": one.host,
                        "pid": one.pid,
                        "device": one.device,
                        "nbytes": one.rss_nbytes,
                        "state": "dead" if running and one.rank in running.dead else one.state,
                        "line": one.line,
                    }
                    for one in ranks
                ],
                "logs": "" if running is None else running.log_dir,
                "every_cell": _every_cell(),
            }
        )


def _registered_comm() -> Any:
    import comm

    # One name, so that the extension takes its own place when it is loaded again.
    made: Any = comm.create_comm(target_name=TARGET, comm_id=TARGET, primary=False)
    comm.get_comm_manager().register_comm(made)
    return made


def _running() -> Cluster | None:
    session = cluster.session
    return None if session is None else session.running


def _every_cell() -> bool:
    # Whether all cells run on the ranks: a setting of the magics, which import no feature.
    shell = get_ipython()
    magics = getattr(shell, "magics_manager", None)
    distributed = magics.registry.get("DistributedMagics") if magics is not None else None
    return bool(getattr(getattr(distributed, "toggle", None), "is_on", False))


FEATURE = Toolbar
