"""What TensorFlow writes when it is imported, and nobody has asked for.

Lines of C++ that come before its log is set up heed no TF_CPP_MIN_LOG_LEVEL.
"""

from __future__ import annotations

import re

#: Its first such line says so.
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
