"""Collectives on values: numbers, lists and arrays, of every rank. Runs in every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from allranks import tensorflow as hvd
from allranks.collectives import Average, ReduceOp
from allranks.tensorflow.compression import Compression


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Returns the reduction of a value over all ranks, a numpy array when eager.

    Args:
        value: a number, a list or an array of the same shape and dtype on every rank.
        average: Horovod's former way to say ``op=Average`` or ``op=Sum``.
        op: Average where it is None.

    Collective over all ranks.
    """
    return _plain(
        hvd.allreduce(
            tf.constant(value),
            average=average,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
            name=name,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns all ranks' values below each other. Collective over all ranks.

    Args:
        value: a list or an array; the first dimension may differ between ranks.
    """
    return _plain(hvd.allgather(tf.constant(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root's value on every rank. Collective over all ranks."""
    return _plain(hvd.broadcast(tf.constant(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """Returns this rank's part of the reduction over all ranks. Collective over all ranks."""
    return _plain(hvd.reducescatter(tf.constant(value), op=op, name=name))


def _plain(tensor: Any) -> Any:
    return tensor.numpy() if tf.executing_eagerly() else tensor
