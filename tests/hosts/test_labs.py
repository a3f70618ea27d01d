"""Labs run on two hosts as they are: only where their ranks are is said."""

from __future__ import annotations

import os

import pytest

from tests import labs
from tests.hosts.conftest import SSH

#: What cells write to the temporary folder is to be read on both hosts.
PLACE = '[pair]\non = "{on}"\nenvironment = {{ TMPDIR = "{folder}" }}\n'


LONG = pytest.mark.skipif(
    "ALLRANKS_TEST_LONG" not in os.environ,
    reason="takes minutes: needs ALLRANKS_TEST_LONG=1",
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("02_allreduce", ""),
        pytest.param("04_data_parallel", "--preload tensorflow", marks=LONG),
    ],
)
def test_a_lab_runs_on_two_hosts_unchanged(hosts, new_notebook, name, options):
    folder = hosts.shared / f"temporary-{name}"
    folder.mkdir()
    sites = hosts.shared / f"{name}.toml"
    sites.write_text(PLACE.format(on=SSH.split()[1], folder=folder))
    notebook = new_notebook(env={"ALLRANKS_SITES": str(sites)})
    started = notebook.run(f"%distributed start --on pair {options}", timeout=120)
    assert "started ranks 0–3 on h1, h2" in started.text
    lab, failed = labs.solved(name), []
    for cell in labs.code_cells(lab):
        ran = notebook.run(cell.source, timeout=120)
        if ran.status != "ok":
            failed.append((cell.id, ran.error_value))
        assert "started ranks" not in ran.text, ran.text
    assert [cell for cell, _ in failed] == labs.tagged(lab, labs.FAILS), failed
    notebook.shutdown()
    notebook.check_nothing_left()
