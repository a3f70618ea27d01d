"""Runs torch's own tests of torch.distributed on the ranks of mpiexec, on allranks or on gloo.

mpiexec -n 3 python tests/torch/ranks/torch_suite.py allranks FOLDER [NAME…] writes a file with the
outcome of each test into the folder, for each rank. The tests are in torch's wheel.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
import unittest
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks import collectives

backend, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
collectives.init()
rank, size = collectives.rank(), collectives.size()
for part in ("barrier", "test_dir", "init_dir", "meet"):
    (folder / part).mkdir(parents=True, exist_ok=True)
os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE=str(size),
    TEMP_DIR=str(folder),
    INIT_METHOD=f"file://{folder}/init_dir/shared_init_file",
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if backend == "allranks":
    from allranks.features.torch_jax import hook

    hook.install()

if importlib.util.find_spec("expecttest") is None:
    # torch's tests import it for comparisons of text, which none of these makes.
    stand_in: Any = ModuleType("expecttest")
    stand_in.TestCase, stand_in.assert_expected_inline = unittest.TestCase, None
    sys.modules["expecttest"] = stand_in

from torch.autograd.profiler_util import FunctionEvent  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402
from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

LONGEST_SECONDS = 240.0
plain_init = FunctionEvent.__init__


def as_of_gloo(self: Any, *args: Any, **options: Any) -> None:
    """The profiler's events are compared with gloo's, except this mark: only C++ can set it."""
    plain_init(self, *args, **options)
    self.is_async = self.is_async or self.name.startswith("gloo:")


if backend == "allranks":
    FunctionEvent.__init__ = as_of_gloo
SKIPS = {skip.exit_code for skip in TEST_SKIPS.values()}


class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """torch's tests, as one class."""

    def __init__(self, name: str, init_file: str) -> None:
        unittest.TestCase.__init__(self, name)
        self.rank, self.init_file = rank, init_file

    @property
    def init_method(self) -> str:
        return f"file://{self.init_file}"


def is_skipped(function: object) -> str:
    """Why unittest would skip a test; it marks the function or a function that it wraps."""
    while function is not None:
        if getattr(function, "__unittest_skip__", False):
            return str(getattr(function, "__unittest_skip_why__", "")) or "skipped"
        function = getattr(function, "__wrapped__", None)
    return ""


def meet(name: str) -> None:
    """A barrier of all ranks through files: it must not depend on what is tested."""
    (folder / "meet" / f"{name}.{rank}").touch()
    deadline = time.monotonic() + LONGEST_SECONDS
    while sum(1 for _ in (folder / "meet").glob(f"{name}.*")) < size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks came to {name}")
        time.sleep(0.01)


def run(name: str) -> str:
    function = getattr(Tests, name)
    why = is_skipped(function)
    if why:
        return f"skipped: {why}"
    test = Tests(name, f"{folder}/init_dir/{name}")
    seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
    suite.Barrier.barrier_id = 0
    with suppress(OSError):
        os.unlink(folder / "barrier" / str(os.getpid()))
    meet(f"{name}-begins")
    torch.manual_seed(1)
    try:
        dist.init_process_group(
            init_method=test.init_method, backend="gloo", world_size=size, rank=rank,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        function(test)
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:
        return f"skipped: {end.code}" if end.code in SKIPS else f"failed: exit {end.code}"
    except BaseException:
        return f"failed: {traceback.format_exc()}"
    return "passed"


def main() -> None:
    if torch.cuda.is_available():
        raise SystemExit("expected ranks without a GPU: CUDA_VISIBLE_DEVICES=")
    torch.set_num_threads(1)
    found = names or sorted(
        name for name, _ in inspect.getmembers(Tests, inspect.isfunction) if name[:5] == "test_"
    )
    outcomes: dict[str, list[object]] = {}
    for number, name in enumerate(found):
        faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True)
        began = time.monotonic()
        collectives.scope.enter(name, None, number + 1)
        outcome = run(name)
        failed = outcome.startswith("failed")
        if failed:  # the others may wait for this rank
            collectives.scope.leave(outcome.splitlines()[-1], failed)
        meet(f"{name}-ended")
        if not failed:
            collectives.scope.leave()
        with suppress(Exception):
            dist.destroy_process_group()
        collectives.renew()
        outcomes[name] = [outcome, round(time.monotonic() - began, 2)]
        (folder / f"outcomes.{rank}").write_text(json.dumps(outcomes))
        if rank == 0 and not outcome.startswith("skipped"):
            print(name, *outcomes[name], flush=True)
    faulthandler.cancel_dump_traceback_later()
    meet("end")


main()
