"""A client of ipyparallel that reaches no ranks."""

from functools import partial
from types import SimpleNamespace

import ipyparallel
from jupyter_client.session import Session
from traitlets import HasTraits


class Unconnected(ipyparallel.Client):
    """Has no sockets; ``calls`` are those that its thread is to make."""

    def __init__(self):
        HasTraits.__init__(self)
        self.calls = []
        self._io_loop = SimpleNamespace(add_callback=self.call_later, stop=lambda: None)
        self._mux_stream = self._broadcast_stream = self._control_stream = None
        self._task_stream = SimpleNamespace(closed=lambda: False)
        self.session = Session(key=b"ours")
        self._update_engines({0: "engine-0", 1: "engine-1"})

    def __del__(self):
        """Has nothing to close."""

    def call_later(self, *call):
        self.calls.append(partial(*call))

    def send(self):
        """Makes the calls, and returns the requests that they send, with their engines."""
        requests = []

        def send(_, message, ident, **__):
            requests.append((ident.decode() if ident else "", message))

        self.session.send = send
        while self.calls:
            self.calls.pop(0)()
        return requests
