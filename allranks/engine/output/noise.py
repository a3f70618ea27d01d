"""What libraries write about themselves when they are imported, and how it is held back."""

from __future__ import annotations

import re

QUIET = "3"
"""TensorFlow looks for CUDA where there is none, and says so at length: only fatal errors show."""
QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torch warns of each connection that ends, with a stack of C++: what it means is told by us."""

#: TensorFlow's lines of C++ that come before its log is set up heed no TF_CPP_MIN_LOG_LEVEL, and
#: the first of them says so.
_BEFORE = "absl::InitializeLog() is called"
#: Where its clock has not been set up yet, "0000 00:00:" and seconds stand for date and time.
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
    """Returns text without TensorFlow's known lines at its start; the log has them."""
    if _BEFORE not in text and "0000 00:00:" not in text:
        return text
    return "".join(line for line in text.splitlines(keepends=True) if not _is_noise(line))


def _is_noise(line: str) -> bool:
    known = _KNOWN.search(line)
    return _BEFORE in line or bool(known and (_EARLY.match(line) or line.startswith("To enable")))
