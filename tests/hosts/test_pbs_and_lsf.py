"""PBS and LSF by their documented commands, of which these are stand-ins: neither is to be had."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.conftest import NewNotebook
from tests.hosts.notebook import NotebookOnAHost

COMMANDS = {
    "pbs": ("qsub", "qstat", "qdel", "pbs_tmrsh"),
    "lsf": ("bsub", "bjobs", "bkill", "blaunch"),
}
#: The number of the third job.
THIRD = "9"
OPTIONS = "--nodes 2 --ntasks-per-node 2"


@pytest.fixture(params=COMMANDS)
def system(request: pytest.FixtureRequest) -> str:
    """Its name."""
    return str(request.param)


@pytest.fixture
def commands(hosts, system: str) -> Path:
    """The folder of a system's commands."""
    folder = Path(hosts.shared, f"{system}{time.monotonic_ns()}")
    folder.mkdir()
    source = Path(__file__).with_name("stand_in.py").read_text()
    for name in COMMANDS[system]:
        (folder / name).write_text(f"#!{sys.executable}\n{source}")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def notebook(new_notebook: NewNotebook, commands: Path) -> Iterator[NotebookOnAHost]:
    """A notebook that finds them, after which nothing is left."""
    opened = new_notebook({"PATH": f"{commands}:/usr/sbin:/usr/bin:/sbin:/bin"})
    yield opened
    opened.shutdown()
    opened.check_nothing_left()


def test_a_job_waits_runs_stops_and_is_named_where_it_is_cancelled(notebook, system, commands):
    (commands / "hold").touch()
    cell = notebook.start_on_ranks("rank", f"--on {system} {OPTIONS}")
    reason = {"pbs": "Insufficient amount of resource", "lsf": "Job slot limit reached"}[system]
    cell.wait_for(reason)
    notebook.interrupt()
    assert cell.wait().error_name == "KeyboardInterrupt"

    (commands / "hold").unlink()
    cell = notebook.on_ranks("import socket; socket.gethostname()", f"--on {system} {OPTIONS}")
    assert cell.text.endswith("ranks 0–1 → 'h1'\nranks 2–3 → 'h2'\n"), cell.text
    assert notebook.run("%distributed stop").text == "The ranks are stopped.\n"

    notebook.on_ranks("rank", f"--on {system} {OPTIONS}")
    cell = notebook.start_on_ranks("import time\nprint('here')\ntime.sleep(60)").wait_for("here")
    notebook._hosts.on("h0", str(commands / COMMANDS[system][2]), THIRD)
    assert cell.wait().error_name == "ClusterLost"
    assert f" job {THIRD}" in cell.error_value
    assert "has ended" in cell.error_value


def test_a_kernel_killed_with_9_cancels_its_job(notebook, system, commands):
    (commands / "hold").touch()
    notebook.start_on_ranks("rank", f"--on {system} {OPTIONS}").wait_for("waits in queue")
    notebook.kill9()
    notebook.check_nothing_left()
