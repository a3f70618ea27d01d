"""The waits of the MPI link, with a fake communicator."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from allranks.lessons import links
from allranks.lessons.ring import MpiLink


class Comm:
    """A fake whose sends complete at once, and whose receives never do."""

    def __init__(self):
        self.sent = []
        self.Get_rank, self.Get_size = lambda: 0, lambda: 2

    def Isend(self, *sent):
        self.sent.append(sent)
        return SimpleNamespace(Test=lambda: True)

    def Irecv(self, buffer, from_, tag):
        return SimpleNamespace(Test=lambda: False)


class Interrupted(Exception):
    pass


def interrupt(requests):
    if not all(request.Test() for request in requests):
        raise Interrupted


def test_a_send_that_completes_leaves_nothing_behind():
    comm = Comm()
    link = MpiLink(comm)
    link.send(1, np.arange(3, dtype=np.int16))
    (header, to, _), (data, _, _) = comm.sent
    assert (header[1], to, data.nbytes, link.unfinished) == (3, 1, 6, {})


def test_a_left_wait_keeps_the_buffers_that_mpi_may_still_write_to():
    link = MpiLink(Comm(), wait=interrupt)
    with pytest.raises(Interrupted):
        link.exchange(1, np.arange(3), 1)
    kept = [buffer for _, buffers in link.unfinished.values() for buffer in buffers]
    assert len(kept) == 3


def test_a_wait_pauses_between_its_looks(monkeypatch):
    looks, pauses = iter([False, False, True]), []
    monkeypatch.setattr(links, "Pause", lambda: lambda: pauses.append("a pause"))
    links.poll([SimpleNamespace(Test=lambda: next(looks))])
    assert len(pauses) == 2


def test_a_dtype_that_cannot_travel_is_named():
    with pytest.raises(TypeError, match="found str"):
        MpiLink(Comm()).send(1, np.array(["a"]))
