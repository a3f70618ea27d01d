"""Ten students on a real JupyterHub: limits of each, and students who exceed them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.hub.hub import CULLED_SECONDS, IDLER, Hub, Student, has_npm, proxy
from tests.kernel import wait_until
from tests.missing import skip_missing

NAMES = ("ada", "eve", *(f"student-{number}" for number in range(3, 11)))
GOOD = "%%distributed\nallreduce(rank + 1, op=Sum)"
#: The first cells of a student, whose two ranks stay.
START = ("%load_ext allranks", "%%distributed\nkept = 10 * rank")
EXCEEDING = {
    "MemoryError: Unable to allocate 9.31 GiB": (
        "import numpy as np\nif rank == 1: np.ones(1_250_000_000)\nallreduce(1, op=Sum)"
    ),
    "RuntimeError: can't start new thread": (
        "import threading, time\nif rank == 1:\n    for n in range(300):\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "allreduce(1, op=Sum)"
    ),
}
#: As many threads as there can be, until ``go`` is set.
THREADS = """
import threading
go = threading.Event()
try:
    while True:
        threading.Thread(target=go.wait, daemon=True).start()
except RuntimeError:
    pass
"""
FORKS = "import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(300)"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    if not proxy():
        without = "" if has_npm() else ", and npm for that, which was not found"
        skip_missing(f"JupyterHub needs configurable-http-proxy{without}: make packages")
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True)
    if os.geteuid() != 0 or tried.returncode:
        skip_missing("accounts of students need CAP_SYS_ADMIN: run as root")
    with (
        tempfile.TemporaryDirectory(prefix="hub-", ignore_cleanup_errors=True) as folder,
        Hub(Path(folder), (*NAMES, IDLER)) as running,
    ):
        yield running


def run_all(students: Iterable[Student], source: str) -> list[str]:
    """Runs a cell in the notebooks of these students, at the same time."""
    sent = [(student, student.begin(source)) for student in students]
    return [student.end(number) for student, number in sent]


@pytest.fixture(scope="module")
def students(hub: Hub) -> dict[str, Student]:
    hub.start(*NAMES)
    with ThreadPoolExecutor() as pool:
        found = dict(zip(NAMES, pool.map(partial(Student, hub), NAMES), strict=True))
    for source in START:
        said = run_all(found.values(), source)
        assert "Error" not in "".join(said), said
    return found


@pytest.fixture(scope="module")
def ada(students: dict[str, Student]) -> Student:
    return students["ada"]


@pytest.fixture(scope="module")
def eve(students: dict[str, Student]) -> Student:
    return students["eve"]


def assert_all_right(students: Iterable[Student]) -> None:
    found = run_all(students, GOOD)
    assert all(text.endswith("→ 3\n") for text in found), found


def test_ten_students_run_cells_on_two_ranks_each_at_the_same_time(students):
    assert len(students) == 10
    assert_all_right(students.values())


def test_no_student_can_read_what_the_kernel_of_another_prints(ada, eve):
    find = "from ipykernel.connect import get_connection_file, get_connection_info"
    assert '"transport": "ipc"' in ada.run(f"{find}\nprint(get_connection_info())")
    sockets = ada.run(f"{find}\nprint(get_connection_file().replace('.json', '-ipc-'))").strip()
    connect = f"import socket\nsocket.socket(socket.AF_UNIX).connect({sockets!r} + '2')"
    assert ada.run(connect) == ""
    assert "PermissionError" in eve.run(connect)


def test_a_student_who_exceeds_a_limit_gets_an_error_and_keeps_the_variables(eve):
    refused = eve.run("%distributed restart -n 3")
    assert "expected at most 2 ranks, as ALLRANKS_MAX_RANKS allows here, found 3" in refused
    for error, source in EXCEEDING.items():
        assert error in eve.run(f"%%distributed\n{source}")
        assert eve.run("%%distributed\nallreduce(kept, op=Sum)").endswith("→ 10\n")


def test_a_start_that_cannot_have_threads_is_refused_and_the_kernel_lives_on(eve):
    eve.run("%distributed stop")
    eve.run(f"kept_here = 5\n{THREADS}")
    assert "found that they cannot (can't start new thread)" in eve.run("%distributed start")
    eve.run("go.set()")
    for source in START:
        eve.run(source)
    assert "5" in eve.run("kept_here")
    assert_all_right([eve])


def test_a_class_through_the_hub_shows_who_joins_to_the_teacher_who_was_named(hub, ada, eve):
    said = eve.run("%distributed join ada")
    assert "the class of ada is not open. ada types: %distributed class" in said
    assert "Students type: %distributed join ada" in ada.run("%distributed class")
    eve.run("1 / 0")
    assert "No student has joined yet." in ada.run("%distributed class")
    assert "ada sees" in eve.run("%distributed join ada panel")
    eve.run("%%distributed\nif rank == 1: raise ValueError('no data')\nallreduce(1, op=Sum)")
    wait_until(lambda: "ValueError: no data" in ada.run("%distributed class"))
    assert "No student has joined yet." in eve.run("%distributed class")
    assert not Path("/tmp/allranks-class-ada").exists()
    # As one who gives another name does:
    eve.run("import os\nos.environ['JUPYTERHUB_USER'] = 'ada'")
    wait_until(lambda: "ada (eve)" in ada.run("%distributed class"))
    assert "ada no longer sees" in eve.run("%distributed leave")
    wait_until(lambda: "left" in ada.run("%distributed class"))
    assert "no data" not in ada.run("%distributed class")
    assert "The class is closed." in ada.run("%distributed class close")
    eve.run("os.environ['JUPYTERHUB_USER'] = 'eve'")


def test_others_cells_are_right_while_a_student_forks_and_floods_until_the_server_is_stopped(
    hub, students, eve
):
    others = [one for name, one in students.items() if name != "eve"]
    hostile = eve.begin(f"%%distributed\n{FORKS}")
    for _ in range(3):
        assert_all_right(others)
    assert "BlockingIOError: [Errno 11] Resource temporarily unavailable" in eve.end(hostile)
    eve.begin("%%distributed\nwhile True: print('x' * 1000)")
    for _ in range(3):
        assert_all_right(others)
    hub.stop("eve")
    again = hub.student("eve")
    for source in START:
        again.run(source)
    assert_all_right([again])


def test_a_kernel_is_culled_when_it_is_idle_and_never_while_a_cell_runs_on_its_ranks(hub):
    ida = hub.student(IDLER)
    for source in START:
        ida.run(source)
    sleep = f"import time\ntime.sleep({CULLED_SECONDS + 6})"
    text = ida.run(f"%%distributed\n{sleep}\nallreduce(kept, op=Sum)")
    assert text.endswith("→ 10\n")
    wait_until(lambda: not ida.kernels(), seconds=120)
