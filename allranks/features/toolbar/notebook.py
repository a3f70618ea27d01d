"""Describes the ranks of the notebook to the page, while they run too.

The page's side is ``labextension``, in JavaScript. It starts and ends ranks by ``%distributed``
commands, as a user would. What it shows comes over a comm that this module registers and never
opens: a front end without the extension would report an unknown target, and the extension finds
the comm by a question to the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from IPython.core.getipython import get_ipython

from allranks import own_files
from allranks.cluster import cluster
from allranks.cluster.cluster import Cluster
from allranks.cluster.failures import RankStatus, ending, read_statuses
from allranks.cluster.features import AskingFeature, ClusterContext
from allranks.features.toolbar import groups
from allranks.records import requests
from allranks.records.agent import Event, Exit
from allranks.records.ranks import DEAD, SILENT, label
from allranks.records.wire import Answer

TARGET = "allranks.ranks"
#: Ranks that have not answered after this time are silent.
_ANSWER_SECONDS = 0.5
_VARIABLES_SECONDS = 3.0
_LOG_NBYTES = 8 << 20
#: Colours, movements and addresses of a terminal, and other control characters.
_CODES = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f]"
)


#: The cells of the notebook that ranks have run since the last message to the page.
_ran: dict[str, None] = {}


class Toolbar(AskingFeature):
    """Answers the page's questions about the ranks, also while a cell runs."""

    in_cells = False  # without a page

    def __init__(self) -> None:
        super().__init__()
        #: The questions that wait for answers, which all pages get.
        self._pending: set[str] = set()
        #: The last question of each kind, to which answers may still come.
        self._open: dict[str, int] = {}
        #: Whether the page has interrupted requests of clients that may still run.
        self.has_interrupted = False
        #: How many ranks are being started, as long as none runs.
        self.starting = 0
        #: By rank and process, how it has ended. The notebook itself may look at this later.
        self._ended: dict[tuple[int, int], str] = {}

    def started(self, cluster: ClusterContext) -> None:
        super().started(cluster)
        self.starting = cluster.size
        self._ended.clear()
        self.in_cells = getattr(get_ipython(), "kernel", None) is not None
        if self.in_cells:
            cluster.listen(self._hear, Exit)
            _open_comm()
            # Not asked for: the page may learn only by this message that the kernel has the comm.
            if _of_notebook() is self and cluster.starts_ranks:
                _send(_without_ranks(self))

    def _hear(self, event: Event, _pid: int | None) -> None:
        running = cluster.running()
        if isinstance(event, Exit) and running is not None and _of_notebook() is self:
            self._ended[event.rank, event.pid] = ending(event.code, event.reason)
            self.ask_all(running, requests.STATUS, _send_state, _ANSWER_SECONDS)

    def how_died(self, running: Cluster) -> dict[int, str]:
        """Returns how ranks have died that are not replaced yet."""
        pids = {rank: hello.pid for rank, hello in running.hellos.items()}
        heard = {rank: how for (rank, pid), how in [*self._ended.items()] if pids.get(rank) == pid}
        return heard | {rank: end.how() for rank, end in [*running.roster.dead.items()]}

    def cell_started(self) -> None:
        # The front end's name for the cell.
        cell = self.cell
        if cell is not None and cell.shown and cell.kernel is not None:
            name = cell.kernel.get_parent("shell").get("metadata", {}).get("cellId")
            if isinstance(name, str):
                _ran[name] = None

    def ask_all(
        self,
        asked: Cluster,
        name: str,
        send: Callable[[Cluster, dict[int, dict[str, Any]]], None],
        seconds: float,
    ) -> None:
        """Sends the answers of all ranks that live to the page, and late ones when all are there.

        Else a rank that a busy machine held up would be called silent until the next question.
        """
        # A page may send requests without end, and each question has a thread.
        if name in self._pending or self.context is None:
            return

        def deliver(answers: dict[int, Answer]) -> None:
            self._pending.discard(name)
            running = cluster.running()
            if running is not None:
                send(running, {r: {} if a.problem else a.content for r, a in answers.items()})

        died = self.how_died(asked)
        alive = [rank for rank in range(asked.size) if rank not in died]
        self.drop(self._open.pop(name, 0))
        self._pending.add(name)
        try:
            self._open[name] = self.ask(alive, name, {}, deliver, seconds, again=True)
        except BaseException:
            self._pending.discard(name)
            raise

    def stopped(self) -> None:
        super().stopped()
        self._pending.clear()
        for request in [*self._open.values()]:
            self.drop(request)
        self._open.clear()
        self.starting = 0
        # Those were other ranks.
        self.has_interrupted = False


