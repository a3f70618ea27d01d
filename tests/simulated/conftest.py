from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated.scenarios import Simulator


@pytest.fixture(scope="session")
def simulator() -> Iterator[Simulator]:
    found = Simulator()
    yield found
    found.close()
