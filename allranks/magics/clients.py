"""``ipp.Client()`` in a notebook connects to the ranks of this notebook, and to no others.

ipyparallel takes the file without a name in IPython's profile, which may be another notebook's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from allranks.cluster.announced import of_notebooks
from allranks.errors import UsageError
from allranks.magics.session import Session
from allranks.post_import import PostImportHook


class Clients:
    """Has ipyparallel's ``Client`` find the ranks of one notebook.

    Args:
        session: the notebook's ranks.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plain: Callable[..., None] | None = None
        self._kind: Any = None
        self._hook = PostImportHook(("ipyparallel.client.client",), self._replace)
        self._hook.install()

    def remove(self) -> None:
        """Leaves ipyparallel as it was."""
        self._hook.uninstall()
        if self._plain is not None:
            self._kind.__init__ = self._plain

    def _replace(self, module: ModuleType) -> None:
        kind = self._kind = module.Client
        plain = self._plain = kind.__init__

        @wraps(plain)
        def init(client: Any, connection_info: Any = None, **options: Any) -> None:
            if connection_info is None and not any(map(options.get, _CHOOSE)):
                connection_info = self._own()
            plain(client, connection_info, **options)

        kind.__init__ = init

    def _own(self) -> dict[str, Any] | None:
        """Returns how this notebook's ranks are reached; None where ipyparallel is to search.

        Raises:
            UsageError: this notebook has no ranks, and others have.
        """
        running = self._session.running
        if running is not None:
            return running.connection_information()
        others = of_notebooks()
        if not others:
            return None
        lines = [f"  ipp.Client({str(path)!r})  {size} ranks" for path, size in others]
        raise UsageError(
            "ipp.Client() expected ranks of this notebook, found none. Type: %distributed start\n"
            "Other notebooks of yours have ranks. To use those, type one of:\n" + "\n".join(lines)
        )


_CHOOSE = ("url_file", "url_or_file", "profile", "profile_dir", "ipython_dir", "cluster_id")
"""Arguments that choose a cluster."""
