"""Models of what is not under test: MPI, mpiexec and prted, stubs, ssh, and ranks."""

from __future__ import annotations

import json
import types

from tests.simulated import system, zeromq
from tests.simulated.kernel import INF, File, Source, Thread, World, pipe
from tests.simulated.system import PROGRAMS, STUBS, P


class HealFailed(Exception):
    pass


class Job:
    """One MPI job, with spare processes."""

    def __init__(self, w, size, n):
        self.w, self.size, self.n = w, size, n
        self.source = Source()
        self.members, self.inited = {}, False
        self.round = None
        self.daemons = {}
        self.aborted = False
        self.arrivals = {}

    def alive(self):
        return [p for p in self.members.values() if p.alive]

    def hosts_cut(self):
        hosts = sorted({p.host.name for p in self.alive()})
        return any(self.w.cut(a, b) for a in hosts for b in hosts)

    def init(self, p):
        self.members[p.pid] = p
        p.on_death.append(self.died)
        if len(self.members) == self.n:
            self.w.after(0.05 + self.w.rng.random() * 0.3, self.try_init)
        self.w.block(lambda: self.inited, [self.source])

    def try_init(self):
        if self.hosts_cut():
            self.w.after(0.2, self.try_init)
        elif len(self.alive()) == self.n:
            self.inited = True
            self.source.notify()

    def died(self, p):
        if self.round is not None:
            self.check(self.round)

    # Replacements: all living processes shrink, then share a new world of `size` ranks.
    def heal(self, p, rank):
        if self.round is None or self.round.over:
            self.round = types.SimpleNamespace(arrived={}, over=False, ok=False, timing=False)
        r = self.round
        r.arrived[p.pid] = (p, rank)
        self.check(r)
        self.w.block(lambda: r.over, [self.source])
        if not r.ok:
            raise HealFailed("MPI_ERR_PROC_FAILED: another rank has died meanwhile")

    def check(self, r):
        if r.over:
            return
        if all(p.pid in r.arrived for p in self.alive()) and not r.timing:
            r.timing = True
            self.w.after(0.05 + self.w.rng.random() * 0.5, self.finish, r, len(self.alive()))
        elif r.timing and any(not p.alive for p, _ in r.arrived.values()):
            self.w.after(self.w.rng.random() * 0.1, self.finish, r, -1)

    def finish(self, r, count):
        if r.over:
            return
        if self.hosts_cut():
            self.w.after(0.2, self.finish, r, count)
            return
        ranks = sorted(rank for p, rank in r.arrived.values() if p.alive and rank >= 0)
        r.over = True
        r.ok = count == len(self.alive()) and ranks == list(range(self.size))
        self.source.notify()


def jobs():
    return World.it.jobs


def mpiexec(argv):
    def mpiexec():
        w, p = World.it, P()
        words = argv
        hosts = [part.split(":") for part in words[words.index("--host") + 1].split(",")]
        n = int(words[words.index("-n") + 1])
        address = words[-1]
        job = Job(w, w.size, n)
        number = len(w.jobs)
        w.jobs.append(job)
        job.mpiexec = p
        job.daemons[hosts[0][0]] = p
        folder = address.rpartition("/")[0]
        kept = []
        for name, _ in hosts[1:]:
            ask = system.Sock()
            ask.connect(folder + "/agent")
            ask.sendall(
                json.dumps({"host": name, "command": f"prted {number} {address}"}).encode() + b"\n"
            )
            kept.append(ask)
        w.block(lambda: len(job.daemons) == len(hosts), [job.source])
        first = 0
        for name, count in hosts:
            daemon = job.daemons[name]
            for each in range(first, first + int(count)):
                w.after(
                    w.delay(p.host.name, name) + w.rng.random() * 0.02,
                    start_stub,
                    job,
                    number,
                    each,
                    daemon,
                    address,
                )
            first += int(count)
        job.started = True

        def lost():
            return [d for d in job.daemons.values() if not d.alive]

        def over():
            return lost() or (job.stubs and not any(s.alive for s in job.stubs))

        while not over():
            w.block(over, [job.source, p.child_ended], 0.25)
            while p.reap() is not None:
                pass
        code = 1 if lost() else 0
        job.aborted = True
        for s in job.stubs:
            if s.alive and not w.cut(p.host.name, s.host.name):
                w.after(w.delay(p.host.name, s.host.name), s.signal, 9)
        if code:
            try:
                p.fds[1].write(b"PRTE has lost communication with a remote daemon\n", p)
            except BrokenPipeError:
                pass
        system._sleep(w.rng.random() * 0.3)
        raise SystemExit(code)

    return mpiexec


