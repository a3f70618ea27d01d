"""The variables that notebooks for ipyparallel have after their first cells: ``rc``, ``dv``, ….

`%load_ext allranks.px` stands in place of these cells, so it adds the variables. Nothing starts
before one of them is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from allranks.magics.session import Session

_LOG_NBYTES = 10_000


class ClientProxy:
    """A client or a view of ipyparallel, which is made when it is first used."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        object.__setattr__(self, "_make", make)

    def __getattr__(self, name: str) -> Any:
        # IPython asks every object for _repr_html_ and the like: that starts nothing.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._make(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._make(), name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._make()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._make()[key] = value

    def __len__(self) -> int:
        return len(self._make())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())

    def __dir__(self) -> list[str]:
        return dir(self._make())

    def __repr__(self) -> str:
        return "<ipyparallel on the ranks of this notebook>"


class EngineSet:
    """What notebooks use of a launcher of ipyparallel: how many ranks there are, and their logs."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def n(self) -> int:
        """The number of ranks; 0 if there are none."""
        running = self._session.running
        return 0 if running is None else running.size

    def get_output(self) -> str:
        """Returns the ends of the ranks' logs."""
        running = self._session.running
        if running is None:
            return ""
        return "".join(running.cells.log_end(rank, _LOG_NBYTES) for rank in range(running.size))


class PxCluster:
    """What notebooks use of ``ipyparallel.Cluster``, on the ranks of this notebook."""

    def __init__(self, session: Session, client: ClientProxy) -> None:
        self._session, self._client = session, client

    def start_cluster_sync(self, n: int | None = None) -> PxCluster:
        """Starts ``n`` ranks, or as many as the notebook has asked for."""
        self._session.of_size(n)
        return self

    def connect_client_sync(self) -> ClientProxy:
        """Returns ``rc``."""
        return self._client

    def start_and_connect_sync(self, n: int | None = None, **_ignored: Any) -> ClientProxy:
        """Starts the ranks, and returns ``rc``."""
        self.start_cluster_sync(n)
        return self._client

    @property
    def engine_set(self) -> EngineSet:
        """The ranks, as the engines that a launcher of ipyparallel has started."""
        return EngineSet(self._session)

    def stop_cluster_sync(self) -> None:
        """Ends the ranks, if there are any."""
        self._session.stop()

    async def start_cluster(self, n: int | None = None) -> PxCluster:
        """Like `start_cluster_sync`."""
        return self.start_cluster_sync(n)

    async def connect_client(self) -> ClientProxy:
        """Like `connect_client_sync`."""
        return self._client

    async def start_and_connect(self, n: int | None = None, **_ignored: Any) -> ClientProxy:
        """Like `start_and_connect_sync`."""
        return self.start_and_connect_sync(n)

    async def stop_cluster(self) -> None:
        """Like `stop_cluster_sync`."""
        self.stop_cluster_sync()

    def __repr__(self) -> str:
        running = self._session.running
        return repr(running) if running is not None else "<ranks, not started yet>"


def variables(session: Session) -> dict[str, Any]:
    """Returns the variables by name."""
    client = ClientProxy(lambda: session.cluster().client())
    view = ClientProxy(lambda: session.cluster().client()[:])
    return {"rc": client, "dv": view, "view": view, "cluster": PxCluster(session, client)}
