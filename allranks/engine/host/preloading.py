"""Imports once, before the ranks are forked, what all of them need: they share it in memory."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from allranks.engine import pinning
from allranks.engine.output.noise import QUIET, QUIET_TORCH
from allranks.records.config import NurseryConfig

_IMPORTS = (
    "allranks.engine.host.controller",
    "allranks.engine.rank",
    # What a first traceback and a first completion would load in every rank again.
    "IPython.core.completer",
    "stack_data",
    "pygments.lexers.python",
    "pygments.formatters.terminal256",
    "pygments.formatters.html",
)


def preload(config: NurseryConfig, tell: Callable[..., None]) -> None:
    """Imports what runs ranks, and then what they were told to begin with.

    What cannot be imported says so in the cell that needs it.

    Args:
        config: has the modules that ranks begin with.
        tell: called with an event and its fields: which is imported next, and one that opened CUDA.
    """
    for name in _IMPORTS:
        importlib.import_module(name)
    _prepare_tracebacks()
    # Not before the launcher is started: it needs time of its own until ranks can be forked.
    from allranks.engine.output import progress

    progress.install()
    if config.preload:
        _preload(config, tell)


def _preload(config: NurseryConfig, tell: Callable[..., None]) -> None:
    for name, value in QUIET_TORCH.items():
        os.environ.setdefault(name, value)
    if not config.devices:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", QUIET)
    sys.path.insert(0, "")  # modules beside the notebook, which it finds as well
    for name in config.preload:
        tell("preloading", module=name)
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
        if set(config.devices) != {pinning.HIDDEN} and pinning.is_cuda_open():
            # Before the first fork: in what is forked from here all of CUDA would fail, which
            # matters to none who are shown no GPU.
            tell("opened_cuda", module=name)
            break
    tell("preloading", module="")
    if "" in sys.path:
        sys.path.remove("")


def _prepare_tracebacks() -> None:
    """Formats one, which loads and compiles what each rank would for its first."""
    from IPython.core.ultratb import VerboseTB

    try:
        raise ValueError
    except ValueError as error:
        with suppress(Exception):  # where IPython cannot, a rank does without it too
            VerboseTB().structured_traceback(ValueError, error, error.__traceback__)
