"""Models of what is not under test: MPI with its launcher, ranks, spare processes, and ssh.

A rank answers requests and runs cells as the real one does, as far as other processes can see.
What MPI does after a death is simple here: it waits until all living processes have come to a
meeting. From then on, the death of one that has a rank, or is to have one, makes the meeting fail.
`tests.simulated.mpi_scripts` compares this.
"""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from tests.simulated import system, zeromq
from tests.simulated.kernel import End, File, Process, Source, Thread, World
from tests.simulated.sockets import Socket, this_process

#: Cells are dictionaries (see ``scenarios.work``), written as Python writes them.
_KEPT = "/kept/{}"
#: The file in shared memory that a rank maps.
SHARED = "/dev/shm/rank-{}"
#: How often a rank looks for its notebook, and for the next one.
_SOON_MS, _LATER_MS = 20, 500
#: ssh ends if nothing comes through for this time.
_SSH_SECONDS = 15.0
_REQUESTS_AT_ONCE = frozenset(
    {"status", "send", "stack", "log", "stay", "seen", "attach", "resume"}
)


class HealFailed(Exception):
    """MPI could not connect the processes, because one has died meanwhile."""


class _Meeting:
    """The living processes of a job, which agree on new places; rank -1 is a spare process.

    ``members`` are those that live when all have come, and the new ones that join them then.
    """

    def __init__(self, number: int, dead: Sequence[int]) -> None:
        self.number, self.dead = number, dead
        self.arrived: dict[int, tuple[Process, int]] = {}
        self.members: dict[int, tuple[Process, int]] = {}
        self.over = self.succeeded = self.began = False