def start_stub(job, number, each, daemon, address):
    if not daemon.alive:
        return
    w = World.it
    env = {
        "OMPI_COMM_WORLD_RANK": str(each),
        "OMPI_COMM_WORLD_SIZE": str(job.n),
        "SIM_JOB": str(number),
    }

    def stub():
        s = system.Sock()
        s.connect(address)
        text = json.dumps({"environment": env, "descriptors": [], "replaced": []}).encode()
        s.sendall(len(text).to_bytes(8, "little") + text)
        answer = s.recv(8)
        if not answer:
            raise SystemExit(1)
        code = int.from_bytes(answer, "little", signed=True)
        P().die(code)

    job.stubs.append(
        w.spawn(f"stub{each}", daemon.host, stub, daemon, {0: File(), 1: File(), 2: File()}, env)
    )


Job.stubs = property(lambda self: self.__dict__.setdefault("_stubs", []))


def prted(argv):
    def prted():
        w, p = World.it, P()
        _, number, address = argv[-1].split(" ")
        job = w.jobs[int(number)]
        here, head = p.host.name, job.mpiexec.host.name
        w.block(lambda: False, [], 2 * w.delay(here, head))
        while w.cut(here, head):
            w.block(lambda: False, [], 0.2)
        job.daemons[here] = p
        job.source.notify()
        while job.mpiexec.alive or w.cut(here, head):
            w.block(lambda: False, [], 0.25)
            while p.reap() is not None:
                pass
        for s in job.stubs:
            if s.host is p.host:
                s.signal(9)
        raise SystemExit(1 if job.aborted else 0)

    return prted


PROGRAMS["prted"] = prted
PROGRAMS["mpiexec"] = mpiexec


class Spare:
    def __init__(self, wake, size, processes):
        self.wake, self.buffer = wake, b""
        p = P()
        p.name = "spare"
        self.job = jobs()[int(p.environ["SIM_JOB"])]
        self.job.init(p)

    def _asked(self):
        while b"\n" not in self.buffer:
            part = system._read(self.wake, 65536)
            if not part:
                raise SystemExit(0)
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def wait(self):
        while (asked := self._asked())["rank"] < 0:
            try:
                self.job.heal(P(), -1)
            except HealFailed:
                pass
        return asked["rank"], asked["dead"], asked["variables"]

    def join(self, rank):
        while True:
            try:
                self.job.heal(P(), rank)
            except HealFailed:
                self._asked()
            else:
                return


