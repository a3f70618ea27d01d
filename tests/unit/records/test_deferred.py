"""Handlers of interrupts that are set for a block."""

import signal
from collections import deque

from allranks.cluster.sockets import EventQueue, InterruptRequested
from allranks.records import deferred


def test_interrupts_of_a_block_go_to_the_queue_and_then_to_the_handler_before_again():
    inbox, before = EventQueue(), signal.getsignal(signal.SIGINT)
    with inbox.hearing_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert inbox.wait(0) == [InterruptRequested()]
    assert signal.getsignal(signal.SIGINT) is before


def test_after_a_block_python_handles_interrupts_that_a_library_in_c_has_handled(monkeypatch):
    handlers = deque[object]([None])

    def set_handler(_signal, handler):
        if handler is None:  # as Python's own
            raise TypeError("signal handler must be signal.SIG_IGN, …")
        handlers.append(handler)
        return handlers[-2]

    monkeypatch.setattr(deferred.signal, "signal", set_handler)
    with EventQueue().hearing_interrupts():
        pass
    assert handlers[-1] is signal.default_int_handler
