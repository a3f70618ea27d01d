"""Without TensorFlow the import says what to type."""

from __future__ import annotations

import subprocess
import sys


def test_a_missing_tensorflow_comes_with_the_install_line() -> None:
    code = "import sys; sys.modules['tensorflow'] = None; import allranks.tensorflow"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "allranks.errors.MissingDependency: allranks.tensorflow needs TensorFlow"
    )
    assert last.endswith('pip install "allranks[tensorflow]"')