class Rank:
    """A rank: a thread for the wire, and the main thread that runs cells and collective requests."""

    def __init__(
        self, config, connection, rank, features, dead, running, stays, last=-1, spare=None
    ):
        self.last_fd = last
        self.config, self.rank, self.spare, self.dead = config, rank, spare, dead
        self.running_board, self.stays = running, stays

    def run(self):
        from allranks.records import wire

        self.wire = wire
        w, p = World.it, P()
        self.w, self.p = w, p
        p.name = f"rank{self.rank}"
        self.job = jobs()[int(p.environ["SIM_JOB"])]
        self.vars = {}
        p.model = self
        if self.spare is not None:
            self.spare.join(self.rank)
        else:
            self.job.init(p)
        self.todo, self.todo_source = [], Source()
        self.cell, self.busy, self.interrupted, self.died = 0, False, False, {}
        #: Asked to join with new ranks; not asked yet to restore what was kept.
        self.healing, self.new = False, self.spare is not None
        self.last = {"cell": 0, "label": "", "seconds": 0.0}
        self.unseen = False
        self.dirty, self.epoch = False, 0
        self.home, self.attached, self.kept = (
            self.config.session_dir if self.stays else "",
            True,
            [],
        )
        self.context = zeromq.Context()
        self.connect(self.config.commands_url, self.config.events_url, 0.02)
        self.hello()
        w.serving(self)
        Thread(p, self.serve, "wire")
        while True:
            w.block(lambda: bool(self.todo), [self.todo_source])
            self.todo.pop(0)()

    def connect(self, commands, events, again):
        self.commands = self.context.socket(zeromq.DEALER)
        self.commands.identity = b"rank-%d" % self.rank
        self.events = self.context.socket(zeromq.PUSH)
        self.commands.reconnect = self.events.reconnect = again
        self.monitor = self.commands.get_monitor_socket(
            zeromq.EVENT_DISCONNECTED | zeromq.EVENT_CLOSED
        )
        self.commands.connect(commands)
        self.events.connect(events)

    def hello(self):
        wire, p = self.wire, self.p
        self.send(
            wire.Hello(
                self.rank,
                self.config.size,
                0,
                1,
                p.host.name,
                p.pid,
                "cpu",
                "e",
                "sim",
                f"/logs/rank-{self.rank}.log",
            )
        )

    def send(self, *records):
        wire = self.wire
        messages = [(r, wire.encode(r)) for r in records]
        for r, frames in messages:
            if isinstance(r, (wire.Output, wire.Reply)):
                self.kept.append(frames)
        if not self.attached:
            messages = [m for m in messages if isinstance(m[0], (wire.Answer, wire.Hello))]
        if messages:
            self.events.send_multipart(wire.join_messages([f for _, f in messages]))

    def serve(self):
        w = self.w
        while True:
            w.block(
                lambda: self.commands.queue or self.monitor.queue,
                [self.commands.source, self.monitor.source],
            )
            if self.monitor.queue:
                self.monitor.queue.clear()
                if self.home and self.commands.conn is None:
                    self.attached = False
                    for s in (self.commands, self.events, self.monitor):
                        s.close(0)
                    from allranks.records.config import COMMANDS_AT_HOME, EVENTS_AT_HOME

                    self.connect(
                        COMMANDS_AT_HOME.format(self.home), EVENTS_AT_HOME.format(self.home), 0.5
                    )
                continue
            while self.commands.queue:
                record, payloads = self.wire.decode(self.commands.queue.pop(0))
                self.take(record)

    def do(self, fn):
        self.todo.append(fn)
        self.todo_source.notify()

    def take(self, r):
        wire = self.wire
        if isinstance(r, wire.RunCell):
            self.new = False
            self.do(lambda: self.run_cell(r))
        elif isinstance(r, wire.Interrupt):
            if self.busy and self.cell == r.cell:
                self.interrupted = True
                self.todo_source.notify()
        elif isinstance(r, wire.Died):
            self.died[r.rank] = r.how
            self.todo_source.notify()
        elif isinstance(r, wire.Ask):
            if r.name in ("status", "send", "stack", "log", "stay", "seen", "attach", "resume"):
                self.answer(r)
            elif self.busy:
                self.send(
                    wire.Answer(r.request, self.rank, {}, f"rank {self.rank} is running a cell")
                )
            elif r.name == "save" and self.healing:
                self.answer(r)
            else:
                self.healing = self.healing or r.name == "heal"
                self.do(lambda: self.answer(r))

    def answer(self, r):
        try:
            content = getattr(self, f"do_{r.name}")(**r.arguments) or {}
            problem = ""
        except Exception as error:
            content, problem = {}, str(error) or type(error).__name__
            if not isinstance(error, (HealFailed, FileNotFoundError)):
                self.w.crashes.append((self.p.name, r.name, problem))
        self.send(self.wire.Answer(r.request, self.rank, content, problem))

    def do_status(self):
        return {
            "pid": self.p.pid,
            "rss_nbytes": 0,
            "state": "running" if self.busy else "idle",
            "line": "",
            "activity": "",
        }

    def do_send(self):
        pass

    def do_stay(self, home):
        self.home = home

    def do_seen(self, cell):
        if cell == self.last["cell"]:
            self.unseen = False

    def do_attach(self):
        self.hello()
        return {
            **self.last,
            "member": False,
            "busy": self.busy,
            "unseen": self.unseen,
            "epoch": self.epoch,
            "dirty": self.dirty,
            "traffic": False,
            "failed": False,
            "died": sorted(self.died),
            "healing": self.healing,
            "new": self.new,
        }

    def do_resume(self):
        for frames in self.kept:
            self.events.send_multipart(frames)
        self.attached = True

    def do_renew(self, epoch):
        self.epoch, self.dirty = epoch, False

    def do_heal(self, dead, epoch):
        self.w.trigger("heal")
        self.w.log("HEAL", self.p, dead)
        try:
            self.job.heal(self.p, self.rank)
            self.died.clear()
        finally:
            self.healing = False
        self.epoch, self.dirty = epoch, False
        return {"warning": ""}

    def do_settle(self):
        self.w.trigger("settle")
        return {"goes_on": 0, "version": 0, "new": self.new}

    def do_restore(self, version, saved=()):
        self.new = False
        return {"names": [], "seconds": 0.0}

    def do_save(self):
        self.w.trigger("save")
        system._sleep(0.01 + self.w.rng.random() * 0.2)
        self.p.host.files[f"/kept/{self.rank}"] = json.dumps(self.vars).encode()
        return {"sets": {}, "goes_on": 0, "left": {}, "new": self.new}

    def do_load(self, sets, saved):
        self.w.trigger("load")
        system._sleep(0.05 + self.w.rng.random() * 0.3)
        self.new = self.rank not in saved
        if self.rank in saved:
            self.vars.update(json.loads(self.p.host.files[f"/kept/{self.rank}"]))
        return {"problem": ""}

    def run_cell(self, r):
        w, wire = self.w, self.wire
        spec = eval(r.source)
        if not self.attached and False:
            return
        w.runs(self, r.cell)
        self.cell, self.busy, self.interrupted = r.cell, True, False
        self.kept.clear()
        self.last = {"cell": r.cell, "label": r.label, "seconds": 0.0}
        self.unseen = True
        self.running_board[self.rank] = r.number
        everyone = r.ranks or tuple(range(self.config.size))
        stop = lambda: self.interrupted
        began, status, report = w.now, "ok", None
        final = []
        count = spec["lines"]
        for i in range(count):
            if stop():
                break
            w.block(
                stop, [self.todo_source], spec["seconds"] / max(1, count) * (0.5 + w.rng.random())
            )
            line = wire.Output(
                self.rank, r.cell, (["out", f"{r.cell}.{self.rank}.{i}\n"],), 0, 0, 0
            )
            if i == count - 1:
                final.append(line)
            else:
                self.send(line)
        if spec["kind"] == "reduce" and not stop():
            there = self.job.arrivals.setdefault(r.cell, set())
            there.add(self.rank)
            self.job.source.notify()

            def ready():
                return there >= set(everyone) or stop() or any(d in everyone for d in self.died)

            w.block(ready, [self.todo_source, self.job.source])
            if not there >= set(everyone) and not stop():
                status = "waiting"
        if self.interrupted:
            status = "interrupted"
        if status != "ok":
            from allranks.errors import Report

            self.dirty = spec["kind"] == "reduce"
            kind = "KeyboardInterrupt" if status == "interrupted" else "RankLost"
            report = Report(
                rank=self.rank,
                host=self.p.host.name,
                device="cpu",
                etype=kind,
                message="m",
                traceback=("t",),
                line=1,
                source_line="",
                waiting=status == "waiting",
            )
        else:
            self.vars["x"] = spec["set"]
        self.busy = False
        self.running_board[self.rank] = 0
        self.send(
            *final,
            wire.Reply(
                self.rank, r.cell, status, w.now - began, self.dirty, False, "", report, self.epoch
            ),
        )


