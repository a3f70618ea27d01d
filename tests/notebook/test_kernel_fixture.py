"""What the other tests ask of the kernel that they drive, and would pass without where it failed.

That it runs cells, shows their output, and is interrupted and restarted, every other test needs.
"""

import pytest

from tests.kernel import KernelDied

#: It has said a line before it counts: until a new program runs, it has no environment to be seen.
SLEEPER = """
import subprocess, sys
program = [sys.executable, '-c', 'import time; print(flush=True); time.sleep(100)']
started = subprocess.Popen(program, stdout=subprocess.PIPE, start_new_session=True)
started.stdout.readline()
started.pid
"""


def test_a_cell_that_never_ends_times_out_with_its_output(kernel):
    cell = kernel.start("import time; print('so far', flush=True); time.sleep(60)")
    with pytest.raises(TimeoutError, match="so far"):
        cell.wait_for("so far").wait(0.2)


def test_processes_are_found_after_the_kernel_that_started_them_was_killed(kernel):
    pid = int(kernel.run(SLEEPER).displays[0]["text/plain"])
    cell = kernel.start("import time; time.sleep(60)")
    kernel.kill9()
    assert not kernel.is_alive
    assert [process.pid for process in kernel.children()] == [pid]
    with pytest.raises(KernelDied):
        cell.wait(5)
    with pytest.raises(TimeoutError, match=r"time\.sleep\(100\)"):
        kernel.wait_for_no_children(0.2)


def test_two_kernels_do_not_see_each_others_processes(new_kernel):
    one, other = new_kernel(), new_kernel()
    one.run(SLEEPER)
    assert len(one.children()) == 1
    assert other.children() == []
    one.stop()
    one.wait_for_no_children(5)
