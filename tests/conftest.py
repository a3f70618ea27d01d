"""What every suite may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kernel import Kernel

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def repository() -> Path:
    """Where pyproject.toml stands."""
    return REPOSITORY


@pytest.fixture
def new_kernel(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Starts kernels, ``new_kernel(env={…})``, that end with the test."""
    with ExitStack() as stack:

        def start(env: dict[str, str | None] | None = None) -> Kernel:
            cwd = tmp_path / f"kernel{len(list(tmp_path.glob('kernel*')))}"
            cwd.mkdir()
            return stack.enter_context(Kernel(cwd, env))

        yield start


@pytest.fixture
def kernel(new_kernel: Callable[..., Kernel]) -> Kernel:
    """A fresh kernel that ends with the test."""
    return new_kernel()