def _asked(message: dict[str, Any]) -> None:
    # Runs in another thread than the cell, where the front end sends comm messages to a subshell of
    # the kernel.
    running, toolbar = cluster.running(), _of_notebook()
    if running is None or toolbar is None:
        _send(_without_ranks(toolbar))
    elif (rank := wanted_log(message, running.size)) is not None:
        _ask_log(toolbar, running, rank)
    elif _wants(message, "interrupt"):
        # The interrupts of a cell are counted by its run.
        toolbar.has_interrupted = not running.roster.busy
        running.interrupt()
    elif _wants(message, "variables"):
        toolbar.ask_all(running, "variables", _send_variables, _VARIABLES_SECONDS)
    else:
        toolbar.ask_all(running, requests.STATUS, _send_state, _ANSWER_SECONDS)


def _of_notebook() -> Toolbar | None:
    # A Cluster that the user makes has a toolbar too, which nothing asks.
    session = cluster.session
    found = () if session is None else session.hooks.features
    return next((one for one in found if isinstance(one, Toolbar)), None)


def _without_ranks(toolbar: Toolbar | None) -> dict[str, Any]:
    starting = 0 if toolbar is None else toolbar.starting
    return {"size": 0, "starting": starting, **_where_cells_run()}


def _wants(message: dict[str, Any], what: str) -> bool:
    # A request of the page that names nothing is for the state.
    data = message["content"].get("data")
    return isinstance(data, dict) and data.get(what) is True


def wanted_log(message: dict[str, Any], size: int) -> int | None:
    """Returns the rank whose log a request of the page is for, if any."""
    data = message["content"].get("data")
    rank = data.get("log") if isinstance(data, dict) else None
    return rank if type(rank) is int and 0 <= rank < size else None


def _ask_log(toolbar: Toolbar, running: Cluster, rank: int) -> None:
    path = running.hellos[rank].log

    def deliver(answers: dict[int, Answer]) -> None:
        found = answers.get(rank)
        if found is None or found.problem:
            why = "no answer" if found is None else found.problem
            _send_log(rank, f"The log is {path} on {running.hellos[rank].host}: {why}.\n")
        else:
            _send_log(rank, str(found.content["text"]))

    try:
        _send_log(rank, own_files.end_of(path, _LOG_NBYTES))
    except OSError:  # on another host
        asked = {"path": path, "nbytes": _LOG_NBYTES}
        toolbar.ask((rank,), requests.LOG, asked, deliver, _VARIABLES_SECONDS)


def _send_log(rank: int, text: str) -> None:
    _send({"log": {"rank": rank, "text": as_text(text)}})


def as_text(log: str) -> str:
    """Returns a log without the codes that colour it or move the cursor."""
    return _CODES.sub("", log.replace("\r\n", "\n").replace("\r", "\n"))


def _send_state(running: Cluster, answers: dict[int, dict[str, Any]]) -> None:
    toolbar = _of_notebook()
    died = {} if toolbar is None else toolbar.how_died(running)
    ranks = read_statuses(running.hellos, answers, left=running.roster.have_left)
    then = what_replaces(running)
    ranks = [
        replace(one, doing=DEAD, rss_nbytes=0, line=f"{died[one.rank]}{then}")
        if one.rank in died
        else one
        for one in ranks
    ]
    _send(
        {
            "size": len(ranks),
            "hosts": list(dict.fromkeys(one.host for one in ranks)),
            "summary": groups.summary(ranks),
            "rows": groups.rows(ranks),
            "is_busy": running.roster.busy or groups.are_busy(ranks) or _awaits_answers(running),
            "interrupt": _next_interrupt(running, toolbar, ranks),
            "asks": any(one.doing.state.asks for one in ranks),
            "logs": running.log_dir,
            **_where_cells_run(),
        }
    )


