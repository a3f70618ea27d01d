"""Replaces functions of TensorFlow and Keras, some of which are private. Runs in every rank.

`install` replaces functions that fail with several ranks on a host:

**GPUs.** ``set_visible_devices(gpus[hvd.local_rank()])`` and ``visible_device_list =
str(hvd.local_rank())`` count the GPUs of the host, but a rank may see only its own GPU. If a rank
sees one GPU and there are several ranks on the host, the list contains that GPU once for each rank.

**Downloads.** Keras downloads a data set into a file of the final name, so a rank that comes a
second later reads an incomplete file. Here a file gets its name when it is complete.

**Failed steps.** A graph counts the steps of a Keras optimizer beside the reduction of gradients,
also if the reduction fails. Here the gradients come first. Otherwise only the ranks that waited
would count the step, and Adam and schedules of the ranks would differ from then on.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from allranks import collectives
from allranks.keras.private_names import import_private, replace

_GPU = "GPU"
_KERAS_FILES = "keras.src.utils.file_utils"
_KERAS_OPTIMIZERS = "keras.src.optimizers.base_optimizer"


def install() -> None:
    """Replaces the functions for several ranks on a host; a second call does nothing."""
    see = tf.config.list_physical_devices
    # Scripts use all of these names; they are separate modules with the same functions.
    for config in (tf.config, tf.compat.v1.config):
        replace(config.experimental, "set_memory_growth", lambda f: _repeatable(f, see))
        for module in (config, config.experimental):
            replace(module, "list_physical_devices", _listing)
            replace(module, "set_visible_devices", lambda f: _repeatable(f, see))
    session = import_private("tensorflow.python.client.session", "BaseSession").BaseSession
    replace(session, "__init__", lambda f: _on_own_gpu(f, see))
    # TensorFlow has imported Keras by now, unless TF_USE_LEGACY_KERAS makes it use Keras 2.
    files: Any = sys.modules.get(_KERAS_FILES)
    if files is not None:
        replace(files, "urlretrieve", _whole_file)
        replace(files, "extract_archive", _whole_archive)
    optimizers: Any = sys.modules.get(_KERAS_OPTIMIZERS)
    if optimizers is not None:
        replace(optimizers.BaseOptimizer, "apply", _gradients_first)


def after(gradients: Sequence[Any]) -> Any:
    """Returns a context in which a graph runs everything after these gradients."""
    # One operation, so that each operation of the step needs one edge for it, not one per gradient.
    return tf.control_dependencies([tf.group(*(g for g in gradients if g is not None))])


def _gradients_first(apply: Callable[..., Any]) -> Callable[..., Any]:
    def applied(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if tf.executing_eagerly():  # also on other backends of Keras
            return apply(self, grads, trainable_variables)
        grads = list(grads)
        with after(grads):
            return apply(self, grads, trainable_variables)

    return applied


def repeated(gpus: Sequence[Any], local_size: int) -> list[Any]:
    """Returns an entry for every local rank if TensorFlow sees only one GPU."""
    return list(gpus) * local_size if len(gpus) == 1 else list(gpus)


def with_own_gpu(config: Any, gpus: int) -> Any:
    """Returns a ConfigProto with GPU 0 if ``gpus``, the number TensorFlow sees, is 1."""
    wanted = "" if config is None else config.gpu_options.visible_device_list
    if gpus != 1 or not wanted.isdecimal() or int(wanted) == 0:
        return config
    changed = type(config)()
    changed.CopyFrom(config)
    changed.gpu_options.visible_device_list = "0"
    return changed


def _on_own_gpu(begin: Callable[..., None], see: Callable[..., list[Any]]) -> Callable[..., None]:
    def __init__(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        begin(self, target, graph, with_own_gpu(config, len(see(_GPU))))

    return __init__


def _listing(see: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def list_physical_devices(device_type: str | None = None) -> list[Any]:
        found = see(device_type)
        # Scripts that choose a GPU by its place in the list pass the device type.
        if device_type != _GPU or not collectives.is_initialized():
            return found
        return repeated(found, collectives.local_size())

    return list_physical_devices


def _repeatable(choose: Callable[..., Any], see: Callable[..., list[Any]]) -> Callable[..., Any]:
    """Allows a second choice of the only GPU after TensorFlow has begun to use it."""

    def chosen(device: Any, *args: Any, **options: Any) -> Any:
        try:
            return choose(device, *args, **options)
        except RuntimeError:
            # TensorFlow refuses any choice after it has initialized the GPUs, even the same one.
            if see(_GPU) != (device if isinstance(device, list) else [device]):
                raise
        return None

    return chosen


def _whole_file(retrieve: Callable[..., Any]) -> Callable[..., Any]:
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
    # In the same folder, for an atomic rename; unique among the ranks of all hosts.
    return f"{os.path.realpath(path)}.{uuid.uuid4().hex}.part"
