"""The calls by which MPI makes a communicator of another one, while a rank may die.

Open MPI 5.0 learns of a death within its calls, and then ends the collectives of all communicators
of that rank. A communicator that is not complete has no collectives yet, and the process crashes
(`ompi_comm_revoke_local`). So these calls do not learn of deaths. If the notebook reports one, the
parent is revoked, which ends the call with an error. MPI learns of the death in its next call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from mpi4py import MPI

from allranks.collectives.calls.rank_state import RankState


def _event_setting() -> Callable[[int], int] | None:
    """Returns Open MPI's function that sets how its calls handle events, 0 for not at all, and
    returns the setting before; None for other libraries.
    """
    try:
        found: Callable[[int], int] = ctypes.CDLL(MPI.__file__).opal_progress_set_event_flag
    except (AttributeError, OSError):
        return None
    # The parent is revoked by another thread.
    return found if MPI.Query_thread() == MPI.THREAD_MULTIPLE else None


class Creation:
    """The call of one rank that makes a communicator."""

    def __init__(self, own: RankState) -> None:
        self._own = own
        self._call: tuple[MPI.Comm, frozenset[int]] | None = None
        """The parent, and its ranks."""
        self._set_events = _event_setting()
        self.through_tcp = not own.shared_by_all
        """Whether ranks are connected by tcp, which needs events: then calls do learn of deaths."""

    @contextmanager
    def of(self, parent: MPI.Comm, ranks: Iterable[int]) -> Iterator[None]:
        """Within, MPI makes a communicator of ``parent``, which has these ranks.

        Raises MPI's exception if one of them dies.
        """
        if self._set_events is None or self.through_tcp:
            yield
            return
        self._call = parent, frozenset(ranks)
        before = self._set_events(0)
        try:
            # If `end` came before this call was noted, it does not come again.
            if not self._call[1].isdisjoint(self._own.died):
                raise MPI.Exception(MPI.ERR_REVOKED)
            yield
        finally:
            self._set_events(before)
            self._call = None

    def end(self) -> None:
        """Ends the call if a rank has died that it needs. For any thread."""
        if (call := self._call) is not None and not call[1].isdisjoint(self._own.died):
            with suppress(MPI.Exception):  # the call has ended, and the parent was freed
                MPI.Comm.Revoke(call[0])
