"""Kernel killed and another one attaches; starts under faults; two notebooks."""

import os
import random
import sys

from tests.simulated import chaos, system
from tests.simulated.chaos import *


class First(chaos.Notebook):
    """Lets its ranks stay, runs cells, and is killed at any moment."""

    def main(self):
        w = self.w
        w.notebook_obj = self
        self.cluster = cluster = new_cluster(w)
        self.doing = "start", w.now
        cluster.start()
        self.outcome.append("started")
        cluster.stay(600.0, {})
        w.folder = cluster.session_dir
        w.stayed = True
        number = 0
        while True:
            number += 1
            for at, kind, *dt in self.plan:
                if at == number:
                    w.after(dt[0] if dt else w.rng.random() * 2.0, w.fault, kind)
            if not self.cell(number):
                break
        self.done = True
        w.block(lambda: False, [], None)


class Second(chaos.Notebook):
    def main(self):
        w = self.w
        self.expected = dict(w.first.expected)
        self.cluster = cluster = new_cluster(w)
        self.doing = "attach", w.now
        end = w.now + 240
        last = None
        while True:
            try:
                from allranks.cluster import sessions

                info = sessions.visit(w.folder)
                if info is None:
                    last = "no cluster there"
                    if not w.find("caretaker") and not w.find("care"):
                        break
                elif not info.holder:
                    taken = sessions.AttachedHostAgent(info)
                    try:
                        left = cluster.attach(taken)
                    except BaseException:
                        taken.let_go()
                        raise
                    break
            except UsageError as error:
                last = str(error)
                if "did not answer" in last:
                    self.outcome.append(f"{w.now - 1000:.1f}: {last[:110]}")
                    cluster = self.cluster = new_cluster(w)
                    system._sleep(5)
            if w.now > end:
                break
            system._sleep(0.3)
        if cluster.state != "running":
            self.outcome.append(f"not attached: {last}")
            self.doing = "stop", w.now
            self.done = True
            w.attach_failed = last
            w.block(lambda: False, [], None)
        self.outcome.append(f"attached {w.now - self.doing[1]:.2f} s; {left}")
        if left.unseen:
            view = View()
            self.views.append(view)
            self.doing = "follow", w.now
            run = cluster.follow(left, view)
            try:
                cluster.wait(run)
                self.outcome.append("followed ok")
            except AllranksError as error:
                self.outcome.append(f"followed {type(error).__name__}: {str(error)[:300]}")
            for rank in range(w.size):
                own = [l for l in view.lines.get(rank, []) if l.startswith(f"{left.cell}.{rank}.")]
                want = [f"{left.cell}.{rank}.{i}" for i in range(len(own))]
                if own != want:
                    w.wrong.append(
                        f"followed cell: rank {rank} shows {own[:6]}, expected {want[:6]}"
                    )
        for rank in range(w.size):
            m = w.rank(rank)
            self.expected[rank] = m.vars.get("x") if m else None
        w.run_after_attach = True
        if cluster.state == "running":
            for number in range(100, 100 + self.cells):
                for at, kind, *dt in self.plan:
                    if at == number:
                        w.after(w.rng.random(), w.fault, kind)
                if not self.cell(number):
                    break
        said = " ".join(
            [n for v in self.views for n in v.notices]
            + self.outcome
            + cluster.news
            + getattr(self, "more", [])
        )
        for rank in range(w.size):
            models = w.ranks_by_number.get(rank, [])
            if len(models) > len(w.first_models[rank]) or (
                len(models) > 1 and rank not in w.told_before
            ):
                if not any(
                    t in said for t in ("no variables", "without variables", "lost", "was killed")
                ):
                    w.wrong.append(
                        f"rank {rank} is another process, and nobody was told that its variables are lost"
                    )
        self.doing = "stop", w.now
        cluster.stop()
        self.outcome.append("stopped")
        self.done = True
        w.block(lambda: False, [], None)


def attach(seed, plan=None, event=None, tracing=False, dt=None, cells=3):
    rng = random.Random(f"attach{seed}")
    event_ = event
    w = AWorld(seed)
    w.tracing = tracing
    plan0 = plan
    plan = (
        plan
        if plan is not None
        else [(1, rng.choice(["kill_rank", "nothing", "kill_rank", "cut_short", "stall_relay"]))]
    )
    event = event if event is not None else rng.choice(["heal", "settle", "any"])
    if event != "any":
        plan = [(1, "kill_rank")]
    first = w.first = First(w, 0, plan)
    spawn = lambda name, main: w.spawn(
        name, w.hosts["nb"], main, None, {0: system.File(), 1: system.File(), 2: system.File()}, {}
    )
    w.notebook = spawn("notebook", first.main)
    w.stayed = False
    w.triggers = []

    def kill():
        w.faults.append(
            (
                round(w.now - 1000, 3),
                f"kernel killed ({event}) while {w.notebook_obj.cluster.count}",
            )
        )
        w.log("FAULT kernel killed")
        w.notebook.signal(9)
        if getattr(w, "extra", None):
            w.after(w.extra[1], w.fault, w.extra[0])
            w.extra = None

    w.kill_kernel = kill
    w.run(lambda: w.stayed or first.done, 200)
    if event == "any":
        w.after(dt if dt is not None else rng.random() * 4, kill)
    else:
        orig = w.trigger
        fired = []

        def trigger(e):
            orig(e)
            if e == event and not fired:
                fired.append(1)
                w.after(dt if dt is not None else rng.random() * 0.5, kill)

        w.trigger = trigger
        nbA = w.notebook
        w.after(20, lambda: nbA.alive and kill())
    w.run(lambda: not w.notebook.alive or first.done, 300)
    w.run(lambda: False, rng.choice([0.05, 0.5, 3.0]))
    second = Second(w, cells, [])
    w.first_models = {r: list(w.ranks_by_number.get(r, [])) for r in range(w.size)}
    told = " ".join(
        n for v in first.views for n in v.notices if "replaced" in n or "started again" in n
    )
    w.told_before = {
        r
        for r in range(w.size)
        if f"rank {r} was replaced" in told or "were replaced" in told or "started again" in told
    }
    second.outcome += first.outcome
    w.notebook = spawn("notebook", second.main)
    w.notebook_obj = second
    why = w.run(lambda: second.done or not w.notebook.alive, 1500)
    if why:
        w.wrong.append(f"{why} in {second.doing[0]} since {w.now - second.doing[1]:.0f} s")
    else:
        w.run(lambda: not left(w), 60)
        if rest := left(w):
            w.wrong.append(f"60 s after the end still there: {rest[:8]}")
    if getattr(w, "attach_failed", None):
        w.wrong.append(f"not attached: {w.attach_failed[:200]}")
    for name, thread, text in w.crashes:
        if thread != "wire":
            w.wrong.append(f"exception in {name}/{thread}: {text.strip().splitlines()[-1]}")
    w.over = True
    return w, second