class HostFeature:
    def started(self, config): ...
    def rank_died(self, rank, code): ...
    def stopping(self): ...


def _controller(engine, client, secret, folder, size, told, deaths=-1):
    system._sleep(0.3)
    told()
    World.it.block(lambda: False, [], None)


def fake_fork(live, environment, log, work_dir, keep=()):
    w, p = World.it, P()
    fds = {0: File(), 1: File(), 2: File()}
    fds.update({fd: p.fds[fd] for fd in keep if fd in p.fds})
    child = w.spawn("child", p.host, live, p, fds, environment, pdeath=True)
    return child.pid


STUBS["allranks.engine.ipp"] = types.SimpleNamespace(
    connection_info=lambda interface: ({"e": 1}, {"c": 1}, "secret", []), run=_controller
)
STUBS["allranks.engine.rank"] = types.SimpleNamespace(
    Rank=Rank, log_path=lambda config, rank: f"{config.log_dir}/rank-{rank}.log"
)
STUBS["allranks.collectives.start.healing"] = types.SimpleNamespace(Spare=Spare)
STUBS["allranks.engine.features"] = types.SimpleNamespace(HostFeature=HostFeature)
STUBS["allranks.engine.libraries"] = types.SimpleNamespace(
    ignore_warnings=lambda: None,
    seed_anew=lambda: None,
    preload=lambda config, tell: None,
    visible_gpus=lambda: (),
)


