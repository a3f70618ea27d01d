"""Shows the profile of a cell below it, and writes it where the user says."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from allranks.errors import UsageError
from allranks.records.profile import Profile
from allranks.widgets.flame.picture import page, svg
from allranks.widgets.flame.tree import fold
from allranks.widgets.flame.words import text
from allranks.widgets.front_end import TERMINAL, front_end


def check_file(name: str) -> Path:
    """Returns where a profile is to be written.

    Raises:
        UsageError: there is no such folder.
    """
    path = Path(name).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"expected a file in an existing folder, found {name!r}. Type for example: "
            "--save profile.txt, or --save profile.svg for the picture"
        )
    return path


def bundle(profiles: Sequence[Profile]) -> dict[str, str]:
    """Returns text/html and text/plain of the flame graph of all ranks."""
    folded = fold(profiles)
    return {"text/html": page(folded), "text/plain": text(folded)}


def show(profiles: Sequence[Profile], file: Path | None = None) -> None:
    """Shows the flame graph of all ranks, and writes it to ``file``: as SVG, else as stacks."""
    folded = fold(profiles)
    if front_end() == TERMINAL:
        sys.stdout.write(text(folded) + "\n")
    else:
        from IPython.display import display

        display(bundle(profiles), raw=True)
    if file is None:
        return
    stacks = "".join(profile.collapsed() for profile in profiles)
    said = f"The profile is in {file}."
    try:
        file.write_text(svg(folded, titled=True) if file.suffix == ".svg" else stacks, "utf-8")
    except OSError as error:
        said = f"The profile could not be written to {file}: {error.strerror}."
    sys.stdout.write(said + "\n")
