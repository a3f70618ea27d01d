"""A job that is being submitted when the user interrupts is not left in the queue."""

from __future__ import annotations

import os
import time

COMMANDS = {
    "sinfo": "echo localhost",
    "sbatch": "touch {0}/asked; while [ -e {0}/busy ]; do sleep .05; done; echo job 7",
    "squeue": "echo 'PENDING|Priority|N/A|main|'",
    "scancel": "echo $* > {0}/cancelled",
}


def test_an_interrupt_while_a_job_is_submitted_cancels_it(new_notebook, tmp_path):
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, script in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/sh\n{script.format(commands)}\n")
        (commands / name).chmod(0o755)
    (commands / "busy").touch()
    notebook = new_notebook({"PATH": f"{commands}:{os.environ['PATH']}"})
    cell = notebook.start("%distributed start --on slurm --nodes 1")
    deadline = time.monotonic() + 20
    while not (commands / "asked").exists():
        assert time.monotonic() < deadline, cell.text
        notebook.drain(0.1)
    notebook.interrupt()
    notebook.drain(0.5)
    (commands / "busy").unlink()
    assert cell.wait(20).error_name == "KeyboardInterrupt", cell.text
    assert (commands / "cancelled").read_text() == "7\n"
    notebook.shutdown()
    notebook.check_nothing_left()
    assert list(notebook.cwd.rglob("invitation")) == []
