"""Replacements of functions of TensorFlow and Keras that fail with several ranks on a host.

**GPUs.** ``set_visible_devices(gpus[hvd.local_rank()])`` and ``visible_device_list =
str(hvd.local_rank())`` count the GPUs of the host, but a rank may see only its own GPU. If a rank
sees one GPU and there are several ranks on the host, the list contains that GPU once for each rank.

**Downloads.** Keras downloads a data set into a file of the final name, so a rank that comes a
second later reads an incomplete file. Here a file gets its name when it is complete.

Runs in every rank.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from allranks import collectives
from allranks.tensorflow.private_api import import_private, require

_GPU = "GPU"
_KERAS_FILES = "keras.src.utils.file_utils"
_PATCHED = "_allranks_patched"


def install() -> None:
    """Replaces the functions; a second call does nothing."""
    _patch_gpus()
    _patch_downloads()


def repeated(gpus: Sequence[Any], local_size: int) -> list[Any]:
    """Returns a list of GPUs with an entry for every local rank, if there is only one GPU.

    Args:
        gpus: the GPUs that TensorFlow sees.
        local_size: the number of ranks on this host.
    """
    return list(gpus) * local_size if len(gpus) == 1 else list(gpus)


def with_own_gpu(config: Any, gpus: int) -> Any:
    """Returns a ConfigProto whose visible GPU exists.

    Args:
        config: has a ``visible_device_list`` such as ``"3"``; or None.
        gpus: the number of GPUs that TensorFlow sees; a single one replaces the chosen one.
    """
    wanted = "" if config is None else config.gpu_options.visible_device_list
    if gpus != 1 or not wanted.isdecimal() or int(wanted) == 0:
        return config
    changed = type(config)()
    changed.CopyFrom(config)
    changed.gpu_options.visible_device_list = "0"
    return changed


def _patch_gpus() -> None:
    if hasattr(tf.config.list_physical_devices, _PATCHED):
        return
    see = tf.config.list_physical_devices
    lists = _listing(see)
    visible = _repeatable(tf.config.set_visible_devices, see)
    growth = _repeatable(tf.config.experimental.set_memory_growth, see)
    # Scripts use all of these names; they are separate modules with the same functions.
    for config in (tf.config, tf.compat.v1.config):
        config.experimental.set_memory_growth = growth
        for module in (config, config.experimental):
            module.list_physical_devices = lists
            module.set_visible_devices = visible
    session = import_private("tensorflow.python.client.session", "BaseSession").BaseSession
    begin = session.__init__

    @functools.wraps(begin)
    def __init__(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        begin(self, target, graph, with_own_gpu(config, len(see(_GPU))))

    session.__init__ = __init__


def _listing(see: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(see)
    def list_physical_devices(device_type: str | None = None) -> list[Any]:
        found = see(device_type)
        # Scripts that choose a GPU by its place in the list pass the device type.
        if device_type != _GPU or not collectives.is_initialized():
            return found
        return repeated(found, collectives.local_size())

    setattr(list_physical_devices, _PATCHED, True)
    return list_physical_devices


def _repeatable(choose: Callable[..., Any], see: Callable[..., list[Any]]) -> Callable[..., Any]:
    """Allows a second choice of the only GPU after TensorFlow has begun to use it."""

    @functools.wraps(choose)
    def chosen(device: Any, *args: Any, **options: Any) -> Any:
        try:
            return choose(device, *args, **options)
        except RuntimeError:
            # TensorFlow refuses any choice after it has initialized the GPUs, even the same one.
            if see(_GPU) != (device if isinstance(device, list) else [device]):
                raise
        return None

    return chosen


def _patch_downloads() -> None:
    # TensorFlow has imported Keras by now, unless TF_USE_LEGACY_KERAS makes it use Keras 2.
    module: Any = sys.modules.get(_KERAS_FILES)
    if module is None:
        return
    for name, whole in (("urlretrieve", _whole_file), ("extract_archive", _whole_archive)):
        require(module, name)
        found = getattr(module, name)
        if not hasattr(found, _PATCHED):
            made = whole(found)
            setattr(made, _PATCHED, True)
            setattr(module, name, made)


def _whole_file(retrieve: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(retrieve)
    def urlretrieve(url: str, filename: str, *args: Any, **options: Any) -> Any:
        part = _beside(filename)
        try:
            _, headers = retrieve(url, part, *args, **options)
            # The real path, because os.replace would replace a link by the file.
            os.replace(part, os.path.realpath(filename))
        finally:
            if os.path.exists(part):
                os.remove(part)
        return filename, headers

    return urlretrieve


def _whole_archive(extract: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(extract)
    def extract_archive(file_path: str, path: str = ".", archive_format: Any = "auto") -> Any:
        part = _beside(path)
        try:
            done = extract(file_path, part, archive_format)
            for folder, folders, files in os.walk(part):
                into = os.path.normpath(os.path.join(path, os.path.relpath(folder, part)))
                os.makedirs(into, exist_ok=True)
                # os.walk lists links to folders as folders, and does not enter them.
                links = [one for one in folders if os.path.islink(os.path.join(folder, one))]
                for file in [*files, *links]:
                    os.replace(os.path.join(folder, file), os.path.join(into, file))
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return done

    return extract_archive


def _beside(path: str) -> str:
    """Returns a name in the same folder that is unique among the ranks of all hosts."""
    return f"{os.path.realpath(path)}.{uuid.uuid4().hex}.part"