class Job:
    """One job of MPI: the processes that mpiexec has started, on one host or several.

    ``size`` counts the ranks, ``count`` also the spare processes.
    """

    def __init__(self, world: World, size: int, count: int, mpiexec: Process) -> None:
        self.world, self.size, self.count, self.mpiexec = world, size, count, mpiexec
        self.changed = Source()
        self.members: dict[int, Process] = {}
        #: The processes of the ranks, since the last meeting that has succeeded.
        self.places: dict[int, Process] = {}
        self.is_up = self.aborted = False
        #: mpiexec on the first host, and prted on the others.
        self.daemons: dict[str, Process] = {mpiexec.host.name: mpiexec}
        self.stubs: list[Process] = []
        #: The ranks that have come to the meeting of a cell, by cell.
        self.arrivals: dict[int, set[int]] = {}
        #: Starts a process in the place of dead ranks, where there are no spare processes.
        self.start_another: Callable[[list[int], int, Callable[[], object]], object] | None = None
        self._meeting: _Meeting | None = None
        self._meetings = 0
        #: The spare process that has become a rank last.
        self.joining: Process | None = None
        #: The epoch of the ranks, which new ones learn.
        self.epoch = 0

    @property
    def has_failed(self) -> bool:
        """Whether a daemon is lost, or a stub has ended with an exit code."""
        lost = any(not daemon.alive for daemon in self.daemons.values())
        return lost or any(not stub.alive and stub.code > 0 for stub in self.stubs)

    def _alive(self) -> list[Process]:
        return [process for process in self.members.values() if process.alive]

    def _is_cut(self) -> bool:
        hosts = sorted({process.host.name for process in self._alive()})
        return any(self.world.cut(a, b) for a in hosts for b in hosts)

    def init(self, process: Process) -> None:
        """What MPI_Init does: returns when all processes are there."""
        self.members[process.pid] = process
        process.on_death.append(self._died)
        if len(self.members) == self.count:
            self.world.after(self.world.rng.uniform(0.05, 0.35), self._try_init)
        self.world.block(lambda: self.is_up, [self.changed])

    def _try_init(self) -> None:
        if self._is_cut():
            self.world.after(0.2, self._try_init)
        elif len(self._alive()) == self.count:
            self.is_up = True
            self.changed.notify()

    def _died(self, process: Process) -> None:
        self.changed.notify()
        if self._meeting is not None:
            self._look(self._meeting)

    def dead(self, observer: Process) -> set[int]:
        """The ranks that have died, as far as others of their host can show it to this process."""
        alive = {process.host.name for process in self.places.values() if process.alive}
        return {
            rank
            for rank, process in self.places.items()
            if not process.alive
            and process.host.name in alive
            and not self.world.cut(process.host.name, observer.host.name)
        }

    def heal(self, process: Process, rank: int, dead: Sequence[int] = (), number: int = 0) -> None:
        """Returns when all living processes have called it; raises HealFailed if one dies.

        ``dead`` are ranks whose places other processes are to be started for. A process that was
        started for one meeting gives its ``number``: those of MPI_Comm_spawn reach no other one.
        """
        if number and (self._meeting is None or self._meeting.over or number != self._meetings):
            raise HealFailed("MPI_ERR_PROC_FAILED: another rank has died meanwhile")
        if self._meeting is None or self._meeting.over:
            self._meetings += 1
            self._meeting = _Meeting(self._meetings, dead)
        meeting = self._meeting
        if process.pid not in self.members:
            self.members[process.pid] = process
            process.on_death.append(self._died)
        meeting.arrived[process.pid] = process, rank
        if meeting.members:
            meeting.members[process.pid] = process, rank
        self._look(meeting)
        self.world.block(lambda: meeting.over, [self.changed])
        if not meeting.succeeded:
            raise HealFailed("MPI_ERR_PROC_FAILED: another rank has died meanwhile")

    def _start_others(self, meeting: _Meeting) -> None:
        assert self.start_another is not None
        for number in meeting.dead:
            replaced = [number, *(each for each in meeting.dead if each != number)]
            self.start_another(replaced, meeting.number, lambda: self._finish(meeting, False))

    def _look(self, meeting: _Meeting) -> None:
        if meeting.over:
            return
        # Shrink waits for all that live, whatever has become of those that have called it.
        if not meeting.members:
            if any(process.pid not in meeting.arrived for process in self._alive()):
                return
            meeting.members = {p.pid: (p, r) for p, r in meeting.arrived.values() if p.alive}
            if self.start_another is not None:
                missing = self.size - len(meeting.members)
                start = self._start_others if missing == len(meeting.dead) else self._finish_soon
                start(meeting)
        of_ranks = [(process, rank) for process, rank in meeting.members.values() if rank >= 0]
        is_complete = {rank for _, rank in of_ranks} == set(range(self.size))
        rng = self.world.rng
        if not all(process.alive for process, _ in of_ranks):
            self._finish_soon(meeting)
        elif is_complete and not meeting.began:
            meeting.began = True
            self.world.trigger("agree")
            self.world.after(rng.uniform(0.05, 0.55), self._finish, meeting, True)
        elif self.start_another is None and not is_complete:
            self._finish_soon(meeting)

    def _finish_soon(self, meeting: _Meeting) -> None:
        self.world.after(self.world.rng.uniform(0, 0.1), self._finish, meeting, False)

    def _finish(self, meeting: _Meeting, complete: bool) -> None:
        if meeting.over:
            return
        if self._is_cut():
            self.world.after(0.2, self._finish, meeting, complete)
            return
        arrived = [rank for process, rank in meeting.arrived.values() if process.alive]
        ranks = sorted(rank for rank in arrived if rank >= 0)
        meeting.over = True
        meeting.succeeded = complete and ranks == list(range(self.size))
        if meeting.succeeded:
            came = [(process, rank) for process, rank in meeting.arrived.values() if process.alive]
            self.places |= {rank: process for process, rank in came if rank >= 0}
        self.changed.notify()


def _job_of(process: Process) -> Job:
    world: Any = process.world
    found: Job = world.jobs[int(process.environ["SIM_JOB"])]
    return found


# mpiexec, prted and stubs.


def mpiexec(words: list[str]) -> system.Main:
    """Starts stubs of ranks on all hosts; without ``--host`` all on its own one."""

    def mpiexec() -> None:
        world, me = World.it, this_process()
        count = int(words[words.index("-n") + 1])
        address = words[-1]
        places = [(me.host.name, count)]
        if "--host" in words:
            named = words[words.index("--host") + 1].split(",")
            places = [(name, int(each)) for name, _, each in (one.partition(":") for one in named)]
        worlds: Any = world
        job = Job(world, worlds.size, count, me)
        number = len(worlds.jobs)
        worlds.jobs.append(job)
        if "--host" not in words:
            job.start_another = partial(_start_another, job, number, address)
        try:
            asked = [_ask_for_prted(name, number, address) for name, _ in places[1:]]
        except ConnectionRefusedError:  # the host agent has ended meanwhile
            raise SystemExit(1) from None
        world.block(lambda: len(job.daemons) == len(places), [job.changed])
        ranks = iter(range(count))
        for name, here in places:
            daemon = job.daemons[name]
            for _ in range(here):
                seconds = world.delay(me.host.name, name) + world.rng.uniform(0, 0.02)
                world.after(seconds, _start_stub, job, number, next(ranks), daemon, address)
        _watch_stubs(job)
        del asked  # its sockets were open until now
        code = 1 if job.has_failed else 0
        job.aborted = True
        for stub in job.stubs:
            if stub.alive and not world.cut(me.host.name, stub.host.name):
                world.after(world.delay(me.host.name, stub.host.name), stub.signal, 9)
        if code:
            end: Any = me.fds[1]
            try:
                end.write(b"PRTE has lost communication with a remote daemon\n", me)
            except BrokenPipeError:
                pass
        system.sleep(world.rng.uniform(1e-6, 0.3))
        raise SystemExit(code)

    return mpiexec


