"""The file names under which ranks compile cells. Both sides; standard library only.

Libraries that cache functions or show their lines recognise ipykernel's names of cells: a file that
does not exist, in a temporary folder ``ipykernel_…``. A cell of the same text has the same name on
every rank, also in later notebooks. People see ``In[3]`` instead.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from functools import cache

_FOLDER = "ipykernel_ranks"
#: A pattern: the file name of a cell's code on any machine.
FILE_OF_CELL = rf"[^\s\"']*\b{_FOLDER}/\w+\.py"


@cache
def _folder() -> str:
    try:
        return os.path.join(tempfile.gettempdir(), _FOLDER, "")
    except OSError:  # the disk is full
        return os.path.join(os.sep, "tmp", _FOLDER, "")


def code_name(source: str) -> str:
    """Returns the file name of a cell's code."""
    text = source.encode("utf-8", "surrogatepass")
    return f"{_folder()}{hashlib.blake2b(text, digest_size=10).hexdigest()}.py"


def is_cell(file: str) -> bool:
    return file.startswith(_folder())


def with_numbers(text: str, numbers: Mapping[str, str]) -> str:
    """Returns a text in which names of cells, as ``In[3]``, replace their file names.

    ``numbers`` has them by file name; those of another machine may be in another folder.
    """
    if _FOLDER not in text:
        return text
    return re.sub(
        FILE_OF_CELL,
        lambda found: numbers.get(_folder() + os.path.basename(found[0]), found[0]),
        text,
    )
