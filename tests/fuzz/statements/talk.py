"""What the notebook asks of ranks, idle and busy: push, pull, status, completion, functions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.fuzz.grammar import Act, Case, Draw, Fault, act, statement
from tests.fuzz.in_notebook import InNotebook
from tests.fuzz.in_process import InProcess
from tests.fuzz.sessions import Ended, Session

_VALUES = (
    "5",
    "{'a': [1, None, 2.5], 'é': ('漢', b'\\x00')}",
    "'x' * 2_000_000",
    "list(range(1000))",
    "float('inf')",
    "'\\ud83d'",
    "{(1, 2): {3}}",
    "2 ** 4000",
)


def _must(ended: Ended, how: str, values: object = None) -> None:
    if ended.how != how or (values is not None and ended.values != values):
        raise Fault(
            "talk",
            f"expected {how} {values!r:.300}, found {ended.how} {ended.values!r:.300}\n"
            f"{ended.text[:2000]}",
        )


@act(weight=2)
def push_and_pull(draw: Draw, session: Session) -> None:
    expression = draw.rng.choice(_VALUES)
    _must(session.push("_pushed", expression), "ok")
    _must(session.pull("_pushed"), "ok", [eval(expression)] * session.size)


@act()
def push_and_pull_what_cannot(draw: Draw, session: Session) -> None:
    which = draw.rng.choice(("lock", "missing", "pull a lock", "exits when pickled"))
    if which == "lock":
        _must(session.push("_pushed", "__import__('threading').Lock()"), "UsageError")
    elif which == "missing":
        _must(session.pull("_nowhere"), "UsageError")
    elif which == "pull a lock":
        session.cell("import threading; _lock = threading.Lock()")
        _must(session.pull("_lock"), "UsageError")
    else:
        session.cell("class _Exits:\n    def __reduce__(self): raise OSError(4)\n_exits = _Exits()")
        _must(session.pull("_exits"), "UsageError")


@act()
def a_pushed_value_that_exits(draw: Draw, session: Session) -> None:
    name = draw.rng.choice(("SystemExit", "KeyboardInterrupt"))
    source = f"type('Exits', (), {{'__reduce__': lambda s: (exec, ('raise {name}',))}})()"
    _must(session.push("_pushed", source), "UsageError")


@act()
def status(draw: Draw, session: Session) -> None:
    _must(session.status(), "ok", [(session.pids[r], "idle") for r in range(session.size)])


@act()
def an_interrupt_while_idle(draw: Draw, session: Session) -> None:
    if isinstance(session, InNotebook):
        session.notebook.interrupt()
        session.notebook.drain(0.1)
    elif isinstance(session, InProcess) and session.cluster.interrupt():
        raise Fault("talk", "expected no cell to interrupt, found one")


def _busy(meanwhile: Callable[[InProcess], None]) -> Callable[[Session], None]:
    """Submits a cell, does something while it runs, lets it end, and waits for it."""

    def do(session: Session) -> None:
        assert isinstance(session, InProcess)

        began, go_on = (session.folder / name for name in ("began", "go on"))

        def both() -> list[object]:
            run = session.cluster.submit(
                f"open(f'{began}-{{rank}}', 'w').close()\n"
                f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)\nbarrier()"
            )
            while len(list(session.folder.glob("began-*"))) < session.size:
                time.sleep(0.01)
            meanwhile(session)
            go_on.touch()
            session.cluster.wait(run)
            return []

        _must(session.do(both), "ok")
        for left in [go_on, *session.folder.glob("began-*")]:
            left.unlink()

    return do


@statement(weight=2, only="cluster")
def asked_while_busy(draw: Draw) -> Act:
    which = draw.rng.choice(("push", "pull", "run", "status", "crew"))

    def meanwhile(session: InProcess) -> None:
        cluster = session.cluster
        if which == "status":
            states = [each.state for each in cluster.status()]
            if states != ["running"] * session.size:
                raise Fault("talk", f"expected ranks that run, found {states}")
            return
        calls: dict[str, Callable[[], object]] = {
            "push": lambda: cluster.push({"_x": 1}),
            "pull": lambda: cluster.pull("kept"),
            "run": lambda: cluster.run("1"),
            "crew": lambda: cluster.crew(1).__enter__(),
        }
        _must(session.do(calls[which]), "UsageError")

    return Act(_busy(meanwhile))


@act(only="cluster")
def a_cell_that_nobody_waits_for(draw: Draw, session: InProcess) -> None:
    session.cluster.submit(draw.rng.choice(("pass", "time.sleep(0.2)", "1 / 0")))
    deadline = time.monotonic() + 10
    while session.do(lambda: session.cluster.run("1")).how == "UsageError":
        if time.monotonic() > deadline:
            raise Fault("talk", "expected the cell to end, found the ranks busy")
        time.sleep(0.05)


@act(weight=2, only="cluster")
def a_function(draw: Draw, session: InProcess) -> None:
    n = draw.rng.randint(0, 99)
    which = draw.rng.choice(("value", "raises", "lambda", "exits", "not picklable"))

    def value(x: int) -> int:
        from allranks.collectives import rank

        return rank() * x

    def raises(x: int) -> int:
        return x // 0

    def exits(x: int) -> int:
        raise SystemExit(1 + x)

    cluster, ranks = session.cluster, range(session.size)
    if which == "value":
        _must(session.do(lambda: cluster.run(value, n)), "ok", [r * n for r in ranks])
    elif which == "lambda":
        _must(session.do(lambda: cluster.run(lambda: [n] * 3)), "ok", [[n] * 3 for _ in ranks])
    elif which == "not picklable":
        _must(session.do(lambda: cluster.run(value, threading.Lock())), "UsageError")
    else:
        _must(
            session.do(lambda: cluster.run(raises if which == "raises" else exits, n)),
            "CellFailed",
        )


@statement(only="cluster")
def a_value_that_cannot_be_sent(draw: Draw) -> Case:
    last = draw.rng.choice(("(i for i in ())", "__import__('threading').Lock()", "sys._getframe()"))
    return Case("", ("UsageError",), ("expected a last expression that can be pickled",), last=last)


@act(only="notebook")
def completion(draw: Draw, session: InNotebook) -> None:
    found = session.notebook.complete("%%distributed\nkep")
    if "kept" not in found:
        raise Fault("talk", f"expected kept among the completions, found {found}")
    if "steps" not in session.notebook.inspect("%%distributed\nkept"):
        raise Fault("talk", "expected kept's value in its tooltip")


_ENSEMBLE = (
    "import numpy as np\n{more}\nlog(step=0, loss=x)\nresult = {{'x': x, 'w': np.full(9, x)}}"
)


@act(only="notebook")
def an_ensemble(draw: Draw, session: InNotebook) -> None:
    many = draw.rng.randint(1, 12)
    bad = draw.rng.randrange(many)
    more = draw.rng.choice(
        (
            "",
            f"if x == {bad}: raise ValueError(x)",
            "allreduce(np.ones(2))",
            f"if x == {bad}: sys.exit(1)\nimport time; time.sleep(0.01)",
        )
    )
    failed = {bad} if f"x == {bad}" in more else set()
    cell = f"%%ensemble x=0:{many}\nimport sys\n{_ENSEMBLE.format(more=more)}"
    notebook = session.notebook
    ended = notebook.run(cell, 60)
    asked = "sorted(m.result['x'] for m in runs.finished), len(runs.failed)"
    shown = notebook.run(asked)
    found = shown.displays[0]["text/plain"] if shown.displays else shown.text
    notebook.run("del runs")  # which gives the memory of its results back
    expected = f"({[x for x in range(many) if x not in failed]}, {len(failed)})"
    if "".join(found.split()) != expected.replace(" ", ""):
        raise Fault("ensemble", f"expected {expected}, found {found}\n{ended.text}")


@act(only="notebook")
def an_interrupted_ensemble(draw: Draw, session: InNotebook) -> None:
    moment = draw.rng.uniform(0.05, 0.5)
    notebook = session.notebook
    cell = notebook.start(
        f"%%ensemble x=0:400\n{_ENSEMBLE.format(more='import time; time.sleep(0.02)')}"
    )
    notebook.drain(moment)
    notebook.interrupt()
    cell.wait(60)
    if cell.error_name not in ("CellInterrupted", "KeyboardInterrupt"):
        raise Fault("ensemble", f"expected CellInterrupted, found {cell.text}")
    if cell.error_name == "CellInterrupted":
        found = notebook.value("all(m.result['x'] == m.number for m in runs.finished)")
        notebook.run("del runs")
        if found != "True":
            raise Fault("ensemble", f"expected right results, found {found}")
