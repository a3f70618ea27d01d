"""The FAKE streams of cupy in several threads, as a call and the making of a communicator have."""

import threading
from collections import deque
from importlib import util
from pathlib import Path

import pytest

FAKE = Path(__file__).resolve().parents[1] / "fakes" / "gpu" / "cupy" / "cuda" / "_queue.py"


@pytest.fixture
def streams():
    spec = util.spec_from_file_location("streams_of_the_fake", FAKE)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_thread_has_a_current_stream_of_its_own(streams):
    mine, other, found = streams.Stream(), streams.Stream(), []
    entered, left = threading.Event(), threading.Event()

    def enter():
        with other:
            entered.set()
            left.wait(60)
            found.append(streams.current())

    thread = threading.Thread(target=enter, daemon=True)
    with mine:
        thread.start()
        assert entered.wait(60)
        assert streams.current() is mine
    left.set()
    thread.join()
    assert found == [other]
    assert streams.current() is streams.null


def test_work_goes_on_while_another_thread_makes_a_stream(streams):
    class Queue(deque):
        def __bool__(self):
            thread = threading.Thread(target=streams.Stream)
            thread.start()
            thread.join()
            return False

    done = []
    streams.Stream()._work = Queue()
    streams.push(lambda: done.append(1))
    streams.progress()
    assert done == [1]
