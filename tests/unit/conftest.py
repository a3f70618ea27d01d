"""What several unit tests need."""

import json
import sys
from pathlib import Path

import pytest

FAKE = str(Path(__file__).resolve().parents[1] / "fakes" / "nvml")


@pytest.fixture
def driver(monkeypatch):
    """Puts GPUs into a FAKE pynvml, and a CUDA_VISIBLE_DEVICES beside them."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def put(gpus, chosen=None):
        monkeypatch.setenv("ALLRANKS_FAKE_NVML", json.dumps(gpus))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if chosen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

    yield put
    sys.modules.pop("pynvml", None)


@pytest.fixture
def shells():
    """Two shells of this process that have loaded the extension, with the features that are there.

    A test file changes these first, in a fixture that each of its tests uses.
    """
    from IPython.core.interactiveshell import InteractiveShell

    from allranks.magics.extension import load, unload

    shells = InteractiveShell(), InteractiveShell()
    for shell in shells:
        load(shell)
    yield shells
    for shell in shells:
        unload(shell)
