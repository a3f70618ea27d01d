"""One world of allranks on simulated hosts, its faults, and what must always be true."""

from __future__ import annotations

import signal as real_signal

from tests.simulated import models, system, zeromq
from tests.simulated.kernel import Host, Thread, World

SimLauncher = models.load()
from allranks.cluster import cluster as cluster_module  # noqa: E402
from allranks.errors import AllranksError  # noqa: E402


class AWorld(World):
    def __init__(self, seed, hosts=3, ranks=2, preempt=0.0, lease=None):
        super().__init__(seed, preempt)
        self.size = hosts * ranks
        import random

        self.work, self.chance = random.Random(f"work{seed}"), random.Random(f"chance{seed}")
        self.jobs, self.socks_to_break, self.still = [], [], {}
        self.places = [(f"h{i + 1}", ranks) for i in range(hosts)]
        for i, name in enumerate(["nb", *[n for n, _ in self.places]]):
            self.hosts[name] = Host(name, f"10.0.0.{i + 1}")
        self.ran = {}
        self.ranks_by_number = {}
        self.wrong = []
        self.faults = []
        self.lease = lease

    def host_of_address(self, address):
        return next(h.name for h in self.hosts.values() if h.address == address)

    def host_of_url(self, url):
        return self.host_of_address(url.removeprefix("tcp://").rpartition(":")[0])

    def all_sockets(self):
        return [s for p in self.procs.values() if p.alive for c in p.contexts for s in c.sockets]

    triggers = ()

    def trigger(self, event):
        for each in [t for t in self.triggers if t[0] == event]:
            self.triggers.remove(each)
            self.after(each[2] if len(each) > 2 else self.rng.random() * 0.6, self.fault, each[1])

    # told by the models of ranks
    def reached(self, where, process):
        """Called where a new rank is about to join, and where all wait for it to agree."""

    def serving(self, model):
        self.ranks_by_number.setdefault(model.rank, []).append(model)

    def runs(self, model, cell):
        """No two processes run the same cell as the same rank."""
        key = model.rank, cell, id(self.notebook)
        before = self.ran.setdefault(key, model.p.pid)
        if before != model.p.pid:
            self.wrong.append(
                f"two processes hold rank {model.rank} in cell {cell}: {before}, {model.p.pid}"
            )

    def rank(self, number):
        found = [m for m in self.ranks_by_number.get(number, ()) if m.p.alive]
        return found[-1] if found else None

    def find(self, name, host=None):
        return [
            p
            for p in self.procs.values()
            if p.alive and p.name == name and (host is None or p.host.name == host)
        ]

    # faults
    def fault(self, kind):
        rng = self.chance
        hosts = [n for n, _ in self.places]
        host = rng.choice(hosts)
        said = kind
        if kind == "kill_rank":
            m = self.rank(rng.randrange(self.size))
            if m:
                said = f"kill rank {m.rank} on {m.p.host.name}"
                m.p.signal(real_signal.SIGKILL)
        elif kind == "stall_rank":
            m = self.rank(rng.randrange(self.size))
            if m:
                s = rng.choice([0.5, 2, 5])
                said = f"stall rank {m.rank} for {s} s"
                m.p.freeze(s)
        elif kind == "kill_spare":
            found = self.find("spare")
            if found:
                p = rng.choice(found)
                said = f"kill a spare on {p.host.name}"
                p.signal(real_signal.SIGKILL)
        elif kind in ("cut_short", "cut_long"):
            s = rng.choice([0.3, 1, 2.5, 3.9]) if kind == "cut_short" else rng.choice([45, 70])
            said = f"cut {host} from nb for {s} s"
            self.partition(host, "nb", s)
            if kind == "cut_long":
                for other in hosts:
                    if other != host:
                        self.partition(host, other, s)
        elif kind == "cut_middle":
            s = rng.choice([5, 8, 12])
            said = f"cut {host} from nb for {s} s"
            self.partition(host, "nb", s)
        elif kind == "reset":
            said = f"reset the connections of {host}"
            for sock in self.all_sockets():
                if (
                    sock.conn is not None
                    and sock.conn.up
                    and sock.proc.host.name == host
                    and "tcp" in sock.url
                ):
                    sock.conn.flight = [[], []]
                    sock.conn.break_client()
        elif kind == "stall_relay":
            s = rng.choice([0.5, 2.5, 6])
            said = f"stall the relay of {host} for {s} s"
            for p in self.find("relay", host):
                p.freeze(s)
        elif kind == "stall_agent":
            s = rng.choice([0.5, 2.5, 6])
            said = f"stall the agent of {host} for {s} s"
            for p in self.find("agent", host):
                p.freeze(s)
        elif kind == "stall_host":
            s = rng.choice([1, 2.5, 3.5, 6])
            said = f"host {host} stands still for {s} s"
            self.still[host] = self.now + s
            for p in list(self.procs.values()):
                if p.alive and p.host.name == host:
                    p.freeze(s)
            for other in self.hosts:
                if other != host:
                    self.partition(host, other, s)
        elif kind == "stall_nb":
            s = rng.choice([0.5, 2.5, 6, 12])
            said = f"the notebook stands still for {s} s"
            self.notebook.freeze(s)
            zeromq.on_frozen_server(self, self.notebook, s)
        elif kind == "kill_agent":
            said = f"kill the agent of {host}"
            for p in self.find("agent", host):
                p.signal(real_signal.SIGKILL)
        elif kind == "kill_relay":
            said = f"kill the relay of {host}"
            for p in self.find("relay", host):
                p.signal(real_signal.SIGKILL)
        elif kind == "kill_host":
            said = f"host {host} loses power"
            for other in self.hosts:
                if other != host:
                    self.partition(host, other, 1e6)
            for p in list(self.procs.values()):
                if p.alive and p.host.name == host:
                    p.die(-9)
        elif kind == "interrupt":
            said = "interrupt"
            self.notebook.signal(real_signal.SIGINT)
        elif kind == "slow_agent":
            said = f"the agent of {host} is slow for 12 s"
            for p in self.find("agent", host):
                p.freeze(12)
        elif kind == "flood":
            # Open MPI writes much because a rank has died, while the relay is not scheduled.
            h = self.places[0][0]
            said = "flood by mpiexec, the relay of its host stands still for 2 s, a rank there dies"
            for p in self.find("relay", h):
                p.freeze(2)
            for m in self.find("mpiexec", h):
                Thread(m, lambda m=m: m.fds[1].write(b"x" * 150_000, m), "flood")
            there = [r for r in range(self.size) if self.rank(r) and self.rank(r).p.host.name == h]
            r = rng.choice(there)
            self.after(0.3, self.rank(r).p.signal, 9)
        elif kind == "nothing":
            pass
        self.faults.append((round(self.now - 1000, 3), said))
        self.log("FAULT", said)


