"""The parts of ``make test-gpu``; each skips where something is missing, and says what."""

from __future__ import annotations

import pytest

from tests.gpu import parts


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", parts.PARTS, ids=lambda part: part.name)
def test_a_part_passes_on_a_gpu(part):
    if why := parts.missing_for(part):
        pytest.skip(why)
    result = parts.run(part)
    if result["state"] == "skipped":
        pytest.skip(" ".join(result["skipped"]))
    assert result["state"] == "passed", result["said"]
