"""Numeric libraries of a rank take the rank's share of the cores, and no more."""

from __future__ import annotations

import os

THREADS = """%%distributed -n 4
import numpy as np
from threadpoolctl import threadpool_info
print({pool["num_threads"] for pool in threadpool_info()})
"""


def test_numpy_has_one_ranks_share_of_the_cores(new_kernel):
    kernel = new_kernel(env={"OMP_NUM_THREADS": None})
    kernel.run("%load_ext allranks")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert kernel.run(THREADS).text.endswith(f"ranks 0–3 │ {{{max(1, cores // 4)}}}\n")
