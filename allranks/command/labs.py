"""``allranks labs``: the labs of the documentation, as copies without output."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import allranks
from allranks.errors import UsageError

_PACKAGE = Path(allranks.__file__).parent
#: In a wheel, and in a checkout; hatch_build.py copies the labs of a checkout into the wheel.
_PLACES = (_PACKAGE / "labs", _PACKAGE.parent / "notebooks")
#: For some labs the packages that they import, and what installs these.
_NEEDS = (
    ("Labs 1 to 8 and 13 need", "'allranks[lab]'", ("jupyterlab", "matplotlib")),
    ("Labs 9 to 11 need", "'allranks[lab,tensorflow]'", ("tensorflow",)),
    ("Lab 12 needs", "torch scikit-learn", ("torch", "sklearn")),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "folder", nargs="?", default=".", type=Path, help="default: the current folder"
    )
    parser.epilog = "An existing copy is not overwritten; remove it to start again."
    parser.set_defaults(act=lambda typed: copy(typed.folder))


def copy(folder: Path) -> int:
    """Copies the labs into a folder, and prints what was copied and kept."""
    labs = next((found for place in _PLACES if (found := sorted(place.glob("*.ipynb")))), [])
    if not labs:
        raise UsageError(
            f"expected the labs in {_PLACES[0]}, found none. Type: pip install --force-reinstall "
            "allranks"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = [lab.name for lab in labs if not _copy_one(lab, folder)]
    except OSError as error:
        raise UsageError(
            f"expected a folder to which the labs can be copied, found {folder}: "
            f"{error.strerror}. Type for example: allranks labs course"
        ) from error
    sys.stdout.write(f"{len(labs) - len(kept)} labs were copied to {folder.resolve()}.\n")
    if kept:
        sys.stdout.write(f"Not overwritten: {', '.join(kept)}\n")
    for needs, installed_by, packages in _NEEDS:
        if missing := [each for each in packages if find_spec(each) is None]:
            what = " and ".join(missing)
            sys.stdout.write(f"{needs} {what}, not found here. Type: pip install {installed_by}\n")
    sys.stdout.write(f"Type: jupyter lab {folder / labs[0].name}\n")
    return 0


def _copy_one(lab: Path, folder: Path) -> bool:
    try:
        # "x": in a folder of several users, a link could lead to any new file.
        with (folder / lab.name).open("x", encoding="utf-8") as copied:
            copied.write(_without_output(lab.read_text(encoding="utf-8")))
    except FileExistsError:
        return False
    return True


def _without_output(text: str) -> str:
    # No answer stands below its question, until the reader has run the cell.
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
