"""The variables that notebooks for ipyparallel have after their first cells: ``rc``, ``dv``, ….

`%load_ext allranks.px` stands in place of these cells, so it adds the variables. Nothing starts
before one of them is used: ``rc.ids`` starts the ranks, and says so; `repr`, a look by ``rc?`` and
the completion of a name do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allranks.cluster.ipython_profile import profile_folder
from allranks.features.ipyparallel.connection_files import connection_files
from allranks.magics.session import Session, described, is_looked_at
from allranks.records.ranks import label

_LOG_NBYTES = 10_000
#: What ipyparallel's clients and views have since they were made, not their classes.
_PARTS = ("executor", "session")


def say_which_start(session: Session) -> None:
    """Says that ranks of this notebook start, if another notebook has some: ipyparallel would use
    those.
    """
    if session.running is not None or session.where():
        return
    if found := connection_files(profile_folder(), only_here=True):
        print(
            f"Starting ranks of this notebook, beside {' and '.join(found.values())}. To use those "
            "in place of these, type: %distributed stop   and then: %distributed attach"
        )


class ClientProxy:
    """ipyparallel's client of the ranks, or its view of all of them, made when it is first used."""

    __slots__ = ("_is_view", "_session")

    def __init__(self, session: Session, is_view: bool = False) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_is_view", is_view)

    def _make(self) -> Any:
        if is_looked_at():
            raise TypeError("a look starts no ranks")
        say_which_start(self._session)
        client = self._session.cluster().client()
        return client[:] if self._is_view else client

    def _kind(self) -> Any:
        import ipyparallel

        return ipyparallel.DirectView if self._is_view else ipyparallel.Client

    def __getattr__(self, name: str) -> Any:
        # IPython asks every object for _repr_html_ and the like: that starts nothing.
        if name.startswith("_"):
            raise AttributeError(name)
        if is_looked_at():
            return described(self._kind(), name, self)
        known = name in _PARTS or self._session.running is not None or hasattr(self._kind(), name)
        if not known:
            raise AttributeError(f"ipyparallel's {self._kind().__name__} has no {name!r}")
        return getattr(self._make(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._make(), name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._make()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._make()[key] = value

    def __bool__(self) -> bool:
        return True  # as of a client, whose number of engines is not asked for

    def __len__(self) -> int:
        return len(self._make())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())

    def __dir__(self) -> list[str]:
        return dir(self._kind())

    def __repr__(self) -> str:
        what = "view" if self._is_view else "client"
        running = self._session.running
        if running is None:
            return f"<ipyparallel {what}: no ranks; the next %%px, or the first use, starts them>"
        return f"<ipyparallel {what} of {label(range(running.size))}>"


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

    def restart_engines_sync(self) -> None:
        """Ends the ranks and starts them again, as ``%distributed restart`` does."""
        self._session.restart()

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

    async def restart_engines(self) -> None:
        """Like `restart_engines_sync`."""
        self.restart_engines_sync()

    async def stop_cluster(self) -> None:
        """Like `stop_cluster_sync`."""
        self.stop_cluster_sync()

    def __repr__(self) -> str:
        running = self._session.running
        return repr(running) if running is not None else "<ranks, not started yet>"


def variables(session: Session) -> dict[str, Any]:
    """Returns the variables by name."""
    client, view = ClientProxy(session), ClientProxy(session, is_view=True)
    return {"rc": client, "dv": view, "view": view, "cluster": PxCluster(session, client)}
