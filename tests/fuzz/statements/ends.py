"""Ways for ranks to leave a cell early: they raise, exit, or die."""

from __future__ import annotations

from tests.fuzz.grammar import Case, Draw, statement, statements

_RAISES = {
    "ValueError": ("raise ValueError('bad batch')", "int('x')"),
    "SystemExit": ("sys.exit(3)", "raise SystemExit('so long')"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt",),
    "GeneratorExit": ("raise GeneratorExit",),
    "StopIteration": ("next(iter(()))", "raise StopIteration"),
    "CancelledError": ("import asyncio; raise asyncio.CancelledError",),
    "RecursionError": ("def _again(): return _again()\n    _again()",),
    "ExceptionGroup": ("raise ExceptionGroup('two', [ValueError('a'), OSError(2, 'b')])",),
    "MemoryError": ("bytearray(1 << 60)",),
    "UnicodeDecodeError": ("b'\\xff'.decode()",),
    "AssertionError": ("assert not rank >= 0, 'x' * 1_000_000",),
    "ZeroDivisionError": (
        "1 / 0",
        "try: {}['a']\n    except KeyError as _e: raise ZeroDivisionError from _e",
    ),
    "_Odd": (
        "class _Odd(Exception):\n        def __str__(self): raise RuntimeError('inner')\n"
        "    raise _Odd()",
        "class _Odd(BaseException):\n        def __repr__(self): return 7\n    raise _Odd(object())",
        "class _Odd(Exception):\n        def __reduce__(self): raise OSError\n    raise _Odd()",
        "class _Odd(Exception):\n        __traceback__ = property(lambda s: 1 / 0)\n    raise _Odd()",
    ),
    "UsageError": ("get_ipython().enable_gui('qt')",),
    "SyntaxError": ("eval('1 +')", "exec('def f(:')"),
    "FileNotFoundError": ("open('/nowhere/at/all')",),
    "UserWarning": (
        "import warnings; warnings.warn_explicit('x', UserWarning, 'f', 1) or 1/1"
        "\n    raise UserWarning('w')",
    ),
}


def _raising(draw: Draw) -> tuple[str, str]:
    name = draw.rng.choice(sorted(_RAISES))
    return name, draw.rng.choice(_RAISES[name])


@statement(weight=6)
def one_rank_raises(draw: Draw) -> Case:
    name, source = _raising(draw)
    then = draw.rng.choice(("", "allreduce(np.ones(3))", "barrier()", "comm.barrier()", "recv(0)"))
    if then == "recv(0)" and draw.rank != 0:
        then = f"recv({draw.rank})"
    ends = ("CellInterrupted", "CellFailed") if name == "KeyboardInterrupt" else ("CellFailed",)
    return Case(f"if rank == {draw.rank}:\n    {source}\n{then}", ends, failed={draw.rank: name})


_NOT_SHOWN = (
    "def __str__(self): return 7",
    "def __repr__(self): raise OSError\n    __str__ = __repr__",
    "def __getattribute__(self, name): raise OSError(name)",
    "__cause__ = property(lambda self: 1 / 0)",
    "__suppress_context__ = property(lambda self: 1 / 0)",
    "__class__ = property(lambda self: 1 / 0)",
)


@statement(weight=2)
def some_ranks_raise(draw: Draw) -> Case:
    name, source = _raising(draw)
    who = draw.among()
    ends = ("CellInterrupted", "CellFailed") if name == "KeyboardInterrupt" else ("CellFailed",)
    then = draw.rng.choice(("", "allreduce(np.ones(3))")) if len(who) < draw.size else ""
    return Case(f"if rank in {who}:\n    {source}\n{then}", ends, failed=dict.fromkeys(who, name))


@statement(weight=2)
def not_python(draw: Draw) -> Case:
    source = draw.rng.choice(
        ("kept = (1,\n", "return kept", "if rank = 0: pass", "\tx\n y", "x = 'é\n")
    )
    return Case(
        source, ("InvalidCell", "SyntaxError", "IndentationError", "TabError"), begins=False
    )


@statement()
def an_await(draw: Draw) -> Case:
    if draw.rng.random() < 0.5:
        return Case("import asyncio\nawait asyncio.sleep(0.05)")
    return Case(
        f"import asyncio\nawait asyncio.sleep(0.01)\nif rank == {draw.rank}: raise OSError('async')",
        ("CellFailed",),
        failed={draw.rank: "OSError"},
    )


_DEATHS = (
    *("os._exit(0)", "os._exit(3)", "os.kill(os.getpid(), 9)", "os.abort()"),
    *("import ctypes; ctypes.string_at(0)", "import ctypes; ctypes.CDLL(None).abort()"),
    *("import ctypes; ctypes.CDLL(None).exit(4)", "os.kill(os.getpid(), 15)"),
    "from mpi4py import MPI; MPI.COMM_WORLD.Abort(5)",
)


@statement(weight=3)
def a_rank_dies(draw: Draw) -> Case:
    then = draw.rng.choice(("time.sleep(30)", "barrier()", "while True: allreduce(np.ones(3))"))
    source = draw.rng.choice(_DEATHS)
    return Case(
        f"if rank == {draw.rank}:\n    {source}\n{then}",
        ("ClusterLost",),
        (f"rank {draw.rank} (",),
        lost=True,
    )


@statement()
def a_rank_kills_another(draw: Draw) -> Case:
    victim = (draw.rank + 1) % draw.size
    return Case(
        "_pids = allgather_object(os.getpid())\n"
        f"if rank == {draw.rank}: os.kill(_pids[{victim}], 9)\n"
        "time.sleep(30)",
        ("ClusterLost",),
        (f"rank {victim} (",),
        lost=True,
    )


_CYCLES = (
    "_a.__cause__ = _a",
    "_a.__cause__, _b.__cause__ = _b, _a",
    "_a.__context__, _b.__context__ = _b, _a",
    "_a = ExceptionGroup('a', [_a]); _a.exceptions[0].__cause__ = _a; _a = _a.exceptions[0]",
)


statements(
    an_exception_that_cannot_be_shown=lambda draw: Case(
        f"class _Odd(Exception):\n    {draw.rng.choice(_NOT_SHOWN)}\n"
        f"if rank == {draw.rank}: raise _Odd()\nbarrier()",
        ("CellFailed",),
        failed={draw.rank: "_Odd"},
    ),
    each_rank_raises_something_else=lambda draw: Case(
        "[int, 1 / (rank - 1) and {}.pop, list, [].pop][rank]('five')",
        ("CellFailed",),
        failed={
            rank: name
            for rank, name in ((0, "ValueError"), (1, "ZeroDivisionError"), (3, "TypeError"))
            if rank < draw.size
        },
    ),
    an_error_in_a_finalizer=lambda draw: Case(
        "class _Held:\n    def __del__(self): raise OSError('late')\n_held = _Held(); del _held"
    ),
    all_ranks_die=lambda draw: Case(draw.rng.choice(_DEATHS), ("ClusterLost",), lost=True),
    a_rank_is_killed_from_outside=lambda draw: Case(
        "for _i in range(10_000): allreduce(np.ones(9)); time.sleep(0.002)",
        ("ClusterLost",),
        (f"rank {draw.rank} (", "SIGKILL"),
        lost=True,
        signals=((draw.rng.uniform(0, 0.5), draw.rank, 9),),
    ),
    a_cyclic_cause=lambda draw: Case(
        f"_a, _b = ValueError('a'), OSError('b')\n{draw.rng.choice(_CYCLES)}\nraise _a",
        ("CellFailed",),
        ("ValueError: a", "Traceback (most recent call last)"),
        dict.fromkeys(range(draw.size), "ValueError"),
    ),
    a_lone_surrogate_in_an_exception=lambda draw: Case(
        "import json\nraise ValueError(json.loads('\"\\\\ud83d\"') + ' follows')",
        ("CellFailed",),
        ("follows",),
        dict.fromkeys(range(draw.size), "ValueError"),
    ),
)
