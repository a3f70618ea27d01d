"""Where a rank has spent its time, as stacks. Both sides; standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Each costs some 0.2 ms where Python is busy: two threads have to take turns twice.
SAMPLES_A_SECOND = 50
#: Seconds by stack, the outermost frame first.
Stacks = Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class Profile:
    """The seconds of one rank in each stack."""

    rank: int
    stacks: Stacks

    @property
    def seconds(self) -> float:
        return sum(self.stacks.values())

    def to_content(self) -> dict[str, Any]:
        # For JSON, with each frame's name once.
        numbers: dict[str, int] = {}
        rows = [
            [seconds, [numbers.setdefault(name, len(numbers)) for name in stack]]
            for stack, seconds in self.stacks.items()
        ]
        return {"frames": list(numbers), "stacks": rows}

    @classmethod
    def from_content(cls, rank: int, content: Mapping[str, Any]) -> Profile:
        frames = content["frames"]
        return cls(
            rank,
            {tuple(frames[i] for i in stack): seconds for seconds, stack in content["stacks"]},
        )

    def collapsed(self) -> str:
        """Returns one line a stack, ``rank 0;outer;inner 1234``: frames and microseconds.

        This is the format of flamegraph.pl, speedscope and inferno.
        """
        lines = []
        for stack, seconds in sorted(self.stacks.items()):
            names = [name.replace(";", ",").replace("\n", " ") for name in stack]
            lines.append(f"{';'.join([f'rank {self.rank}', *names])} {round(seconds * 1e6)}\n")
        return "".join(lines)
