"""Changes of libraries in ranks, and the libraries that the host agent imports before the fork."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from allranks.engine import pinning
from allranks.post_import import PostImportHook
from allranks.records.config import NurseryConfig

#: Otherwise each rank would load these for its first traceback and its first completion.
_IMPORTS = (
    "IPython.core.completer",
    "stack_data",
    "pygments.lexers.python",
    "pygments.formatters.terminal256",
    "pygments.formatters.html",
)
#: Libraries that run beside the cells, in the same process.
_BESIDE_CELLS = r"(ipykernel|ipyparallel|jupyter_client|tornado|traitlets|zmq)(\.|$)"
_EVERY_WARNING = ("ignore", None, Warning, None, 0)
_WRITES_SOURCE = "tensorflow.python.autograph.pyct.loader"
_TQDM_CHOICE = "tqdm.autonotebook"


def preload(config: NurseryConfig, tell: Callable[..., None]) -> None:
    """Imports modules once for all ranks: those that each rank needs, and those of ``--preload``.

    An import that fails here fails again, with its error, in the cell that needs the module.
    """
    for name in _IMPORTS:
        importlib.import_module(name)
    _prepare_tracebacks()
    show_progress_as_text()
    if config.preload:
        _preload(config, tell)


def _preload(config: NurseryConfig, tell: Callable[..., None]) -> None:
    for name, value in pinning.QUIET_TORCH.items():
        os.environ.setdefault(name, value)
    if not config.devices:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", pinning.QUIET)
    sys.path.insert(0, "")  # the notebook finds modules beside it, too
    for name in config.preload:
        tell("preloading", module=name)
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
        if set(config.devices) != {pinning.HIDDEN} and pinning.is_cuda_open():
            # Ranks are forked from this process, and CUDA would fail in them. That does not matter
            # where no rank is shown a GPU.
            tell("opened_cuda", module=name)
            break
    tell("preloading", module="")
    if "" in sys.path:
        sys.path.remove("")


def _prepare_tracebacks() -> None:
    from IPython.core.ultratb import VerboseTB

    try:
        # Loads and compiles the code that each rank would need for its first traceback.
        raise ValueError
    except ValueError as error:
        with suppress(Exception):  # ranks handle it if IPython cannot
            VerboseTB().structured_traceback(ValueError, error, error.__traceback__)


def ignore_warnings() -> None:
    # With ``PYTHONWARNINGS=error``, a deprecation in a library would end every rank at its start.
    warnings.simplefilter("ignore")


def restore_warnings() -> None:
    warnings.filters.remove(_EVERY_WARNING)  # type: ignore[attr-defined]
    # This call also invalidates Python's cache of filters.
    warnings.filterwarnings("ignore", module=_BESIDE_CELLS)


def keep_temporary_files_in(folder: str) -> None:
    """Has multiprocessing and TensorFlow's AutoGraph write temporary files to the session's folder.

    The libraries remove them at the exit of the process, but a rank is killed.
    """
    import multiprocessing

    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]

    def write_there(loader: Any) -> None:
        named = partial(tempfile.NamedTemporaryFile, dir=folder)
        loader.tempfile = SimpleNamespace(NamedTemporaryFile=named)

    PostImportHook([_WRITES_SOURCE], write_there).install()


def show_progress_as_text() -> None:
    """Has ``tqdm.auto`` and rich draw text bars, for libraries that are imported from now on.

    Equal lines of several ranks are folded, and text is saved with the notebook. ``tqdm.notebook``
    still is a widget on each rank.
    """
    _rich.install()
    if not any(isinstance(finder, _TqdmChoice) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TqdmChoice())


class _TqdmChoice(MetaPathFinder, Loader):
    """Replaces the module in which tqdm decides whether it draws a widget."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == _TQDM_CHOICE else None

    def exec_module(self, module: ModuleType) -> None:
        import tqdm.std

        vars(module).update(tqdm=tqdm.std.tqdm, trange=tqdm.std.trange)


def _draw_as_in_a_terminal(progress: Any) -> None:
    from rich.console import Console

    # TERM of the kernel's environment describes a terminal in which the bars are not drawn.
    console = Console(
        force_jupyter=False,
        force_terminal=True,
        color_system="standard",
        width=80,
        _environ={**os.environ, "TERM": "xterm"},
    )
    progress.get_console = lambda: console


_rich = PostImportHook(["rich.progress"], _draw_as_in_a_terminal)
