"""A notebook on simulated hosts, and the user who runs its cells and checks what comes back."""

from __future__ import annotations

import functools
import itertools
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

from tests.simulated import production, system
from tests.simulated.chaos import NOTEBOOKS_HOST, ClusterWorld
from tests.simulated.kernel import File, Source

# After `production`, which has them imported into the simulation.
from allranks.cluster import cluster as cluster_module  # isort: skip
from allranks.cluster import failures, features  # isort: skip
from allranks.features.ensemble.grid import Options  # isort: skip
from allranks.features.ensemble.member import Member  # isort: skip
from allranks.features.ensemble.runner import EnsembleRunner  # isort: skip
from allranks.features.ensemble.runs import Runs  # isort: skip
from allranks.errors import AllranksError, CellFailed, UsageError  # isort: skip
from allranks.features.attach import ownership, sessions, sharing  # isort: skip
from allranks.features.heal.notebook import NotebookHeal  # isort: skip
from allranks.features.hosts import doctor  # isort: skip
from allranks.features.hosts.notebook import NotebookHosts  # isort: skip
from allranks.records import wire  # isort: skip

#: In virtual seconds: how long each may take at most, whatever happens.
START_SECONDS, CELL_SECONDS, STOP_SECONDS, STAY_SECONDS = 140.0, 260.0, 20.0, 120.0
ATTACH_SECONDS, FOLLOW_SECONDS, DOCTOR_SECONDS = 75.0, 260.0, 90.0
features.register([ownership.Ownership, NotebookHeal, NotebookHosts])
_SAYS_LOST = re.compile("no variables|without variables|lost|was killed|were killed")


class NotebookDied(Exception):
    """The kernel was killed while it did what was asked."""


class Stuck(Exception):
    """The notebook did not do in time what was asked."""


class ShownCell:
    """The view of a cell: it keeps what a reader would see."""

    def __init__(self) -> None:
        #: Its number, once something of it was shown.
        self.cell = 0
        self.lines: defaultdict[int, list[str]] = defaultdict(list)
        self.notices: list[str] = []
        self.lefts: list[tuple[int, str]] = []
        #: The ranks of which it has shown lines after their ends.
        self.after_end: set[int] = set()

    def output(self, batch: Any) -> None:
        self.cell = batch.cell or self.cell  # 0: of an earlier one
        if batch.cell and batch.rank in dict(self.lefts):
            self.after_end.add(batch.rank)
        for kind, *rest in batch.entries:
            if kind == "out":
                self.lines[batch.rank].extend(rest[0].splitlines())

    def left(self, rank: int, status: str) -> None:
        self.lefts.append((rank, status))

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def telemetry(self, record: Any, payloads: list[bytes]) -> None: ...
    def make_way(self) -> None: ...
    def name_cause(self, text: str) -> None: ...
    def refresh(self) -> None: ...
    def finish(self) -> None: ...


