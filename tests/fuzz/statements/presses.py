"""Interrupts from the notebook at random moments, once and twice, and --timeout."""

from __future__ import annotations

from tests.fuzz.grammar import Case, Draw, statement, statements

_BUSY = (
    "time.sleep(20)",
    "while True: pass",
    "_a = np.ones((300, 300))\nwhile True: _a @ _a",
    "import asyncio\nawait asyncio.sleep(20)",
    "!sleep 20",
    "_lines = !sleep 20",
    "import subprocess; subprocess.run(['sleep', '20'])",
    "import threading; threading.Event().wait()",
    "while True: allreduce(np.ones(3))",
    "while True: allreduce(np.ones(300_000))",
    "while True: comm.allreduce(rank)",
    "while True: barrier()",
    "while True: grouped_allreduce([np.ones(99)] * 5)",
    "while True: synchronize(allreduce_async(np.ones(9)))",
    "time.sleep(20) if rank == {rank} else allreduce(np.ones(3))",
    "time.sleep(20) if rank == {rank} else barrier()",
    "time.sleep(20) if rank == {rank} else recv({rank})",
    "_i = 0\nwhile True: print('line', _i, 'of', rank); _i += 1; time.sleep(0.001)",
    "while True: allgather_object([rank] * 1000)",
    # One that an earlier interrupt has left there is refused.
    "from allranks.errors import UsageError\nwhile True:\n"
    "    try: remove_process_set(add_process_set([0]))\n    except UsageError: pass",
    "def _deep(n): return _deep(n + 1) if n < 500 else time.sleep(0.01)\nwhile True: _deep(0)",
    "while True: display(rank); time.sleep(0.05)",
)
_BLOCKS = "from mpi4py import MPI\nif rank == {}: MPI.Intracomm(MPI.COMM_WORLD).Barrier()"
_ONCE = ("CellInterrupted", "KeyboardInterrupt")


def _busy(draw: Draw) -> str:
    return draw.rng.choice(_BUSY).replace("{rank}", str(draw.rank))


@statement(weight=6)
def an_interrupt(draw: Draw) -> Case:
    # The moment may come before the cell has begun: then it has not run, or not been sent.
    return Case(_busy(draw), _ONCE, presses=(draw.rng.uniform(0, 0.5),))


@statement()
def an_interrupt_of_finalizers(draw: Draw) -> Case:
    source = "class _Held:\n    def __del__(self): time.sleep(0.05)\nwhile True: _Held()"
    return Case(source, _ONCE, presses=(draw.rng.uniform(0.3, 0.5),))


@statement(weight=2)
def an_interrupt_that_comes_too_late(draw: Draw) -> Case:
    moment = draw.rng.choice((0.004, 0.01, 0.02, 0.04))
    source = draw.rng.choice(("pass", "allreduce(np.ones(3))", "time.sleep(0.01)", "1 / 0"))
    ends = (*_ONCE, "ok", "CellFailed")
    return Case(source, ends, presses=(moment * draw.rng.random() * 2,), after_end=True)


@statement(weight=2)
def two_interrupts(draw: Draw) -> Case:
    first = draw.rng.uniform(0, 0.4)
    moments = (first, first + draw.rng.choice((0.0, 0.001, 0.01, 0.1, 0.5)))
    return Case(_busy(draw), _ONCE, lost=None, presses=moments, after_end=True)


@statement(weight=2)
def a_timeout(draw: Draw) -> Case:
    return Case(
        _busy(draw),
        ("CellTimeout",),
        ("reached: interrupting",),
        timeout=draw.rng.choice((0.001, 0.05, 0.3)),
    )


@statement()
def a_timeout_while_a_rank_fails(draw: Draw) -> Case:
    return Case(
        f"if rank == {draw.rank}: raise OSError('first')\ntime.sleep(20)",
        ("CellFailed", "CellTimeout"),  # a rank may be late even to fail
        timeout=0.3,
        after_end=True,
    )


statements(
    two_interrupts_of_ranks_that_ignore_one=lambda draw: Case(
        f"while rank == {draw.rank}:\n    try: time.sleep(30)\n    except KeyboardInterrupt: pass",
        _ONCE,
        lost=None,
        presses=(0.5, 1.2),
        after_end=True,
    ),
    two_interrupts_in_a_blocking_call=lambda draw: Case(
        _BLOCKS.format(draw.rank),
        _ONCE,
        lost=None,
        presses=(0.5, 1.2),
        after_end=True,
        mixes=False,
    ),
    an_interrupt_that_is_answered=lambda draw: Case(
        "try: time.sleep(20)\nexcept KeyboardInterrupt: print('answered')",
        ("ok", *_ONCE),
        presses=(0.6,),
        mixes=False,
    ),
    a_timeout_that_is_long_enough=lambda draw: Case("allreduce(np.ones(3))", timeout=59),
    a_timeout_in_a_blocking_call=lambda draw: Case(
        _BLOCKS.format(draw.rank),
        ("CellTimeout",),
        (f"rank {draw.rank}",),
        lost=None,
        timeout=0.5,
        after_end=True,
        mixes=False,
    ),
    a_death_while_interrupted=lambda draw: Case(
        f"try: time.sleep(20)\nexcept KeyboardInterrupt:\n    if rank == {draw.rank}: os._exit(9)\n"
        "    time.sleep(20)",
        ("ClusterLost", *_ONCE),
        lost=None,
        presses=(0.5,),
        after_end=True,
    ),
)
