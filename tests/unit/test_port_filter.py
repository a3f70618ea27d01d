"""What closes the ports of mpiexec opens nothing that stays open."""

import os
import subprocess
import sys

import pytest

from allranks import port_filter


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no packet filters")
def test_no_descriptor_of_a_child_or_its_sockets_stays_open():
    listens = "import socket; s = socket.create_server(('', 0)); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", listens], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        before = set(os.listdir("/proc/self/fd"))
        port_filter.restrict_ports_of(child.pid)
        # Threads of other tests may close some.
        assert not set(os.listdir("/proc/self/fd")) - before
        child.kill()