def _next_interrupt(running: Cluster, toolbar: Toolbar | None, ranks: Sequence[RankStatus]) -> str:
    """Returns what another interrupt does where one has not ended everything; else ""."""
    if running.roster.busy:
        if toolbar is not None:
            toolbar.has_interrupted = False  # what is silent after the cell was not interrupted
        run = running.cells.connection.run
        return "" if run is None else run.next_press
    silent = [one.rank for one in ranks if one.doing == SILENT]
    if toolbar is None or not toolbar.has_interrupted:
        return ""
    toolbar.has_interrupted = bool(silent)
    if not silent:
        return ""
    does, it, its = ("does", "it", "its") if len(silent) == 1 else ("do", "they", "their")
    return (
        f"{label(silent)} {does} not react to the interrupt: {it} may be in a call that does not "
        f"return to Python, which another interrupt does not end either. To end {label(silent)} "
        f'with {its} variables, type: ranks.client().send_signal("SIGKILL", targets={silent})'
    )


def _awaits_answers(running: Cluster) -> bool:
    hooks, ranks = running.cells.hooks, running.cells.connection
    return hooks.holds_cells and bool(hooks.command("unanswered", ranks, range(running.size)))


def what_replaces(running: Cluster) -> str:
    """Returns what follows the end of a rank, for the user: how it gets a new process."""
    roster = running.roster
    if roster.busy:
        return ""
    if not roster.can_replace or roster.replacing == "off":
        return ": the next cell of the ranks starts all of them again"
    if roster.replacing == "on":
        return ": the next cell of the ranks replaces it"
    return f". Type: {running.cells.hooks.replaces_ranks}"


def _send_variables(running: Cluster, answers: dict[int, dict[str, Any]]) -> None:
    by_rank = {rank: found["variables"] for rank, found in answers.items() if found}
    missing = [rank for rank in range(running.size) if rank not in by_rank]
    # Ranks that have begun a cell refuse. The page names those that are missing, because a
    # comparison without them could call variables equal that are not.
    if by_rank:
        _send({"variables": compare(by_rank), "missing": label(missing) if missing else ""})


Description = Sequence[str]
"""Kind, text and digest, as a rank's side makes them."""


def compare(by_rank: Mapping[int, Mapping[str, Description]]) -> list[dict[str, str]]:
    """Returns a row for each variable: its name, its value or kind, and whether ranks agree."""
    rows = []
    for name in sorted({name for found in by_rank.values() for name in found}):
        there = {rank: found[name] for rank, found in sorted(by_rank.items()) if name in found}
        (kind, text, _), *_ = there.values()
        kinds = {one[0] for one in there.values()}
        digests = {one[2] for one in there.values()}
        if len(there) < len(by_rank):
            state = f"only on {label(there)}"
        elif len(kinds) > 1:
            state = "different types or shapes"
        elif "" in digests:
            state = "same shape" if "(" in kind else "same type"
        elif len(digests) == 1:
            state = "same"
        else:
            state = "same shape, different values" if "(" in kind else "different"
        # For the tooltip, because a sidebar has no room for a column per rank.
        each = [f"rank {rank}: {one[1] or one[0]}" for rank, one in there.items()]
        shown = (text or kind) if len(digests) == 1 else kind
        rows.append({"name": name, "value": shown, "state": state, "each": "\n".join(each)})
    return rows


def _open_comm() -> None:
    import comm

    manager: Any = comm.get_comm_manager()
    if TARGET not in manager.comms:
        made: Any = comm.create_comm(target_name=TARGET, comm_id=TARGET, primary=False)
        made.on_msg(_asked)
        manager.register_comm(made)


def _send(data: dict[str, Any]) -> None:
    import comm

    manager: Any = comm.get_comm_manager()
    if TARGET in manager.comms:
        manager.comms[TARGET].send(data)


def _where_cells_run() -> dict[str, Any]:
    # Where the next ones do is a setting of the magics, which import no feature.
    shell = get_ipython()
    magics = getattr(shell, "magics_manager", None)
    distributed = magics.registry.get("DistributedMagics") if magics is not None else None
    toggle = getattr(distributed, "toggle", None)
    ran = [name for name in [*_ran] if _ran.pop(name, "") is None]
    if toggle is None:
        return {"every_cell": False, "local": [], "ran": ran}
    return {"every_cell": toggle.is_on, "local": toggle.local_beginnings, "ran": ran}


FEATURE = Toolbar
