"""Shows an array of JAX that is spread over the ranks with its sharding and this rank's parts,
where JAX shows its shape only.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from IPython.core.interactiveshell import InteractiveShell

#: Of more parts, only their number is shown.
_SHOWN = 4


def install(module: ModuleType, shell: InteractiveShell) -> None:
    """Registers the arrays of ``jax._src.array`` with the shell."""
    display: Any = shell.display_formatter
    display.formatters["text/plain"].for_type(module.ArrayImpl, _print)


def _print(array: Any, printer: Any, cycle: bool) -> None:
    for number, line in enumerate(text_of(array).splitlines()):
        if number:
            printer.break_()
        printer.text(line)


def text_of(array: Any) -> str:
    """Returns the text that stands for an array in the output of a cell."""
    # JAX shows the values of these itself.
    if array.is_deleted() or array.is_fully_addressable or array.is_fully_replicated:
        return repr(array)
    kind = f"shape={array.shape}, dtype={array.dtype}, sharding={array.sharding}"
    lines = [f"Array({kind})"]
    for shard in array.addressable_shards[:_SHOWN]:
        lines.append(f"{_place(shard.index, array.shape)} on {shard.device}:")
        lines += [f"  {line}" for line in str(np.asarray(shard.data)).splitlines()]
    more = len(array.addressable_shards) - _SHOWN
    return "\n".join([*lines, f"… {more} more parts on this rank"] if more > 0 else lines)


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    spans = (part.indices(length) for part, length in zip(index, shape, strict=True))
    return f"[{', '.join(f'{start}:{stop}' for start, stop, _ in spans)}]"