def _ask_for_prted(host: str, number: int, address: str) -> Socket:
    """Asks the host agent, as the stub of ssh does, to run a command on another host."""
    asked = Socket()
    asked.connect(f"{address.rpartition('/')[0]}/agent")
    request = {"host": host, "command": f"prted {number} {address}"}
    asked.sendall(json.dumps(request).encode() + b"\n")
    return asked


def _watch_stubs(job: Job) -> None:
    """Returns when a daemon is lost, a stub has failed, or all have ended."""
    me = job.mpiexec

    def over() -> bool:
        ended = bool(job.stubs) and not any(stub.alive for stub in job.stubs)
        return ended or job.has_failed

    while not over():
        job.world.block(over, [job.changed, me.child_ended], 0.25)
        while me.reap() is not None:
            pass


def _start_stub(
    job: Job,
    number: int,
    place: int,
    daemon: Process,
    address: str,
    replaced: Sequence[int] = (),
    meeting: int = 0,
) -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": str(place),
        "OMPI_COMM_WORLD_SIZE": str(job.count),
        "SIM_JOB": str(number),
        "SIM_MEETING": str(meeting),
    }

    def stub() -> None:
        agent = Socket()
        try:
            agent.connect(address)
        except ConnectionRefusedError:
            this_process().die(1)  # the host agent has ended
        request = {"environment": environ, "descriptors": [], "replaced": list(replaced)}
        text = json.dumps(request).encode()
        agent.sendall(len(text).to_bytes(8, "little") + text)
        answer = agent.recv(8)
        this_process().die(int.from_bytes(answer, "little", signed=True) if answer else 1)

    if daemon.alive:
        files = {number: File() for number in range(3)}
        job.stubs.append(World.it.spawn(f"stub{place}", daemon.host, stub, daemon, files, environ))


def _start_another(
    job: Job,
    number: int,
    address: str,
    replaced: list[int],
    meeting: int,
    ended: Callable[[], object],
) -> None:
    """Starts a stub for a process that joins the others; ``ended`` is called when it ends."""

    def start() -> None:
        _start_stub(job, number, replaced[0], job.mpiexec, address, replaced, meeting)
        job.stubs[-1].on_death.append(lambda _: ended())

    job.world.after(job.world.rng.uniform(0.01, 0.1), start)


def prted(words: list[str]) -> system.Main:
    """The launcher's daemon on another host."""

    def prted() -> None:
        world, me = World.it, this_process()
        number = words[-1].split(" ")[1]
        worlds: Any = world
        job: Job = worlds.jobs[int(number)]
        here, head = me.host.name, job.mpiexec.host.name
        system.sleep(2 * world.delay(here, head))
        while world.cut(here, head):
            system.sleep(0.2)
        job.daemons[here] = me
        job.changed.notify()
        while job.mpiexec.alive or world.cut(here, head):
            system.sleep(0.25)
            while me.reap() is not None:
                pass
        for stub in job.stubs:
            if stub.host is me.host:
                stub.signal(9)
        raise SystemExit(1 if job.aborted else 0)

    return prted