class View:
    """Keeps what a cell has shown."""

    def __init__(self):
        self.lines, self.notices, self.lefts = {}, [], []

    def output(self, batch):
        for kind, *rest in batch.entries:
            if kind == "out":
                self.lines.setdefault(batch.rank, []).extend(rest[0].splitlines())

    def telemetry(self, record, payloads): ...
    def left(self, rank, status):
        self.lefts.append((rank, status))

    def notice(self, text):
        self.notices.append(text)

    def make_way(self): ...
    def refresh(self): ...
    def finish(self): ...


def new_cluster(w):
    cluster_module.launchers.named = lambda text: SimLauncher(w.places)
    return cluster_module.Cluster(launcher="sim", show_output=False)


LIMITS = {"start": 140.0, "cell": 260.0, "stop": 15.0}
END_SECONDS = 60.0


class Notebook:
    """The user: starts ranks, runs cells, checks what comes back."""

    def __init__(self, w, cells=6, plan=()):
        self.w, self.cells, self.plan = w, cells, plan
        self.outcome = []
        self.done = False
        self.expected = dict.fromkeys(range(w.size))
        self.doing = ("nothing", w.now)
        self.lost = 0
        self.views = []

    def main(self):
        w = self.w
        w.notebook_obj = self
        self.cluster = cluster = new_cluster(w)
        number = 0
        try:
            self.doing = "start", w.now
            cluster.start()
            self.outcome.append("started")
        except AllranksError as error:
            self.outcome.append(f"{type(error).__name__}: {error}")
        if cluster.state == "running":
            for number in range(1, self.cells + 1):
                for at, kind, *dt in self.plan:
                    if at == number:
                        w.after(dt[0] if dt else w.rng.random() * 2.0, w.fault, kind)
                if not self.cell(number):
                    break
        self.doing = "stop", w.now
        cluster.stop()
        self.outcome.append("stopped")
        self.stopped_at = w.now
        self.done = True
        w.block(lambda: False, [], None)

    def cell(self, number):
        w, cluster = self.w, self.cluster
        view = View()
        self.views.append(view)
        kind = w.work.choice(["work", "reduce"])
        spec = {
            "kind": kind,
            "seconds": w.work.choice([0.01, 0.3, 1.5]),
            "lines": w.work.choice([1, 5, 30]),
            "set": number,
        }
        self.doing = "cell", w.now
        error = None
        try:
            cluster.run(repr(spec), view=view)
        except KeyboardInterrupt:
            error = KeyboardInterrupt()
        except AllranksError as e:
            error = e
        took = w.now - self.doing[1]
        run_cell = cluster.count
        self.outcome.append(
            f"cell {number} ({kind}) {type(error).__name__ if error else 'ok'} {took:.2f} s"
            + (f": {str(error)[:300]}" if error else "")
        )
        if took > LIMITS["cell"]:
            w.wrong.append(f"cell {number} took {took:.0f} s")
        # no line twice, none out of order, none lost
        for rank in range(w.size):
            lines = view.lines.get(rank, [])
            own = [l for l in lines if l.startswith(f"{run_cell}.{rank}.")]
            want = [f"{run_cell}.{rank}.{i}" for i in range(len(own))]
            if own != want:
                w.wrong.append(f"cell {number}: rank {rank} shows {own[:8]}, expected {want[:8]}")
            if error is None and len(own) != spec["lines"]:
                w.wrong.append(
                    f"cell {number}: rank {rank} shows {len(own)} of {spec['lines']} lines"
                )
        if error is None:
            for rank in self.expected:
                self.expected[rank] = number
        else:
            # a rank that ran to its end has set x
            for rank, status in view.lefts:
                if status == "ok":
                    self.expected[rank] = number
        said = " ".join([*view.notices, str(error or ""), *cluster.news])
        if cluster.state != "running":
            self.lost += 1
            return False
        # A rank that is alive keeps its variables, or it is said that they are lost.
        self.check_variables(said)
        return True

    def check_variables(self, said):
        w, cluster = self.w, self.cluster
        for rank in range(w.size):
            if rank in cluster._ranks.roster.dead:
                self.expected[rank] = None
                continue
            m = w.rank(rank)
            if m is None:
                continue
            have = m.vars.get("x")
            want = self.expected[rank]
            if have != want:
                if have is None and (
                    "no variables" in said or "lost" in said or "without variables" in said
                ):
                    self.expected[rank] = None
                elif have is None:
                    w.wrong.append(
                        f"rank {rank} has no x, expected {want}, and nothing was said: {said[:300]!r}"
                    )
                    self.expected[rank] = None
                else:
                    self.expected[rank] = have


