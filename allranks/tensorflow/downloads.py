"""Files that several ranks download at once, for Keras' data sets. Runs in every rank.

Keras writes a file where it is looked for while it downloads: a rank that comes a second later
finds half of it. Here a file takes its place when it is whole, whoever is first and last.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from typing import Any

_PLACE = "keras.src.utils.file_utils"
_MARK = "_allranks_whole"


def install() -> None:
    """Keras downloads so from now on; a second call does nothing.

    TensorFlow imports Keras; where it was told to use another Keras, this does nothing.
    """
    module: Any = sys.modules.get(_PLACE)
    for name, whole in (("urlretrieve", _downloads), ("extract_archive", _extracts)):
        found = getattr(module, name, None)
        if found is not None and not hasattr(found, _MARK):
            made = whole(found)
            setattr(made, _MARK, True)
            setattr(module, name, made)


def _downloads(retrieve: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(retrieve)
    def urlretrieve(url: str, filename: str, *args: Any, **options: Any) -> Any:
        part = _beside(filename)
        try:
            _, headers = retrieve(url, part, *args, **options)
            os.replace(part, os.path.realpath(filename))
        finally:
            if os.path.exists(part):
                os.remove(part)
        return filename, headers

    return urlretrieve


def _extracts(extract: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(extract)
    def extract_archive(file_path: str, path: str = ".", archive_format: Any = "auto") -> Any:
        part = _beside(path)
        try:
            done = extract(file_path, part, archive_format)
            for folder, folders, files in os.walk(part):
                into = os.path.normpath(os.path.join(path, os.path.relpath(folder, part)))
                os.makedirs(into, exist_ok=True)
                links = [one for one in folders if os.path.islink(os.path.join(folder, one))]
                for file in [*files, *links]:
                    os.replace(os.path.join(folder, file), os.path.join(into, file))
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return done

    return extract_archive


def _beside(path: str) -> str:
    """A name in the same folder that no other rank of any host takes."""
    return f"{os.path.realpath(path)}.{uuid.uuid4().hex}.part"
