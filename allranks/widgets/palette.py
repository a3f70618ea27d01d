"""The colours of ``front/palette.js``, for pictures without scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path

_SOURCE = (Path(__file__).parent / "front" / "palette.js").read_text("utf-8")
_FOUND = re.search(r"^export const PALETTE = (\{.*\});$", _SOURCE, re.MULTILINE | re.DOTALL)
assert _FOUND is not None
_PALETTE = json.loads(_FOUND[1])

#: Of ranks, or of members, on white paper: after the last one, the first is dashed.
RANKS: tuple[str, ...] = tuple(_PALETTE["ranks"]["light"])
#: Lengths of dashes and gaps, for more ranks than there are colours.
DASHES: tuple[list[int], ...] = tuple(_PALETTE["dashes"])
#: What a rank spends its time on, and the colours of that on white paper.
KINDS: tuple[str, ...] = tuple(_PALETTE["kinds"])
TIME: tuple[str, ...] = tuple(_PALETTE["time"]["light"])
#: Greys from the worst member to the best.
WORST_TO_BEST: tuple[int, int] = tuple(_PALETTE["worstToBest"]["light"])
