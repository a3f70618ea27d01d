"""What every suite may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kernel import Kernel
from tests.labs import LABS

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says which tests must run in one process where several share the work."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    # What looks at a lab needs the process that has run it. Launches of mpiexec share nothing.
    lab = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    if lab in LABS:
        return lab
    return item.nodeid if item.path.parent.name == "mpi" else item.nodeid.partition("::")[0]


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
