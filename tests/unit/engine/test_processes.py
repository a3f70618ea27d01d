"""The end of all descendants of a process."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux gives orphans to another process than init"
)
_END = """
import signal, subprocess
from allranks.engine import processes

# As it is inherited from a process that waits for its children by another way.
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGCHLD}})
processes.adopt_orphans()
subprocess.Popen(["sh", "-c", {script!r}], stdout=subprocess.PIPE).stdout.readline()
processes.end_descendants({seconds}, 0.0)
assert not processes.descendants()
"""


def _end_descendants(script: str, seconds: float) -> None:
    code = _END.format(script=script, seconds=seconds)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_descendants_that_end_by_themselves_are_waited_for(tmp_path: Path) -> None:
    _end_descendants(f"(sleep 0.1; echo done > {tmp_path}/file) & echo", 50.0)
    assert (tmp_path / "file").read_text() == "done\n"


def test_descendants_that_do_not_end_are_killed_with_all_that_they_start() -> None:
    _end_descendants("(while true; do (sleep 300) & sleep 0.001; done) & echo; sleep 300", 0.1)
