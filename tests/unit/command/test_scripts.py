"""A script runs on a rank as Python runs it."""

import asyncio
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

import allranks
from allranks.command.script import _exit_code
from allranks.errors import CellFailed, Report
from allranks.script import Script, ScriptExited

SCRIPT = """
import inspect, os
os.chdir("elsewhere")

def scaled(by: float) -> int: ...

assert __builtins__.print is print

assert scaled.__annotations__ == {"by": float, "return": int}
assert __file__ == os.path.join(os.path.dirname(os.getcwd()), "scripts", "train.py")
assert "def scaled" in inspect.getsource(scaled)
"""


@pytest.fixture
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for name in ("scripts", "elsewhere"):
        (tmp_path / name).mkdir()


@pytest.mark.usefixtures("_in_a_folder")
def test_a_script_has_its_own_annotations_and_an_absolute_path() -> None:
    Path("scripts", "train.py").write_text(SCRIPT)
    Script(["scripts/train.py"])()


THREADS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

done = []
def save():
    for _ in range(100_000):
        done.append(1)
    Path("saved").touch()

pool = ThreadPoolExecutor(1)
for _ in range(1000):
    pool.submit(done.append, 1)
pool.submit(Path("computed").touch)
Thread(target=save).start()

# As mpi4py.futures ends the threads of its pools.
over = threading.Event()
Thread(target=over.wait).start()
threading._register_atexit(over.set)

# After the end of the main thread an executor takes no work.
late = ThreadPoolExecutor(1)
Thread(target=lambda: (over.wait(), late.submit(int))).start()
raise SystemExit(3)
"""
RUN = """
import os
from concurrent.futures import ThreadPoolExecutor
before = ThreadPoolExecutor(1)
before.submit(int, 0).result()
from allranks.script import Script, ScriptExited
try:
    Script(["scripts/train.py"])()
except ScriptExited as end:
    assert before.submit(int, 1).result() == ThreadPoolExecutor(1).submit(int, 1).result() == 1
    os._exit(int(str(end)))
"""


@pytest.mark.usefixtures("_in_a_folder")
def test_a_script_ends_with_its_threads() -> None:
    Path("scripts", "train.py").write_text(THREADS)
    assert subprocess.run([sys.executable, "-c", RUN], timeout=60).returncode == 3
    assert Path("saved").exists()
    assert Path("computed").exists()


JOINS = """
import threading
assert threading.enumerate() == [threading.current_thread()]
assert threading.active_count() == 1
done = []
threading.Thread(target=done.append, args=(1,)).start()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
assert done
"""


@pytest.mark.usefixtures("_in_a_folder")
def test_a_script_may_wait_for_all_threads() -> None:
    Path("scripts", "train.py").write_text(JOINS)
    over = threading.Event()
    of_the_rank = threading.Thread(target=over.wait)
    of_the_rank.start()
    try:
        Script(["scripts/train.py"])()
        assert of_the_rank in threading.enumerate()
    finally:
        over.set()


ASYNC = """
import asyncio

async def second():
    await asyncio.sleep(0)
    return 2

assert asyncio.get_event_loop().run_until_complete(second()) == 2
assert asyncio.run(second()) == 2
raise SystemExit(0)
"""


@pytest.mark.usefixtures("_in_a_folder")
def test_a_script_may_run_an_event_loop_of_its_own() -> None:
    Path("scripts", "train.py").write_text(ASYNC)

    async def run() -> None:
        task = asyncio.current_task()
        Script(["scripts/train.py"])()
        await asyncio.sleep(0)
        assert asyncio.current_task() is task

    asyncio.run(run())


#: What a script ends with, and the exit code of its job.
ENDS = {
    **{"None": 0, "0": 0, "False": 0, "3": 3, "-1": -1},
    **{"'0'": 1, "'3'": 1, "'-1'": 1, "True": 1},
    **{"'no data'": 1, "[]": 1, "0.0": 1, "__import__('numpy').zeros(2)": 1},
}


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize(("value", "code"), ENDS.items())
def test_a_script_ends_with_the_exit_code_of_a_program(value: str, code: int) -> None:
    Path("scripts", "train.py").write_text(f"raise SystemExit({value})")
    try:
        Script(["scripts/train.py"])()
    except ScriptExited as end:
        found = Report(0, "", "", type(end).__name__, str(end), (), None, "", False)
        assert _exit_code(CellFailed("", "", [found]))[0] == code
    else:
        assert code == 0


MAIN = """
import sys
from . import helper
print(sys.argv, sys.path[0], __name__, __package__, __file__, __spec__.name, helper.__name__)
"""
RUN_MODULE = "import sys; from allranks.script import Script; Script(sys.argv[1:], True)()"


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("name", ["scripts", "scripts.train"])
def test_a_module_runs_as_python_runs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("__main__", "train"):
        Path("scripts", f"{file}.py").write_text(MAIN)
    for file in ("__init__", "helper"):
        Path("scripts", f"{file}.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(Path(allranks.__file__).parents[1]))
    python = partial(subprocess.check_output, timeout=60, text=True)
    said = python([sys.executable, "-m", name, "--epochs", "3"])
    assert "--epochs" in said
    assert python([sys.executable, "-c", RUN_MODULE, name, "--epochs", "3"]) == said


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("name", ["scripts", "scripts.nothing"])
def test_what_is_no_module_to_run_is_refused_with_what_to_type(name: str) -> None:
    with pytest.raises(ScriptExited, match=f"found none named {name}. Type the name that follows"):
        Script([name], is_module=True)()
