"""What a cell may do to its own Python: replaced functions, descriptors, forks, threads."""

from __future__ import annotations

from tests.fuzz.grammar import Case, Draw, statement, statements

_BY = {
    "nothing": "lambda *a, **k: None",
    "an error": "lambda *a, **k: 1 / 0",
    "another signature": "lambda: 'x'",
}
_TIME = ("time", "monotonic", "perf_counter", "sleep", "monotonic_ns", "time_ns", "strftime")


@statement(weight=2)
def a_function_of_time_is_replaced(draw: Draw) -> Case:
    name, by = draw.rng.choice(_TIME), draw.rng.choice(sorted(_BY.values()))
    by = draw.rng.choice((by, "lambda *a, **k: 0.0", "lambda *a, **k: -1e9"))
    return Case(
        f"_was = time.{name}\ntime.{name} = {by}",
        ("ok", "CellFailed"),
        undo=f"time.{name} = _was",
        after_end=True,
    )


_BUILTINS = (
    *("print", "len", "open", "isinstance", "repr", "str", "dict", "list", "range", "max", "sum"),
    *("getattr", "hasattr", "Exception", "type", "id", "sorted", "print", "iter", "super", "set"),
)


@statement(weight=2)
def a_builtin_is_replaced(draw: Draw) -> Case:
    name, by = draw.rng.choice(_BUILTINS), draw.rng.choice(sorted(_BY.values()))
    # In the cell's own names, as most people do it by accident, or for all modules.
    where = draw.rng.choice(("globals", "globals", "builtins"))
    if where == "globals":
        return Case(
            f"{name} = {by}", ("ok", "CellFailed"), speaks=False, undo=f"del {name}", after_end=True
        )
    return Case(
        f"import builtins as _b\n_was = _b.{name}\ntry: _b.{name} = {by}\nfinally: _b.{name} = _was"
    )


_MODULES = {
    "json": ("loads", "JSONEncoder", "JSONDecoder"),
    "pickle": ("loads", "dumps", "Pickler", "Unpickler"),
    "os": ("getpid", "fspath", "path", "environ", "read", "write", "fstat", "pread"),
    "threading": ("Thread", "Lock", "current_thread", "main_thread"),
    "socket": ("socket", "gethostname"),
    "signal": ("signal", "pthread_kill"),
    "traceback": ("format_exception", "extract_stack", "walk_tb"),
    "linecache": ("getline", "checkcache"),
    "asyncio": ("sleep", "get_running_loop", "ensure_future"),
    "numpy": ("empty", "zeros", "asarray", "frombuffer", "ndarray"),
    "gc": ("collect", "freeze"),
    "codecs": ("getincrementaldecoder",),
    "select": ("poll", "select"),
    "weakref": ("ref", "WeakSet"),
    "functools": ("partial", "wraps"),
    "dataclasses": ("fields", "asdict"),
    "cloudpickle": ("dumps", "loads"),
}


@statement(weight=3)
def a_function_of_a_module_is_replaced(draw: Draw) -> Case:
    module = draw.rng.choice(sorted(_MODULES))
    name, by = draw.rng.choice(_MODULES[module]), draw.rng.choice(sorted(_BY.values()))
    return Case(
        f"import {module} as _m\n_was = _m.{name}\ntry: _m.{name} = {by}\nfinally: _m.{name} = _was"
    )


@statement(weight=2)
def a_function_of_json_is_replaced(draw: Draw) -> Case:
    by = draw.rng.choice(sorted(_BY.values()))
    name = draw.rng.choice(("loads", "load", "dump"))
    return Case(
        f"import json as _j\n_was = _j.{name}\n_j.{name} = {by}",
        undo=f"_j.{name} = _was",
        mixes=False,
    )


@statement()
def names_are_given_away(draw: Draw) -> Case:
    names = draw.rng.choice(
        (
            "allreduce = barrier = broadcast = None",
            "comm = 5",
            "Sum = 'sum'",
            "np = None",
            "os = time = None",
            "display = get_ipython = None",
        )
    )
    back = (
        "import os, sys, time\nimport numpy as np\nimport allranks.collectives as _c\n"
        "from IPython.display import display\nfrom IPython import get_ipython\n"
        "allreduce, barrier, broadcast, Sum = _c.allreduce, _c.barrier, _c.broadcast, _c.Sum\n"
        "comm = _c.comm"
    )
    return Case(names, undo=back)


@statement()
def all_names_are_forgotten(draw: Draw) -> Case:
    how = draw.rng.choice(("%reset -f", "globals().clear()"))
    return Case(how, ("ok", "CellFailed"), begins=False, forgets=True)


