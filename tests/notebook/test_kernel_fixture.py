"""The kernel that the other tests drive does what a front end would."""

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


def test_a_cell_returns_its_streams_and_its_value(kernel):
    cell = kernel.run("import sys; print('out'); print('err', file=sys.stderr); 1 + 1")
    assert (cell.status, cell.stdout, cell.stderr) == ("ok", "out\n", "err\n")
    assert cell.displays == [{"text/plain": "2"}]
    assert cell.seconds > 0


def test_an_error_is_named_and_counts_as_failed(kernel):
    cell = kernel.run("1 / 0")
    assert (cell.status, cell.error_name) == ("error", "ZeroDivisionError")
    assert "division by zero" in cell.error_value
    assert "1 / 0" in cell.text


def test_an_update_from_a_later_cell_changes_the_display_it_names(kernel):
    first = kernel.run("handle = display('before', display_id=True)")
    kernel.run("handle.update('after')")
    assert first.displays == [{"text/plain": "'after'"}]


def test_clear_output_empties_the_cell(kernel):
    cell = kernel.run(
        "from IPython.display import clear_output\nprint(1)\nclear_output(wait=True)\nprint(2)"
    )
    assert cell.text == "2\n"


def test_output_after_the_cell_ended_is_taken_in(kernel):
    cell = kernel.run(
        "import threading\nhandle = display('early', display_id=True)\n"
        "threading.Timer(0.3, lambda: handle.update('late')).start()"
    )
    kernel.pump(lambda: cell.displays != [{"text/plain": "'early'"}], 30, "the update", cell)
    assert cell.displays == [{"text/plain": "'late'"}]


def test_interrupt_ends_a_running_cell_and_keeps_variables(kernel):
    kernel.run("x = 41")
    cell = kernel.start("import time\nprint('here', flush=True)\ntime.sleep(60)").wait_for("here")
    kernel.interrupt()
    assert cell.wait(10).error_name == "KeyboardInterrupt"
    assert kernel.run("x + 1").displays == [{"text/plain": "42"}]


def test_restart_forgets_variables(kernel):
    kernel.run("x = 1")
    kernel.restart()
    assert kernel.run("x").error_name == "NameError"


def test_a_killed_kernel_can_be_started_again(kernel):
    kernel.kill9()
    kernel.restart()
    assert kernel.is_alive
    assert kernel.run("print('again')").text == "again\n"


def test_a_cell_that_never_ends_times_out_with_its_output(kernel):
    cell = kernel.start("import time; print('so far', flush=True); time.sleep(60)")
    with pytest.raises(TimeoutError, match="so far"):
        cell.wait_for("so far").wait(0.2)


def test_completion_and_inspection_are_answered(kernel):
    kernel.run("seventeen = 17")
    assert "seventeen" in kernel.complete("sevente")
    assert "int" in kernel.inspect("seventeen")


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


def test_stopping_leaves_no_process(new_kernel):
    kernel = new_kernel()
    kernel.run(SLEEPER)
    kernel.stop()
    kernel.wait_for_no_children(5)


def test_two_kernels_do_not_see_each_others_processes(new_kernel):
    one, other = new_kernel(), new_kernel()
    one.run(SLEEPER)
    assert len(one.children()) == 1
    assert other.children() == []


def test_the_environment_can_be_added_to(new_kernel):
    kernel = new_kernel(env={"COLOUR": "green", "PATH": None})
    assert kernel.run("import os; print(os.environ['COLOUR'], 'PATH' in os.environ)").text == (
        "green False\n"
    )
