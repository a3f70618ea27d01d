"""What TensorFlow writes to a rank's log while it starts, and its temporary files."""

from __future__ import annotations

import os
import re
import tempfile
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from allranks.engine import libraries
from allranks.engine.features import RankContext, RankFeature
from allranks.post_import import PostImportHook

_WRITES_SOURCE = "tensorflow.python.autograph.pyct.loader"
#: TensorFlow's C++ code ignores TF_CPP_MIN_LOG_LEVEL until its log is set up. The first such line
#: has this text.
_BEFORE = "absl::InitializeLog() is called"
#: Before its clock is set up, it writes "0000 00:00:" and seconds instead of date and time.
_MARKS = _BEFORE, "0000 00:00:"
_EARLY = re.compile(r"[IWE]0000 00:00:\d+\.\d+ ")
_KNOWN = re.compile(
    r"port\.cc:\d+\] oneDNN custom operations are on"
    r"|cudart_stub\.cc:\d+\] Could not find cuda drivers"
    r"|cuda_\w+\.cc:\d+\] (Unable to register|failed call to cuInit)"
    r"|computation_placer\.cc:\d+\] computation placer already registered"
    r"|cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized"
    r"|^To enable the following instructions: .* rebuild TensorFlow"
)


def held_back(text: str) -> str:
    kept = []
    for line in text.splitlines(keepends=True):
        known = _KNOWN.search(line)
        if _BEFORE in line or (known and (_EARLY.match(line) or line.startswith("To enable"))):
            continue
        kept.append(line)
    return "".join(kept)


class TensorflowFiles(RankFeature):
    """Keeps lines that say nothing about a program in the log, and files in the session's folder.

    TensorFlow's AutoGraph removes its files at the exit of the process, but a rank is killed.
    """

    def started(self, rank: RankContext) -> None:
        if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == libraries.QUIET:
            rank.transcript.sift, rank.transcript.sift_marks = held_back, _MARKS
        self._folder = rank.config.session_dir
        PostImportHook([_WRITES_SOURCE], self._write_there).install()

    def _write_there(self, module: ModuleType) -> None:
        loader: Any = module
        named = partial(tempfile.NamedTemporaryFile, dir=self._folder)
        loader.tempfile = SimpleNamespace(NamedTemporaryFile=named)


FEATURE = TensorflowFiles
