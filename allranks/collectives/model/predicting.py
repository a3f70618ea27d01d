"""The time of an allreduce that has not been run."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.collectives.model.cost import Terms, terms
from allranks.collectives.model.fabric import Fabric, Latency, Share
from allranks.collectives.model.fabrics import HGX_H100
from allranks.records.predictions import Prediction


def predict(
    nbytes: int,
    ranks: int,
    hosts: int = 1,
    algorithm: str = "best",
    fabric: Fabric = HGX_H100,
    protocol: str = "best",
) -> Prediction:
    """The time an allreduce would take; every text made from it says "simulated".

    Args:
        nbytes: bytes of the array on each rank.
        ranks: number of ranks in all, up to 10⁵ and beyond: the model is a formula.
        hosts: number of hosts; the ranks are spread evenly over them.
        algorithm: "ring", "tree", "recursive doubling" or "nvls", or "best": the fastest that
            the fabric has.
        fabric: what connects the ranks; published ones are in ``fabrics``, ``fit`` makes one.
        protocol: a protocol of the fabric, or "best".

    Raises:
        ValueError: the fabric has no such algorithm or protocol, or has never been measured
            over the links that these hosts need.
    """
    found = list(_candidates(nbytes, ranks, hosts, algorithm, fabric, protocol))
    if not found:
        raise ValueError(
            f"this fabric carries {', '.join(fabric.algorithms)} "
            f"({', '.join(p.name for p in fabric.protocols)}): found algorithm {algorithm!r}, "
            f"protocol {protocol!r} on {hosts} hosts. Use 'best' to have the model choose."
        )
    return min(found, key=lambda prediction: prediction.seconds)


def _candidates(
    nbytes: int, ranks: int, hosts: int, algorithm: str, fabric: Fabric, protocol: str
) -> Iterator[Prediction]:
    for wire in fabric.protocols:
        if protocol not in ("best", wire.name):
            continue
        for name, latency in wire.latency.items():
            if algorithm not in ("best", name) or (name == "nvls" and hosts > 1):
                continue
            counts = terms(name, nbytes, ranks, hosts, fabric.pipelined_tree)
            yield Prediction(
                algorithm=name,
                protocol=wire.name,
                nbytes=nbytes,
                ranks=ranks,
                hosts=hosts,
                latency_seconds=_waiting(counts, latency, fabric) if ranks > 1 else 0.0,
                transfer_seconds=_moving(counts, wire.share[name], hosts, fabric),
                fabric=fabric.name,
            )


def _waiting(counts: Terms, latency: Latency, fabric: Fabric) -> float:
    seconds = latency.base
    if counts.inside:
        seconds += counts.inside * _known(latency.inside, "latency inside a host", fabric)
    if counts.between:
        seconds += counts.between * _known(latency.between, "latency between hosts", fabric)
    return seconds


def _moving(counts: Terms, share: Share, hosts: int, fabric: Fabric) -> float:
    seconds = 0.0
    if counts.inside_nbytes:
        link = _known(fabric.inside_bandwidth, "bandwidth inside a host", fabric)
        seconds += counts.inside_nbytes / share.of(link, hosts)
    if counts.between_nbytes:
        link = _known(fabric.between_bandwidth, "bandwidth between hosts", fabric)
        seconds += counts.between_nbytes / share.of(link, hosts)
    return seconds


def _known(value: float | None, what: str, fabric: Fabric) -> float:
    if value is None:
        raise ValueError(
            f"a prediction needs the {what}: {fabric.name} does not have it. Fit measurements "
            "that use such links, at small and large sizes."
        )
    return value
