"""A kernel that is killed at a random moment leaves no process, segment or file after 10 s."""

from __future__ import annotations

import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.faults.notebook import Notebook
from tests.fuzz.grammar import Fault
from tests.fuzz.sessions import SHARED

PHASES = ("starting", "in a cell", "idle", "stopping")
_CELLS = (
    "while True: allreduce(np.ones(100_000))",
    "while True: print('x' * 1000)",
    "import subprocess; subprocess.run(['sleep', '60'])",
    "time.sleep(60) if rank == 0 else barrier()",
    "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
)


def kill(seed: str, phase: str) -> None:
    """Kills a kernel in a phase of its life, a random moment after that has begun.

    Raises:
        Fault: something is left.
    """
    rng = random.Random(f"kill {seed} {phase}")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    # Apart from what other programs of MPI on this machine have, or leave.
    shared = Path(tempfile.mkdtemp(prefix="fuzz-", dir=SHARED))
    try:
        with Notebook(folder, {"OMPI_MCA_btl_sm_backing_directory": str(shared)}) as notebook:
            _reach(notebook, phase, rng)
            notebook.kill9()
            try:
                notebook.check_nothing_left()
            except (TimeoutError, AssertionError) as error:
                left = f"killed {phase} ({seed}): {error}{notebook.files_left()}"
                raise Fault("left", left) from error
            if left := [path.name for path in shared.iterdir()]:
                raise Fault("left", f"killed {phase} ({seed}): segments {left}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(shared, ignore_errors=True)


def _reach(notebook: Notebook, phase: str, rng: random.Random) -> None:
    start = f"%distributed start -n {rng.randint(2, 4)}"
    if phase == "starting":
        notebook.start(start)
        _wait(notebook, rng.uniform(0, 2.0))
        return
    notebook.run(start)
    notebook.on_ranks("import time\nimport numpy as np\nfloat(allreduce(np.ones(100_000))[0])")
    notebook.note_files()
    if phase == "in a cell":
        notebook.start_on_ranks(rng.choice(_CELLS))
        _wait(notebook, rng.uniform(0, 0.5))
    elif phase == "idle":
        _wait(notebook, rng.uniform(0, 0.2))
    else:
        stop = rng.choice(("%distributed stop", "%distributed restart", "%unload_ext allranks"))
        notebook.start(stop)
        _wait(notebook, rng.uniform(0, 0.3))


def _wait(notebook: Notebook, seconds: float) -> None:
    with suppress(TimeoutError):
        notebook.pump(lambda: False, seconds, "the moment")
    notebook.note_files()
