"""Where the threads are is told without harm to the process."""

import gc
import subprocess
import sys
import textwrap
import threading

import pytest

from allranks.collectives.calls import frames
from allranks.engine.telemetry import current_line, importing

# Frees a threading.local in a garbage collection that begins at each point in turn.
COLLECTED = """
    import faulthandler
    import gc
    import threading

    from allranks.collectives.calls import frames

    class Cycle:
        pass

    def leave_garbage():
        one = Cycle()
        one.itself, one.local = one, threading.local()
        one.local.value = 1

    faulthandler.dump_traceback_later(60, exit=True)
    gc.disable()
    for allocations in range(40):
        end = threading.Event()
        threads = [threading.Thread(target=end.wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        gc.collect()
        leave_garbage()
        gc.set_threshold(gc.get_count()[0] + allocations)
        gc.enable()
        frames.frames_of_threads()
        assert gc.isenabled()
        gc.disable()
        end.set()
        for thread in threads:
            thread.join()
    frames.frames_of_threads()
    assert not gc.isenabled()
    print("went on")
"""


def test_a_garbage_collection_does_not_end_the_asking():
    program = [sys.executable, "-c", textwrap.dedent(COLLECTED)]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.returncode) == ("went on\n", 0), ran.stderr


def test_the_main_thread_is_told_from_others():
    found = []
    other = threading.Thread(target=lambda: found.append(frames.frame_of_main_thread()))
    other.start()
    other.join()
    main = found[0]
    names = []
    while main is not None:
        names.append(main.f_code.co_name)
        main = main.f_back
    assert "test_the_main_thread_is_told_from_others" in names


def test_a_line_is_the_users_and_none_where_only_libraries_run(monkeypatch):
    end = threading.Event()
    waits = threading.Thread(target=end.wait)
    waits.start()
    monkeypatch.setattr(frames, "frame_of_main_thread", lambda: sys._current_frames()[waits.ident])
    line = current_line()
    end.set()
    waits.join()
    assert line == ""
    monkeypatch.setattr(frames, "frame_of_main_thread", sys._getframe)
    assert current_line().startswith("test_frames.py:")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="needs a Python before 3.12")
@pytest.mark.parametrize("walk", [current_line, importing])
def test_no_garbage_is_collected_while_frames_of_another_thread_are_walked(monkeypatch, walk):
    collects = []
    monkeypatch.setattr(frames, "frame_of_main_thread", lambda: collects.append(gc.isenabled()))
    walk()
    assert collects == [False]
    assert gc.isenabled()