@statement()
def modules_are_forgotten(draw: Draw) -> Case:
    name = draw.rng.choice(("json", "numpy", "allranks", "allranks.collectives", "time", "pickle"))
    return Case(
        f"_was = sys.modules.pop('{name}')\nsys.modules['{name}'] = _was"
        if draw.rng.random() < 0.5
        else f"_was = sys.modules.pop('{name}')",
        undo=f"import sys; sys.modules['{name}'] = _was",
        mixes=False,
    )


@statement()
def the_environment_is_emptied(draw: Draw) -> Case:
    act, undo = draw.rng.choice(
        (
            ("_was = dict(os.environ); os.environ.clear()", "os.environ.update(_was)"),
            ("_was = sys.path[:]; sys.path.clear()", "sys.path[:] = _was"),
            ("_was = os.getcwd(); os.chdir('/')", "os.chdir(_was)"),
            (
                "_was = sys.getrecursionlimit(); sys.setrecursionlimit(9999)",
                "sys.setrecursionlimit(_was)",
            ),
            ("import gc; gc.disable()", "import gc; gc.enable()"),
            ("sys.setswitchinterval(0.5)", "sys.setswitchinterval(0.005)"),
            ("import locale; locale.setlocale(locale.LC_ALL, 'C')", ""),
            ("import random; random.seed(1); np.random.seed(1)", ""),
            ("os.umask(0o777)", "os.umask(0o022)"),
            ("sys.argv = None; sys.excepthook = None", "sys.argv = ['']"),
            ("sys.displayhook = print", "sys.displayhook = sys.__displayhook__"),
            ("__name__ = 'x'; __builtins__ = __builtins__", "__name__ = '__main__'"),
        )
    )
    return Case(act, undo=undo)


@statement()
def a_trace_is_set(draw: Draw) -> Case:
    which = draw.rng.choice(("settrace", "setprofile"))
    return Case(f"sys.{which}(lambda *a: None)", undo=f"sys.{which}(None)")