def run(seed, plan, hosts=3, ranks=2, cells=6, preempt=0.0, tracing=False, after=None):
    w = AWorld(seed, hosts, ranks, preempt)
    w.tracing = tracing
    nb = Notebook(w, cells, plan)
    w.notebook = w.spawn(
        "notebook",
        w.hosts["nb"],
        nb.main,
        None,
        {0: system.File(), 1: system.File(), 2: system.File()},
        {},
    )
    if after:
        after(w)
    w.triggers = [t for t in plan if isinstance(t[0], str)]
    for at, kind, *dt in plan:
        if at == 0:
            w.after(dt[0] if dt else w.rng.random() * 2.5, w.fault, kind)
    why = w.run(lambda: nb.done or not w.notebook.alive, 3000.0)
    if why:
        w.wrong.append(f"{why} in {nb.doing[0]} since {w.now - nb.doing[1]:.0f} s")
    else:
        w.run(lambda: not left(w), END_SECONDS)
        if rest := left(w):
            w.wrong.append(f"{END_SECONDS:g} s after the stop still there: {rest[:6]}")
    for name, thread, text in w.crashes:
        if thread != "wire":
            w.wrong.append(f"exception in {name}/{thread}: {text.strip().splitlines()[-1]}")
    w.over = True
    return w, nb


def left(w):
    return [p for p in w.procs.values() if p.alive and p.name not in ("notebook", "ssh")]
