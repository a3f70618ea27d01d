"""The kernel of a rank: IPython's shell, and the event loop in which cells run."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.profiledir import ProfileDir
from IPython.paths import get_ipython_dir
from traitlets.config import Config

# ipykernel imports debugpy for a debugger that no front end can reach on a rank, which takes half
# the start of a kernel. ipykernel works without it, and a cell can still import debugpy.
if "debugpy" not in sys.modules:
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    try:
        import ipykernel.debugger  # noqa: F401
    finally:
        del sys.modules["debugpy"]


#: After this time ZeroMQ's thread has sent an answer. Clients wait for it without a limit.
LAST_ANSWER_SECONDS = 1.0


def use_ipython_folder(temporary: str) -> None:
    """Has IPython write to the folder ``temporary`` if it cannot write in the user's home.

    Otherwise it would make a folder of its own, and never remove it.
    """
    if not _has_ipython_folder(temporary):
        os.environ["IPYTHONDIR"] = os.path.join(temporary, "ipython")


def _has_ipython_folder(temporary: str) -> bool:
    """Whether IPython finds a folder for its profiles, and makes none in ``temporary`` instead."""
    before, tempfile.tempdir = tempfile.tempdir, temporary
    try:
        found = get_ipython_dir()
        ProfileDir.create_profile_dir_by_name(found)
    except OSError:  # the disk is full, or the mode of a folder promises too much
        return False
    finally:
        tempfile.tempdir = before
    return os.path.dirname(found) != temporary


class RankKernel(Protocol):
    """A kernel whose shell runs the cells of a rank."""

    @property
    def kernel(self) -> Any:
        """ipykernel's own object, with its ``shell``."""

    @property
    def ident(self) -> str:
        """The name by which clients know this kernel; empty without clients."""

    def start(self) -> None:
        """Runs the event loop, in which it calls `KernelStart.ready` once."""

    @property
    def is_shut_down(self) -> bool:
        """Whether a client has ended it."""


@dataclass(frozen=True)
class KernelStart:
    """What a feature needs to make the kernel of a rank.

    Attributes:
        connection: how kernels reach the feature's `ClientController`.
        rank: the rank's number among ``size``.
        profile_dir: a folder for its profile of IPython.
        ready: is called with the kernel when its shell is there, in its event loop.
        replaces: whether the rank replaces one that has died.
    """

    connection: dict[str, Any]
    rank: int
    size: int
    profile_dir: str
    ready: Callable[[RankKernel], None]
    replaces: bool


class PlainKernel:
    """The kernel of a rank that no clients reach."""

    ident = ""
    is_shut_down = False

    def __init__(self, start: KernelStart) -> None:
        self._start = start
        self.kernel: Any = None

    def start(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.call_soon(self._begin)
        loop.run_forever()

    def _begin(self) -> None:
        from ipykernel.inprocess.ipkernel import InProcessKernel

        self.kernel = InProcessKernel.instance(
            shell_class=ZMQInteractiveShell,
            profile_dir=ProfileDir(location=self._start.profile_dir),
            config=Config(HistoryManager={"hist_file": ":memory:"}),
            user_ns={},
        )
        self._start.ready(self)
