"""The scenario of CONTRIBUTING.md, which is a test as it stands there."""

from __future__ import annotations

import re

from tests.gate import REPOSITORY
from tests.simulated.scenarios import reduce, simulated, work

_GUIDE = (REPOSITORY / "CONTRIBUTING.md").read_text()
_FOUND = re.search(r"```python\n(@simulated.*?)```", _GUIDE, re.DOTALL)
assert _FOUND is not None
_NAMES = {"__name__": __name__, "reduce": reduce, "simulated": simulated, "work": work}
exec(_FOUND[1], _NAMES)
globals().update({name: each for name, each in _NAMES.items() if name.startswith("test_")})
