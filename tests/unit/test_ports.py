"""The ports that tests give away: two processes never have the same one."""

import subprocess
import sys

from tests import ports

OTHER = "from tests import ports; ports._turn = {}; print(ports.free_port())"


def test_another_process_that_begins_at_the_same_port_gets_another_one(repository):
    begin = ports._turn
    own = [ports.free_port() for _ in range(3)]
    command = [sys.executable, "-c", OTHER.format(begin)]
    other = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert int(other.stdout) not in own