def ssh(remote: Process, here: End, there: End) -> None:
    """Passes the end of its input on, and ends as the remote process does; or when the network
    has been interrupted for long.
    """
    world, me = World.it, this_process()
    near, far = me.host.name, remote.host.name
    cut_since: float | None = None
    is_open = True

    def ready() -> bool:
        return not remote.alive or (here.readable() and is_open)

    while True:
        world.block(ready, [here.source, remote.ended], 0.5)
        if world.cut(near, far):
            cut_since = cut_since or world.now
            if world.now - cut_since > _SSH_SECONDS:
                raise SystemExit(255)
            system.sleep(0.25)
            continue
        cut_since = None
        if not remote.alive:
            system.sleep(world.delay(near, far))
            raise SystemExit(remote.code if remote.code >= 0 else 255)
        if here.readable() and is_open:
            is_open = False
            system.sleep(world.delay(near, far))
            me.close(3)


# Ranks.


class Spare:
    """A process without a rank; stands for ``allranks.features.heal.replacement.Spare``."""

    def __init__(self, wake: int, size: int, processes: int) -> None:
        self._wake, self._heard = wake, b""
        me = this_process()
        me.name = "spare"
        self._job = _job_of(me)
        self._job.init(me)

    def _asked(self) -> dict[str, Any]:
        while b"\n" not in self._heard:
            part = system.read(self._wake, 65536)
            if not part:
                raise SystemExit(0)
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def wait(self) -> tuple[int, list[int], dict[str, str]]:
        """Returns when it becomes a rank; until then it takes part in all meetings."""
        while (asked := self._asked())["rank"] < 0:
            try:
                self._job.heal(this_process(), -1)
            except HealFailed:
                pass
        return asked["rank"], asked["dead"], asked["variables"]

    def join(self, rank: int) -> None:
        while True:
            self._job.joining = this_process()
            self._job.world.trigger("join")
            try:
                self._job.heal(this_process(), rank)
            except HealFailed:
                self._asked()
            else:
                return