class EnsembleView(MagicMock):
    """The view of an ensemble: it keeps the lines of each member, by the numbers of its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: defaultdict[int, dict[int, list[str]]] = defaultdict(dict)
        self.states: list[str] = []

    def output(self, member: int, record: Any, log: str) -> None:
        lines = self.shown[member].setdefault(record.cell, [])
        for kind, *rest in record.entries:
            if kind == "out":
                lines.extend(rest[0].splitlines())

    # What it has is no such view.
    def _get_child_mock(self, **options: Any) -> MagicMock:
        return MagicMock(**options)


@dataclass
class CellResult:
    """How a cell has ended: ``error`` is what it raised."""

    name: str
    seconds: float
    error: BaseException | None
    view: ShownCell = field(default_factory=ShownCell)

    @property
    def text(self) -> str:
        """All that the reader was told beside the lines of ranks."""
        return "\n".join([*self.view.notices, str(self.error or "")])

    def __str__(self) -> str:
        what = f": {type(self.error).__name__}: {self.error}" if self.error else " ok"
        return f"{self.name} {self.seconds:.2f} s{what:.400}"


class SimulatedNotebook:
    """A process on the notebook's machine. A scenario asks it to do something, and waits for it.

    After each cell it checks what must always be true; what is not goes to ``world.wrong``.
    """

    def __init__(self, world: ClusterWorld, before: SimulatedNotebook | None = None) -> None:
        self.world = world
        #: What variable ``x`` of each rank should be.
        self.expected: dict[int, int | None] = dict(before.expected) if before else {}
        #: What a reader of this notebook and the ones before could read, a line each.
        self.outcome: list[str] = before.outcome if before else []
        self._said: list[str] = []
        self._shown: set[str] = set()
        self._cells = before._cells if before else 0
        self._orders: list[Callable[[], object]] = []
        self._ordered, self._finished = Source(), Source()
        self.folder = before.folder if before else ""
        files = {number: File() for number in range(3)}
        host = world.hosts[NOTEBOOKS_HOST]
        self.process = world.spawn("notebook", host, self._main, None, files, {})
        world.notebooks.append(self)
        self.cluster: Any = None

    def _main(self) -> None:
        for module in (cluster_module.launchers, doctor.registry):
            module.named = lambda text: production.launcher(self.world)
        while True:
            try:
                self.world.block(lambda: bool(self._orders), [self._ordered])
                self._orders.pop(0)()
            except KeyboardInterrupt:
                pass  # it came between two cells

    def do(self, name: str, action: Callable[[], Any], seconds: float) -> Any:
        """Has the notebook do something, and returns the result or raises its error."""
        found: list[Any] = []

        def act() -> None:
            try:
                found.append((action(), None))
            except (AllranksError, KeyboardInterrupt) as error:
                found.append((None, error))
            self._finished.notify()

        self._orders.append(act)
        self._ordered.notify()
        world, process = self.world, self.process
        began = world.now
        # It may take as long as the notebook stands still on top of the limit.
        while not found and process.alive and world.now < began + seconds + self._stood(began):
            world.block(lambda: found or not process.alive, [self._finished, process.ended], 1.0)
        if found:
            result, error = found[0]
            if error is not None:
                raise error
            return result
        if not process.alive:
            raise NotebookDied(name)
        world.wrong.append(f"{name} did not end within {seconds:g} s. {world.waits()}")
        raise Stuck(name)

    def _stood(self, began: float) -> float:
        return max(0.0, self.process.frozen_until - began)

    def _new_cluster(self) -> Any:
        size = self.world.size
        return cluster_module.Cluster(size, gpus="none", launcher="simulated", show_output=False)

    @property
    def state(self) -> str:
        return str(self.cluster.state) if self.cluster is not None else "new"

    def start(self, **environment: str) -> None:
        """Starts the ranks; raises StartFailed."""
        self.process.environ.update(environment)
        self.world.begin_cell(0)

        def start() -> None:
            self.cluster = self._new_cluster()
            self.cluster.start()

        try:
            self.do("the start", start, START_SECONDS)
        except AllranksError as error:
            self.outcome.append(f"{self.world.seconds()} {type(error).__name__}: {error}")
            raise
        self.outcome.append(f"{self.world.seconds()} started")
        self.expected = dict.fromkeys(range(self.world.size))

    def restart(self) -> None:
        """Ends the ranks and starts new ones, also on hosts that were lost."""
        self.do("the restart", self.cluster.restart, STOP_SECONDS + START_SECONDS)
        self.outcome.append(f"{self.world.seconds()} restarted")
        self.expected = dict.fromkeys(range(self.world.size))

    def stay(self, seconds: float = 600.0) -> None:
        """Lets the ranks stay when this notebook ends."""
        self.do("stay", lambda: ownership.stay(self.cluster.cells, seconds, {}), STAY_SECONDS)
        self.folder = self.cluster.cells.connection.session_dir

    def watched(self) -> Watcher:
        """Returns another notebook, which watches the cells of this one from now on."""
        return Watcher(self.world, self.cluster.cells.connection.session_dir)

    def kill(self) -> None:
        """Kills the kernel."""
        self.world.note("the kernel is killed")
        self.process.signal(signal.SIGKILL)

    def interrupt(self) -> None:
        self.world.note("the user interrupts")
        self.process.signal(signal.SIGINT)

    def stop(self) -> None:
        if self.cluster is not None:
            self.do("the stop", self.cluster.stop, STOP_SECONDS)
        self.outcome.append(f"{self.world.seconds()} stopped")

    def examine_hosts(self) -> list[doctor.Finding]:
        """Checks the hosts, as ``allranks doctor --on`` does."""
        found: list[doctor.Finding] = self.do(
            "the doctor", lambda: doctor.examine_hosts("hosts", print), DOCTOR_SECONDS
        )
        return found

    # Cells.

    def cell(self, spec: dict[str, Any]) -> CellResult:
        """Runs a cell (see ``scenarios.work`` and ``scenarios.reduce``), and checks its end."""
        self._cells += 1
        self.world.begin_cell(self._cells)
        return self._observed(
            spec, lambda view: self.cluster.run(repr(spec), view=view), CELL_SECONDS
        )

    def awaited_cell(self, spec: dict[str, Any]) -> CellResult:
        """Runs a cell as a notebook does that answers widgets meanwhile."""
        self._cells += 1
        self.world.begin_cell(self._cells)

        def run(view: ShownCell) -> None:
            cell = self.cluster.cells.begin(repr(spec), view=view)
            loop = system.EventLoop()
            try:
                loop.run_until_complete(self.cluster.cells.wait_awaited(cell))
            finally:
                loop.close()

        return self._observed(spec, run, CELL_SECONDS)

    def submitted_cells(self, specs: Sequence[dict[str, Any]]) -> list[CellResult]:
        """Submits cells to another thread, all at once, and waits for their ends."""
        submitted = []
        for spec in specs:
            self._cells += 1
            view = ShownCell()
            submit = functools.partial(self.cluster.submit, repr(spec), view=view)
            future = self.do("submit", submit, CELL_SECONDS)
            submitted.append((spec, view, self._cells, future))
        self.world.begin_cell(self._cells)
        results = []
        for spec, view, number, future in submitted:
            began, error = self.world.now, None
            try:
                self.do(f"submitted cell {number}", future.result, CELL_SECONDS)
            except AllranksError as found:
                error = found
            result = CellResult(f"submitted cell {number}", self.world.now - began, error, view)
            results.append(result)
            self.outcome.append(f"{self.world.seconds()} {result}")
            self._said += [*view.notices, str(error or "")]
            self._check_lines(result, None if error else spec["lines"])
            self._check_reports(result)
        return results

    def ensemble(self, spec: dict[str, Any], count: int) -> EnsembleView:
        """Runs a cell as so many members of an ensemble, and checks what each has shown."""
        self._cells += 1
        self.world.begin_cell(self._cells)
        members = [Member(number, {"x": number}) for number in range(count)]
        view, runs = EnsembleView(), Runs(members, repr(spec), ("x", True))

        def run() -> None:
            EnsembleRunner(self.cluster, runs, Options(), view, repr(spec)).run()

        self.do(f"ensemble {self._cells}", run, CELL_SECONDS)
        for member in members:
            shown = list(view.shown[member.number].values())
            orders = [[int(line.split(".")[2]) for line in lines] for lines in shown]
            assert all(order == list(range(len(order))) for order in orders), orders
            assert member.state != "finished" or len(shown[-1]) == spec["lines"], shown
            assert member.state != "finished" or member.numbers == {"x": member.number}
        view.states = [member.state for member in members]
        self.outcome.append(f"{self.world.seconds()} ensemble: {view.states}")
        return view

    def lend(self) -> None:
        """Leaves the ranks to another notebook, as long as this one runs."""
        self.do("lend", lambda: ownership.lend(self.cluster.cells, {}), STAY_SECONDS)

    def dies_in(self, *specs: dict[str, Any]) -> None:
        """Runs cells, the last one again and again, until something has killed the kernel."""
        try:
            for spec in itertools.chain(specs, itertools.repeat(specs[-1])):
                self.cell(spec)
                if self.state != "running":
                    break
        except NotebookDied:
            return
        self.world.wrong.append(f"the ranks were lost before the kernel died: {self.outcome[-1]}")
        raise Stuck("a cell")

    def _observed(
        self, spec: dict[str, Any], run: Callable[[ShownCell], object], seconds: float
    ) -> CellResult:
        world, view, began = self.world, ShownCell(), self.world.now
        name, error = f"cell {self._cells} ({spec['kind']})", None
        try:
            self.do(name, lambda: run(view), seconds)
        except (AllranksError, KeyboardInterrupt) as found:
            error = found
        result = CellResult(name, world.now - began, error, view)
        self.outcome.append(f"{world.seconds()} {result}")
        self._said += [*view.notices, str(error or "")]
        self._check_lines(result, None if error else spec["lines"])
        self._check_reports(result)
        if self.state == "running":
            self._check_variables(result, spec)
        return result

    def _check_lines(self, result: CellResult, lines: int | None = None) -> None:
        """The lines of a rank are complete, if it is known how many there are, in order, and not
        those of an earlier cell again.
        """
        wrong = self.world.wrong
        shown = [line for of_rank in result.view.lines.values() for line in of_rank]
        if again := sorted(self._shown.intersection(shown)):
            wrong.append(f"{result.name} shows lines of earlier cells again: {again[:8]}")
        self._shown.update(shown)
        for rank in range(self.world.size):
            begin = f"{result.view.cell}.{rank}."
            own = [line for line in result.view.lines[rank] if line.startswith(begin)]
            if own != [f"{begin}{at}" for at in range(len(own))]:
                wrong.append(f"{result.name}: rank {rank} shows {own[:8]}, not each line once")
            if lines is not None and len(own) != lines:
                wrong.append(f"{result.name}: rank {rank} shows {len(own)} of {lines} lines")

    def _check_reports(self, result: CellResult) -> None:
        """Each fault is named with the right rank and host, in the fields of its report."""
        world, wrong, roster = self.world, self.world.wrong, self.cluster.cells.connection.roster
        reports = result.error.reports if isinstance(result.error, CellFailed) else ()
        for report in (each for each in reports if each.etype == failures.DEATH):
            if not world.may_have_died(report.rank, report.host):
                wrong.append(f"{result.name}: rank {report.rank} lives, on {report.host}")
        for end in [*roster.ends, *roster.dead.values()]:
            if end.why and not world.may_be_lost(end.host):
                wrong.append(f"{result.name}: nothing has happened to {end.host}: {end.why}")
            elif not end.why and end.rank >= 0 and end.pid:
                process = world.procs[end.pid]
                if process.alive or process.code != end.code or process.rank != end.rank:
                    wrong.append(f"{result.name}: {process} is alive or ended otherwise: {end}")

    def _check_variables(self, result: CellResult, spec: dict[str, Any]) -> None:
        """A rank that lives has its variables, or the user was told that it has lost them."""
        ended = {rank for rank, status in result.view.lefts if status == "ok"}
        for rank in range(self.world.size):
            if result.error is None or rank in ended:
                self.expected[rank] = spec["sets"]
        self.check_variables("\n".join([result.text, *self.cluster.cells.news]))

    def check_variables(self, said: str) -> None:
        for rank in range(self.world.size):
            model = self.world.rank(rank)
            if model is None or rank in self.cluster.cells.connection.roster.dead:
                self.expected[rank] = None
                continue
            found, expected = model.vars.get("x"), self.expected.get(rank)
            if found is None and expected is not None and not _says_lost(said, rank):
                self.world.wrong.append(
                    f"rank {rank} has lost its variables, and the user was not told: {said[:300]!r}"
                )
            self.expected[rank] = found

    # Another notebook.

    def attach(self, before: SimulatedNotebook, again_after: float = 5.0) -> bool:
        """Attaches to the ranks of a notebook that has ended, trying again as a user does.

        Then it shows the last cell, if that was not shown. Returns whether it has the ranks.
        """
        self.folder = before.folder
        world, end = self.world, self.world.now + ATTACH_SECONDS
        while world.now < end:
            try:
                left = self.do("attach", self._attach, ATTACH_SECONDS)
            except UsageError as error:
                self.outcome.append(f"{world.seconds()} not attached: {str(error)[:200]}")
                system.sleep(again_after if "did not answer" in str(error) else 0.3)
            else:
                if left is not None:
                    break
                if not world.find("caretaker") and not world.find("agent"):
                    self.outcome.append(f"{world.seconds()} no cluster is left")
                    return False
                system.sleep(0.3)
        else:
            return False
        self.outcome.append(f"{world.seconds()} attached: {left}")
        self.expected = {
            rank: model.vars.get("x") if (model := world.rank(rank)) else None
            for rank in range(world.size)
        }
        if left.unseen:
            self._follow(left)
        return True

    def _attach(self) -> Any:
        found = sessions.visit(self.folder)
        if found is None or found.holder:
            return None
        self.cluster = self._new_cluster()
        taken = sessions.AttachedHostAgent(found)
        try:
            return ownership.attach(self.cluster.cells, taken)
        except BaseException:
            taken.let_go()
            raise

    def is_refused(self) -> bool:
        """Whether another notebook cannot take the ranks, which this one has."""
        found = sessions.visit(self.folder)
        assert found is not None
        try:
            sessions.AttachedHostAgent(found).let_go()
        except UsageError:
            return True
        return False

    def _follow(self, left: Any) -> None:
        def follow(view: ShownCell) -> None:
            cells = self.cluster.cells
            cells.wait(ownership.follow(cells, left, view))

        view, error, began = ShownCell(), None, self.world.now
        try:
            self.do("the last cell", lambda: follow(view), FOLLOW_SECONDS)
        except (AllranksError, KeyboardInterrupt) as found:
            error = found
        result = CellResult("the last cell", self.world.now - began, error, view)
        self.outcome.append(f"{self.world.seconds()} {result}")
        self._said += [*view.notices, str(error or "")]
        self._check_lines(result)
        self._check_reports(result)

    def told(self, words: str) -> bool:
        """Whether the user of this notebook could read these words."""
        return any(words in line for line in [*self._said, *self.outcome])

    def was_told_of(self, ranks: Iterable[int]) -> bool:
        """Whether the user was told that these ranks have lost their variables."""
        said = "\n".join([*self._said, *self.outcome, *self.cluster.cells.news])
        return all(_says_lost(said, rank) for rank in ranks)


class Watcher:
    """Another notebook, which watches the cells of one that has the ranks.

    It checks that no line of a rank is there twice, or in another order.
    """

    def __init__(self, world: ClusterWorld, folder: str) -> None:
        self._world, self._folder = world, folder
        #: The numbers of the lines that it has shown, by cell and rank.
        self.lines: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        #: The ranks that have ended each cell.
        self.ended: defaultdict[int, set[int]] = defaultdict(set)
        host = world.hosts[NOTEBOOKS_HOST]
        files = {number: File() for number in range(3)}
        self.process = world.spawn("notebook", host, self._main, None, files, {})

    def _main(self) -> None:
        sessions.visit(self._folder, "watch")
        connection: Any = sessions.watch(self._folder, 0)
        connection.settimeout(None)  # as asyncio does
        stream = connection.makefile("rb")
        while message := self._next(stream):
            _, frames = message
            if frames:
                self._show(wire.decode(frames)[0])

    def _next(self, stream: Any) -> Any:
        """Returns the next message; None if the notebook has closed the connection."""

        async def read(nbytes: int) -> bytes:
            found: bytes = stream.read(nbytes)
            if len(found) < nbytes:
                raise EOFError
            return found

        try:
            sharing.unpack(read).send(None)  # it never awaits: `read` blocks
        except StopIteration as end:
            return end.value
        except (EOFError, OSError):
            return None

    def _show(self, record: Any) -> None:
        if isinstance(record, wire.Reply):
            self.ended[record.cell].add(record.rank)
        elif isinstance(record, wire.Output):
            for text in (rest[0] for kind, *rest in record.entries if kind == "out"):
                numbers = [int(line.split(".")[2]) for line in text.splitlines()]
                self.lines[record.cell, record.rank] += numbers
            shown = self.lines[record.cell, record.rank]
            if shown != list(range(shown[0], shown[0] + len(shown))):
                place = f"rank {record.rank} in cell {record.cell}"
                self._world.wrong.append(f"a watcher shows the lines {shown} of {place}")


def _says_lost(said: str, rank: int) -> bool:
    """Whether a sentence names a rank, and says that variables are lost."""
    return any(
        _SAYS_LOST.search(sentence) and rank in _ranks_in(sentence)
        for sentence in re.split(r"[;\n]|\. ", said)
    ) or ("variables of all" in said or "All variables" in said)


def _ranks_in(sentence: str) -> set[int]:
    found: set[int] = set()
    for listed in re.findall(r"ranks? ((?:\d+(?:–\d+)?(?:, | and )?)+)", sentence):
        for part in re.split(", | and ", listed):
            first, _, last = part.partition("–")
            if first:
                found.update(range(int(first), int(last or first) + 1))
    return found
