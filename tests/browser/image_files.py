"""Screenshots as files that are small enough for the docs: palettes, and one that moves."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

MOVING_NBYTES = 1_000_000
_COLOURS, _MOVING_COLOURS = 256, 64


def write(shot: bytes, path: Path) -> None:
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    image.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def write_moving(shots: list[bytes], path: Path, seconds: float, last_seconds: float) -> int:
    """Writes a GIF; returns its size in bytes.

    Args:
        shots: its frames; the last but one has all colours.
        path: where it goes.
        seconds: how long a frame is shown.
        last_seconds: how long the last one is.

    Raises:
        ValueError: it is too large.
    """
    opened = [Image.open(io.BytesIO(shot)).convert("RGB") for shot in shots]
    tall, wide = max(image.height for image in opened), opened[0].width
    # One palette for all, and no dithering: what has not changed is not written again.
    palette = opened[-2].quantize(_MOVING_COLOURS, dither=Image.Dither.NONE)
    frames = []
    for image in opened:
        page = Image.new("RGB", (wide, tall), "white")
        page.paste(image)
        frames.append(page.quantize(palette=palette, dither=Image.Dither.NONE))
    durations = [int(1000 * seconds)] * (len(frames) - 1) + [int(1000 * last_seconds)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)
    nbytes = path.stat().st_size
    if nbytes > MOVING_NBYTES:
        raise ValueError(f"expected at most {MOVING_NBYTES:,} bytes, found {nbytes:,}: {path}")
    return nbytes
