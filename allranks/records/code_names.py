"""The file names under which ranks compile cells. Both sides; standard library only.

Libraries that cache functions or show their lines recognise ipykernel's names of cells: a file that
does not exist, in a temporary folder ``ipykernel_…``. A cell of the same text has the same name on
every rank, in later notebooks in another folder. People see ``In[3]`` instead.

All accounts can write to ``/tmp``. A rank that gets a function of a cell which it has not run looks
for the file, and `inspect.getsource` gives its text to libraries that compile it. So the folder's
name is a secret of the cluster.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from functools import cache

_FOLDER = "ipykernel_ranks"
#: A pattern: the file name of a cell's code on any machine. It begins behind a space or quotation
#: mark, because a search at each character of a long word would take minutes.
FILE_OF_CELL = rf"(?<![^\s\"'])[^\s\"']*\b{_FOLDER}\w*/\w+\.py"
_name = _FOLDER


def name_folder(secret: str) -> None:
    """Gives the folder of all names a name that only those with this text can find."""
    global _name
    _name = f"{_FOLDER}_{_digest(secret)}"
    _folder.cache_clear()


@cache
def _folder() -> str:
    try:
        return os.path.join(tempfile.gettempdir(), _name, "")
    except OSError:  # the disk is full
        return os.path.join(os.sep, "tmp", _name, "")


def code_name(source: str) -> str:
    """Returns the file name of a cell's code."""
    return f"{_folder()}{_digest(source)}.py"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()


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