class Rank:
    """A rank: one thread for its connection to the notebook, and the main thread for cells.

    Stands for ``allranks.engine.rank.Rank``.
    """

    def __init__(
        self,
        config: Any,
        connection: object,
        rank: int,
        features: object,
        dead: Collection[int],
        running: Any,
        stays: bool,
        last: int,
        spare: Spare | None = None,
    ) -> None:
        self.config, self.rank = config, rank
        self._dead, self._running, self._last, self._spare = list(dead), running, last, spare
        self.world: Any = World.it
        self.p = this_process()
        #: The variables of cells.
        self.vars: dict[str, int] = {}
        self._to_do: list[Callable[[], object]] = []
        #: Notified when the main thread has something to look at.
        self._wake = Source()
        self._cell, self.is_busy, self._is_interrupted = 0, False, False
        #: The cell for which an interrupt has come before its begin.
        self._early = 0
        self._died: dict[int, str] = {}
        #: Whether it joins with new ranks, or has been asked to; whether it has taken the place of
        #: a rank, and has not been asked yet to restore what was kept.
        self._is_healing, self._is_new = False, spare is not None or bool(dead)
        #: How it was asked to join with new ranks the last time.
        self._last_heal: dict[str, Any] = {}
        #: Whether it has loaded its variables, whose file is still there.
        self._has_loaded = False
        self._last_cell = {"cell": 0, "label": "", "ranks": (), "seconds": 0.0}
        self._is_unseen = self._is_dirty = self._has_failed = self._had_traffic = False
        self._epoch = 0
        #: The folder in which the next notebook will listen.
        self._home = config.session_dir if stays else ""
        self._is_attached = True
        #: What the last notebook may not have shown.
        self._kept: list[list[bytes]] = []

    def run(self) -> None:
        from allranks.records import wire

        self._wire = wire
        self.p.name, self.p.rank = f"rank{self.rank}", self.rank
        self._job = _job_of(self.p)
        if self._spare is not None:
            self._spare.join(self.rank)
        elif self._dead:
            try:
                self._job.heal(self.p, self.rank, number=int(self.p.environ["SIM_MEETING"]))
            except HealFailed:
                raise SystemExit(1) from None
        else:
            self._job.init(self.p)
            self._job.places[self.rank] = self.p
        self._epoch = self._job.epoch
        self.p.host.files[SHARED.format(self.p.pid)] = b""
        self._context = zeromq.Context()
        gone = zeromq.EVENT_DISCONNECTED | zeromq.EVENT_CLOSED
        self._connect(self.config.commands_url, self.config.events_url, _SOON_MS, gone)
        self._greet()
        self.world.serving(self)
        Thread(self.p, self._serve, "wire")
        Thread(self.p, self._find_dead, "deaths")
        end = self.p.fds[self._last]
        while True:
            self.world.block(lambda: self._to_do or end.readable(), [self._wake, end.source])
            if not self._to_do:
                raise SystemExit(0)  # the host agent ends idle ranks so
            self._to_do.pop(0)()

    # The connection.

    def _connect(self, commands: str, events: str, again_ms: int, watched: int) -> None:
        self._commands = self._context.socket(zeromq.DEALER)
        self._commands.setsockopt(zeromq.IDENTITY, b"rank-%d" % self.rank)
        self._events = self._context.socket(zeromq.PUSH)
        for one in (self._commands, self._events):
            one.setsockopt(zeromq.RECONNECT_IVL, again_ms)
            one.setsockopt(zeromq.SNDHWM, 0)
        self._monitor = self._commands.get_monitor_socket(watched)
        self._commands.connect(commands)
        self._events.connect(events)

    def _serve(self) -> None:
        while True:
            self.world.block(
                lambda: self._commands.queue or self._monitor.queue,
                [self._commands.source, self._monitor.source],
            )
            if self._monitor.queue:
                self._monitor.queue.clear()
                self._leave()
            while self._commands.queue:
                self._take(*self._wire.decode(self._commands.recv_multipart()))

    def _leave(self) -> None:
        """The notebook is gone: looks for the next one, if there will be one."""
        from allranks.records.config import COMMANDS_AT_HOME, EVENTS_AT_HOME

        if not self._home:
            return
        self._is_attached = False
        for one in (self._commands, self._events, self._monitor):
            one.close(0)
        urls = COMMANDS_AT_HOME.format(self._home), EVENTS_AT_HOME.format(self._home)
        # Not refused connections: the next notebook is not there yet.
        self._connect(*urls, _LATER_MS, zeromq.EVENT_DISCONNECTED)
        self._wake.notify()

    def _find_dead(self) -> None:
        """Finds the ranks that have died while no notebook is there, which would report them."""
        job = self._job
        while True:
            self.world.block(
                lambda: not self._is_attached and job.dead(self.p) - self._died.keys(),
                [self._wake, job.changed],
            )
            # Those of their host look now and then, and show it to the other hosts.
            system.sleep(self.world.rng.uniform(0, 0.3))
            if not self._is_attached:
                self._died |= dict.fromkeys(job.dead(self.p) - self._died.keys(), "has died")
                self._wake.notify()

    def _greet(self) -> None:
        hello = self._wire.Hello(
            rank=self.rank,
            size=self.config.size,
            local_rank=0,
            local_size=1,
            host=self.p.host.name,
            pid=self.p.pid,
            device="cpu",
            engine=f"engine-{self.rank}",
            mpi="simulated",
            log=f"/logs/rank-{self.rank}.log",
        )
        self._send(hello)

    def _send(self, *records: Any) -> None:
        wire, messages = self._wire, []
        for record in records:
            frames = wire.encode(record)
            if isinstance(record, (wire.Output, wire.Reply)):
                self._kept.append(frames)
            if self._is_attached or isinstance(record, (wire.Answer, wire.Hello)):
                messages.append(frames)
        if messages:
            self._events.send_multipart(wire.join_messages(messages))

    def _take(self, record: Any, payloads: Sequence[Any] = ()) -> None:
        wire = self._wire
        if isinstance(record, wire.RunCell):
            self._is_new = False
            self._do(lambda: self._run_cell(record))
        elif isinstance(record, wire.RunMember):
            self._do(lambda: self._run_member(record, payloads[0]))
        elif isinstance(record, wire.Interrupt):
            if self.is_busy and self._cell == record.cell:
                self._is_interrupted = True
                self._wake.notify()
            else:
                self._early = record.cell
        elif isinstance(record, wire.Died):
            self._died[record.rank] = record.how
            self._wake.notify()
        elif isinstance(record, wire.Query):
            if record.name in _REQUESTS_AT_ONCE:
                self._answer(record)
            elif self.is_busy:
                problem = f"rank {self.rank} is running a cell"
                self._send(wire.Answer(record.request, self.rank, {}, problem))
            elif record.name == "save" and self._is_healing:
                self._answer(record)
            else:
                if record.name == "heal":
                    self._is_healing, self._last_heal = True, record.arguments
                self._do(lambda: self._answer(record))

    def _do(self, action: Callable[[], object]) -> None:
        self._to_do.append(action)
        self._wake.notify()

    # Requests: see ``allranks.records.requests``.

    def _answer(self, ask: Any) -> None:
        content, problem = {}, ""
        self.world.trigger(ask.name)
        try:
            content = getattr(self, f"_on_{ask.name}")(**ask.arguments) or {}
        except Exception as error:
            problem = str(error) or type(error).__name__
            if not isinstance(error, (HealFailed, FileNotFoundError)):
                self.world.crashes.append((self.p.name, ask.name, problem))
        self._send(self._wire.Answer(ask.request, self.rank, content, problem))

    def _on_status(self) -> dict[str, Any]:
        from allranks.records.ranks import IDLE, RUNNING

        doing = RUNNING if self.is_busy else IDLE
        return {"pid": self.p.pid, "rss_nbytes": 0, "doing": doing, "line": ""}

    def _on_send(self) -> None: ...

    def _on_log(self, path: str, nbytes: int) -> dict[str, Any]:
        return {"text": ""}

    def _on_stay(self, home: str) -> None:
        self._home = home

    def _on_seen(self, cell: int) -> None:
        self._is_unseen = self._is_unseen and cell != self._last_cell["cell"]

    def _on_attach(self) -> dict[str, Any]:
        self._greet()
        about = {"member": False, "busy": self.is_busy, "unseen": self._is_unseen}
        epoch = {"epoch": self._epoch, "dirty": self._is_dirty}
        traffic = {"traffic": self._had_traffic, "failed": self._has_failed}
        others = {"died": sorted(self._died), "new": self._is_new}
        others |= {"healing": self._is_healing, "heal": self._last_heal}
        return {**self._last_cell, **about, **epoch, **traffic, **others}

    def _on_resume(self) -> None:
        for frames in self._kept:
            self._events.send_multipart(frames)
        self._is_attached = True

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._is_dirty, self._had_traffic = epoch, False, False

    def _on_members(self, ranks_each: int) -> dict[str, Any]:
        return {"epoch": self._epoch, "dirty": self._is_dirty}

    def _on_renew(self, epoch: int) -> None:
        self._begin_epoch(epoch)

    def _on_heal(self, dead: list[int], epoch: int) -> dict[str, Any]:
        self.world.log("HEAL", self.p, dead)
        self._job.epoch, self._is_healing = epoch, True
        try:
            self._job.heal(self.p, self.rank, dead)
            self._died.clear()
        finally:
            self._is_healing = False
        self._begin_epoch(epoch)
        return {"warning": ""}

    def _on_settle(self) -> dict[str, Any]:
        if self._has_loaded:
            self._has_loaded = False
            self.p.host.files.pop(_KEPT.format(self.rank), None)
        return {"goes_on": 0, "version": 0, "new": self._is_new}

    def _on_restore(self, version: int, saved: Collection[int] = ()) -> dict[str, Any]:
        self._is_new = False
        found = self.p.host.files.pop(_KEPT.format(self.rank), None)
        if self.rank in saved and found is not None:
            self.vars.update(json.loads(found))
        else:
            self.vars.update(self.world.kept.get(self.rank, {}))
        return {"names": list(self.vars), "seconds": 0.0}

    def _on_save(self) -> dict[str, Any]:
        system.sleep(self.world.rng.uniform(0.01, 0.21))
        self.p.host.files[_KEPT.format(self.rank)] = json.dumps(self.vars).encode()
        return {"sets": {}, "goes_on": 0, "left": {}, "new": self._is_new}

    def _on_load(self, sets: object, saved: Collection[int]) -> dict[str, Any]:
        system.sleep(self.world.rng.uniform(0.05, 0.35))
        self._is_new, self._has_loaded = self.rank not in saved, True
        if self.rank in saved:
            self.vars.update(json.loads(self.p.host.files[_KEPT.format(self.rank)]))
        return {"problem": ""}

    # Cells.

    def _run_cell(self, cell: Any) -> None:
        """Runs a cell. A scenario may add to it: ``later`` lines after its end, whether it
        ``keeps`` its variables on another host, or leaves calls ``unfinished``, and the ranks that
        it ``ends``, once they have saved their variables, or that are ``stuck`` in it.
        """
        world, spec = self.world, ast.literal_eval(cell.source)
        world.runs(self, cell.cell)
        world.begins_in(self, cell.cell, self._epoch, self._is_dirty)
        world.trigger("run")
        self._cell, self.is_busy = cell.cell, True
        self._is_interrupted = self._early == cell.cell
        self._kept.clear()
        last = {"cell": cell.cell, "label": cell.label, "ranks": cell.ranks}
        self._last_cell = {**last, "seconds": 0.0}
        self._is_unseen = True
        self._running[self.rank] = cell.number
        began = world.now
        if self.rank in spec.get("stuck", ()):
            world.block(lambda: False, [])
        last_line = self._print_lines(cell.cell, spec)
        everyone = set(cell.ranks or range(self.config.size))
        is_reduce = spec["kind"] == "reduce"
        self._had_traffic = self._had_traffic or is_reduce
        met = not is_reduce or self._is_interrupted or self._meet(cell.cell, everyone)
        status = "interrupted" if self._is_interrupted else "ok" if met else "waiting"
        if status == "ok":
            self.vars["x"] = spec["sets"]
            if spec.get("keeps"):
                world.kept[self.rank] = dict(self.vars)
            self._is_dirty = bool(spec.get("unfinished"))
        else:
            self._is_dirty = is_reduce
        self._has_failed = status != "ok"
        self.is_busy = False
        self._running[self.rank] = 0
        ends = "it ends" if self.rank in spec.get("ends", ()) else ""
        if ends:
            self._on_save()
        self._send(*last_line, self._reply(cell.cell, status, world.now - began, ends))
        for number in range(spec["lines"], spec["lines"] + spec.get("later", 0)):
            world.block(lambda: False, [], 0.5)
            self._send(self._line(cell.cell, number))

    def _run_member(self, run: Any, packed: Any) -> None:
        """Runs a member of an ensemble, whose result is a number."""
        world, spec = self.world, ast.literal_eval(run.source)
        world.runs(self, run.cell)
        world.trigger("run")
        self._cell, self.is_busy = run.cell, True
        self._is_interrupted = self._early == run.cell
        self._running[self.rank] = run.number
        began = world.now
        last_line = self._print_lines(run.cell, spec)
        status = "interrupted" if self._is_interrupted else "ok"
        numbers = {"x": float(pickle.loads(packed)["x"])}
        result = self._wire.Result(self.rank, run.cell, numbers, "", 0, "", "")
        self.is_busy = False
        self._running[self.rank] = 0
        replies = [self._reply(run.cell, status, world.now - began, "")]
        self._send(*last_line, *([result] if status == "ok" else []), *replies)

    def _print_lines(self, cell: int, spec: dict[str, Any]) -> list[Any]:
        """Sends the lines of a cell; returns the last one, which comes with the reply."""
        if self.rank in spec.get("late", ()):
            self.world.block(lambda: self._is_interrupted, [self._wake])
        count, last = spec["lines"], []
        for number in range(count):
            if self._is_interrupted:
                break
            seconds = spec["seconds"] / count * self.world.rng.uniform(0.5, 1.5)
            self.world.block(lambda: self._is_interrupted, [self._wake], seconds)
            line = self._line(cell, number)
            if number == count - 1:
                last.append(line)
            else:
                self._send(line)
        return last

    def _line(self, cell: int, number: int) -> Any:
        text = ["out", f"{cell}.{self.rank}.{number}\n"]
        return self._wire.Output(self.rank, cell, (text,), 0, 0, 0)

    def _meet(self, cell: int, everyone: set[int]) -> bool:
        """Waits for the other ranks, as a collective does; false if one of them has died."""
        there = self._job.arrivals.setdefault(cell, set())
        there.add(self.rank)
        self._job.changed.notify()

        def ready() -> bool:
            return there >= everyone or self._is_interrupted or bool(everyone & self._died.keys())

        self.world.block(ready, [self._wake, self._job.changed])
        return there >= everyone or self._is_interrupted

    def _reply(self, cell: int, status: str, seconds: float, ends: str) -> Any:
        from allranks.errors import Report

        report = None
        if status != "ok":
            report = Report(
                rank=self.rank,
                host=self.p.host.name,
                device="cpu",
                etype="KeyboardInterrupt" if status == "interrupted" else "RankLost",
                message="simulated",
                traceback=("simulated",),
                line=1,
                source_line="",
                waiting=status == "waiting",
            )
        return self._wire.Reply(
            rank=self.rank,
            cell=cell,
            status=status,
            seconds=seconds,
            dirty=self._is_dirty,
            has_value=False,
            value_problem="",
            report=report,
            epoch=self._epoch,
            traffic=self._had_traffic,
            ends=ends,
        )
