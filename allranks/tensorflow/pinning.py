"""Lines that choose a GPU by local rank, on a rank that sees one GPU: its own. Runs in every rank.

``set_visible_devices(gpus[hvd.local_rank()])`` and ``visible_device_list = str(hvd.local_rank())``
count the GPUs of the host. A rank that sees its own GPU alone would look for the fourth of one. So
where a rank sees one GPU and has neighbours, the list of GPUs has that one once for each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import BaseSession

from allranks import collectives

_GPU = "GPU"


def as_seen_by(gpus: Sequence[Any], local_size: int) -> list[Any]:
    """Returns a list of GPUs that has an entry for every local rank, all the same one.

    Args:
        gpus: what TensorFlow sees; returned as it is unless it is one.
        local_size: the number of ranks on this host.
    """
    return list(gpus) * local_size if len(gpus) == 1 else list(gpus)


def own_gpu(config: Any, gpus: int) -> Any:
    """Returns a ConfigProto whose list of visible GPUs is there.

    Args:
        config: with ``visible_device_list`` as ``"3"``, or None.
        gpus: how many GPUs TensorFlow sees; where it is one, that is the one.
    """
    wanted = "" if config is None else config.gpu_options.visible_device_list
    if gpus != 1 or not wanted.isdecimal() or int(wanted) == 0:
        return config
    mended = type(config)()
    mended.CopyFrom(config)
    mended.gpu_options.visible_device_list = "0"
    return mended


def install() -> None:
    """TensorFlow lists and takes GPUs so from now on; a second call does nothing."""
    if hasattr(tf.config.list_physical_devices, "allranks"):
        return
    see = tf.config.list_physical_devices
    lists = _listing(see)
    visible = _settled(tf.config.set_visible_devices, see)
    growth = _settled(tf.config.experimental.set_memory_growth, see)
    for config in (tf.config, tf.compat.v1.config):
        config.experimental.set_memory_growth = growth
        for module in (config, config.experimental):
            module.list_physical_devices = lists
            module.set_visible_devices = visible
    begin = BaseSession.__init__

    @functools.wraps(begin)
    def __init__(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        begin(self, target, graph, own_gpu(config, len(see(_GPU))))

    BaseSession.__init__ = __init__


def _listing(see: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(see)
    def list_physical_devices(device_type: str | None = None) -> list[Any]:
        found = see(device_type)
        if device_type != _GPU or not collectives.is_initialized():
            return found
        return as_seen_by(found, collectives.local_size())

    list_physical_devices.allranks = True  # type: ignore[attr-defined]
    return list_physical_devices


def _settled(choose: Callable[..., Any], see: Callable[..., list[Any]]) -> Callable[..., Any]:
    """Lets a cell that chooses the one GPU be run again, when TensorFlow has begun to use it."""

    @functools.wraps(choose)
    def chosen(device: Any, *args: Any, **options: Any) -> Any:
        try:
            return choose(device, *args, **options)
        except RuntimeError:
            if see(_GPU) != (device if isinstance(device, list) else [device]):
                raise
        return None

    return chosen