STUBS["allranks.own_files"] = types.SimpleNamespace(
    make_folder=lambda path: system.os.makedirs(path, exist_ok=True),
    make_folders=lambda path: system.os.makedirs(path, exist_ok=True),
    open_folder=lambda path, others=0: P().add(File()),
    open_file=lambda path: path,
    open_any_file=lambda path: path,
    check_owner=lambda descriptor, path: None,
    check_peer=lambda connection, path: None,
    exposed_part=lambda path: "",
    remove_old_logs=lambda place: None,
    is_own_folder=lambda path, others=0: True,
)
STUBS["allranks.doors"] = types.SimpleNamespace(accept=lambda listener: listener.accept()[0])
STUBS["allranks.port_filter"] = types.SimpleNamespace(restrict_ports_of=lambda pid: None)


def load():
    """Imports the real modules, with the world's in place of the system's."""
    system.install()
    zeromq.error = types.SimpleNamespace(ZMQBaseError=zeromq.ZMQError)
    system.os.getsid = lambda pid: (_ for _ in ()).throw(ProcessLookupError())
    import allranks.cluster.cells as cells
    import allranks.cluster.cluster as cluster
    import allranks.cluster.connection as connection
    import allranks.cluster.folders as folders
    import allranks.engine.host.attachment as attachment
    import allranks.engine.host.caretaker as caretaker
    import allranks.engine.host.port_test as port_test
    import allranks.engine.host.relay as relay
    import allranks.engine.processes as processes
    from allranks.cluster.launchers.launcher import Host as LHost
    from allranks.cluster.launchers.launcher import Job as LauncherJob
    from allranks.cluster.launchers.launcher import MultiHostLauncher

    processes.adopt_orphans = lambda: setattr(P(), "subreaper", True)
    processes.fork = fake_fork
    processes.share_cores = lambda n: None
    processes.shared_memory_left = lambda: INF
    processes.shared_segments = lambda pid, began=0.0: set()
    processes.segments_since = lambda began: set()
    processes._group_of = lambda pid: None
    processes._of_the_system = lambda: float("nan")
    processes.ExitReports._memory = lambda self, group, nbytes: ""
    processes.write_to = lambda log: None
    relay._own_address = lambda url: P().host.address
    port_test.unreachable = unreachable
    real_listen = port_test.listen

    def listen(address):
        World.it.trigger("listens")
        return real_listen(address)

    port_test.listen = listen
    attachment.sign_of = lambda pid: (
        str(World.it.procs[pid].started)
        if pid in World.it.procs and World.it.procs[pid].alive
        else ""
    )
    attachment.process_of = lambda visitor: visitor.end.peer.pid
    counter = iter(range(1, 10**9))
    folders.make_log_folder = lambda: "/logs"
    name = lambda where="": f"/tmp/allranks-session-{P().pid}-{next(counter):08x}"
    folders.name_session_folder = connection.name_session_folder = name
    folders.session_folders = lambda: []

    class Files:
        def __init__(self, size): ...
        def write(self, *a): ...
        def close(self): ...

    class Kept:
        def __init__(self, paths=(), on_several_hosts=False):
            self.paths = tuple(paths) or ("/dev/shm/kept",)

        def hold(self): ...
        def stay(self, on): ...
        def let_go(self): ...
        def close(self): ...

    class Progress:
        def show(self, *a): ...
        def end(self): ...

    connection.ConnectionFiles = Files
    cluster.KeptFolders = Kept
    cluster.ProgressLine = Progress
    cells.front_end = lambda: "text"
    cells.of_this_process = lambda: None

    class SimJob(LauncherJob):
        def __init__(self, hosts, invitation, tell):
            import dataclasses

            w, me = World.it, P()
            self._hosts, self.ssh, self.stdin = hosts, {}, {}
            for host in hosts:
                inv = dataclasses.replace(invitation, host=host.name)
                r, far = pipe()

                def relay_main(inv=inv, host=host):
                    code = relay.Relay(inv, host.name, lifeline=0).run()
                    raise SystemExit(code)

                remote = w.spawn(
                    "relay",
                    w.hosts[host.name],
                    relay_main,
                    None,
                    {0: r, 1: File(), 2: File()},
                    {"PATH": ""},
                )
                near, stdin = pipe()
                self.stdin[host.name] = me.add(stdin)
                ssh = self.ssh[host.name] = w.spawn(
                    "ssh",
                    me.host,
                    lambda remote=remote, far=far, near=near: ssh_main(remote, far, near),
                    me,
                    {0: near, 1: File(), 2: File(), 3: far},
                )
                ssh.remote = remote

                def watch(ssh=ssh, host=host):
                    w.block(lambda: not ssh.alive, [ssh.ended])
                    tell(host.name, f"was lost: ssh ended with exit code {ssh.code}")

                system.FThread(target=watch, name="ssh").start()

        def give_up(self, host):
            self.ssh[host].signal(9)

        def outlives(self):
            return {"yes": True}

        def close(self):
            w = World.it
            for fd in self.stdin.values():
                P().close(fd)
            end = w.now + 2.0
            for one in self.ssh.values():
                w.block(lambda: not one.alive, [one.ended], max(0, end - w.now))
                one.signal(9)

    class Taken(LauncherJob):
        def __init__(self, hosts):
            self._hosts = hosts

        def close(self): ...

    class SimLauncher(MultiHostLauncher):
        name = "sim"
        outlives_hosts = True

        def __init__(self, hosts):
            super().__init__("where")
            self.hosts = [LHost(n, c) for n, c in hosts]

        def size(self, n):
            return sum(h.ranks for h in self.hosts)

        def address(self):
            return P().host.address

        def environment(self):
            return {}

        def why_not_replaced(self):
            return ""

        def command(self, hosts, spares=0):
            where = ",".join(f"{h.name}:{h.ranks + spares}" for h in hosts)
            return ["mpiexec", "--host", where, "-n", str(sum(h.ranks + spares for h in hosts))]

        def run(self, invitation, log_dir, tell):
            return SimJob(self.hosts, invitation, tell)

        def take_over(self, hosts, job):
            return Taken(hosts)

    def agent_main(argv):
        def agent():
            from allranks.engine.host.host_agent import main

            main(lambda side: [])

        return agent

    def caretaker_main(argv):
        def care():
            caretaker.main()

        return care

    PROGRAMS["allranks.agent"] = agent_main
    PROGRAMS["allranks.engine.host.caretaker"] = caretaker_main
    return SimLauncher


