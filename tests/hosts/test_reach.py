"""Ranks on hosts that a command reaches, as ``docker exec`` reaches containers."""

import json
import subprocess
import sys

from tests.hosts.conftest import folder_in
from tests.hosts.hosts import HERE

PLACE = f"""
[boxes]
reach = "{HERE}/hosts.sh on {{host}}"
"""
USES = """
import json
from allranks import Cluster
with Cluster(launcher="boxes:h1:2,h2:1") as cluster:
    print(json.dumps(cluster.run("import socket; rank, socket.gethostname(), allreduce(1, Sum)")))
"""


def test_ranks_run_on_hosts_that_are_entered_and_leave_nothing(hosts):
    folder = folder_in(hosts.shared)
    (folder / "allranks.toml").write_text(PLACE)
    own = {
        "ALLRANKS_SITES": str(folder / "allranks.toml"),
        "ALLRANKS_ADDRESS": "10.77.0.1",
        "ALLRANKS_LOG_DIR": str(folder / "logs"),
    }
    # All hosts have this file. Pods often cannot resolve each other's names either.
    hosts.on("h1", "sh", "-c", "cp /etc/hosts /tmp; echo 127.0.0.1 localhost > /etc/hosts")
    try:
        ran = subprocess.run(
            hosts.beside([sys.executable, "-c", USES], folder),
            env=hosts.environment | own,
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        hosts.on("h1", "sh", "-c", "cat /tmp/hosts > /etc/hosts; rm /tmp/hosts")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [[0, "h1", 3], [1, "h1", 3], [2, "h2", 3]]
    assert hosts.left() == []
