"""The commands that a launcher runs for its hosts: why each has ended."""

import sys
from queue import SimpleQueue

from allranks import __version__
from allranks.cluster.launchers.job import RELAY, CommandJob, Host
from allranks.records.config import Invitation


def test_a_host_whose_allranks_has_another_relay_is_named_with_what_to_install():
    ends = SimpleQueue[tuple[str, str]]()
    older = [sys.executable, *RELAY[1:-1], f"{RELAY[-1]}_of_another_version"]
    job = CommandJob(
        "ssh", {Host("h1", 2): older}, Invitation("", "", ""), lambda *end: ends.put(end)
    )
    host, why = ends.get(timeout=60)
    job.close()
    assert host == "h1"
    assert "No module named allranks.relay" in why
    assert f"It has another allranks; the notebook has {__version__}." in why