@statement()
def signals_are_handled_otherwise(draw: Draw) -> Case:
    act = draw.rng.choice(
        (
            "for _n in (1, 2, 10, 14, 15): signal.signal(_n, signal.SIG_IGN)",
            "signal.signal(signal.SIGINT, lambda *a: print('mine'))",
            "signal.signal(signal.SIGALRM, lambda *a: print('ring')); signal.setitimer(0, 0.05, 0.05)\n"
            "time.sleep(0.2); signal.setitimer(0, 0)",
            "signal.set_wakeup_fd(-1)",
            "signal.pthread_sigmask(signal.SIG_BLOCK, [])",
            "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        )
    )
    return Case(
        f"import signal\n{act}",
        undo="import signal\nfor _n in (1, 10, 14, 15, 17): signal.signal(_n, signal.SIG_DFL)",
    )


@statement()
def a_pool(draw: Draw) -> Case:
    kind = draw.rng.choice(
        (
            "import multiprocessing as _m\nwith _m.get_context('fork').Pool(2) as _p: _r = _p.map(abs, [-1, -2])",
            "import concurrent.futures as _f\n"
            "with _f.ThreadPoolExecutor(3) as _p: _r = list(_p.map(abs, [-1, -2]))",
            "import multiprocessing as _m\n_c = _m.get_context('fork')\n"
            "_p = _c.Pool(2); _r = _p.map(abs, [-1, -2])",
        )
    )
    return Case(
        f"{kind}\nassert _r == [1, 2]",
        undo="if hasattr(_p, 'terminate'): _p.terminate(); _p.join()",
    )


@statement(soak=True)
def a_pool_that_spawns(draw: Draw) -> Case:
    return Case(
        "import multiprocessing as _m\n_c = _m.get_context('spawn')\n_p, _d = _c.Pool(1), _c.Manager()\n"
        "assert _p.map(abs, [-1]) == [1] and _d.list([2])[0] == 2"
    )


@statement()
def a_forked_child_that_exits(draw: Draw) -> Case:
    code = draw.rng.choice(("0", "7"))
    return Case(
        "sys.stdout.flush()\n_pid = os.fork()\n"
        f"if _pid == 0: os.write(1, b'child\\n'); os._exit({code})\n"
        f"assert os.waitpid(_pid, 0)[1] == {int(code) << 8}"
    )


@statement()
def event_hooks(draw: Draw) -> Case:
    name = draw.rng.choice(("pre_run_cell", "post_run_cell", "pre_execute", "post_execute"))
    return Case(
        f"def _hook(*a): 1 / 0\nget_ipython().events.register('{name}', _hook)",
        undo=f"get_ipython().events.unregister('{name}', _hook)",
    )


statements(
    json_replaced_by_another_signature=lambda draw: Case(
        f"import json as _j\n_was = _j.dumps\n_j.dumps = {draw.rng.choice(sorted(_BY.values()))}",
        ("ok", "ClusterLost"),
        lost=None,
        undo="if '_was' in globals(): _j.dumps = _was",
    ),
    input_and_output_history_is_cleared=lambda draw: Case(
        "In.clear(); Out.clear(); del _, __, ___" if draw.step % 2 else "In[:] = []; Out.clear()",
        ("ok", "CellFailed"),
    ),
    a_trace_that_raises=lambda draw: Case(
        "def _t(*a): raise OSError('trace')\nsys.settrace(_t)", ("ok", "CellFailed"), after_end=True
    ),
    an_alarm_raises=lambda draw: Case(
        "import signal\ndef _ring(*a): raise OSError('alarm')\n"
        "signal.signal(signal.SIGALRM, _ring); signal.setitimer(0, 0.1)\n"
        f"{draw.rng.choice(('time.sleep(5)', 'while True: allreduce(np.ones(3))'))}",
        ("CellFailed",),
        undo="import signal; signal.setitimer(0, 0); signal.signal(signal.SIGALRM, signal.SIG_DFL)",
    ),
    threads=lambda draw: Case(
        "import threading\n"
        "_ts = [threading.Thread(target=sum, args=([i],)) for i in range(20)]\n"
        "for _t in _ts: _t.start()\nfor _t in _ts: _t.join()\n"
        "threading.Thread(target=time.sleep, args=(0.3,), daemon=True).start()\n"
        "threading.Thread(target=int, args=('x',)).start()"
    ),
    a_thread_interrupts_the_main_one=lambda draw: Case(
        "import _thread, threading\n"
        f"if rank == {draw.rank}: threading.Timer(0.1, _thread.interrupt_main).start()\n"
        f"if rank == {draw.rank}: time.sleep(20)",
        ("CellFailed", "CellInterrupted"),
        failed={draw.rank: "KeyboardInterrupt"},
    ),
    a_forked_child_that_leaves_the_cell=lambda draw: Case(
        "_pid = os.fork()\nif _pid: os.waitpid(_pid, 0)"
    ),
    children_that_stay=lambda draw: Case(
        "import subprocess\n"
        "_child = subprocess.Popen(['sleep', '300'], start_new_session=True)\nos.system('sleep 300 &')"
    ),
    descriptors_that_stay=lambda draw: Case(
        "_files = [open(os.devnull) for _ in range(100)]", undo="for _f in _files: _f.close()"
    ),
    standard_input_is_closed=lambda draw: Case(
        "os.close(0)", undo="import os; os.open(os.devnull, os.O_RDONLY)"
    ),
    limits=lambda draw: Case(
        "import resource as _l\n_soft, _hard = _l.getrlimit(_l.RLIMIT_NOFILE)\n"
        "_l.setrlimit(_l.RLIMIT_NOFILE, (64, _hard))",
        undo="_l.setrlimit(_l.RLIMIT_NOFILE, (_soft, _hard))",
    ),
    all_descriptors_are_used_up=lambda draw: Case(
        "import resource as _l\n_soft, _hard = _l.getrlimit(_l.RLIMIT_NOFILE)\n"
        "_l.setrlimit(_l.RLIMIT_NOFILE, (256, _hard))\n_files = []\n"
        "try:\n    while True: _files.append(os.open('/dev/null', 0))\nexcept OSError: pass",
        undo="for _f in _files: os.close(_f)\n_l.setrlimit(_l.RLIMIT_NOFILE, (_soft, _hard))",
    ),
    a_debugger=lambda draw: Case("breakpoint()", ("ok", "CellFailed")),
    tasks_that_stay=lambda draw: Case(
        "import asyncio\nasync def _tick():\n    for _ in range(20): await asyncio.sleep(0.02)\n"
        "    raise OSError('task')\n"
        "_task = asyncio.ensure_future(_tick())\nawait asyncio.sleep(0.01)"
    ),
    magics=lambda draw: Case(
        "%time _x = 1\n_l = !echo one\nassert list(_l) == ['one']\n"
        "get_ipython().run_cell_magic('bash', '', 'exit 0')\n%cd -q .\n%timeit -n1 -r1 pass"
    ),
)
