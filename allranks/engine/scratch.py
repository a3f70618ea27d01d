"""What libraries write to temporary files lies in the session's folder, which is removed.

They remove it themselves at the exit of their process, and a rank ends without one.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any

from allranks.post_import import PostImportHook

_WRITES_SOURCE = "tensorflow.python.autograph.pyct.loader"


def keep_in(folder: str) -> None:
    """Has multiprocessing and TensorFlow's AutoGraph write to a folder, from now on."""
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]

    def write_there(loader: Any) -> None:
        named = partial(tempfile.NamedTemporaryFile, dir=folder)
        loader.tempfile = SimpleNamespace(NamedTemporaryFile=named)

    PostImportHook([_WRITES_SOURCE], write_there).install()
