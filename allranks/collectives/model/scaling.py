"""How a data-parallel training step scales, from the cost of its allreduces."""

from __future__ import annotations

from math import ceil

from allranks.collectives.model.fabric import Fabric
from allranks.collectives.model.fabrics import HGX_H100
from allranks.collectives.model.predicting import predict
from allranks.records.predictions import StepPrediction

BACKWARD_SHARE = 2 / 3
"""Part of a step in which gradients appear: the backward pass costs two forward passes."""

FUSION_NBYTES = 64 * 2**20
"""Horovod's fusion buffer when its figures were published (HOROVOD_FUSION_THRESHOLD)."""


def predict_step(
    alone_seconds: float,
    gradient_nbytes: int,
    ranks: int,
    hosts: int = 1,
    fabric: Fabric = HGX_H100,
    *,
    overlap: float = 0.0,
    tensors: int | None = None,
    fusion_nbytes: int | None = FUSION_NBYTES,
    algorithm: str = "best",
) -> StepPrediction:
    """The time of a step on all ranks; every text made from it says "simulated".

    The step alone, plus the communication that is not hidden. Of the communication, the
    fraction ``overlap`` is hidden behind the backward pass, but never more than that pass
    lasts.

    Args:
        alone_seconds: a step on one rank, same batch per rank.
        gradient_nbytes: bytes of all gradients.
        ranks: number of ranks in all.
        hosts: number of hosts; the ranks are spread evenly over them.
        fabric: what connects the ranks.
        overlap: 0 (reduce after the backward pass) to 1 (all hidden, as far as it goes). It
            is a property of model and framework: fit it with ``fit_overlap``.
        tensors: number of gradients; None: enough to fill every fusion buffer.
        fusion_nbytes: gradients are packed into allreduces of this size; None: one each.
        algorithm: as for ``predict``.

    Raises:
        ValueError: ``overlap`` is not between 0 and 1.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(
            f"overlap is the hidden fraction of the communication, 0 to 1: found {overlap}."
        )
    count = allreduces(gradient_nbytes, tensors, fusion_nbytes)
    one = predict(round(gradient_nbytes / count), ranks, hosts, algorithm, fabric)
    communication = count * one.seconds
    hidden = min(overlap * communication, BACKWARD_SHARE * alone_seconds)
    return StepPrediction(
        ranks=ranks,
        hosts=hosts,
        alone_seconds=alone_seconds,
        communication_seconds=communication,
        exposed_seconds=communication - hidden,
        allreduces=count,
        allreduce=one,
    )


def allreduces(gradient_nbytes: int, tensors: int | None, fusion_nbytes: int | None) -> int:
    """How many allreduces a step makes: one per full fusion buffer, or one per tensor."""
    if fusion_nbytes is None:
        return tensors or 1
    buffers = max(1, ceil(gradient_nbytes / fusion_nbytes))
    return buffers if tensors is None else max(1, min(tensors, buffers))


def fit_overlap(efficiency: float, unhidden: StepPrediction) -> float:
    """The overlap with which a step would have the efficiency that was measured.

    Args:
        efficiency: measured; 1.0 is perfect scaling.
        unhidden: the same step, predicted with ``overlap=0``.

    Returns:
        Between 0 and 1. At either end, or where the backward pass is too short to hide that
        much, no overlap explains the measurement.
    """
    if not unhidden.communication_seconds:
        return 0.0
    exposed = unhidden.alone_seconds * (1 / efficiency - 1)
    return min(max(1 - exposed / unhidden.communication_seconds, 0.0), 1.0)