def start(seed, tracing=False, plan=None):
    """Faults while ranks start."""
    rng = random.Random(f"start{seed}")
    kinds = [
        "stall_host",
        "stall_relay",
        "stall_agent",
        "stall_nb",
        "cut_short",
        "cut_middle",
        "reset",
    ]
    plan = plan or [(0, rng.choice(kinds), rng.random() * 0.4) for _ in range(rng.randint(1, 2))]
    w, nb = chaos.run(seed, plan, cells=1, tracing=tracing)
    if nb.outcome[0] != "started":
        w.wrong.append("START " + nb.outcome[0][:300])
    return w, nb


def flood(seed, tracing=False):
    return chaos.run(seed, [(2, "flood")], cells=4, tracing=tracing)


def firewall(seed, tracing=False):
    """A slow start, and a host that stands still for some seconds while the network is tested."""
    rng = random.Random(f"fw{seed}")
    plan = [
        (0, "slow_agent", 0.107 + rng.random() * 0.01),
        ("listens", "stall_host", rng.random() * 0.008),
    ]
    return start(seed, tracing, plan)


def host_while_healing(seed, tracing=False):
    rng = random.Random(f"hwh{seed}")
    return lossless(
        chaos.run(
            seed,
            [(1, "kill_rank"), ("heal", rng.choice(["kill_host", "kill_agent", "kill_relay"]))],
            cells=3,
            tracing=tracing,
        )
    )


def two_hosts(seed, tracing=False):
    rng = random.Random(f"th{seed}")
    return lossless(
        chaos.run(
            seed,
            [(1, "kill_agent"), (rng.choice(["save", "load"]), "kill_agent")],
            hosts=4,
            cells=3,
            tracing=tracing,
        )
    )


def two_deaths(seed, tracing=False):
    rng = random.Random(f"td{seed}")
    t = rng.random() * 2
    return lossless(
        chaos.run(
            seed,
            [(1, "kill_rank", t), (1, "kill_rank", t + rng.random() * 0.5)],
            cells=3,
            tracing=tracing,
        )
    )


def interrupted_load(seed, tracing=False):
    return chaos.run(
        seed, [(1, "kill_agent"), ("load", "interrupt", 0.01)], cells=3, tracing=tracing
    )


def lossless(found):
    w, nb = found
    if nb.lost:
        w.wrong.append(
            "all variables lost though hosts are left: "
            + next(x for x in reversed(nb.outcome) if x.startswith("cell"))[:60]
        )
    return w, nb


def mixed(seed, tracing=False):
    rng = random.Random(f"mx{seed}")
    kinds = [
        "kill_rank",
        "kill_rank",
        "stall_rank",
        "kill_spare",
        "cut_short",
        "reset",
        "reset",
        "stall_relay",
        "stall_agent",
        "stall_nb",
        "kill_host",
        "kill_agent",
    ]
    return chaos.run(
        seed, [(rng.randint(1, 4), rng.choice(kinds)) for _ in range(3)], cells=4, tracing=tracing
    )


def attach_faults(seed, tracing=False):
    """As attach, with a fault after the kernel's death, before or while another one attaches."""
    rng = random.Random(f"af{seed}")
    old = chaos.AWorld.__init__
    kind = rng.choice(
        [
            "kill_rank",
            "kill_agent",
            "kill_host",
            "cut_short",
            "cut_middle",
            "reset",
            "stall_relay",
            "kill_spare",
            "nothing",
        ]
    )
    at = rng.random() * 2.5

    def init(self, *a, **k):
        old(self, *a, **k)
        self.extra = (kind, at)

    chaos.AWorld.__init__ = init
    sig = chaos.AWorld.log
    try:
        real_kill = None
        return attach(seed, tracing=tracing)
    finally:
        chaos.AWorld.__init__ = old


def main():
    name, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1
    for seed in range(first, first + count):
        sys.stdout.flush()
        if os.fork() == 0:
            w, nb = globals()[name](seed, tracing=count == 1)
            print(seed, "WRONG" if w.wrong else "ok", w.wrong[:3], w.faults)
            if count == 1:
                print("\n".join(nb.outcome))
                print("\n".join(w.trace))
            sys.stdout.flush()
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