def ssh_main(remote, far, near):
    w = World.it
    here, there = P().host.name, remote.host.name
    cut_since = None
    eof = False
    P().on_death.append(lambda p: None)
    while True:
        w.block(
            lambda: not remote.alive or (near.readable() and not eof),
            [near.reads.source, remote.ended],
            0.5,
        )
        if w.cut(here, there):
            cut_since = cut_since or w.now
            if w.now - cut_since > 15:
                raise SystemExit(255)
            system._sleep(0.25)
            continue
        cut_since = None
        if not remote.alive:
            system._sleep(w.delay(here, there))
            code = remote.code
            raise SystemExit(code if code >= 0 else 255)
        if near.readable() and not eof:
            eof = True
            system._sleep(w.delay(here, there))
            P().close(3)


def unreachable(targets, seconds=2.5):
    w = World.it
    here = P().host.name
    targets = list(targets)
    problems = {}
    waits = 0.0
    for t in targets:
        there = w.host_of_address(t.address)
        cut = w.blocked.get((here, there), 0) - w.now
        still = w.still.get(there, 0) - w.now
        wait = max(cut, still, 0)
        # SYN is repeated after 1 s, then 2 s.
        answered = 0 if wait <= 0 else 1.0 if wait <= 1 else 3.0
        if answered + 2 * w.delay(here, there) > seconds:
            problems[t.host] = f"no answer within {seconds:g} s"
            waits = seconds
        else:
            waits = max(waits, answered)
    w.block(lambda: False, [], waits + 1e-6)
    return problems
